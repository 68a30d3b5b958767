"""What is simulated: episodes as a run recorded them, how fast trainers and engines are, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.learning.shared.settings import Packing
from tasks.planning.seconds import DecodeCosts


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """Tokens that the engine reads before the turn and that it samples; seconds that a tool then takes."""

    fed: int
    sampled: int
    tool_seconds: float = 0.0


EpisodeTurns = Sequence[TurnSizes]


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds of a step, and those for which all turns wait: of reading a new token (`fed_token`), of each turn that
    begins (`turn`), and of each moment at which some begin (`read`). An engine `in_process` also waits while its
    process plays the environments.
    """

    decode: DecodeCosts
    fed_token: float = 0.0
    turn: float = 0.0
    read: float = 0.0
    in_process: bool = False


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds. `position` of a trainer per position, `update` of each update besides; `share_weights` of one trainer
    that gathers weights and adds up gradients with others, per pass, in a node and between nodes; `refresh` of new
    weights to the engines; `save` per iteration, and `write` of what a save leaves to be written behind the next one;
    `host_turn` of the one process that plays all environments. `slowed_beside`: seconds that an update and a collection
    in one process each lose per second side by side.
    """

    engine: EngineSpeed
    position: float
    update: float = 0.0
    share_weights: tuple[float, float] = (0.0, 0.0)
    refresh: float = 0.0
    save: float = 0.0
    write: float = 0.0
    host_turn: float = 0.0
    slowed_beside: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of episodes of one problem, as they were played; a batch draws whole groups, and episodes from them. With
    `groups_under_way` that many stream, and a batch is those that finish first; without, it is collected whole.
    """

    groups: Sequence[Sequence[EpisodeTurns]]
    problems: int
    group_size: int
    max_concurrent_episodes: int
    max_staleness: int
    packing: Packing
    micro_batch_tokens: int
    groups_under_way: int | None = None

    @property
    def episodes(self) -> int:
        return self.problems * self.group_size


@dataclass(frozen=True, slots=True)
class Allocation:
    """`engine_size` GPUs to an engine."""

    trainers: int
    engines: int
    engine_size: int = 1

    @property
    def gpus(self) -> int:
        return self.trainers + self.engines * self.engine_size


def costs_of_group(group: Sequence[EpisodeTurns], workload: Workload) -> list[int]:
    """Positions of what is dealt to trainers whole: the group's tree, or several where it is too large for one forward;
    or each episode.
    """
    lengths = [sum(turn.fed + turn.sampled for turn in episode) for episode in group]
    if workload.packing == "none":
        return lengths
    prompt = min(episode[0].fed for episode in group)
    whole = prompt + sum(length - prompt for length in lengths)
    parts = min(len(group), math.ceil(whole / workload.micro_batch_tokens))
    return [math.ceil((whole + (parts - 1) * prompt) / parts)] * parts
