"""Promotion: who becomes champion, who does not and why, and what a crash, a race or altered weights leave behind.

MLflow is real; episodes are not: a snapshot's weight file says which share of the test problems it solves.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.registry import adopt
from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.records import Problem, TokenSequence, Trajectory, Turn
from tasks.core.settings import Paths, load
from tasks.drift.pin import ACCEPT_VARIABLE, check_pin, make_pin, play_probes, write_pin
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tasks.measurement.statistics import summarise
from tasks.models.folders import write_pointer
from tasks.models.settings import on_cpu
from tasks.models.trained_on import TrainedOn, write_trained_on
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate.identity import hash_episodes, hash_folders, identify_models
from tasks.stages.evaluate.measurement_key import key_parts
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.settings import PromoteSections
from tasks.stages.promote.stage import run
from tasks.tracking.aliases import lock_registry
from tasks.tracking.history import events_of
from tasks.tracking.journal import append
from tasks.tracking.registry import Registry
from tests.records_of_stages import write_records
from tests.tracking.project import SETTINGS, enter_project_again
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow

PROBLEMS = list(TravelDesk().generate(seed=3, num_problems=200, max_level=3))
PIN = make_pin(TravelDesk(), PROBLEMS[:4], [play_probes(environment_settings(), PROBLEMS[:4])])
RANK = {problem.id: number * 77 % 200 for number, problem in enumerate(PROBLEMS)}  # each of 0…199 once
EVALUATE: dict[str, Any] = {
    "greedy": False, "select_samples_per_problem": 1, "test_samples_per_problem": 1, "racing": None,
    "confidence": 0.95, "power": 0.8,
    "frontier": None,
    "also": [],
    "reflexion": None,
    "sharded": None,
}  # fmt: skip
FORCE = ManualOverride("force", "incident 4711")
PLACES = {"artifacts": "artifacts", "custom": "tasks/custom"}
PARAMS: dict[str, Any] = {
    "seed": 7,
    "compute": on_cpu(2).model_dump(),
    "environment": environment_settings().model_dump(mode="json"),
    "engine": {"name": "transformers", "max_concurrent_episodes": 8, "probe_tolerance": 0.001, "settings": None},
    "sampling": {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_turns": 4,
        "max_tokens_per_turn": 24,
        "max_thinking_tokens_per_turn": None,
        "max_tokens_per_episode": 200,
        "max_completion_tokens": None,
        "stop_strings": [],
    },
    "promote": {
        "model_name": "travel-desk-agent",
        "minimum_success": 0.6,
        "confidence": 0.95,
        "or_cheaper": None,
        "max_cost_increase": None,
        "categories": {"max_loss": 0.05, "false_alarm": 0.2, "never_fall": []},
        "max_extra_lost_share": 0.01,
        "max_invalid_call_share": 0.1,
        "max_overlong_share": 0.1,
        "approval": False,
        "approval_expires_days": 7,
        "power": 0.8,
        "error_budget": {"per_year": 0.5, "decisions_per_year": 20},  # 2.5% a decision
        "max_looks_per_problem": 3,
        "on_holdout_reuse": "warn",
        "min_unseen_problems": 20,
    },
    "tracking": SETTINGS.model_dump(),
}


def play(share: float, problems: list[Problem] = PROBLEMS, *, fingerprint: str | None = None) -> list[Trajectory]:
    """Each problem once; a larger `share` solves what a smaller one does, and more."""
    fingerprint = fingerprint or TravelDesk().fingerprint()
    return [
        Trajectory(
            problem_id=problem.id,
            category=problem.category,
            request=problem.requests[0],
            draw=0,
            sample_index=0,
            policy_version=0,
            environment_fingerprint=fingerprint,
            sequences=[TokenSequence([1, 2], [False, True], [0.0, -0.5])],
            turns=[Turn("Done.")],
            outcome="success" if RANK[problem.id] < share * len(PROBLEMS) else "failure",
            limit=None,
            checks={},
            num_calls=1,
            num_invalid_calls=0,
            split_group=problem.split_group,
        )
        for problem in problems
    ]


def write_model(folder: Path, share: float) -> None:
    """A model that solves `share` of test, as its weight file says."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(str(share).encode())
    write_trained_on(folder, TrainedOn())


