"""The stages in order, the check of the whole of `params.yaml`, and running one stage.

`python -m tasks <stage>`, `dvc repro` and the flow (through DVC) all call `run_stage`, which refuses bad settings
before it imports anything heavy.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tasks.core.custom_code import unwatched
from tasks.core.passing_faults import PassingFault
from tasks.core.provenance import RECORDED, hash_now, provenance, provenance_file, write_provenance
from tasks.core.resume import resume_folder
from tasks.core.settings import PARAMS_FILE, Paths, Settings, check_section_names, load, load_paths, read_params
from tasks.core.stages import STAGES
from tasks.core.targets import remove_leftovers
from tasks.core.urls import local_path
from tasks.models.settings import ComputeSettings, LaunchSettings
from tasks.models.torch_setup import device_name
from tasks.pipeline.cli_errors import DEBUG
from tasks.pipeline.launch import (
    LAUNCHED,
    joined,
    number_to_tell,
    place_of,
    told_once_per_node,
)
from tasks.pipeline.outer_launcher import launch_command, run_launched
from tasks.pipeline.ray_cluster import refuse_without_ray
from tasks.pipeline.run_lock import only_run
from tasks.pipeline.settings import PipelineSettings, ServeSettings
from tasks.pipeline.supervise import supervise, told_by_supervisor
from tasks.planning.family import check_family
from tasks.planning.nearest import check_size
from tasks.rollouts.settings import EngineSettings
from tasks.storage.inputs import check_storage, copy_inputs, share_endpoint
from tasks.storage.mirror import RUN, fetch_resume
from tasks.storage.settings import StorageSections
from tasks.storage.uploader import uploading

if TYPE_CHECKING:
    from tasks.learning.shared.ranks import Ranks

CHECKPOINTED = ("warm_start", "train")
LOADS_A_MODEL = ("assess", "warm_start", "train", "evaluate")  # promote at most measures again what evaluate loaded
# Libraries that compute in threads read one of these when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# How often a thread of torch (GNU OpenMP) checks for the others before it sleeps. By default it checks for
# milliseconds, which on a busy machine takes the core from the thread that it waits for: two threads beside two busy
# processes took three times as long. On a quiet machine both are equal (tests/benchmarks/test_spinning.py).
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "1000"

# Python searches for cycles after so many; by default after 700, which is 0.55 s of the 4 s that a stage imports.
NEW_OBJECTS = 10_000


class StageModule(Protocol):
    SETTINGS: type[Settings]

    def run(self, settings: Any, paths: Paths, **asked: Any) -> None: ...


class LaunchedStage(StageModule, Protocol):
    def follow(self, settings: Any, paths: Paths, ranks: Ranks) -> None: ...


class CommonSections(StorageSections):
    compute: ComputeSettings
    launch: LaunchSettings
    pipeline: PipelineSettings
    serve: ServeSettings


class EngineSections(Settings):
    engine: EngineSettings


def stage_module(name: str) -> StageModule:
    """`tasks/stages/<name>/stage.py`; cheap to import, since heavy imports are inside `run`."""
    return cast(StageModule, importlib.import_module(f"tasks.stages.{name}.stage"))


def check_params(params: dict[str, Any] | None = None, *, source: Path = PARAMS_FILE) -> None:
    """ValueError with one line per mistake. Every stage checks the whole file: a typo under `evaluate` is found before
    training.
    """
    params = read_params(source) if params is None else params
    classes: list[type[Settings]] = [CommonSections, *(stage_module(name).SETTINGS for name in STAGES)]
    check_section_names(params, {section for cls in classes for section in cls.model_fields}, source=source)
    mistakes: list[str] = []
    for cls in classes:
        try:
            load(cls, params, source=source)
        except ValueError as error:
            mistakes += str(error).splitlines()
    if not mistakes:
        mistakes = unwatched(params, source=source)
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))


def check_sources(params: dict[str, Any]) -> None:
    """Refuse a missing model or data file and a model that cannot be trained, before any stage starts. DVC's own
    message is obscure.
    """
    from tasks.models.missing import check_model_path

    check_storage(params)
    copy_inputs(params)
    check_model_path(params["model"]["path"])
    check_family(params)
    for name, path, what in (
        ("curate.source", params["curate"]["source"], "a JSONL file of problems, or tasks/environments/<name>"),
        (
            "environment.cache.frozen",
            params["environment"]["cache"]["frozen"],
            "a file that `python -m tasks cache freeze` wrote, or null",
        ),
    ):
        if path is not None and not local_path(path).exists():
            raise ValueError(
                f"{name} = {path!r} does not exist, so the pipeline has nothing to work on. Correct the path: {what}."
            )


def check_machine(params: dict[str, Any]) -> None:
    """Refuse a device that is not there and a model that does not fit it, where the stages run on this machine."""
    common = load(CommonSections, params)
    if common.launch.launcher == "ray":
        refuse_without_ray()
    device_name(common.compute)  # else a missing GPU's model would not fit the processor
    check_size(params)


def run_stage(name: str, *, options: Sequence[str] = (), **asked: Any) -> Path | None:
    """Run one stage with `params.yaml`; returns the folder with its results, or None where another process tells of
    them. `options`: of the command line, for ranks that it starts. `asked` goes to the stage, beyond params.yaml.
    """
    params = read_params()
    with told_once_per_node(number_to_tell(name, params, os.environ)):
        check_params(params)
        paths, common = load_paths(params), load(CommonSections, params)
        prepare_process(params)
        started = launch_command(name, common.launch, options, os.environ) if name in LAUNCHED else None
        place = place_of(common.launch, os.environ) if name in LAUNCHED and started is None else None
    if started is not None:
        run_launched(started)
        return None
    if place is not None:
        told = told_by_supervisor(debug=DEBUG in options) if common.launch.starts_ranks else nullcontext()
        with told, joined(place, common.launch, common.compute, paths.artifacts) as ranks:
            if not ranks.leads:
                launched = cast(LaunchedStage, stage_module(name))
                launched.follow(load(launched.SETTINGS, params), paths, ranks)
                return None
            _run_here(name, params, paths, {**asked, "ranks": ranks})
    elif name in LAUNCHED and common.launch.launcher == "torchrun":
        supervise(name, common.launch, common.compute, options)
        return None
    elif name in LAUNCHED and common.launch.launcher == "ray":
        from tasks.pipeline.on_ray import run_on_ray

        run_on_ray(name, common.launch, common.compute, load(EngineSections, params).engine.own, options)
        return None
    else:
        _run_here(name, params, paths, asked)
    return paths.stage(name)


def _run_here(name: str, params: dict[str, Any], paths: Paths, asked: Mapping[str, Any]) -> None:
    """The stage in this process, with its lock, its record and its copies on S3."""
    stage, compute = stage_module(name), ComputeSettings(**params["compute"])
    device = device_name(compute)  # refuses one that is not there
    copy_inputs(params)
    if name in LOADS_A_MODEL:
        check_size(params)
        check_family(params)
    with only_run(paths.artifacts):
        for folder in (paths.artifacts, provenance_file(name, paths).parent):
            remove_leftovers(folder)
        record = _record(stage, name, params, paths, device=device) if name in RECORDED else None
        settings = load(stage.SETTINGS, params)
        with _mirrored(name, params, settings, paths):
            stage.run(settings, paths, **asked)
            if record is not None:
                _refuse_changed_source(record, params["curate"]["source"])
                write_provenance(record, paths)


def _refuse_changed_source(record: Mapping[str, Any], source: str) -> None:
    """PassingFault where problems came while curate read them. So its record has the hash of what it read, whatever
    comes later (decision 0110). A source that is code is in no record's data.
    """
    read = record["data"].get(source)
    if read is not None and hash_now(local_path(source)) != read:
        raise PassingFault(
            f"{source} was changed while {record['stage']} read it, so nobody knows what is in the splits. Run "
            f"again once it is whole; write it elsewhere and `mv` it here, and it always is."
        )


def _mirrored(name: str, params: dict[str, Any], settings: Settings, paths: Paths) -> AbstractContextManager[None]:
    """Around a stage: its checkpoints come from `paths.remote`, and go there with its results."""
    sections = load(StorageSections, params)
    resume = None
    if sections.paths.remote is not None and name in CHECKPOINTED:
        resume = resume_folder(name, settings, paths)
        fetch_resume(sections, name, resume)
    frozen = params["environment"]["cache"]["frozen"]
    return uploading(sections, [name, RUN], stage=name, frozen=frozen and local_path(frozen), resume=resume)


def _record(stage: StageModule, name: str, params: Mapping[str, Any], paths: Paths, *, device: str) -> dict[str, Any]:
    sections = {section: params[section] for section in stage.SETTINGS.model_fields}
    record = provenance(name, sections, paths, num_threads=params["compute"]["num_threads"], device=device)
    launch = params["launch"]
    return record | ({key: launch[key] for key in ("launcher", "num_trainers")} if name in LAUNCHED else {})


def search_for_cycles_rarely() -> None:
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def prepare_process(params: Mapping[str, Any]) -> None:
    """Set what libraries read when they are loaded: the number of threads, the address of S3, and offline mode for the
    model hub. And let Python search for cycles less often.
    """
    search_for_cycles_rarely()
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(params["compute"]["num_threads"])
    os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    share_endpoint(params)
