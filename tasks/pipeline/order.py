"""The stages in order, the check of the whole of `params.yaml`, and running one stage.

`python -m tasks <stage>`, `dvc repro` and the flow (through DVC) all call `run_stage`, which refuses bad settings
before it imports anything heavy.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import Field

from tasks.core.files import remove_leftovers
from tasks.core.provenance import RECORDED, provenance, provenance_file, write_provenance
from tasks.core.settings import PARAMS_FILE, Paths, Settings, check_section_names, load, load_paths, read_params
from tasks.models.settings import ComputeSettings
from tasks.models.torch_setup import device_name
from tasks.pipeline.run_lock import only_run
from tasks.planning.family import check_family
from tasks.planning.nearest import check_size

STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote")
# Libraries that compute in threads read one of these when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# How often a thread of torch (GNU OpenMP) checks for the others before it sleeps. By default it checks for
# milliseconds, which on a busy machine takes the core from the thread that it waits for: two threads beside two busy
# processes took three times as long. On a quiet machine both are equal (tests/benchmarks/test_spinning.py).
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "1000"


class StageModule(Protocol):
    SETTINGS: type[Settings]

    def run(self, settings: Any, paths: Paths, **asked: Any) -> None: ...


class PathsSettings(Settings):
    artifacts: str = Field(min_length=1)


class CommonSections(Settings):
    paths: PathsSettings
    compute: ComputeSettings


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
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))


def check_sources(params: dict[str, Any]) -> None:
    """Refuse a device that is not there, a missing model or data file, and a model that cannot fit or be trained,
    before any stage starts. DVC's own message is obscure.
    """
    from tasks.models.missing import check_model_path

    device_name(load(CommonSections, params).compute)  # else a missing GPU's model would not fit the processor
    check_model_path(params["model"]["path"])
    check_size(params)
    check_family(params)
    for name, path, what in (
        ("curate.source", params["curate"]["source"], "a JSONL file of problems, or tasks/environments/<name>"),
        (
            "environment.cache.frozen",
            params["environment"]["cache"]["frozen"],
            "a file that `python -m tasks cache freeze` wrote, or null",
        ),
    ):
        if path is not None and not Path(path).exists():
            raise ValueError(
                f"{name} = {path!r} does not exist, so the pipeline has nothing to work on. Correct the path: {what}."
            )


def run_stage(name: str, **asked: Any) -> Path:
    """Run one stage with `params.yaml`; returns the folder with its results. `asked` are options beyond params.yaml."""
    params = read_params()
    check_params(params)
    stage, paths, compute = stage_module(name), load_paths(params), ComputeSettings(**params["compute"])
    prepare_process(params)
    device = device_name(compute)  # refuses one that is not there
    if name == "train":
        check_size(params)
        check_family(params)
    with only_run(paths.artifacts):
        for folder in (paths.artifacts, provenance_file(name, paths).parent):
            remove_leftovers(folder)
        record = _record(stage, name, params, paths, device=device) if name in RECORDED else None
        stage.run(load(stage.SETTINGS, params), paths, **asked)
        if record is not None:
            write_provenance(record, paths)
    return paths.stage(name)


def _record(stage: StageModule, name: str, params: Mapping[str, Any], paths: Paths, *, device: str) -> dict[str, Any]:
    sections = {section: params[section] for section in stage.SETTINGS.model_fields}
    return provenance(name, sections, paths, num_threads=params["compute"]["num_threads"], device=device)


def prepare_process(params: Mapping[str, Any]) -> None:
    """Set what libraries read when they are loaded: the number of threads, and offline mode for the model hub."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(params["compute"]["num_threads"])
    os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
