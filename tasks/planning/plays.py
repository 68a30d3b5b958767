"""What a run plays beside training: the episodes of assess, of a warm start's check and of evaluate.

Of each play its size: all its episodes are played together, as many as the engine takes at once. How many there are of
one size, and how long they take, is in `commands/doctor/estimates.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.settings import Paths

SPLITS = ("select", "test")
CHECK = "warm_start.stop"  # the play that judges an attempt of a warm start


@dataclass(frozen=True, slots=True)
class Play:
    """`samples` episodes of each problem, of up to `max_tokens` (None: `sampling.max_tokens_per_episode`). Its name is
    that of the settings that ask for it.
    """

    name: str
    problems: int
    samples: int = 1
    max_tokens: int | None = None


def plays_of(params: Mapping[str, Any], num_problems: Mapping[str, int]) -> tuple[Play, ...]:
    """By params.yaml, already checked; `num_problems` of select and test, at most."""
    return (*_before_training(params, num_problems["select"]), *_evaluation(params, **num_problems))


def _before_training(params: Mapping[str, Any], select: int) -> Iterator[Play]:
    """Each further look of assess at most doubles what was played, and plays what is new."""
    assess, stop = params["assess"], params["warm_start"]["stop"]
    samples = assess["samples_per_problem"]
    yield Play("assess", min(assess["num_problems"], select), samples)
    if assess["warm_start_below"] > 0 or assess["skip_rl_above"] is not None:
        yield Play("assess", math.ceil(assess["max_episodes"] // 2 / samples), samples)
    if assess["warm_start_below"] > 0 and stop is not None:
        yield Play(CHECK, min(stop["num_problems"], select))


def _evaluation(params: Mapping[str, Any], *, select: int, test: int) -> Iterator[Play]:
    evaluate, longest = params["evaluate"], params["sampling"]["max_tokens_per_episode"]
    yield Play("evaluate", select, evaluate["select_samples_per_problem"])
    yield Play("evaluate", test, evaluate["test_samples_per_problem"])
    if (told := evaluate["sharded"]) is not None:
        yield Play("evaluate.sharded", min(told["num_problems"] or test, test), told["samples_per_problem"])
    if (notes := evaluate["reflexion"]) is not None:
        yield Play(
            "evaluate.reflexion", test, max_tokens=longest + notes["max_memory_tokens"] + notes["max_note_tokens"]
        )
    for other in evaluate["also"]:
        name, longest = f"evaluate.also ({other['name']})", other["budgets"]["max_tokens_per_episode"]
        yield Play(name, other["num_problems"], other["samples_per_problem"], longest)


def problems_at_most(params: Mapping[str, Any]) -> dict[str, int]:
    """Of each split, whatever is curated."""
    return {name: params["curate"][f"max_{name}_problems"] for name in SPLITS}


def curated_problems(paths: Paths, params: Mapping[str, Any]) -> dict[str, int] | None:
    """Of each split as it was curated, and no more than `curate` would keep of it now; None before it was."""
    files = {name: paths.split(name) for name in SPLITS}
    if not all(file.exists() for file in files.values()):
        return None
    most = problems_at_most(params)
    return {name: min(most[name], _num_lines(file)) for name, file in files.items()}


def _num_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())
