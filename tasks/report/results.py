"""Reads the result files of all stages, for the chart, the summary and the report, and formats numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.core.files import content_hash, number_of, read_json, read_jsonl
from tasks.core.settings import Paths
from tasks.core.text import one_line
from tasks.measurement.learnt import by_heart_sentence, read_untrained
from tasks.measurement.points import level_text
from tasks.report.inputs import find_others

# The policies measured on `test`: their names in evaluation.json and for people.
POLICIES = {"base": "base", "warm_start": "warm start", "best": "best snapshot"}
MAX_NAME_CHARACTERS = 18


@dataclass(frozen=True, slots=True)
class StoredResults:
    """The result files of one run; None or empty where a stage has not run on this evaluation, or ran again since."""

    evaluation: dict[str, Any]
    training: list[dict[str, Any]]  # its metrics, one row per iteration
    baseline: dict[str, Any] | None
    attempts: list[dict[str, Any]]  # of the warm start; none where it was not needed
    decision: dict[str, Any] | None
    run: dict[str, Any]
    timings: dict[str, Any]
    idle: dict[str, float]  # trainer, engine: shares of the seconds of the process that ended this training; else empty
    untrained: str | None  # why the best snapshot is no trained model, where it is not
    left_out: list[str]  # what is empty since a stage ran again, a sentence each

    @property
    def best_snapshot(self) -> str:
        return str(self.evaluation["best_snapshot"])

    @property
    def by_heart(self) -> str | None:
        """That the best snapshot knows the problems it trained on only; None where it does not."""
        return by_heart_sentence(self.training, self.evaluation)

    @property
    def test(self) -> dict[str, Any]:
        """Result by policy on the test split, in the order of POLICIES: stored JSON has its keys sorted."""
        return {policy: self.evaluation["test"][policy] for policy in POLICIES}

    @property
    def greedy(self) -> dict[str, Any]:
        """Result by policy with the likeliest token each time, on the test split; empty where it was not asked for."""
        found = self.evaluation.get("greedy") or {}
        return {policy: found[policy] for policy in POLICIES if policy in found}

    @property
    def best_of_k(self) -> dict[str, Any] | None:
        """The warm start's best of k tries at the cost of one episode of the best snapshot (`measurement/tries.py`)."""
        return self.evaluation.get("warm_start_best_of_k")

    @property
    def sharded(self) -> dict[str, Any] | None:
        """What telling test's requests in parts costs each policy, with the user's noise; None where not measured."""
        return self.evaluation.get("sharded")

    @property
    def baselines(self) -> dict[str, Any]:
        """Result on the test split per scripted baseline, best first; empty where the environment has none."""
        found: dict[str, Any] = self.evaluation.get("baselines", {})
        return dict(sorted(found.items(), key=lambda item: -item[1]["success_rate"]))

    @property
    def frontier(self) -> dict[str, Any] | None:
        """The model behind an endpoint that was measured on `test`, with its result and cost; None without one."""
        return self.evaluation.get("frontier")

    @property
    def also(self) -> dict[str, Any]:
        """By environment that training never saw: the result of each policy, and the gain from base to best."""
        found: dict[str, Any] = self.evaluation.get("also", {})
        return found

    @property
    def reflexion(self) -> dict[str, Any] | None:
        """The frozen policy that tried test problems again with notes of its own; None without one."""
        return self.evaluation.get("reflexion")

    @property
    def dropped(self) -> frozenset[str]:
        """The snapshots that racing dropped before they had met all of `select`."""
        return frozenset((self.evaluation.get("racing") or {}).get("dropped", ()))

    @property
    def seconds_per_episode(self) -> dict[str, float]:
        timed = self.timings.get("test", {})
        return {policy: row["seconds"] / row["episodes"] for policy, row in timed.items() if row["episodes"]}

    @property
    def champion_before(self) -> dict[str, Any] | None:
        """Version and result on `test` of the champion that the decision compared with; None without one, or where its
        weights are this run's snapshot.
        """
        decision = self.decision or {}
        if not decision.get("champion_before") or not decision.get("comparison"):
            return None
        return {"version": decision["champion_before"]["version"], "result": decision["comparison"]["other"]}

    @property
    def categories(self) -> list[str]:
        return sorted(self.test["best"]["by_category"])

    @property
    def champion(self) -> dict[str, Any]:
        """The champion after the decision, and whether it is this run's snapshot; nulls where there is none."""
        champion = self.decision["champion_after"] if self.decision else None
        return {
            "model": self.decision["model"] if self.decision else None,
            "version": champion["version"] if champion else None,
            "alias": "champion" if champion else None,
            "promoted": bool(self.decision and self.decision["is_champion"]),
        }

    @property
    def name(self) -> str:
        """For titles: the model, which tells agents apart, and the snapshot; before a decision the snapshot alone."""
        model = self.champion["model"]
        return f"{model}, {self.best_snapshot}" if model else self.best_snapshot

    @property
    def not_promoted(self) -> str:
        waits = self.decision is not None and self.decision.get("approval") == "waiting"
        return "waits for approval" if waits else "was not promoted"

    @property
    def interval_name(self) -> str:
        return (
            f"{level_text(self.evaluation['confidence'])} interval" if "confidence" in self.evaluation else "interval"
        )


