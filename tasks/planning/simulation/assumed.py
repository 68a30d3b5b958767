"""Speeds of a GPU that nothing was measured on: the arithmetic of `planning/seconds.py`, and links between GPUs.

**Assumed**: all of it. Bandwidths are those of NVLink within a node and of one 200 Gbit/s adapter between nodes, used
by nothing else; a transfer hides behind no computation. An engine over several GPUs has a share of their speed
(`TENSOR_PARALLEL_SHARE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from tasks.planning.memory import trained_parameters
from tasks.planning.seconds import (
    NCCL_BYTES,
    Lengths,
    decode_costs,
    fed_token_seconds,
    plan_seconds,
    saving_seconds,
)
from tasks.planning.setup import Setup
from tasks.planning.simulation.measured import mean_tokens
from tasks.planning.simulation.workload import EngineSpeed, EpisodeTurns, Speeds, Workload, costs_of_group

NODE_BYTES = 200e9  # per second
HOST_TURN_SECONDS = 0.005  # the one process that plays: 200 turns per second, of prompts of 18,000 tokens (issue 19)


def recorded_lengths(groups: Sequence[Sequence[EpisodeTurns]]) -> Lengths:
    rest = [
        sum(turn.sampled for turn in episode) + sum(turn.fed for turn in episode[1:])
        for group in groups
        for episode in group
    ]
    return Lengths(*mean_tokens(groups), longest=max(rest))


def assumed_speeds(setup: Setup, workload: Workload) -> Speeds:
    """Of `setup.machine`, whose rates are known, with episodes as recorded."""
    lengths = recorded_lengths(workload.groups)
    seconds = plan_seconds(setup, lengths, evaluated_episodes=0)
    saving, writing = saving_seconds(setup)
    positions = workload.problems * mean(sum(costs_of_group(group, workload)) / len(group) for group in workload.groups)
    return Speeds(
        engine=EngineSpeed(decode_costs(setup, lengths), fed_token_seconds(setup, lengths)),
        position=(seconds.update + seconds.reference) / (positions * workload.group_size),
        share_weights=share_weights(setup),
        refresh=seconds.refresh,
        save=saving,
        write=writing,
        host_turn=HOST_TURN_SECONDS,
    )


def share_weights(setup: Setup) -> tuple[float, float]:
    """Of one pass of a batch over cut weights: gather them forward and backward, add up the gradients of what is
    trained; within a node, and between nodes.
    """
    weights = 2 * setup.base_bytes
    moved = setup.settings.train.updates_per_batch * (weights + 4 * trained_parameters(setup))
    return moved / NODE_BYTES, moved / NCCL_BYTES
