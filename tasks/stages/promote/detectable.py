"""What a decision can see, said before anything is measured: the smallest gain over the opponent that is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.core.settings import Paths
from tasks.core.terminal import tell
from tasks.measurement.statistics import groups_by_problem
from tasks.stages.promote.opponent import baseline_policy
from tasks.stages.promote.settings import PolicySettings

if TYPE_CHECKING:
    from tasks.stages.promote.challenger import Challenger
    from tasks.tracking.versions import Version

WORST = 0.5  # the success at which a difference is hardest to find


def recorded_success(paths: Paths, challenger: Challenger, champion: Version | None) -> float:
    """Success of the opponent as far as it is on record: the champion's when it was promoted, or that of what a first
    champion must beat. Of a version that does not say, the one at which a difference is hardest to find.
    """
    if champion is not None:
        return float(champion.tags.get("test.success_rate", WORST))
    return float(challenger.evaluation["test"][baseline_policy(paths)]["success_rate"])


def tell_detectable(
    policy: PolicySettings, challenger: Challenger, *, opponent_success: float, alpha: float
) -> dict[str, Any]:
    """The gain over a opponent of this success that a test at `alpha`, one-sided, finds with the power of params; None
    where not even a challenger that solves everything would be found.
    """
    from tasks.measurement.power import detectable_change

    given = {
        "success_rate": opponent_success,
        "num_problems": challenger.result["num_problems"],
        "samples_per_problem": challenger.result["samples_per_problem"],
        "num_groups": len(set(groups_by_problem(challenger.trajectories).values())),
        "power": policy.power,
    }
    gain = detectable_change("gain", level=alpha, **given)
    found = f"a gain of {gain:.1%} is" if gain is not None else "not even the gain to 100% is"
    tell(
        f"promote: {given['num_problems']:,} test problems of {given['num_groups']:,} groups, "
        f"{given['samples_per_problem']} episodes each: over {opponent_success:.1%} {found} found with a chance of "
        f"{policy.power:.0%}, and a smaller one more rarely; one that is no better passes with {alpha:.3%} at most"
    )
    return {"difference": gain, "alpha": alpha, **given}
