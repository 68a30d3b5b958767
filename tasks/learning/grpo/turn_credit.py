"""Credit per turn: each turn is compared with the others of its group that stood at the same place.

The natural estimator, each turn's reward normalised over the turns with the same number, subtracts a baseline with as
many terms as the trajectory has turns; the policy chooses that number, so the gradient is biased (verl issue 7244).
Here the baseline of a turn depends on what came before the turn, and on other trajectories, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tasks.core.records import EQUAL_REWARDS, TokenSequence, Trajectory
from tasks.learning.shared.prefix_trees import common_prefix


def turn_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], is_counted: Sequence[bool]
) -> list[list[float]]:
    """For each sampled token of each trajectory, its sequences one after another: A = r − mean of r over the others
    that share all tokens before its turn.

    Where no other has come the same way, the others at the last turn for which one had. With the mean over all others
    of the group at every turn this is RLOO (arXiv:2402.14740), which it is at the first turn. Unbiased: the mean does
    not depend on what the turn itself wrote. The others of a turn of a later sequence are those that have a sequence
    with the same beginning. A trajectory that is not counted, or is alone, gets zeros.
    """
    ids = [[np.asarray(sequence.token_ids) for sequence in trajectory.sequences] for trajectory in trajectories]
    found: list[list[float]] = []
    for number, trajectory in enumerate(trajectories):
        others = [other for other in range(len(trajectories)) if other != number and is_counted[other]]
        credit: list[float] = []
        for own, sequence in zip(ids[number], trajectory.sequences, strict=True):
            shared = {other: max((common_prefix(own, theirs) for theirs in ids[other]), default=0) for other in others}
            for peers, length in _peers_of_turns(sequence, shared):
                has_credit = is_counted[number] and len(peers) > 0
                gain = rewards[number] - sum(rewards[other] for other in peers) / max(1, len(peers))
                credit += [gain if has_credit and abs(gain) >= EQUAL_REWARDS else 0.0] * length
        found.append(credit)
    return found


def _peers_of_turns(sequence: TokenSequence, shared: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
    """Whom each turn is compared with, and its length. `shared`: how many tokens of the sequence each other begins
    with.
    """
    peers = [*shared]
    for start, length in _turns(sequence.sampled_mask):
        peers = [other for other in peers if shared[other] >= start] or peers
        yield peers, length


def _turns(sampled_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, length) of each unbroken run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.asarray([False, *sampled_mask, False], dtype=np.int8)))
    return [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
