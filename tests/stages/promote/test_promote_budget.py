"""A promotion within the error of its year, on test problems that are not worn; both are the registry's to remember."""

from __future__ import annotations

import html
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import file_hash, read_json, write_json, write_jsonl
from tasks.core.records import TokenSequence, Trajectory
from tasks.stages.evaluate.identity import hash_episodes
from tasks.stages.evaluate.noted import note_evaluation
from tasks.stages.promote.allowance import holdout_set
from tasks.tracking.journal import Entry, read_journal
from tasks.tracking.registry import Registry
from tests.stages.promote.test_promote import FORCE, PROBLEMS, Pipeline, pipeline, play, write_records  # noqa: F401
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow
BUDGET = {"per_year": 0.1, "decisions_per_year": 4}  # 2.5% each: what promote.confidence 0.95 allows a decision anyway


def entries(kind: Any) -> list[Entry]:
    return read_journal(Registry(SETTINGS, "travel-desk-agent")).of(kind)


def test_decisions_against_a_champion_share_the_error_of_a_year(pipeline: Pipeline, capsys: Any):  # noqa: F811
    """The first champion spends nothing. Then 2.5%, 2.5%, 2.5%, half of the last 2.5%, half of that."""
    pipeline.params["promote"]["error_budget"] = BUDGET
    pipeline.params["promote"]["max_looks_per_problem"] = 50
    spent = []
    for share in (0.7, 0.71, 0.72, 0.72, 0.715, 0.725):
        pipeline.evaluate(share)
        budget = pipeline.promote()["error_budget"]
        spent.append((budget["kind"], round(budget["this_decision"], 9), budget["spent"], budget["num_decisions"]))
    against = "against the champion"
    assert spent == [
        ("first", 0.0, 0.0, 0),
        (against, 0.025, 0.025, 1),
        (against, 0.025, 0.05, 2),
        (against, 0.025, 0.05, 2),  # the same decision again
        (against, 0.025, 0.075, 3),
        (against, 0.0125, 0.0875, 4),
    ]
    printed = " ".join(capsys.readouterr().out.split())
    assert "This decision may be wrong with a chance of 1.2%. Of 10% within 365 days 8.8% are spent" in printed
    assert "decisions_per_year" in printed
    assert [entry.body["alpha"] for entry in entries("decision")] == pytest.approx([0.0, 0.025, 0.025, 0.025, 0.0125])
    assert [entry.body["way"] for entry in entries("decision")] == ["first", None, None, None, None]
    pipeline.evaluate(0.5)
    forced = pipeline.promote(FORCE)
    assert (forced["decision"], forced["error_budget"]["this_decision"]) == ("promote", 0.0)
    assert forced["error_budget"]["spent"] == 0.0875
    write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in reversed(PROBLEMS)))
    pipeline.evaluate(0.51)
    assert pipeline.promote()["error_budget"]["spent"] == 0.09375  # another test set gives no error back
    page = html.unescape((pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8"))
    assert "9.4% are spent" in page


def test_less_error_finds_only_larger_differences(pipeline: Pipeline):  # noqa: F811
    """A gain that passes at 2.5% (p is 2⁻⁸ for 8 problems gained and none lost) does not pass at 0.027%."""
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.evaluate(0.74)
    pipeline.params["promote"]["error_budget"] = {"per_year": 0.1, "decisions_per_year": 365}
    careful = pipeline.promote()
    assert (careful["decision"], careful["error_budget"]["this_decision"]) == ("hold", pytest.approx(0.1 / 365))
    pipeline.params["promote"]["error_budget"] = BUDGET
    again = pipeline.promote()
    assert again["error_budget"]["this_decision"] == careful["error_budget"]["this_decision"]  # taken before
    pipeline.evaluate(0.745)
    quick = pipeline.promote()
    assert quick["decision"] == "promote"
    assert careful["detectable_difference"]["difference"] > 1.4 * quick["detectable_difference"]["difference"]


def test_looks_are_counted_by_problem_and_the_registry_remembers_them(pipeline: Pipeline):  # noqa: F811
    """0.5, again 0.5 (the same decision), 0.51, then 0.52 in a new artifacts folder; at most 2 are allowed."""
    pipeline.params["promote"]["max_looks_per_problem"] = 2
    counts = []
    for share in (0.5, 0.5, 0.51):
        pipeline.evaluate(share)
        decision = pipeline.promote()
        counts.append((decision["test_set"]["median_looks"], decision["test_set"]["is_new_decision"]))
    assert counts == [(1, True), (1, False), (2, True)]
    assert decision["warnings"] == []
    shutil.rmtree(pipeline.paths.stage("promote"))
    pipeline.evaluate(0.52)
    decision = pipeline.promote()
    assert decision["test_set"]["median_looks"] == 3
    (warning,) = decision["warnings"]
    assert "promote.max_looks_per_problem is 2" in warning
    assert "curate.test_rotation" in warning
    write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in reversed(PROBLEMS)))
    pipeline.evaluate(0.52)
    assert pipeline.promote()["test_set"]["median_looks"] == 4  # another file of the same problems


