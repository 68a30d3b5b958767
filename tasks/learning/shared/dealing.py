"""Which rank computes what: work is dealt by longest processing time first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The numbers of the items that each rank gets: the costliest first, each to the rank with the least so far.

    At most 4/3 − 1/(3·ranks) of the least possible maximum. One rank gets all items in their order. Source: Graham,
    "Bounds on multiprocessing timing anomalies", 1969, theorem 2.
    """
    if num_ranks == 1:
        return [[*range(len(costs))]]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return shares
