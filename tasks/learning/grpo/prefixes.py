"""Groups that begin in the middle: the first turns of a known episode are given, and only what follows is learnt.

A group whose episodes nearly all fail, or nearly all succeed, compares little. A replayed start moves it towards one
success in two: the start of a success where a problem mostly fails, that of a failure where it mostly succeeds. All
episodes of a group share one start, drawn before any of them is played, so their comparison is that of GRPO on another
problem: "solve this from here". Source: Prefix Sampling, arXiv:2605.05112; infra/decisions/0065.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from tasks.core.records import Group, Problem, Trajectory
from tasks.learning.grpo.exploration import on_straight_lines
from tasks.learning.shared.exploration_settings import PrefixSettings

Messages = Sequence[Sequence[int]]  # the ids that an agent wrote, by turn, each with its end
HALF = 0.5  # the success rate at which a group compares most


class Prefixes:
    """What is known of each problem when it is played from its start, and which turns a group begins with.

    `reference` gives the messages of a problem's reference solution. A group that began with a prefix teaches nothing
    here: its success is of another problem.
    """

    def __init__(self, settings: PrefixSettings, reference: Callable[[Problem], Messages], *, seed: int):
        self.settings, self.reference, self.seed = settings, reference, seed
        self.success: dict[str, float] = {}  # of the last group of each problem
        self.own: dict[str, dict[str, Any]] = {}  # its last success and failure

    def draw(self, iteration: int, round_number: int, problems: Sequence[Problem]) -> list[Messages]:
        """What each problem's group begins with, nothing for most; the problems furthest from one in two come first."""
        rng = random.Random(f"prefixes/{self.seed}/{iteration}/{round_number}")
        count = self._count(iteration, round_number, len(problems), rng.random())
        depth = on_straight_lines(self.settings.depth, iteration)
        order = sorted(range(len(problems)), key=lambda number: (-self._distance(problems[number]), rng.random()))
        found: list[Messages] = [[] for _ in problems]
        for number in order:
            if count == 0:
                break
            messages, num_turns = self._source(problems[number])
            most = min(len(messages), num_turns - 1, max(1, int(depth * num_turns)))
            if most > 0:
                found[number] = messages[: rng.randint(1, most)]
                count -= 1
        return found

    def _count(self, iteration: int, round_number: int, num_groups: int, drawn: float) -> int:
        """How many groups, the share on average: of 0.2 of 4, four draws in five give 1 and the others 0. Of the
        groups that an iteration draws first at least one is played from its start, since its metrics are of those.
        """
        most = num_groups - (round_number == 0)
        return min(most, int(on_straight_lines(self.settings.share, iteration) * num_groups + drawn))

    def learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if group.is_prefixed:
                continue
            solved = [item for item in group.trajectories if item.is_success]
            failed = [item for item in group.trajectories if not item.is_success]
            self.success[group.problem_id] = len(solved) / len(group.trajectories)
            if self.settings.source == "own":
                known = self.own.setdefault(group.problem_id, {})
                known |= {name: _row(items[0]) for name, items in (("success", solved), ("failure", failed)) if items}

    def state(self) -> dict[str, Any]:
        return {"success": dict(self.success), "own": {name: dict(known) for name, known in self.own.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.success, self.own = dict(state["success"]), {name: dict(known) for name, known in state["own"].items()}

    def _distance(self, problem: Problem) -> float:
        return abs(self.success.get(problem.id, 0.0) - HALF)

    def _source(self, problem: Problem) -> tuple[Messages, int]:
        """The messages that may be replayed, and how many turns their episode has; none where nothing fits."""
        success = self.success.get(problem.id, 0.0)
        if self.settings.source == "reference":
            messages = self.reference(problem) if success < HALF else []
            return messages, len(messages)
        wanted = "success" if success < HALF else "failure" if success > HALF else ""
        row = self.own.get(problem.id, {}).get(wanted, {"messages": [], "num_turns": 0})
        return row["messages"], row["num_turns"]


def _row(trajectory: Trajectory) -> dict[str, Any]:
    """Its leading turns that the policy ended itself: a turn that a limit cut would be cut elsewhere."""
    if len(trajectory.sequences) != 1:  # only the agent that asked could ask again
        return {"messages": [], "num_turns": 0}
    tokens = trajectory.sequences[0]
    pairs = zip(tokens.token_ids, tokens.sampled_mask, strict=True)
    written = [[token for token, _ in run] for is_sampled, run in groupby(pairs, lambda pair: pair[1]) if is_sampled]
    if len(written) != len(trajectory.turns):  # a thought that was closed for the policy is two runs of one turn
        return {"messages": [], "num_turns": 0}
    is_whole = [turn.stop_reason == "end_of_turn" for turn in trajectory.turns]
    num_whole = is_whole.index(False) if False in is_whole else len(is_whole)
    return {"messages": written[:num_whole], "num_turns": len(written)}
