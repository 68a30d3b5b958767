"""What today's splits do not show: problems of later test sets, and those that a cap cut, are never taken."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.harvest import labels
from tasks.commands.harvest.harvest import harvest
from tasks.core.files import write_jsonl
from tasks.core.settings import load, load_paths
from tasks.environments.catalog import load_bare_environment
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.sources import read_file, read_problems
from tasks.stages.curate.splitting import side_of, split_and_cap
from tests import sums
from tests.commands.harvest.conftest import counts, row, says
from tests.profiles import profile_params


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(labels, "load_object", lambda path: lambda conversation: True)
    params = profile_params("demo")
    params["curate"] |= {"split_seed": 0, "train_share": 0.5, "num_test_sets": 2}
    return params


def harvested(params: dict[str, Any], asked: list[list[str]], capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    rows = [row(0, [said for text in texts for said in says(text)], "Done.", name="a") for texts in asked]
    named = [one | {"conversation": f"{number:024x}"} for number, one in enumerate(rows)]
    write_jsonl(Path("served/conversations.jsonl"), named)
    capsys.readouterr()
    return counts(harvest(Path("served"), Path("out.jsonl"), checker="x"), capsys)


@pytest.mark.parametrize("is_curated", [True, False])
def test_what_any_test_set_asks_is_left_out_whatever_the_rotation_and_the_cap(
    params: dict[str, Any], is_curated: bool, capsys: pytest.CaptureFixture[str]
):
    """By their hashes g0 is in train, g9 and g10 in select, g1 and g13 in test set 0, g8 in 1. The caps leave one."""
    params["curate"] |= {"source": "mine.jsonl", "max_test_problems": 1, "max_select_problems": 1}
    groups = ["g0", "g9", "g10", "g1", "g13", "g8"]
    problems = [sums.problem(group, group=group, requests=[f"Ask {group}"]) for group in groups]
    write_jsonl(Path("mine.jsonl"), [problem.model_dump() for problem in problems])
    if is_curated:
        splits = split_and_cap(read_file(Path("mine.jsonl")), load(CurateSections, params).curate)
        assert {name: len(rows) for name, rows in splits.items()} == {"train": 1, "select": 1, "test": 1}
        for name, rows in splits.items():
            write_jsonl(load_paths(params).split(name), [item.problem.model_dump() for item in rows])

    found = harvested(params, [[f"ask  {group}"] for group in groups] + [["Hello", "ask g8"], ["new"]], capsys)

    assert found == {
        "taken": 1, "left out: it is in test": 4, "left out: it is in select": 2, "left out: it is in train": 1
    }  # fmt: skip


def test_what_an_environment_generates_is_known_before_it_is_curated(
    params: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    params["curate"] |= {"source": "tasks/environments/travel_desk", "num_generated": 40}
    settings = load(CurateSections, params)
    with closing(load_bare_environment(settings.environment)) as environment:
        problems = [problem for _, problem in read_problems(settings, environment)]
    in_test = [item for item in problems if side_of(item.split_group, seed=0, train_share=0.5) == "test"]

    found = harvested(params, [item.requests for item in problems], capsys)

    assert found["taken"] == 0
    assert found["left out: it is in test"] >= len(in_test) > 0


def test_a_source_that_is_not_there_yet_is_told(params: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    params["curate"]["source"] = "mine.jsonl"
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    write_jsonl(Path("served/conversations.jsonl"), [row(0, says("new"), "Done.", name="a")])
    harvest(Path("served"), Path("out.jsonl"), checker="x")
    assert "warning: curate.source mine.jsonl does not exist" in capsys.readouterr().err
