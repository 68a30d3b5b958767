"""The baseline gate: what the success of the base model calls for.

    warm_start   success is below `warm_start_below`: exploration finds too little, so demonstrations come first
    rl           it is between the thresholds
    skip_rl      it is at least `skip_rl_above`: RL brings little, so `train` passes the model on as it is

While a threshold is inside the interval the answer is `need_more_evidence`, and more episodes are played, up to
`max_episodes`. Several looks at one model are several chances to be wrong, so each look's interval is wider
(Bonferroni). `baseline.json` contains the last interval, its `confidence`, and whether the evidence sufficed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tasks.core.records import Gate, Trajectory
from tasks.stages.assess.settings import AssessSettings

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result

Answer = Literal["skip_rl", "rl", "warm_start", "need_more_evidence"]


def plan_looks(settings: AssessSettings, num_select: int) -> list[tuple[int, int]]:
    """(problems, samples per problem) of each possible look: first more problems, then more samples. Only the first may
    exceed `max_episodes`.
    """
    looks = [(min(settings.num_problems, num_select), settings.samples_per_problem)]
    while True:
        num_problems, num_samples = looks[-1]
        more = (min(2 * num_problems, num_select), num_samples)
        if num_problems == num_select:
            more = (num_problems, 2 * num_samples)
        if more[0] * more[1] > settings.max_episodes:
            return looks
        looks.append(more)


def look_confidence(settings: AssessSettings, num_looks: int) -> float:
    """The confidence of each look's interval, so that all looks together have `assess.confidence` (Bonferroni)."""
    return round(1 - (1 - settings.confidence) / num_looks, 6)


def read_look(
    played: list[Trajectory], settings: AssessSettings, *, confidence: float
) -> tuple[Result, dict[str, Any]]:
    from tasks.measurement.statistics import summarise

    result = summarise(played, confidence=confidence)
    shown = ("num_problems", "samples_per_problem", "success_rate", "ci_low", "ci_high")
    row: dict[str, Any] = {name: result[name] for name in shown}  # type: ignore[literal-required]
    return result, {**row, "answer": answer(result["ci_low"], result["ci_high"], settings)}


def answer(low: float, high: float, settings: AssessSettings) -> Answer:
    """What an interval of success calls for; `need_more_evidence` where a threshold is inside it."""
    if high < settings.warm_start_below:
        return "warm_start"
    if settings.skip_rl_above is not None and low >= settings.skip_rl_above:
        return "skip_rl"
    is_weak_enough = settings.skip_rl_above is None or high < settings.skip_rl_above
    return "rl" if low >= settings.warm_start_below and is_weak_enough else "need_more_evidence"


def decide(looks: list[dict[str, Any]], settings: AssessSettings, *, confidence: float) -> dict[str, Any]:
    """The gate with its reason. Without enough evidence RL is never skipped: a needless run costs hours, a model that
    never learns costs more.
    """
    last = looks[-1]
    has_evidence = last["answer"] != "need_more_evidence"
    gate: Gate = "warm_start" if last["success_rate"] < settings.warm_start_below else "rl"
    if has_evidence:
        gate = last["answer"]
    explain = _explain_evidence if has_evidence else _explain_limit
    found = (
        f"The base model succeeds on {last['success_rate']:.1%} of {last['num_problems']} problems × "
        f"{last['samples_per_problem']} (interval {100 * last['ci_low']:.1f}–{100 * last['ci_high']:.1f})"
    )
    return {
        "gate": gate,
        "has_evidence": has_evidence,
        "reason": f"{found}, {explain(gate, last, settings)}.",
        "confidence": confidence,  # of each look; all together: assess.confidence
        "looks": looks,
    }


def _explain_evidence(gate: Gate, last: dict[str, Any], settings: AssessSettings) -> str:
    if gate == "warm_start":
        return f"below assess.warm_start_below ({settings.warm_start_below:.0%}): RL would find too little"
    if gate == "rl":
        return "enough to learn from and not too much"
    return (
        f"at least assess.skip_rl_above ({settings.skip_rl_above:.0%}): RL would improve little, so train passes it "
        f"on untrained. Set assess.skip_rl_above higher, or to null, to train anyway"
    )


def _explain_limit(gate: Gate, last: dict[str, Any], settings: AssessSettings) -> str:
    is_about_warm_start = last["ci_low"] < settings.warm_start_below <= last["ci_high"]
    threshold = "warm_start_below" if is_about_warm_start else "skip_rl_above"
    if gate == "warm_start":
        why = "the estimate itself is below it"
    else:
        why = "the estimate itself is not below it" if is_about_warm_start else "skipping RL would need evidence"
    return (
        f"and assess.{threshold} ({getattr(settings, threshold):.0%}) is inside the interval: assess.max_episodes "
        f"({settings.max_episodes}) gave too little evidence; decided because {why}"
    )