class Pipeline:
    """A project after `evaluate`, and the champions `promote` had to measure."""

    def __init__(self, paths: Paths):
        self.paths = paths
        self.measured: list[dict[str, Any]] = []
        self.printed_before_measuring: Callable[[], str] = lambda: ""
        self.params = json.loads(json.dumps({"paths": PLACES, **PARAMS}))
        self.drawn_from = {"temperature": 0.7, "top_p": 0.9}  # evaluate's own

    def evaluate(
        self,
        share: float,
        *,
        warm_start: float = 0.4,
        base: float = 0.0,
        fingerprint: str | None = None,
        complete: Callable[[Path], None] = lambda snapshot: None,
    ) -> None:
        """As if a snapshot that solves `share` of test, and has what `complete` adds, had been trained and measured."""
        folder = self.paths.stage("train") / "snapshots" / "iteration-0010"
        models = {
            "base": (self.paths.base_model, base),
            "warm_start": (self.paths.start_model, warm_start),
            "best": (folder, share),
        }
        for model, solved in models.values():
            write_model(model, solved)
        complete(folder)
        played = {"base": play(base), "warm_start": play(warm_start), "best": play(share, fingerprint=fingerprint)}
        for name, trajectories in played.items():
            file = self.paths.stage("evaluate") / "trajectories" / f"test_{name}.jsonl"
            write_jsonl(file, (item.to_row() for item in trajectories))
        results = {name: summarise(trajectories, confidence=0.95) for name, trajectories in played.items()}
        checked = check_pin(environment_settings(), self.paths, stage="evaluate")
        options = {**EVALUATE, "sampling": self.drawn_from}
        settings = load(EvaluateSections, {**self.params, "evaluate": options})
        parts = key_parts(settings.plays["test"], self.paths, settings.environment, checked)
        folders = {name: model for name, (model, _) in models.items()}
        evaluation = {
            "best_snapshot": "iteration-0010",
            "confidence": 0.95,
            "sampling": self.drawn_from,
            "select": {"iteration-0010": results["best"]},
            "test": results,
            "contents": hash_episodes(self.paths.stage("evaluate") / "trajectories"),
            "environment": checked.to_row(),
            **identify_models(folders, hash_folders(folders), parts),
        }
        write_json(self.paths.stage("evaluate") / "evaluation.json", evaluation)
        write_records(self.paths, self.params)

    def write_params(self) -> None:
        Path("params.yaml").write_text(yaml.safe_dump(self.params), encoding="utf-8")

    def promote(self, override: ManualOverride | None = None) -> dict[str, Any]:
        self.write_params()
        run(load(PromoteSections, self.params), self.paths, override)
        return dict(read_json(self.paths.stage("promote") / "decision.json"))

    def champion(self) -> tuple[int, float] | None:
        """(version, share it solves), read back from the registry."""
        registry = Registry(SETTINGS, "travel-desk-agent")
        champion = registry.champion()
        if champion is None:
            return None
        folder = registry.fetch(champion, Path("fetched"))
        return champion.version, float((folder / "model.safetensors").read_text())

    def num_versions(self) -> int:
        return len(Registry(SETTINGS, "travel-desk-agent").client.search_model_versions("name = 'travel-desk-agent'"))

    def sample_episodes(
        self, folder: Path, environment: Any, problems: list[Problem], play_settings: PlaySettings, **named: Any
    ) -> list[Trajectory]:
        printed = self.printed_before_measuring()
        self.measured.append({"problems": problems, "printed": printed, "play": play_settings, **named})
        return play(float((folder / "model.safetensors").read_text()), problems)


