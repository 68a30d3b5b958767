"""`paths.custom`: the user's code that stages watch, where several agents have a folder each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core import import_graph
from tasks.core.custom_code import CUSTOM, custom_data, custom_folder, unwatched
from tasks.core.import_graph import imports, module_file
from tasks.core.settings import read_params
from tasks.pipeline.order import check_params
from tasks.stages.evaluate.measurement_key import code_of_episodes
from tasks.stages.evaluate.settings import EvaluateSections
from tests.conftest import ROOT
from tests.profiles import profile_text

DESK = {"object": "tasks.custom.desk.tickets:Desk"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a project in which two agents have a folder each."""
    (tmp_path / "tasks").mkdir()
    for item in (ROOT / "tasks").iterdir():
        if item.name != "custom":
            (tmp_path / "tasks" / item.name).symlink_to(item)
    monkeypatch.setattr(import_graph, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    _forget()
    for name in ("desk", "shop"):
        (tmp_path / CUSTOM / name).mkdir(parents=True)
        (tmp_path / CUSTOM / name / "tickets.py").write_text("from . import words\n")
        (tmp_path / CUSTOM / name / "words.py").write_text("import tasks.custom\n")
    (tmp_path / "params.yaml").write_text(
        profile_text("demo").replace("custom: tasks/custom ", "custom: tasks/custom/desk")
    )
    yield tmp_path
    _forget()


def _forget() -> None:
    imports.cache_clear()
    module_file.cache_clear()


def params(**changed: Any) -> dict[str, Any]:
    """Of the agent whose code is in tasks/custom/desk."""
    found = copy.deepcopy(read_params())
    for section, values in changed.items():
        found[section] |= values
    return found


def test_a_folder_that_is_not_there_is_told_by_its_key(root: Path) -> None:
    [told] = unwatched(params(paths={"custom": "tasks/custom/desks"}))
    assert told.startswith("params.yaml: paths.custom is tasks/custom/desks, and there is no such folder")


def test_what_is_in_the_agents_own_folder_is_watched(root: Path) -> None:
    """And what dvc.yaml names itself, wherever it is."""
    assert custom_folder() == CUSTOM / "desk"
    assert unwatched(params(environment={"settings": DESK}, curate={"source": "tasks/custom/problems.jsonl"})) == []


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"environment": {"settings": {"object": "tasks.custom.shop.tickets:Desk"}}}, "environment.settings.object"),
        ({"environment": {"settings": {"object": "tasks.custom.tickets:Desk"}}}, "environment.settings.object"),
        (
            {"environment": {"settings": {"command": ["python", "tasks/custom/serve.py"]}}},
            "environment.settings.command.1",
        ),
        ({"environment": {"settings": {"corpus": "tasks/custom/desk/../corpus.jsonl"}}}, "environment.settings.corpus"),
        ({"reward": {"parts": [{"function": "tasks.custom.desks.rewards:score"}]}}, "reward.parts.0.function"),
    ],
)
def test_what_no_stage_would_watch_is_refused_by_its_key(root: Path, changed: dict[str, Any], key: str) -> None:
    [told] = unwatched(params(**changed))
    assert told.startswith(f"params.yaml: {key} = ") and "not in paths.custom, tasks/custom/desk" in told


def test_a_module_that_imports_from_another_agents_folder_is_refused(root: Path) -> None:
    (root / CUSTOM / "desk" / "words.py").write_text("def late():\n    from ..shop import words\n")
    [told] = unwatched(params(environment={"settings": DESK}))
    assert "imports tasks/custom/shop/words.py, which is not in paths.custom" in told


def test_the_whole_folder_is_watched_where_it_is_named(root: Path) -> None:
    whole = params(
        environment={"settings": {"object": "tasks.custom.shop.tickets:Desk"}}, paths={"custom": "tasks/custom"}
    )
    assert unwatched(whole) == []


def test_episodes_depend_on_the_agents_own_code_alone(root: Path) -> None:
    environment = EvaluateSections.model_validate(
        {name: read_params()[name] for name in EvaluateSections.model_fields}
    ).environment
    found = {file for file in code_of_episodes("transformers", environment) if file.is_relative_to(CUSTOM)}
    assert found == {CUSTOM / "desk" / "tickets.py", CUSTOM / "desk" / "words.py"}


def test_episodes_depend_on_files_that_the_code_may_read_and_on_problems_only_as_they_are_read(root: Path) -> None:
    for name in ("desk/about.json", "desk/problems.jsonl", "desk/README.md", "shop/about.json"):
        (root / CUSTOM / name).touch()
    text = (
        (root / "params.yaml")
        .read_text()
        .replace("source: tasks/environments/travel_desk", f"source: {CUSTOM}/desk/problems.jsonl")
    )
    (root / "params.yaml").write_text(text)
    assert custom_data() == {CUSTOM / "desk" / "about.json"}


def test_a_link_to_a_folder_is_refused_since_nobody_follows_it(root: Path) -> None:
    """Python imports through it, and neither DVC nor a hash sees an edit behind it; a link to a file is read."""
    (root / "elsewhere").mkdir()
    (root / CUSTOM / "desk" / "one.json").symlink_to(root / "params.yaml")
    assert unwatched(params()) == []
    (root / CUSTOM / "desk" / "mine").symlink_to(root / "elsewhere")
    for folder in ("tasks/custom", "tasks/custom/desk"):
        [told] = unwatched(params(paths={"custom": folder}))
        assert told.startswith("params.yaml: tasks/custom/desk/mine is a link to a folder, behind which no stage")


NO_FOLDERS = ["custom", "tasks/core", "tasks/custom/../core", "/tasks/custom", "tasks/custom/my-desk", "./tasks/custom"]


@pytest.mark.parametrize("folder", [*NO_FOLDERS, "tasks/custom/"])
def test_only_a_folder_of_importable_names_in_tasks_custom_is_one(folder: str) -> None:
    changed = {**read_params(), "paths": {"artifacts": "artifacts", "custom": folder, "remote": None}}
    with pytest.raises(ValueError, match=r"paths\.custom: .* is not tasks/custom or a folder in it.*my_agent"):
        check_params(changed)
