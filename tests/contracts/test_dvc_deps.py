"""DVC reruns a stage when its deps change, so the folders it watches must hold whatever the stage's code can import.

Too few, and an edit leaves a stale result that looks fresh; too many, and an edit retrains for nothing. The folders of
the environment and the engine are named by templates (`tasks/environments/${environment.name}`), so that editing one
does not rerun the stages of another. Of curate's folder a stage names the files it reads: a new test set is no reason
to train again.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.import_graph import closure, imports
from tasks.core.provenance import RECORDED
from tasks.core.resume import fill_in
from tasks.core.settings import load, read_params
from tasks.core.stages import STAGES
from tasks.drift.pin import PIN_FILE
from tasks.pipeline.order import stage_module
from tasks.stages.evaluate.measurement_key import code_of_episodes
from tasks.stages.evaluate.settings import EvaluateSections
from tests.conftest import ROOT
from tests.contracts.import_graph import python_files
from tests.profiles import NAMES, profile_params

WHOLE: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
GRAPH: dict[str, Any] = WHOLE["stages"]
CATALOG, LOAD = Path("tasks/environments/catalog.py"), Path("tasks/rollouts/load.py")  # both import by name
PROFILES = {"params": read_params(ROOT / "params.yaml"), **{name: profile_params(name) for name in NAMES}}
ARTIFACTS = "${paths.artifacts}"
CURATED = f"{ARTIFACTS}/curate"
MOST_NEEDLESS = 0.3  # of the lines that a stage watches and does not import
# How the code names a curated file; a stage that names one in another way cannot be read here, and fails.
NAMES_A_FILE = re.compile(
    r'stage\("curate"\) / (?:"([\w.]+)"|(PIN_FILE)\b)|(?:read_split\(paths, |paths\.split\()"(\w+)"\)'
)
TOUCHES_CURATED = re.compile(r'stage\("curate"\)|(?<!def )read_split\(|paths\.split\(')
DOORS = {Path("tasks/core/settings.py"), Path("tasks/core/splits.py")}  # where a split's name becomes its file
WATCHED_BY_NOBODY = {"paths"}  # where results go changes no result


def folders_of(room: str) -> list[str]:
    """The names of the folders in a room: environments, engines."""
    return sorted(folder.name for folder in (ROOT / "tasks" / room).iterdir() if (folder / "__init__.py").is_file())


@cache
def imported_by(name: str) -> frozenset[Path]:
    """A file, or the files of a folder, and every file that they can import, inside functions too."""
    return frozenset(closure([Path(name)] if name.endswith(".py") else python_files(name)))


@cache
def files_of(stage: str, environment: str, engine: str) -> frozenset[Path]:
    """Every file that a stage's code can import where params name this environment and this engine: of the two folders
    that are imported by name all that is in them.
    """
    files = imported_by(f"tasks/stages/{stage}/stage.py")
    for door, folder in ((CATALOG, f"tasks/environments/{environment}"), (LOAD, f"tasks/engines/{engine}")):
        if door in files:
            files |= imported_by(folder)
    return files


def watched_by(stage: str, params: dict[str, Any]) -> set[Path]:
    """The deps under tasks/ that DVC watches with these params."""
    return {Path(dep) for item in GRAPH[stage]["deps"] if (dep := fill_in(item, params)).startswith("tasks/")}


def is_watched(file: Path, watched: Collection[Path]) -> bool:
    return any(path in watched for path in (file, *file.parents))


@cache
def is_docstring_alone(file: Path) -> bool:
    """A package's `__init__.py` that imports and defines nothing cannot change a result."""
    return file.name == "__init__.py" and not imports(file)


def named_so(environment: str, engine: str) -> dict[str, Any]:
    """params.yaml with another environment and another engine."""
    params = PROFILES["params"]
    named = {
        "environment": {**params["environment"], "name": environment},
        "engine": {**params["engine"], "name": engine},
    }
    return {**params, **named}


def test_the_graph_holds_every_stage_but_promote_in_order():
    assert list(GRAPH) == [stage for stage in STAGES if stage != "promote"]  # promote has a side effect


def test_the_graph_can_be_read_at_a_sitting_and_says_what_each_stage_does():
    assert (ROOT / "dvc.yaml").read_text(encoding="utf-8").count("\n") <= 134
    assert all(stage["desc"].endswith(".") and "\n" not in stage["desc"] for stage in GRAPH.values())


@pytest.mark.parametrize("engine", folders_of("engines"))
@pytest.mark.parametrize("environment", folders_of("environments"))
@pytest.mark.parametrize("stage", GRAPH)
def test_whatever_a_stages_code_can_import_is_watched(stage: str, environment: str, engine: str):
    watched = watched_by(stage, named_so(environment, engine))
    code = files_of(stage, environment, engine)
    assert not [str(file) for file in code if not is_watched(file, watched) and not is_docstring_alone(file)]


