"""How ranks wait for each other and leave, for `test_ranks.py`.

It loads no trainer: each process that ends here was started for it, and loading one takes 4 s of a processor.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch.distributed as dist

from tasks.learning.shared.ranks import END, Ranks


def let_the_leader_collect(ranks: Ranks, seconds: float) -> None:
    if not ranks.leads:
        ranks.follow(None)
        return
    time.sleep(seconds)
    ranks.announce(END)


def be_late_in_a_step(ranks: Ranks, seconds: float) -> None:
    if ranks.leads:
        time.sleep(seconds)
    with pytest.raises(RuntimeError):
        ranks.gather("arrived")


def end_one_after_the_other(ranks: Ranks, late: int, is_in_a_step: bool) -> None:
    """As a command ends that was told of a mistake: the other rank is gone when this one leaves."""
    ranks.gather("arrived")
    ranks.is_stepping = is_in_a_step
    if ranks.number == late:
        time.sleep(1.0)
    with suppress(RuntimeError):
        ranks.end()
    is_left = not dist.is_initialized() and ranks.group is None and ranks.idle is None
    raise SystemExit(7 if is_left else 8)