def test_an_evaluation_that_promotes_nothing_is_a_look_too(pipeline: Pipeline):  # noqa: F811
    """The champion itself is evaluated again on other problems, 150 of which are old ones."""
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.promote()
    assert len(entries("look")) == 1
    kept = [*PROBLEMS[:150], *(problem.model_copy(update={"id": f"new {problem.id}"}) for problem in PROBLEMS[150:])]
    write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in kept))
    write_records(pipeline.paths, pipeline.params)
    for _ in range(2):
        assert pipeline.promote()["is_champion"]
    _, look = entries("look")
    assert look.body["test"] != entries("decision")[0].body["test"]
    write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in PROBLEMS))
    pipeline.evaluate(0.71)
    assert pipeline.promote()["test_set"]["median_looks"] == 3  # of 150 problems; 2 of the others


def test_evaluations_between_two_promotions_are_looks(pipeline: Pipeline):  # noqa: F811
    """Four while promotions are paused, of which the third is noted twice, and the last one promotes."""
    test = holdout_set(pipeline.paths)
    pipeline.evaluate(0.7)
    pipeline.promote()
    for share in (0.71, 0.72, 0.73, 0.73, 0.74):
        pipeline.evaluate(share)
        episodes = file_hash(pipeline.paths.test_episodes("best"))
        note_evaluation(pipeline.paths, test=test.sha256, episodes=episodes, problem_ids=test.problem_ids)
    assert [pipeline.promote()["test_set"]["median_looks"] for _ in range(2)] == [5, 5]


def test_an_evaluation_that_is_refused_is_a_look_too(pipeline: Pipeline):  # noqa: F811
    pipeline.params["promote"]["min_unseen_problems"] = 201
    pipeline.evaluate(0.7)
    with pytest.raises(ValueError, match="min_unseen_problems"):
        pipeline.promote()
    (look,) = entries("look")
    assert look.body["evaluation"] == file_hash(pipeline.paths.test_episodes("best"))


