"""DVC reruns a stage when its deps change, so the deps must be exactly the files the stage's code imports.

Too few, and an edit leaves a stale result that looks fresh; too many, and an edit retrains for nothing. The chosen
world, engine and model are named by templates (`tasks/environments/${environment.name}.py`), so that editing one does
not rerun the stages of another. Of curate's folder a stage names the files it reads: a new test set is no reason to
train again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.import_graph import closure, imports
from tasks.pinning import PIN_FILE
from tasks.provenance import RECORDED
from tasks.resume import fill_in
from tasks.settings import read_params
from tasks.stages import STAGES, stage_module
from tests.conftest import ROOT

PARAMS = read_params(ROOT / "params.yaml")
GRAPH: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
CATALOG = Path("tasks/environments/catalog.py")
WORLD, ENGINE = "tasks/environments/${environment.name}.py", "tasks/rollouts/${engine.name}_engine.py"
EMBEDDED_MODEL = Path("tasks/learning/embedded_model.py")
FRONTIER = Path("tasks/rollouts/openai_engine.py")  # no engine of `engine.name`: evaluate.frontier asks for it
MODEL = "${model.path}"  # that file, or a model folder, whose content DVC then watches instead
ARTIFACTS = "${paths.artifacts}"
CURATED = f"{ARTIFACTS}/curate"
# How the code names a curated file; a stage that names one in another way cannot be read here, and fails.
NAMES_A_FILE = re.compile(
    r'stage\("curate"\) / (?:"([\w.]+)"|(PIN_FILE)\b)|(?:read_split\(paths, |paths\.split\()"(\w+)"\)'
)
TOUCHES_CURATED = re.compile(r'stage\("curate"\)|(?<!def )read_split\(|paths\.split\(')
DOORS = {Path("tasks/settings.py"), Path("tasks/problems.py")}  # where a split's name becomes its file
WATCHED_BY_NOBODY = {"paths"}  # where results go changes no result


def code_of(stage: str) -> set[str]:
    """The files a stage's code consists of, as dvc.yaml should name them."""
    templates = {Path(fill_in(WORLD, PARAMS)): WORLD, Path(fill_in(ENGINE, PARAMS)): ENGINE, EMBEDDED_MODEL: MODEL}
    return {templates.get(file, file.as_posix()) for file in files_of(stage) if not is_docstring_alone(file)}


def files_of(stage: str) -> set[Path]:
    """The same as they are called with today's params."""
    chosen_world, chosen_engine = Path(fill_in(WORLD, PARAMS)), Path(fill_in(ENGINE, PARAMS))

    def is_another_engine(file: Path) -> bool:
        return file.match("tasks/rollouts/*_engine.py") and file not in (chosen_engine, FRONTIER)

    files = closure([Path(f"tasks/{stage}.py")], without=is_another_engine)
    if CATALOG in files:  # worlds are imported by name
        files |= closure([chosen_world], without=is_another_engine)
    return files


def is_docstring_alone(file: Path) -> bool:
    """A package's `__init__.py` that imports and defines nothing cannot change a result."""
    return file.name == "__init__.py" and not imports(file)


def test_the_graph_holds_every_stage_but_promote_in_order():
    assert list(GRAPH) == [stage for stage in STAGES if stage != "promote"]  # promote has a side effect


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_depends_on_exactly_the_code_it_imports(stage: str):
    code = code_of(stage)
    listed = {dep for dep in GRAPH[stage]["deps"] if dep == MODEL or dep.startswith("tasks/")}

    lines = "\n".join(f"      - {file}" for file in sorted(code))
    assert listed == code, (
        f"dvc.yaml, stage {stage}: missing {sorted(code - listed)}, needless {sorted(listed - code)}. "
        f"Its code deps should read:\n{lines}"
    )


@pytest.mark.parametrize("stage", [name for name in GRAPH if name != "curate"])
def test_of_curates_folder_a_stage_depends_on_exactly_the_files_it_reads(stage: str):
    """And on the pin, whether it reads it or not: tools that describe themselves otherwise are another world."""
    reads = {PIN_FILE}
    for file in files_of(stage) - DOORS:
        source = (ROOT / file).read_text(encoding="utf-8")
        found = NAMES_A_FILE.findall(source)
        assert len(found) == len(TOUCHES_CURATED.findall(source)), f"{file}: which curated file does it read?"
        reads |= {PIN_FILE if pin else name or f"{split}.jsonl" for name, pin, split in found}
    assert {dep for dep in GRAPH[stage]["deps"] if dep.startswith(CURATED)} == {f"{CURATED}/{name}" for name in reads}


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_watches_exactly_the_params_it_reads(stage: str):
    reads = set(stage_module(stage).SETTINGS.model_fields) - WATCHED_BY_NOBODY
    assert set(GRAPH[stage]["params"]) == reads


@pytest.mark.parametrize("stage", GRAPH)
def test_a_dep_that_is_a_file_of_ours_exists(stage: str):
    files = [fill_in(dep, PARAMS) for dep in GRAPH[stage]["deps"] if dep.startswith("tasks/")]
    assert not [file for file in files if not (ROOT / file).is_file()]


def test_every_stage_that_meets_the_world_watches_the_frozen_tool_cache():
    assert not [name for name, stage in GRAPH.items() if "${environment.cache.frozen}" not in stage["deps"]]


def test_a_stage_runs_the_command_of_its_name_and_leaves_its_own_folder_and_what_it_ran_with():
    for name, stage in GRAPH.items():
        assert stage["cmd"] == f"python -m tasks {name}"
        assert stage["outs"] == [f"${{paths.artifacts}}/{name}", f"${{paths.artifacts}}/provenance/{name}.json"]


def test_no_stage_depends_on_what_another_ran_with():
    """Else a repeat under another commit, with the same results, would start every stage after it."""
    assert not [dep for stage in GRAPH.values() for dep in stage["deps"] if "provenance/" in dep or dep == ARTIFACTS]
    assert list(GRAPH) == list(RECORDED)
