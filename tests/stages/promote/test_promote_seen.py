"""Promotion where a side has learnt from today's test problems: they are left out of both, and counted."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, write_json
from tasks.core.records import Problem
from tasks.models.files import TRAINED_ON
from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on
from tasks.tracking.registry import Registry
from tests.stages.promote.test_promote import FORCE, PROBLEMS, Pipeline, pipeline
from tests.tracking.project import SETTINGS

__all__ = ["pipeline"]
pytestmark = pytest.mark.slow


def snapshot_of(
    pipeline: Pipeline, share: float, *, trained: list[Problem], chosen: list[Problem] | None = None
) -> None:
    """As if a snapshot that solves `share` had been trained on some of what is test today."""
    known = TrainedOn(digests_of(trained), chosen=digests_of(chosen or []))
    pipeline.evaluate(share, complete=lambda snapshot: write_trained_on(snapshot, known))


def by_row(pipeline: Pipeline) -> None:
    """Today's splits are divided as published: what shares a split group with training is not left out."""
    file = pipeline.paths.stage("curate") / "card.json"
    write_json(file, {**read_json(file), "split": "published"})


def test_what_either_side_has_seen_is_left_out_of_both_and_counted(pipeline: Pipeline, capsys: Any) -> None:
    by_row(pipeline)
    snapshot_of(pipeline, 0.7, trained=PROBLEMS[:30], chosen=PROBLEMS[30:50])
    first = pipeline.promote()
    assert first["unseen"] == {
        "num_problems": 200, "num_left_out": 50, "num_left": 150, "num_seen": {"iteration-0010": 50}, "minimum": 20,
        "base_models": {},
    }  # fmt: skip
    assert first["comparison"]["challenger"]["num_problems"] == first["comparison"]["other"]["num_problems"] == 150
    assert first["detectable_difference"]["num_problems"] == 150
    assert first["test"]["best"]["num_problems"] == 200  # what evaluate measured stays on record

    snapshot_of(pipeline, 0.95, trained=PROBLEMS[40:70])
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    assert decision["unseen"]["num_seen"] == {"iteration-0010": 30, "the champion, version 1": 50}
    assert decision["unseen"]["num_left"] == decision["comparison"]["other"]["num_problems"] == 130
    assert decision["warnings"] == []
    told = "70 of 200 test problems are left out on both sides"
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in html.unescape((pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8"))


def test_a_champion_that_memorised_test_does_not_keep_its_place_by_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It solves the 100 problems it was trained on and 70% of the others; the challenger 85% of all. On all of test the
    two are equal, on what neither has seen the challenger is better.
    """
    by_row(pipeline)
    snapshot_of(pipeline, 0.7, trained=PROBLEMS[:100])
    assert pipeline.promote()["decision"] == "promote"
    honest = pipeline.sample_episodes

    def with_memory(*args: Any, **kwargs: Any) -> Any:
        played = honest(*args, **kwargs)
        remembered = {problem.id for problem in PROBLEMS[:100]}
        for trajectory in played:
            trajectory.outcome = "success" if trajectory.problem_id in remembered else trajectory.outcome
        return played

    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", with_memory)
    monkeypatch.setattr(
        "tasks.stages.promote.episodes.registered_episodes", lambda *_: None
    )  # measured on today's test
    snapshot_of(pipeline, 0.85, trained=[])
    decision = pipeline.promote()
    assert decision["unseen"]["num_left"] == 100
    assert decision["comparison"]["difference"] > 0.1
    assert decision["decision"] == "promote"


def test_where_splits_are_by_group_what_shares_one_with_training_is_left_out_too(pipeline: Pipeline) -> None:
    pipeline.evaluate(0.9)
    group = PROBLEMS[0].split_group
    size = sum(problem.split_group == group for problem in PROBLEMS)
    sibling = PROBLEMS[0].model_copy(update={"id": "of another day", "requests": ["Another request."]})
    snapshot_of(pipeline, 0.9, trained=[sibling])
    assert pipeline.promote()["unseen"]["num_left_out"] == size


def test_too_few_unseen_problems_are_one_line_and_nothing_is_decided(pipeline: Pipeline) -> None:
    by_row(pipeline)
    snapshot_of(pipeline, 0.9, trained=PROBLEMS[:185])
    with pytest.raises(ValueError, match=r"185 of 200 test problems .* 15 .*promote\.min_unseen_problems asks for 20"):
        pipeline.promote()
    assert not (pipeline.paths.stage("promote") / "decision.json").exists()
    assert pipeline.champion() is None and pipeline.num_versions() == 0
    decision = pipeline.promote(FORCE)
    assert decision["decision"] == "promote" and decision["unseen"]["num_left"] == 15
    assert "overruled: 185 of 200 test problems" in decision["warnings"][0]


def test_a_version_that_does_not_say_what_it_was_trained_on_is_told_of(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_of(pipeline, 0.7, trained=[])
    with monkeypatch.context() as before:
        before.setattr(
            "tasks.stages.promote.publish.write_trained_on", lambda *_: None
        )  # as versions were registered once
        pipeline.promote()
    snapshot_of(pipeline, 0.9, trained=[])
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    (warning,) = decision["warnings"]
    assert warning.startswith("the champion, version 1 does not say what it was trained on")


def test_an_unknown_ancestor_is_told_of_on_either_side_and_a_base_from_elsewhere_is_noted(pipeline: Pipeline) -> None:
    """Version 1 is of before models said what they saw; it is trained on, promoted, and challenged."""
    unknown, elsewhere = TrainedOn(unknown=frozenset(["v1"])), TrainedOn(elsewhere=frozenset(["Qwen"]))
    pipeline.evaluate(0.7, complete=lambda snapshot: write_trained_on(snapshot, unknown))
    (warning,) = pipeline.promote()["warnings"]
    assert "what model v1 was trained on" in warning and "iteration-0010 grew from it" in warning
    pipeline.evaluate(0.9, complete=lambda snapshot: write_trained_on(snapshot, elsewhere))
    decision = pipeline.promote()
    (warning,) = decision["warnings"]
    assert "what model v1 was trained on" in warning and "the champion, version 1 grew from it" in warning
    assert decision["unseen"]["base_models"] == {"Qwen": "outside turnwise", "v1": "unknown"}


def test_a_snapshot_that_does_not_say_what_it_saw_becomes_a_version_that_does_not_know_it(pipeline: Pipeline) -> None:
    pipeline.evaluate(0.7, complete=lambda snapshot: (snapshot / TRAINED_ON).unlink())
    (warning,) = pipeline.promote()["warnings"]
    assert "what model iteration-0010 was trained on" in warning
    snapshot_of(pipeline, 0.9, trained=[])
    assert "the champion, version 1 grew from it" in pipeline.promote()["warnings"][0]


def test_an_order_overrules_a_category_that_no_problem_has_and_keeps_what_was_known(pipeline: Pipeline) -> None:
    by_row(pipeline)
    known = TrainedOn(digests_of(PROBLEMS[:30]), unknown=frozenset(["v1"]))
    pipeline.evaluate(0.9, complete=lambda snapshot: write_trained_on(snapshot, known))
    pipeline.params["promote"]["categories"]["never_fall"] = ["no such"]
    with pytest.raises(ValueError, match=r"promote\.categories\.never_fall names 'no such'"):
        pipeline.promote()
    decision = pipeline.promote(FORCE)
    assert decision["decision"] == "promote" and decision["unseen"]["num_left"] == 170
    overruled, warning = decision["warnings"]
    assert "never_fall" in overruled and "what model v1 was trained on" in warning


def test_an_order_keeps_what_could_be_seen_where_the_champion_cannot_be_measured(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise ValueError("its folder is missing")

    monkeypatch.setattr("tasks.stages.promote.comparison.find_opponent", lost)
    snapshot_of(pipeline, 0.9, trained=[])
    decision = pipeline.promote(FORCE)
    assert "its folder is missing" in decision["warnings"][0]
    assert decision["unseen"]["num_left"] == decision["detectable_difference"]["num_problems"] == 200

    card = pipeline.paths.stage("curate") / "card.json"
    write_json(card, {**read_json(card), "hashes": {"test.jsonl": "bb"}})
    snapshot_of(pipeline, 0.95, trained=[])
    assert pipeline.promote(FORCE)["detectable_difference"] is None  # its success is known on another test set only


def test_a_fetched_version_has_what_it_learnt_from_and_an_altered_record_is_refused(pipeline: Pipeline) -> None:
    by_row(pipeline)
    snapshot_of(pipeline, 0.7, trained=PROBLEMS[:30])
    pipeline.promote()
    registry = Registry(SETTINGS, "travel-desk-agent")
    champion = registry.champion()
    assert champion is not None
    folder = registry.fetch(champion, Path("again"))
    assert read_trained_on(folder) == TrainedOn(digests_of(PROBLEMS[:30]))
    (kept,) = (file for file in Path.cwd().rglob(f"lineage/{TRAINED_ON}") if folder.absolute() not in file.parents)
    write_trained_on(kept.parent, TrainedOn())
    snapshot_of(pipeline, 0.9, trained=[])
    with pytest.raises(ValueError, match=rf"version 1: its lineage/{TRAINED_ON} is gone or not the one"):
        pipeline.promote()
