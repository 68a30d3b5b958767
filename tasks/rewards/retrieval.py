"""Retrieval metrics as parts of a reward: NDCG@k and Recall@k of the documents that an agent found.

The environment leaves both lists in its verdict's details, ids as texts, the best document first:

    {"retrieval": {"ranked": ["d7", "d2"], "relevant": ["d2", "d9"]}}

Only the first mention of a document counts, or citing one relevant document k times would be a perfect ranking. Source:
Rec-R1, arXiv:2503.24289, which trains on such metrics alone.
"""

from __future__ import annotations

from math import log2

from tasks.core.records import Trajectory
from tasks.rewards.left_details import left_details


def ndcg(trajectory: Trajectory, k: int) -> float:
    """Σ 1/log₂(rank + 1) over the relevant documents among the first k, over that of a perfect ranking; 0 to 1.

    0 where nothing is relevant. Relevance is binary. Source: Järvelin and Kekäläinen (2002).
    """
    ranked, relevant = _lists(trajectory)
    best = sum(1 / log2(rank + 1) for rank in range(1, min(k, len(relevant)) + 1))
    gain = sum(1 / log2(rank + 1) for rank, document in enumerate(ranked[:k], start=1) if document in relevant)
    return min(1.0, gain / best) if best else 0.0


def recall(trajectory: Trajectory, k: int) -> float:
    """Share of the relevant documents that are among the first k; 0 where nothing is relevant."""
    ranked, relevant = _lists(trajectory)
    return len(relevant.intersection(ranked[:k])) / len(relevant) if relevant else 0.0


def _lists(trajectory: Trajectory) -> tuple[list[str], set[str]]:
    """(ranked, relevant); a document that is ranked twice counts where it was first."""
    left = left_details(trajectory, "retrieval", ("ranked", "relevant"))
    ranked, relevant = left["ranked"], left["relevant"]
    for name, ids in (("ranked", ranked), ("relevant", relevant)):
        if not isinstance(ids, list) or not all(isinstance(document, str) for document in ids):
            raise ValueError(
                f"details of problem {trajectory.problem_id!r}: retrieval.{name} is no list of texts, so no ranking "
                f"can be scored. Make the environment's verdict leave the documents' ids as texts."
            )
    return list(dict.fromkeys(ranked)), set(relevant)