def test_a_repeat_is_free_on_the_very_same_episodes_only(pipeline: Pipeline, monkeypatch: Any):  # noqa: F811
    """0.71 against 0.7, whose episodes are measured again; against 0.7 with another config; then 0.71 itself again."""
    pipeline.params["promote"] |= {"error_budget": BUDGET, "max_looks_per_problem": 50}

    def spent_anew() -> bool:
        return bool(pipeline.promote()["error_budget"]["is_spent_anew"])

    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.evaluate(0.71)
    assert [spent_anew(), spent_anew()] == [True, False]
    monkeypatch.setattr("tasks.stages.promote.episodes.registered_episodes", lambda *_: None)
    assert not spent_anew()
    assert len(pipeline.measured) == 1  # the champion, and it played the same
    shutil.rmtree(pipeline.paths.stage("promote") / "episodes")
    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", lambda *_, **__: drawn_anew(0.7))
    assert [spent_anew(), spent_anew()] == [True, False]

    pipeline.evaluate(0.7, complete=lambda folder: write_json(folder / "config.json", {"of": "another"}))
    pipeline.promote(FORCE)
    pipeline.evaluate(0.71)
    assert spent_anew()

    file = pipeline.paths.test_episodes("best")
    write_jsonl(file, (item.to_row() for item in drawn_anew(0.71)))
    evaluation = read_json(pipeline.paths.stage("evaluate") / "evaluation.json")
    evaluation["contents"] = hash_episodes(file.parent)
    write_json(pipeline.paths.stage("evaluate") / "evaluation.json", evaluation)
    write_records(pipeline.paths, pipeline.params)
    assert [spent_anew(), spent_anew()] == [True, False]


def drawn_anew(share: float) -> list[Trajectory]:
    """As successful, in other tokens."""
    return [replace(item, sequences=[TokenSequence(token_ids=[1, 3])]) for item in play(share)]


@pytest.mark.parametrize("has_next", [True, False])
def test_worn_problems_ask_for_the_next_test_set(pipeline: Pipeline, has_next: bool):  # noqa: F811
    pipeline.params["promote"] |= {"max_looks_per_problem": 1, "on_holdout_reuse": "rotate"}
    pipeline.params["curate"] = {"num_test_sets": 2 if has_next else 1, "test_rotation": 0}
    pipeline.evaluate(0.7)
    assert pipeline.promote()["decision"] == "promote"
    pipeline.params["seed"] = 8  # the champion's stored episodes no longer fit
    pipeline.evaluate(0.9)
    if not has_next:
        with pytest.raises(ValueError, match=r"num_test_sets: 1.*[Bb]ring problems of new split groups"):
            pipeline.promote()
    else:
        decision = pipeline.promote()
        assert decision["decision"] == "hold"
        assert any("curate.test_rotation: 1" in reason for reason in decision["reasons"])
        assert yaml.safe_load(Path("params.yaml").read_text())["curate"]["test_rotation"] == 1
        pipeline.params["curate"]["test_rotation"] = 1
        with pytest.raises(ValueError, match=r"curate\.test_rotation = 0, and params\.yaml has 1.*dvc repro"):
            pipeline.promote()  # and no third set is asked for
    assert pipeline.measured == []
    assert pipeline.champion() == (1, 0.7)


def test_worn_problems_are_refused_before_anything_is_measured(pipeline: Pipeline):  # noqa: F811
    pipeline.params["promote"] |= {"max_looks_per_problem": 1, "on_holdout_reuse": "refuse"}
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.params["seed"] = 8
    pipeline.evaluate(0.9)
    with pytest.raises(ValueError, match=r"max_looks_per_problem is 1.*curate\.test_rotation"):
        pipeline.promote()
    assert pipeline.measured == []
    assert pipeline.promote(FORCE)["decision"] == "promote"  # a person may


def test_of_decisions_at_once_each_spends_of_what_the_others_left(pipeline: Pipeline, monkeypatch: Any):  # noqa: F811
    """While one judges, another is written down: it judges again with what is left, and the sum stays in the budget."""
    pipeline.params["promote"]["error_budget"] = {"per_year": 0.04, "decisions_per_year": 1}  # 2%, then 1%
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.evaluate(0.71)
    from tasks.stages.promote import stage as module

    compare, alphas = module.compare, []

    def judge(*args: Any, alpha: float) -> Any:
        alphas.append(alpha)
        if len(alphas) == 1:
            pipeline.params["promote"]["minimum_success"] = 0.65  # another policy, another decision
            pipeline.promote()
        return compare(*args, alpha=alpha)

    monkeypatch.setattr(module, "compare", judge)
    assert pipeline.promote()["error_budget"]["spent"] == 0.03
    assert alphas == [0.02, 0.02, 0.01]
