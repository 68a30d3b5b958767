"""What is played beside training, from params.yaml and the sizes of the splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.core.settings import Paths
from tasks.planning.plays import Play, curated_problems, plays_of, problems_at_most
from tests.profiles import profile_params

SIZES = {"select": 100, "test": 40}
BUDGETS = {"max_turns": None, "max_tokens_per_turn": None, "max_tokens_per_episode": 900, "max_completion_tokens": None}


def params(**changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = profile_params("demo")
    values["assess"] = {
        "num_problems": 30, "samples_per_problem": 4, "max_episodes": 2000, "warm_start_below": 0.0,
        "skip_rl_above": None,
    }  # fmt: skip
    values["evaluate"] |= {"select_samples_per_problem": 1, "test_samples_per_problem": 2, "sharded": None}
    for name, value in changed.items():
        section, key = name.split("__")
        values[section][key] = value
    return values


def test_assess_plays_its_first_look_and_evaluate_each_split_at_once() -> None:
    assert plays_of(params(), SIZES) == (Play("assess", 30, 4), Play("evaluate", 100, 1), Play("evaluate", 40, 2))


def test_a_gate_that_may_be_unclear_looks_again_at_no_more_than_it_has_seen() -> None:
    """Of at most 2,000 episodes no look plays more than 1,000 new ones: 250 of 4 samples."""
    assert plays_of(params(assess__skip_rl_above=0.9), SIZES)[:2] == (Play("assess", 30, 4), Play("assess", 250, 4))


def test_a_warm_start_is_judged_on_as_many_problems_as_select_has() -> None:
    few = {"select": 60, "test": 40}  # warm_start.stop.num_problems is 200
    first, again, on_select, on_test = (
        Play("assess", 30, 4),
        Play("assess", 250, 4),
        Play("evaluate", 60),
        Play("evaluate", 40, 2),
    )
    judged = plays_of(params(assess__warm_start_below=0.2), few)
    assert judged == (first, again, Play("warm_start.stop", 60), on_select, on_test)
    unseen = plays_of(params(assess__warm_start_below=0.2, warm_start__stop=None), few)
    assert unseen == (first, again, on_select, on_test)


def test_parts_other_environments_and_notes_are_plays_of_their_own_lengths() -> None:
    sharded = {"num_problems": None, "samples_per_problem": 3}
    notes = {"max_memory_tokens": 50, "max_note_tokens": 7}
    also = [{"name": "shop", "num_problems": 9, "samples_per_problem": 2, "budgets": BUDGETS}]
    found = plays_of(params(evaluate__sharded=sharded, evaluate__reflexion=notes, evaluate__also=also), SIZES)
    assert found[3:] == (
        Play("evaluate.sharded", 40, 3),
        Play("evaluate.reflexion", 40, 1, 420 + 50 + 7),
        Play("evaluate.also (shop)", 9, 2, 900),
    )


def test_problems_are_counted_as_curated_and_before_that_are_unknown_but_for_their_most(tmp_path: Path) -> None:
    paths, values = Paths(tmp_path), params(curate__max_select_problems=3, curate__max_test_problems=50)
    assert curated_problems(paths, values) is None
    assert problems_at_most(values) == {"select": 3, "test": 50}
    paths.stage("curate").mkdir()
    paths.split("select").write_text("{}\n" * 5, encoding="utf-8")
    assert curated_problems(paths, values) is None
    paths.split("test").write_text("{}\n{}\n\n", encoding="utf-8")
    assert curated_problems(paths, values) == {"select": 3, "test": 2}  # curate would keep 3 of select now