def read_results(paths: Paths) -> StoredResults:
    evaluation = read_json(paths.stage("evaluate") / "evaluation.json")
    decision = _read_if_there(paths, "promote/decision.json")
    if decision is not None and not _is_about(decision, evaluation):
        decision = None
    others = find_others(paths)
    is_trained_anew = "train" in others
    return StoredResults(
        evaluation=evaluation,
        training=[] if is_trained_anew else read_training(paths),
        baseline=None if "assess" in others else _read_if_there(paths, "assess/baseline.json"),
        attempts=[] if "warm_start" in others else _read_attempts(paths),
        decision=decision,
        run=_read_if_there(paths, "run.json") or {},
        timings=_read_timings(paths),
        idle={} if is_trained_anew else _read_idle(paths),
        untrained=None if is_trained_anew else read_untrained(paths.stage("train"), evaluation["best_snapshot"]),
        left_out=list(others.values()),
    )


def _read_attempts(paths: Paths) -> list[dict[str, Any]]:
    """A record from before it said which one is kept (`is_kept`) says none."""
    path = paths.stage("warm_start") / "attempts.json"
    return [{"is_kept": None, **row} for row in read_json(path)] if path.exists() else []


def _read_timings(paths: Paths) -> dict[str, Any]:
    """How long evaluating took: not a stage output, so it may be missing, or belong to another evaluation."""
    timings = _read_if_there(paths, "timings/evaluate.json") or {}
    is_of_this = timings.get("evaluation") == content_hash(paths.stage("evaluate") / "evaluation.json")
    return timings if is_of_this else {}


def _read_idle(paths: Paths) -> dict[str, float]:
    metrics, idle = paths.stage("train") / "metrics.jsonl", _read_if_there(paths, "timings/idle.json")
    if idle is None or not metrics.exists() or idle["metrics"] != content_hash(metrics):
        return {}
    if not idle["iteration_seconds"]:
        return {}
    return {name: idle[f"{name}_idle_seconds"] / idle["iteration_seconds"] for name in ("trainer", "engine")}


def _is_about(decision: dict[str, Any], evaluation: dict[str, Any]) -> bool:
    """False where only `dvc repro` ran since the decision. A LoRA adapter is registered merged, so its hash differs."""
    challenger = decision["challenger"]
    is_of_the_weights = challenger.get("evaluated", challenger["weights"]) == evaluation["weights"]["best"]
    return is_of_the_weights and challenger.get("evaluated_files") == evaluation.get("folders", {}).get("best")


def read_training(paths: Paths) -> list[dict[str, Any]]:
    path = paths.stage("train") / "metrics.jsonl"
    return [row for _, row in read_jsonl(path)] if path.exists() else []


def optimizer_steps(training: list[dict[str, Any]], snapshots: Iterable[str]) -> dict[int, int] | None:
    """The number of optimizer steps after each iteration; None where some snapshot's number is not known. An iteration
    without signal takes no step, so it is not `updates_per_batch` times the iteration.
    """
    if any("optimizer_steps" not in row for row in training):
        return None
    steps = {row["iteration"]: row["optimizer_steps"] for row in training}
    return steps if all(steps.get(number_of(name)) for name in snapshots) else None


def percent(rate: float) -> str:
    """0.9413 → `94.1%`."""
    return f"{100 * rate:.1f}%"


def interval(result: dict[str, Any]) -> str:
    """The ends of a result's interval in percent: `92.4–95.5`."""
    return f"{100 * result['ci_low']:.1f}–{100 * result['ci_high']:.1f}"


def rate_of_category(result: dict[str, Any], category: str) -> str:
    return percent(result["by_category"][category]["success_rate"]) if category in result["by_category"] else "–"


def short_name(model: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """A model's name beside a number: without its owner, cut to `most` characters, on one line."""
    return one_line(model.rstrip("/").rpartition("/")[2], most - 1)


def _read_if_there(paths: Paths, name: str) -> dict[str, Any] | None:
    path = paths.artifacts / name
    return dict(read_json(path)) if path.exists() else None
