"""What an ablation finds: every variant beside the base on the same problems, in numbers.

Trajectories and training rows in, plain JSON-ready values out; `ablate/words.py` tells them, and which variants there
are and how they were trained is `tasks/commands/ablate/ablate.py`'s. Seeds of a variant are pooled: success is the mean
over problems of the mean over its seeds, and intervals are clustered by problem. They say what other *problems* would
change, never what another training seed would, which is why each run is listed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.records import Trajectory
from tasks.measurement.statistics import paired_difference, summarise

BASE = "base"


@dataclass(frozen=True, slots=True)
class VariantRun:
    """One training run: its rows of metrics, why it was stopped early if it was, and its last snapshot on `select`."""

    seed: int
    training: list[dict[str, Any]]
    alarm: dict[str, Any] | None  # iteration and reason
    snapshot: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class VariantRuns:
    """A variant with its runs, one a seed; `changes` are its differences to params.yaml, one line each."""

    name: str
    label: str
    changes: list[str]
    runs: list[VariantRun]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for run in self.runs for trajectory in run.trajectories]


def compare(
    variants: Sequence[VariantRuns], *, about_base: str, num_iterations: int, confidence: float
) -> dict[str, Any]:
    """The content of results.json. Without the base there is no difference to it, and `difference` is null.

    `same_as` is the label of an earlier variant that trained number for number alike: where no episode was ever cut,
    say, it makes no odds whether those are filtered, and a difference of 0.0 is no evidence.

    A difference is paired on the seeds both have: the base with one seed more would add its luck to every comparison.
    """
    base = next((variant for variant in variants if variant.name == BASE), None)
    return {
        "about_base": about_base,
        "confidence": confidence,
        "num_iterations": num_iterations,
        "split": "select",
        "variants": [
            {
                "name": variant.name,
                "label": variant.label,
                "changes": variant.changes,
                "result": dict(summarise(variant.trajectories, confidence=confidence)),
                "difference": _difference(variant, base, confidence),
                "same_as": next((other.label for other in variants[:number] if _is_same(variant, other)), None),
                "runs": [_run(run, confidence) for run in variant.runs],
            }
            for number, variant in enumerate(variants)
        ],
    }


def _is_same(variant: VariantRuns, other: VariantRuns) -> bool:
    """Whether both trained number for number alike, on every seed."""
    trained, others = ({run.seed: run.training for run in side.runs} for side in (variant, other))
    return trained == others


def _difference(variant: VariantRuns, base: VariantRuns | None, confidence: float) -> dict[str, Any] | None:
    if base is None or variant is base:
        return None
    shared = {run.seed for run in variant.runs} & {run.seed for run in base.runs}
    if not shared:
        return None
    ours, theirs = (
        [trajectory for run in side.runs if run.seed in shared for trajectory in run.trajectories]
        for side in (variant, base)
    )
    return dict(paired_difference(ours, theirs, confidence=confidence))


def _run(run: VariantRun, confidence: float) -> dict[str, Any]:
    result = summarise(run.trajectories, confidence=confidence)
    return {
        "seed": run.seed,
        "num_iterations": len(run.training),
        "snapshot": run.snapshot,
        "alarm": run.alarm,
        "rolled_back_at": [row["iteration"] for row in run.training if "rolled_back_to" in row],
        **{key: result[key] for key in ("success_rate", "ci_low", "ci_high", "mean_sampled_tokens")},
    }
