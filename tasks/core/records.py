"""The nouns everything shares: Problem, Turn, Trajectory, Score, Group.

Problem and Trajectory are also turnwise's two file formats: one JSON object per line. People who bring their own data
write Problems. A stored trajectory can be scored again, browsed and trained on without running a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["success", "failure", "max_turns", "overlong", "environment_error"]
StopReason = Literal[
    "end_of_turn", "stop_string", "max_tokens_per_turn", "max_tokens_per_episode", "max_completion_tokens"
]
Limit = Literal["max_turns", "max_tokens_per_episode", "max_completion_tokens"]


class Record(BaseModel):
    """Base of the records people write by hand: frozen, and an unknown key is an error rather than a silent typo."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ToolCall(Record):
    """One call as the policy writes it: a tool's name and its JSON arguments."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any]


class ReferenceTurn(Record):
    """What solves one user request: the calls in order (failed attempts included), then the closing message."""

    calls: list[ToolCall]
    answer: str


class Problem(Record):
    """One dataset row: what the user asks, the state they ask it in, and one solution that is known to score 1.

    Results are reported by `category`. `level` is the difficulty, from 1 to 100, and how often its demonstration is
    shown. From `world` the environment builds the episode's state. `requests` and `reference` have one entry per user
    turn. `split_group` names what the solution depends on: problems that share it are on the same side of a split.
    """

    id: str = Field(min_length=1)
    category: str = Field(min_length=1)
    level: int = Field(ge=1, le=100)
    requests: list[str] = Field(min_length=1)
    world: dict[str, Any]
    reference: list[ReferenceTurn] = Field(min_length=1)
    split_group: str = Field(min_length=1)


class Demonstration(Record):
    """An expert episode for supervised fine-tuning: the assistant texts and, after each, the tool replies it got.

    `replies[i]` are the replies to `assistant_texts[i]`; the last entry is empty, since the last text is the answer.
    """

    problem_id: str
    request: str
    assistant_texts: list[str]
    replies: list[list[str]]


@dataclass(slots=True)
class Turn:
    """One assistant turn: the text the policy chose, the calls parsed from it, and the reply to each call.

    `errors` has one entry per reply: the type of the error, None where the call was carried out. `follow_up` is what
    the user said next where the turn closed one of several requests. `policy_version` is that of the weights that
    wrote it: in training the iterations behind them, 0 where a model is measured.
    """

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    stop_reason: StopReason = "end_of_turn"
    follow_up: str | None = None
    policy_version: int = 0


@dataclass(slots=True)
class Trajectory:
    """One episode. The three token lists have one entry per token of the whole conversation; they are empty where the
    policy is behind an endpoint that shows no tokens, and `details["usage"]` says what it took.

    `sampled_mask` is True only where the policy chose the token; prompts and tool replies are False: attended to, out
    of the loss. `sampler_logp` is the engine's log-prob (nats) of the distribution it sampled from, 0.0 elsewhere.
    `request` is the first thing the user said; `policy_version` the oldest that wrote a turn of it. `limit` names the
    budget that ended the episode, if one did. `checks` is the environment's own verdict, part by part, and `details`
    (JSON) what more it says, such as what differs. `fault` says what failed where the outcome is `environment_error`.
    Statistics cluster by `split_group`, the problem's.
    """

    problem_id: str
    category: str
    request: str
    draw: int
    sample_index: int
    policy_version: int
    environment_fingerprint: str
    token_ids: list[int]
    sampled_mask: list[bool]
    sampler_logp: list[float]
    turns: list[Turn]
    outcome: Outcome
    limit: Limit | None
    checks: dict[str, bool]
    num_calls: int
    num_invalid_calls: int
    fault: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    split_group: str = ""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.sampled_mask)

    @property
    def is_success(self) -> bool:
        return self.outcome == "success"

    def to_row(self) -> dict[str, Any]:
        """The parts themselves, not copies, which would descend into every call."""
        return _row(self) | {"turns": [_row(turn) for turn in self.turns]}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trajectory:
        return cls(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]})


def _row(record: Turn | Trajectory) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


@dataclass(frozen=True, slots=True)
class Score:
    """A trajectory's reward and the parts it is the sum of."""

    reward: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one problem in one draw, with their scores: the unit GRPO compares within.

    `round_number` is 0 for the problems an iteration drew, and counts the rounds of dynamic sampling for replacements.
    """

    problem_id: str
    category: str
    trajectories: list[Trajectory]
    scores: list[Score]
    round_number: int = 0
