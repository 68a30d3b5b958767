"""What curation tells of the run to come: splits too small to show a gain, budgets too small for the references."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tasks.commands.doctor import context
from tasks.commands.doctor.context import DoctorSections
from tasks.commands.doctor.outlook import smallest_difference, warnings
from tasks.core.files import write_json, write_jsonl
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.stages.curate.data_card import LATER_TEST_SETS
from tasks.stages.curate.references import Replay, Replays, Row, replay_references, sample_of_references
from tasks.stages.curate.splitting import split_and_cap
from tasks.stages.evaluate import sharded
from tests import tiny
from tests.commands.doctor.project import params


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    paths = Paths(tmp_path_factory.mktemp("outlook"))
    problems = tiny.problems(33)
    replays = replay_references(Replays(TravelDesk()), problems)
    rows = [
        Row(place, "", problem, replay) for place, (problem, replay) in enumerate(zip(problems, replays, strict=True))
    ]
    for name, members in (("train", rows[:20]), ("select", rows[20:]), ("test", rows[20:])):
        write_jsonl(paths.split(name), (row.problem.model_dump() for row in members))
    write_jsonl(paths.stage("curate") / "references.jsonl", sample_of_references(rows))
    shown = [TravelDesk().demonstrate(problem, random.Random(number)) for number, problem in enumerate(problems)]
    write_jsonl(paths.stage("curate") / "demonstrations.jsonl", (item.model_dump() for item in shown if item))
    return paths


def told(
    paths: Paths, *, train: int = 500, select: int = 300, test: int = 300, other_tests: int = 0, **changed: Any
) -> list[str]:
    """The warnings where curation left splits of these sizes, and `other_tests` for another test set."""
    left_out = [{"reason": LATER_TEST_SETS, "num_problems": other_tests, "ids": []}]
    sizes = {"train": train, "select": select, "test": test}
    write_json(
        paths.stage("curate") / "card.json",
        {"num_problems": sizes, "hashes": {}, "split": "groups", "left_out": left_out},
    )
    return warnings(params(sampling__max_tokens_per_turn=90, sampling__max_tokens_per_episode=400, **changed), paths)


def test_roomy_budgets_and_large_splits_are_no_word_worth(curated: Paths) -> None:
    assert told(curated) == []


def test_a_tiny_split_is_warned_of_with_the_difference_it_could_show(curated: Paths) -> None:
    (test,) = told(curated, test=7)
    assert test.startswith("test has 7 problems, 1 episode each: only a difference of ")
    assert "evaluate.test_samples_per_problem" in test
    settings = load(DoctorSections, params())
    # By hand: (1.96 + 0.84) · √(2·¼·(¼ + ½) / 470) ≈ 0.079.
    assert smallest_difference(settings, num_problems=470, samples_per_problem=1) == pytest.approx(0.079, abs=0.002)
    assert [line.split()[0] for line in told(curated, train=3, select=4)] == ["select", "train"]


def test_a_test_set_on_which_nothing_could_be_promoted_is_told_before_anything_is_trained(curated: Paths) -> None:
    (warning,) = told(curated, promote__min_unseen_problems=301)
    assert warning.startswith("test has 300 problems and promote.min_unseen_problems asks for 301")
    assert "or lower promote.min_unseen_problems" in warning


def test_the_settings_that_make_test_small_are_named_with_what_others_would_give(curated: Paths) -> None:
    """7 problems, and 7 more in the other of two test sets: the setting that halves them is told first."""
    options = {"promote__min_unseen_problems": 8, "curate__num_test_sets": 2, "curate__max_test_problems": 50}
    lines = told(curated, test=7, other_tests=7, **options)
    (line,) = [line for line in lines if "promote.min_unseen_problems asks for 8" in line]
    assert "Set curate.num_test_sets to 1 (then 14 problems), or curate.train_share to 0." in line
    share, size = re.findall(r"curate\.train_share to (0\.\d+) \(then (\d+)\), before the first champion", line)[0]
    asked = load(DoctorSections, params(**options)).curate.model_copy(update={"train_share": float(share)})
    train = read_split(curated, "train")  # of the 20 there, those that this share moves to this test set
    moved = split_and_cap([Row(0, "", item, Replay(1, "", "")) for item in train], asked)["test"]
    assert int(size) == 7 + len(moved) >= 8
    capped = told(curated, test=5, **{**options, "curate__num_test_sets": 1, "curate__max_test_problems": 5})
    assert any("Set curate.max_test_problems to at least 8. Else: Bring problems" in line for line in capped)


def test_budgets_that_cut_references_are_warned_of_with_the_values_to_set(curated: Paths) -> None:
    (warning,) = told(curated, sampling__max_turns=6)
    assert "references do not fit" in warning
    assert warning.endswith("Set sampling.max_turns to at least 7.")


def test_a_model_that_is_not_there_is_told_with_the_command_that_fetches_it(curated: Paths) -> None:
    (warning,) = told(curated, model__path="Qwen/Qwen2.5-1.5B-Instruct")
    assert warning.startswith("the token budgets could not be checked: model.path = 'Qwen/Qwen2.5-1.5B-Instruct'")
    assert "hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir models/Qwen2.5-1.5B-Instruct" in warning


def test_problems_without_parts_that_are_to_be_told_in_parts_are_warned_of_before_assess(
    curated: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor refuses them, but only after the warm start."""
    asked = {"reveal": "sharded", "num_problems": 8, "samples_per_problem": 1, "num_replays": 1}
    assert told(curated, evaluate__sharded=asked) == []
    monkeypatch.setattr(sharded, "shards_of", lambda environment, problem: problem.requests[:1])
    (warning,) = told(curated, evaluate__sharded=asked)
    assert warning.startswith("evaluate.sharded: no problem of test has parts")
    assert warning.endswith("or set evaluate.sharded to null.")


def test_an_environment_that_cannot_be_loaded_again_fails_no_curation(
    curated: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its work is done by then."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("the server is gone")

    monkeypatch.setattr(context, "load_bare_environment", refuse)
    (warning,) = told(curated, evaluate__sharded=None)
    assert warning.startswith("the token budgets could not be checked")
    asked = {"reveal": "sharded", "num_problems": 8, "samples_per_problem": 1, "num_replays": 1}
    assert told(curated, evaluate__sharded=asked) == [warning]