@pytest.mark.parametrize("engine", folders_of("engines"))
def test_a_model_in_this_process_that_judges_or_plays_users_is_watched_under_every_engine(engine: str):
    code = {Path(f"tasks/tools/{name}.py") for name in ("frozen", "judge/frozen", "user/frozen")}
    assert all(code <= files_of(stage, "travel_desk", engine) for stage in GRAPH)
    assert code <= code_of_episodes(engine, load(EvaluateSections, PROFILES["params"]).environment)


def test_code_in_c_that_plays_is_part_of_what_episodes_depend_on():
    environment = load(EvaluateSections, PROFILES["params"]).environment
    sources = {Path("tasks/models/native") / name for name in ("decode_step.c", "vectors.h")}
    assert sources <= code_of_episodes("transformers", environment)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("stage", GRAPH)
def test_the_environment_and_engine_of_a_profile_are_watched_and_no_others(stage: str, profile: str):
    params = PROFILES[profile]
    environment, engine = params["environment"]["name"], params["engine"]["name"]
    watched = watched_by(stage, params)
    code = files_of(stage, environment, engine)
    assert not [str(file) for file in code if not is_watched(file, watched) and not is_docstring_alone(file)]
    others = [
        *(f"tasks/environments/{name}" for name in folders_of("environments") if name != environment),
        *(f"tasks/engines/{name}" for name in folders_of("engines") if name not in (engine, "endpoint")),
    ]
    assert not [other for other in others if is_watched(Path(other), watched)]


@pytest.mark.parametrize("stage", GRAPH)
def test_little_is_watched_that_a_stage_does_not_import(stage: str):
    """Every dep is needed, and of the lines that are watched most are imported."""
    params = PROFILES["params"]
    watched = watched_by(stage, params)
    code = files_of(stage, params["environment"]["name"], params["engine"]["name"])
    yours = Path("tasks/custom")
    assert not [str(dep) for dep in watched if dep != yours and not any(is_watched(file, [dep]) for file in code)]
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in python_files("tasks")}
    seen = sum(lines[file] for file in lines if is_watched(file, watched))
    assert 1 - sum(lines[file] for file in code) / seen < MOST_NEEDLESS


@pytest.mark.parametrize("stage", GRAPH)
def test_what_is_yours_is_watched(stage: str):
    assert "${paths.custom}" in GRAPH[stage]["deps"]


@pytest.mark.parametrize("stage", [name for name in GRAPH if name != "curate"])
def test_of_curates_folder_a_stage_depends_on_exactly_the_files_it_reads(stage: str):
    """And on the pin, whether it reads it or not: tools that describe themselves otherwise are another world."""
    reads = {PIN_FILE}
    params = PROFILES["params"]
    for file in files_of(stage, params["environment"]["name"], params["engine"]["name"]) - DOORS:
        source = (ROOT / file).read_text(encoding="utf-8")
        found = NAMES_A_FILE.findall(source)
        assert len(found) == len(TOUCHES_CURATED.findall(source)), f"{file}: which curated file does it read?"
        reads |= {PIN_FILE if pin else name or f"{split}.jsonl" for name, pin, split in found}
    assert {dep for dep in GRAPH[stage]["deps"] if dep.startswith(CURATED)} == {f"{CURATED}/{name}" for name in reads}


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_watches_exactly_the_params_it_reads(stage: str):
    reads = set(stage_module(stage).SETTINGS.model_fields) - WATCHED_BY_NOBODY
    assert set(GRAPH[stage]["params"]) == reads


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("stage", GRAPH)
def test_a_dep_of_ours_exists(stage: str, profile: str):
    assert not [str(dep) for dep in watched_by(stage, PROFILES[profile]) if not (ROOT / dep).exists()]


def test_a_stage_runs_the_command_of_its_name_and_leaves_its_own_folder_and_what_it_ran_with():
    for name, stage in GRAPH.items():
        assert stage["cmd"] == f"python -m tasks {name}"
        assert stage["outs"] == [f"${{paths.artifacts}}/{name}", f"${{paths.artifacts}}/provenance/{name}.json"]


def test_no_stage_depends_on_what_another_ran_with():
    """Else a repeat under another commit, with the same results, would start every stage after it."""
    assert not [dep for stage in GRAPH.values() for dep in stage["deps"] if "provenance/" in dep or dep == ARTIFACTS]
    assert list(GRAPH) == list(RECORDED)


def test_the_numbers_and_curves_that_dvc_compares_belong_to_a_stage_and_the_chart_to_the_report():
    assert WHOLE["metrics"] == [f"{ARTIFACTS}/evaluate/metrics.json"]
    assert [next(iter(plot)) if isinstance(plot, dict) else plot for plot in WHOLE["plots"]] == [
        f"{ARTIFACTS}/train/curve.csv",
        f"{ARTIFACTS}/progress.png",
    ]


def test_dvcs_own_folder_is_not_relative_since_experiments_run_in_a_copy():
    """`dvc exp run --temp` and `--queue` would look for it in the copy, and fail."""
    assert "site_cache_dir" not in (ROOT / ".dvc" / "config").read_text(encoding="utf-8")