@pytest.fixture
def pipeline(used_folder: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    return make_pipeline(used_folder, empty_database, monkeypatch)


def make_pipeline(folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    project = enter_project_again(folder, database, monkeypatch)
    write_jsonl(project.split("test"), (problem.model_dump() for problem in PROBLEMS))
    described = {"environment": "travel_desk", "fingerprint": TravelDesk().fingerprint(), "split": "groups"}
    card = {**described, "hashes": {"test.jsonl": "aa"}}
    write_json(project.stage("curate") / "card.json", card)
    write_pin(project.stage("curate"), PIN)
    pipeline = Pipeline(project)
    pipeline.write_params()
    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", pipeline.sample_episodes)
    return pipeline


def killed(*args: Any, **kwargs: Any) -> None:
    """As far as the process gets."""
    raise KeyboardInterrupt


def test_the_first_snapshot_that_beats_the_warm_start_becomes_champion(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    assert decision["is_champion"] is True
    assert pipeline.champion() == (1, 0.9)
    assert decision["champion_before"] is None
    assert decision["champion_after"]["version"] == 1


def test_a_promoted_snapshot_that_learnt_nothing_is_called_untrained(pipeline: Pipeline, capsys: Any):
    pipeline.evaluate(0.9)
    row = {
        "is_trained": False, "num_iterations": 16, "num_with_signal": 0, "success_rate": 1.0,
        "untrained_snapshots": ["iteration-0010"],
    }  # fmt: skip
    write_json(pipeline.paths.stage("train") / "learnt.json", row)
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    (warning,) = decision["warnings"]
    assert warning.startswith("iteration-0010 is untrained: none of 16 iterations")
    assert "! iteration-0010 is untrained" in capsys.readouterr().out
    assert warning in html.unescape((pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8"))


def test_a_snapshot_that_knows_its_own_problems_by_heart_is_told_what_to_bring(pipeline: Pipeline, capsys: Any):
    pipeline.evaluate(0.5)
    write_jsonl(pipeline.paths.stage("train") / "metrics.jsonl", [{"iteration": 10, "success_rate": 1.0}])
    (warning,) = pipeline.promote()["warnings"]
    assert "100% of the problems it trained on" in warning and "50% of test" in warning
    assert "! iteration-0010 succeeds on 100%" in capsys.readouterr().out


def test_the_decision_holds_every_number_and_says_why_in_sentences(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    comparison = decision["comparison"]
    assert decision["challenger"]["evaluated_files"] == decision["challenger"]["files"]  # no adapter that was merged
    assert comparison["against"] == "the warm start"
    assert comparison["difference"] == 0.5  # 180 of 200 against 80 of 200
    assert 0.4 < comparison["ci_low"] < 0.5 < comparison["ci_high"] < 0.6
    assert comparison["challenger"]["success_rate"] == decision["test"]["best"]["success_rate"]
    assert decision["policy"].items() >= {"minimum_success": 0.6, "confidence": 0.95}.items()
    assert all(reason.endswith(".") for reason in decision["reasons"])
    assert "Against the warm start" in decision["reasons"][1]


def test_the_champions_tags_tell_where_it_came_from(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    lineage = pipeline.promote()["champion_after"]["lineage"]
    assert lineage["seed"] == "7"
    assert lineage["data_hash.test.jsonl"] == "aa"
    assert lineage["environment_fingerprint"] == TravelDesk().fingerprint()
    assert {"params_hash", "git_commit", "git_dirty", "dvc_lock_hash", "test.success_rate"} <= lineage.keys()


@pytest.mark.parametrize(
    ("share", "warm_start", "verdict", "reason"),
    [
        (0.5, 0.1, "reject", r"below promote\.minimum_success"),
        (0.7, 0.7, "hold", "no clear difference"),
        (0.7, 0.9, "reject", "worse"),
    ],
)
def test_without_a_champion_a_snapshot_must_be_good_enough_and_better_than_the_warm_start(
    pipeline: Pipeline, share: float, warm_start: float, verdict: str, reason: str
):
    pipeline.evaluate(share, warm_start=warm_start)
    decision = pipeline.promote()
    assert decision["decision"] == verdict
    assert re.search(reason, " ".join(decision["reasons"]))
    assert decision["reasons"][-1] == "There is still no champion."
    assert pipeline.champion() is None
    assert pipeline.num_versions() == 0


def test_where_no_warm_start_was_needed_the_base_is_what_a_first_champion_must_beat(pipeline: Pipeline):
    pipeline.evaluate(0.7, warm_start=0.7, base=0.3)
    write_pointer(pipeline.paths.start_model, "artifacts/assess/base_model")
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    assert decision["comparison"]["against"] == "the base"


def test_the_same_weights_again_change_nothing_and_keep_the_decision_that_made_the_champion(pipeline: Pipeline, capsys):
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    page = (pipeline.paths.stage("promote") / "decision.html").read_bytes()
    assert read_json(pipeline.paths.stage("promote") / "outcome.json")["decision"] == "promote"
    capsys.readouterr()
    assert pipeline.promote() == decision
    assert (pipeline.paths.stage("promote") / "decision.html").read_bytes() == page
    told = capsys.readouterr().out
    assert "hold: iteration-0010 is already champion" in told
    assert re.search(r"The decision of 20[-\d]+ that made it champion: artifacts/promote/decision\.html", told)
    outcome = read_json(pipeline.paths.stage("promote") / "outcome.json")
    assert (outcome["decision"], outcome["registered_version"], outcome["champion"]) == ("hold", 1, 1)
    assert pipeline.num_versions() == 1
    assert pipeline.measured == []


def test_a_better_challenger_takes_the_alias_and_the_old_version_stays(pipeline: Pipeline):
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    assert decision["decision"] == "promote"
    assert decision["comparison"]["against"] == "the champion, version 1"
    assert (decision["champion_before"]["version"], decision["champion_after"]["version"]) == (1, 2)
    assert pipeline.champion() == (2, 0.9)
    assert pipeline.num_versions() == 2


@pytest.mark.parametrize(("share", "verdict"), [(0.81, "hold"), (0.65, "reject")])
def test_a_challenger_that_is_not_clearly_better_leaves_the_champion_in_place(
    pipeline: Pipeline, share: float, verdict: str
):
    pipeline.evaluate(0.8)
    pipeline.promote()
    pipeline.evaluate(share)
    decision = pipeline.promote()
    assert decision["decision"] == verdict
    assert decision["is_champion"] is False
    assert decision["reasons"][-1] == "The champion, version 1, stays."
    assert pipeline.champion() == (1, 0.8)


def test_a_champion_measured_under_the_same_settings_is_not_measured_again(pipeline: Pipeline):
    """Its own evaluation counts, and so does what a later promotion measured."""
    pipeline.evaluate(0.7)
    pipeline.promote()
    for share in (0.71, 0.72):
        pipeline.evaluate(share)
        pipeline.promote()
    assert pipeline.measured == []


def test_a_champion_from_other_settings_is_measured_once_as_evaluate_measured_the_challenger(pipeline: Pipeline):
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.params["seed"] = 8
    for share in (0.71, 0.72):
        pipeline.evaluate(share)
        pipeline.promote()
    (measured,) = pipeline.measured
    assert [problem.id for problem in measured["problems"]] == [problem.id for problem in PROBLEMS]
    assert (measured["stage"], measured["play"].seed, measured["play"].samples_per_problem) == ("test", 8, 1)
    assert measured["play"].sampling.model_dump() == PARAMS["sampling"] | pipeline.drawn_from
    assert not list(pipeline.paths.stage("promote").rglob("model.safetensors"))


@pytest.mark.parametrize("change", ["problems", "sampling", "budgets"])
def test_stored_trajectories_are_not_used_for_anything_they_were_not_made_from(pipeline: Pipeline, change: str):
    pipeline.evaluate(0.7)
    pipeline.promote()
    if change == "problems":
        write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in reversed(PROBLEMS)))
    elif change == "sampling":
        pipeline.drawn_from = {"temperature": 0.7, "top_p": 0.8}
    else:
        pipeline.params["sampling"]["max_turns"] = 5
    pipeline.evaluate(0.71)
    decision = pipeline.promote()
    assert decision["comparison"]["other"]["success_rate"] == 0.7
    assert len(pipeline.measured) == 1


def test_weights_that_changed_after_evaluation_are_refused(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    (pipeline.paths.stage("train") / "snapshots" / "iteration-0010" / "model.safetensors").write_bytes(b"0.99")
    with pytest.raises(ValueError, match=r"iteration-0010: its weights .* are not the ones evaluate measured"):
        pipeline.promote()
    assert pipeline.champion() is None
    assert not pipeline.paths.stage("promote").exists()


def test_episodes_that_changed_after_evaluation_are_refused(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    file = pipeline.paths.stage("evaluate") / "trajectories" / "test_best.jsonl"
    write_jsonl(file, (item.to_row() for item in play(0.95)))
    with pytest.raises(ValueError, match=r"test_best\.jsonl: is not the file that evaluate left.*dvc repro evaluate"):
        pipeline.promote(FORCE)
    evaluation = pipeline.paths.stage("evaluate") / "evaluation.json"
    write_json(evaluation, {**read_json(evaluation), "contents": hash_episodes(file.parent)})
    with pytest.raises(ValueError, match=r"its episodes succeed on 95\.0%, and evaluation\.json says 90\.0%"):
        pipeline.promote(FORCE)


def test_trajectories_of_another_version_of_the_world_are_refused(pipeline: Pipeline):
    pipeline.evaluate(0.9, fingerprint="older")
    with pytest.raises(ValueError, match="measured in another version of the environment"):
        pipeline.promote()


def test_an_answer_that_changed_after_evaluation_is_refused_though_it_was_accepted(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    """No description shows it, so the fingerprint is the same; the numbers are of other refunds all the same."""
    pipeline.evaluate(0.9)
    monkeypatch.setattr(TravelDeskEpisode, "_number", lambda episode, *key: 10)
    with pytest.raises(ValueError, match=r"promote: the environment has changed since curation.*(\n.*)*refund: "):
        pipeline.promote()
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    with pytest.raises(ValueError, match=r"measured in another version of the environment.*--force --single-item"):
        pipeline.promote()
    pipeline.evaluate(0.9)
    assert pipeline.promote()["decision"] == "promote"


def test_a_drift_that_was_accepted_is_in_the_decision_and_in_the_lineage(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    pinned = TravelDesk().fingerprint()
    monkeypatch.setattr(TravelDesk, "version", "2")
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    lineage = decision["champion_after"]["lineage"]
    assert lineage["environment_drift"] == 'evaluate, promote: environment.version: "1" → "2"'
    assert lineage["environment_fingerprint"] == pinned
    assert lineage["environment_fingerprint_at_evaluation"] == TravelDesk().fingerprint() != pinned
    assert decision["environment"]["accepted_drift"] == ['evaluate, promote: environment.version: "1" → "2"']


def test_an_edit_of_our_own_world_is_told_beside_the_champion_which_is_measured_anew(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    pipeline.evaluate(0.7)
    first = pipeline.promote()
    assert first["champion_after"]["lineage"]["environment_drift"] == "none"
    assert first["environment"]["differs_from_champion"] == []
    monkeypatch.setattr(TravelDesk, "version", "2")
    write_pin(pipeline.paths.stage("curate"), make_pin(TravelDesk(), [], []))  # as curation does after an edit
    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    assert decision["environment"]["differs_from_champion"] == ["environment"]
    assert "The environment differs from the champion's in: environment." in decision["reasons"]
    assert len(pipeline.measured) == 1


def test_a_champion_whose_stored_weights_were_altered_is_not_compared_with(pipeline: Pipeline):
    pipeline.evaluate(0.7)
    pipeline.promote()
    (stored,) = Path("artifacts/mlflow").rglob("model.safetensors")
    stored.write_bytes(b"0.1")
    pipeline.params["seed"] = 8
    pipeline.evaluate(0.8)
    with pytest.raises(ValueError, match="version 1: its stored weights are not those that were registered"):
        pipeline.promote()


@pytest.mark.parametrize("step", ["tracking.registry.Registry.register", "tracking.aliases.make_champion"])
def test_a_promotion_killed_on_the_way_is_finished_by_the_next_with_one_version(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, step: str
):
    pipeline.evaluate(0.9)
    with monkeypatch.context() as patch:
        patch.setattr(f"tasks.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.promote()
    assert pipeline.champion() is None
    assert not (pipeline.paths.stage("promote") / "decision.json").exists()
    assert pipeline.promote()["decision"] == "promote"
    assert pipeline.champion() == (1, 0.9)
    assert pipeline.num_versions() == 1


@pytest.mark.parametrize("step", ["stages.promote.record.write_decision", "tracking.aliases._point"])
@pytest.mark.parametrize("override", [None, FORCE])
def test_a_promotion_killed_before_its_record_was_written_gets_it_next_time_and_judges_nothing_anew(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, step: str, override: ManualOverride | None
):
    """Killed between the aliases (before the first is moved, the transition decided), or after them."""
    pipeline.evaluate(0.5)
    assert pipeline.promote()["decision"] == "reject"  # so there is a record, of another challenger
    pipeline.evaluate(0.9)
    with monkeypatch.context() as patch:
        patch.setattr(f"tasks.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.promote(override)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stages.promote.stage.decide", killed)
        decision = pipeline.promote()
    assert (decision["decision"], decision["is_champion"]) == ("promote", True)
    assert (decision["champion_before"], decision["champion_after"]["version"]) == (None, 1)
    assert decision["comparison"]["against"] == "the warm start"
    assert decision["override"] == (None if override is None else {"kind": "force", "reason": "incident 4711"})
    assert decision["test_set"]["num_decisions"] == 2
    assert "its record is written only now" in decision["warnings"][-1]
    assert "is written only now" in (pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8")
    champion = Registry(SETTINGS, "travel-desk-agent").champion()
    assert champion is not None
    assert len(events_of(Registry(SETTINGS, champion.model), champion)) == 1
    assert pipeline.promote() == decision  # from then on it stays what it is
    assert pipeline.num_versions() == 1


def test_a_record_on_another_test_set_than_todays_is_not_taken_for_todays(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.promote()
    (pipeline.paths.stage("promote") / "decision.json").unlink()
    write_jsonl(pipeline.paths.split("test"), (problem.model_dump() for problem in reversed(PROBLEMS)))
    write_records(pipeline.paths, pipeline.params)
    decision = pipeline.promote()
    assert decision["decision"] == "hold"
    assert "iteration-0010 is already champion: version 1" in decision["reasons"][0]


def test_after_the_only_champion_was_deleted_the_next_one_is_a_first_once_a_person_says_so(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.promote()
    registry = Registry(SETTINGS, "travel-desk-agent")
    registry.client.delete_model_version("travel-desk-agent", "1")
    pipeline.evaluate(0.7)
    with pytest.raises(ValueError, match=r"version 1 was deleted.*registry adopt"):
        pipeline.promote()
    adopt(reason="tidied up")
    decision = pipeline.promote()
    assert (decision["decision"], decision["champion_before"]) == ("promote", None)
    assert decision["comparison"]["against"] == "the warm start"
    (told,) = [reason for reason in decision["reasons"] if "first promotion" in reason]
    assert "version 1" in told and "tidied up" in told
    assert pipeline.champion() == (2, 0.7)


def test_an_operator_may_overrule_the_policy_and_that_is_on_record_everywhere(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.promote()
    pipeline.evaluate(0.5)
    decision = pipeline.promote(FORCE)
    assert (decision["decision"], decision["policy_decision"]) == ("promote", "reject")
    assert decision["override"] == {"kind": "force", "reason": "incident 4711"}
    assert decision["reasons"][-2:] == ["The policy says reject.", "Forced by an operator: incident 4711"]
    assert pipeline.champion() == (2, 0.5)
    assert "incident 4711" in (pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8")
    champion = Registry(SETTINGS, "travel-desk-agent").champion()
    assert champion is not None
    assert [
        event["reason"]
        for event in events_of(Registry(SETTINGS, champion.model), champion)
        if event.get("override") == "force"
    ] == ["incident 4711"]


def test_while_promotions_are_held_an_order_fails_and_the_page_is_of_the_model_at_hand(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.promote()
    registry = Registry(SETTINGS, "travel-desk-agent")
    with lock_registry(registry) as lock:
        append(registry, lock, "hold", {"reason": "an incident"})
    pipeline.evaluate(0.9, complete=lambda folder: write_json(folder / "config.json", {"rope_theta": 1.0}))
    with pytest.raises(ValueError, match=r"held since .*an incident.*registry release"):
        pipeline.promote(FORCE)
    decision = pipeline.promote()  # the champion's weights, and another configuration
    assert (decision["decision"], decision["is_champion"]) == ("hold", False)
    assert "an incident" in decision["reasons"][0]
    assert decision["challenger"]["files"] != decision["champion_after"]["files"]
    assert "an incident" in (pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8")


def test_an_operator_needs_no_checks_where_the_champion_cannot_be_fetched(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.promote()
    shutil.rmtree("artifacts/mlflow/artifacts/models")
    pipeline.params["seed"] = 8  # so the episodes on record are not of today's settings
    pipeline.evaluate(0.8)
    with pytest.raises(ValueError, match="its files cannot be fetched"):
        pipeline.promote()
    decision = pipeline.promote(FORCE)
    assert (decision["checks"], decision["decision"], decision["policy_decision"]) == ([], "promote", "hold")
    assert decision["warnings"][0].startswith("The checks could not be made and were overruled: ")
    assert pipeline.champion() == (2, 0.8)


def test_nobody_can_force_altered_weights_or_another_world(pipeline: Pipeline):
    pipeline.evaluate(0.9, fingerprint="older")
    with pytest.raises(ValueError, match="measured in another version of the environment"):
        pipeline.promote(FORCE)
    pipeline.evaluate(0.9)
    (pipeline.paths.stage("train") / "snapshots" / "iteration-0010" / "model.safetensors").write_bytes(b"0.99")
    with pytest.raises(ValueError, match=r"its weights .* are not the ones evaluate measured"):
        pipeline.promote(FORCE)
    assert pipeline.champion() is None


def test_a_policy_made_milder_after_the_answer_was_no_is_another_look(pipeline: Pipeline):
    pipeline.evaluate(0.55)
    assert pipeline.promote()["decision"] == "reject"
    pipeline.params["promote"]["minimum_success"] = 0.45
    decision = pipeline.promote()
    assert (decision["decision"], decision["test_set"]["most_looks"]) == ("promote", 2)


def test_a_new_artifacts_folder_uses_the_episodes_kept_with_the_champion(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    """No weights are fetched and no engine is loaded."""
    pipeline.evaluate(0.7)
    pipeline.promote()
    shutil.rmtree(pipeline.paths.stage("promote"))
    pipeline.evaluate(0.72)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stages.promote.episodes.measure", killed)
        assert pipeline.promote()["comparison"]["other"]["success_rate"] == 0.7


def test_what_the_test_set_can_tell_is_said_before_the_champion_is_measured(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
):
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.params["seed"] = 8
    pipeline.evaluate(0.72)
    capsys.readouterr()
    pipeline.printed_before_measuring = lambda: capsys.readouterr().out
    decision = pipeline.promote()
    (measured,) = pipeline.measured
    found = decision["detectable_difference"]
    groups = len({problem.split_group for problem in PROBLEMS})
    assert (found["num_problems"], found["num_groups"], found["power"]) == (200, groups, 0.8)
    assert f"200 test problems of {groups} groups, 1 episode each: over 70.0% a gain of" in measured["printed"]
    assert f"{100 * found['difference']:.1f} points is found with a chance of 80%" in measured["printed"]


@pytest.mark.parametrize("test_set", ["aa", "bb"])
def test_what_is_recorded_as_detectable_is_of_the_success_that_was_measured(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, test_set: str
):
    """The champion solved 70% as it was promoted and solves 60% when it is measured again."""
    pipeline.evaluate(0.7)
    pipeline.promote()
    pipeline.params["seed"] = 8
    card = pipeline.paths.stage("curate") / "card.json"
    write_json(card, {**read_json(card), "hashes": {"test.jsonl": test_set}})
    pipeline.evaluate(0.72)
    capsys.readouterr()
    before: list[str] = []

    def sample_episodes(*_: Any, **__: Any) -> list[Trajectory]:
        before.append(capsys.readouterr().out)
        return play(0.6)

    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", sample_episodes)
    decision = pipeline.promote()
    after, found = capsys.readouterr().out, decision["detectable_difference"]
    assert (found["success_rate"], decision["comparison"]["other"]["success_rate"]) == (0.6, 0.6)
    old = "over 70.0% (its success on another test set) a gain of" if test_set == "bb" else "over 70.0% a gain of"
    assert old in before[0] and "over 60.0%" not in before[0]
    gain = f"{100 * found['difference']:.1f} points"
    assert f"over 60.0% (the champion, version 1, as measured) a gain of {gain} is found" in " ".join(after.split())


def test_the_page_holds_every_reason_also_where_the_answer_is_no(pipeline: Pipeline):
    pipeline.evaluate(0.5, warm_start=0.7)
    decision = pipeline.promote()
    page = (pipeline.paths.stage("promote") / "decision.html").read_text(encoding="utf-8")
    assert decision["decision"] == "reject"
    assert len(decision["checks"]) == 6
    assert all(html.escape(reason, quote=False) in page for reason in decision["reasons"])
