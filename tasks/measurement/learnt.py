"""Whether a training run learnt anything, from the metrics of its iterations; the result is learnt.json.

Where all episodes of every group earn the same reward no weight changes, but the run ends normally, with snapshots
equal to its start. `evaluate` and `promote` accept such snapshots and call them untrained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.files import number_of, read_json

LEARNT_FILE = "learnt.json"
START = "iteration-0000"  # the snapshot that a run starts from
RECENT = 10  # iterations up to a snapshot whose batches say how often it succeeds on what it trained on
MUCH_MORE = 0.1  # success in training above that on test, from which on it is told
NEARLY = 0.01  # success within this of 0 or of 1 is reported as "every episode"


def learnt_row(
    rows: Sequence[Mapping[str, Any]], *, snapshots: Mapping[str, int], drops_zero_variance: bool, limit: float | None
) -> dict[str, Any]:
    """learnt.json of a run; `snapshots` maps each name to its iteration.

    `is_trained` is false where the share of iterations without signal is above `limit`, where none had one (limit
    null), and where a roll back undid all that had. A snapshot of weights from before the first signal is always
    untrained.
    """
    signal = [has_signal(row, drops_zero_variance=drops_zero_variance) for row in rows]
    has_learnt = learnt_by_iteration(rows, signal)
    is_trained = has_learnt[-1] and (limit is None or 1 - sum(signal) / len(signal) <= limit)
    played = [row["success_rate"] for row in rows if "success_rate" in row]
    return {
        "is_trained": is_trained,
        "num_iterations": len(signal),
        "num_with_signal": sum(signal),
        "success_rate": round(sum(played) / len(played), 6) if played else None,
        "untrained_snapshots": [name for name, number in snapshots.items() if not is_trained or not has_learnt[number]],
        **({"is_rolled_back": True} if any(signal) and not has_learnt[-1] else {}),
    }


def learnt_by_iteration(rows: Sequence[Mapping[str, Any]], signal: Sequence[bool]) -> list[bool]:
    """Whether some signal is in the weights after each iteration, from 0 on; a roll back puts earlier ones there."""
    found = [False]
    for row, has_own in zip(rows, signal, strict=True):
        found.append(found[row["rolled_back_to"]] if "rolled_back_to" in row else found[-1] or has_own)
    return found


def skipped_row() -> dict[str, Any]:
    """Of a run that trains nothing."""
    return {
        "is_trained": False, "num_iterations": 0, "num_with_signal": 0, "success_rate": None,
        "untrained_snapshots": [START],
    }  # fmt: skip


def has_signal(row: Mapping[str, Any], *, drops_zero_variance: bool) -> bool:
    """Whether an iteration had a group to learn from. Where other groups are dropped, no step is taken without one."""
    return "loss" in row and (drops_zero_variance or row["informative_group_share"] > 0)


def read_untrained(train: Path, snapshot: str) -> str | None:
    """Why a snapshot in the folder `train` is untrained, as a sentence; None where it is trained or not noted."""
    file = train / LEARNT_FILE
    row = read_json(file) if file.exists() else {"untrained_snapshots": []}
    return untrained_sentence(row, snapshot) if snapshot in row["untrained_snapshots"] else None


def untrained_sentence(row: Mapping[str, Any], snapshot: str) -> str:
    num_iterations, num_with_signal = row["num_iterations"], row["num_with_signal"]
    if not num_iterations:
        return f"{snapshot} is untrained: the baseline gate said skip_rl, so train did not change the model."
    if row["is_trained"]:
        return f"{snapshot} is untrained: its weights are from before the first group of unequal rewards."
    if row.get("is_rolled_back"):
        return f"{snapshot} is untrained: the last alarm rolled all back that was learnt."
    found = (
        f"{num_with_signal} of {num_iterations} iterations"
        if num_with_signal
        else f"none of {num_iterations} iterations"
    )
    return (
        f"{snapshot} is untrained: {found} had a group with unequal rewards ({_success(row)}), so "
        f"{'next to ' if num_with_signal else ''}nothing was learnt."
    )


def by_heart_sentence(rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> str | None:
    """That the best snapshot knows the problems it trained on, and not others: the batches up to it succeeded much more
    often than `test`, and above its interval. `rows` are the metrics of training; None where it is not so.
    """
    snapshot, test = evaluation["best_snapshot"], evaluation["test"]["best"]
    last = number_of(snapshot)
    played = [row["success_rate"] for row in rows if last - RECENT < row["iteration"] <= last and "success_rate" in row]
    trained, others = sum(played) / max(1, len(played)), test["success_rate"]
    if trained < others + MUCH_MORE or trained <= test["ci_high"]:
        return None
    return (
        f"{snapshot} succeeds on {trained:.0%} of the problems it trained on, in the iterations up to it, and on "
        f"{others:.0%} of test: it knows its own problems by heart. Bring more problems, or more varied ones."
    )


def what_to_do(row: Mapping[str, Any], *, has_warm_start: bool) -> str:
    """The remedy for a run that learnt nothing, by whether its episodes failed, succeeded or were all alike."""
    if row.get("is_rolled_back"):
        return "What the alarms say to change is in the folder alarms/train of the artifacts."
    if row["success_rate"] is None:
        return "See what `python -m tasks doctor` says of the tools."
    if row["success_rate"] <= NEARLY:
        more = "train the warm start longer (warm_start.num_steps, warm_start.stop, curate.num_demonstrations)"
        begin = "begin with a warm start (curate.num_demonstrations, assess.warm_start_below)"
        return (
            f"Look at the token budgets with `python -m tasks doctor`, {more if has_warm_start else begin}, or bring "
            f"easier problems (curate.max_level)."
        )
    if row["success_rate"] >= 1 - NEARLY:
        return "These problems are solved; bring harder ones (curate.max_level)."
    return "Raise sampling.temperature or train.group_size, so that the episodes of a group differ."


def _success(row: Mapping[str, Any]) -> str:
    rate = row["success_rate"]
    if rate is None:
        return "no episode was played to its end"
    if rate <= NEARLY or rate >= 1 - NEARLY:
        return f"{'nearly ' if 0 < rate < 1 else ''}every episode {'failed' if rate <= NEARLY else 'succeeded'}"
    return f"{rate:.0%} of the episodes succeeded"
