"""The records everything shares: Problem, Turn, Trajectory, Score, Group.

Problem and Trajectory are also file formats: one JSON object per line. A stored trajectory can be scored again, browsed
and trained on without a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["success", "failure", "max_turns", "overlong", "environment_error"]
StopReason = Literal[
    "end_of_turn", "stop_string", "max_tokens_per_turn", "max_tokens_per_episode", "max_completion_tokens"
]
BY_ENVIRONMENT = "success_by_environment"  # in a row of metrics: success rate by name, of a mixture
OF_A_THOUGHT = ("thought", "num_thought_tokens", "thought_was_cut")
LEFT_OUT_IF_EMPTY = ("score", "num_replayed_turns", "token_versions")
Limit = Literal["max_turns", "max_tokens_per_episode", "max_completion_tokens"]


class Record(BaseModel):
    """Base of hand-written records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ToolCall(Record):
    name: str = Field(min_length=1)
    arguments: dict[str, Any]


class ReferenceTurn(Record):
    """The solution of one user request: calls in order, failed attempts included, then the closing message."""

    calls: list[ToolCall]
    answer: str


class Problem(Record):
    """One dataset row: the user's requests, the initial state, and one solution that is known to score 1.

    Results are reported by `category`. `level` is the difficulty, 1 to 100, and how often its demonstration is shown.
    The environment builds the episode's state from `world`. `requests` and `reference` have one entry per user turn.
    Problems with the same `split_group` depend on the same facts and are in the same split.
    """

    id: str = Field(min_length=1)
    category: str = Field(min_length=1)
    level: int = Field(ge=1, le=100)
    requests: list[str] = Field(min_length=1)
    world: dict[str, Any]
    reference: list[ReferenceTurn] = Field(min_length=1)
    split_group: str = Field(min_length=1)


class Demonstration(Record):
    """An expert episode for supervised fine-tuning. `replies[i]` are the tool replies to `assistant_texts[i]`; the last
    is empty, since the last text is the answer. `follow_ups`: what the user says to the earlier texts without replies,
    in order.
    """

    problem_id: str
    request: str
    assistant_texts: list[str]
    replies: list[list[str]]
    follow_ups: list[str] = Field(default_factory=list)


@dataclass(slots=True)
class Turn:
    """One assistant turn: the sampled text, its calls, and the reply to each call.

    `thought`: what a thinking model wrote before `text`, in which no call counts, of `num_thought_tokens`;
    `thought_was_cut`: by its own budget. Rows of turns without a thought leave the three out.
    `errors`: per reply, the error type, or None. `follow_up`: the user's next request, if the turn closed one.
    `policy_version`: iterations behind the weights that wrote its last token; 0 when a model is only measured.
    """

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    stop_reason: StopReason = "end_of_turn"
    follow_up: str | None = None
    policy_version: int = 0
    thought: str | None = None
    num_thought_tokens: int = 0
    thought_was_cut: bool = False


@dataclass(slots=True)
class Trajectory:
    """One episode. The three token lists have one entry per token of the whole conversation; they are empty for an
    endpoint without token ids, whose token counts are in `details["usage"]`.

    `sampled_mask`: True only where the policy chose the token; prompts and tool replies are attended to, but not in the
    loss. `sampler_logp`: the engine's log-prob (nats) under its sampling distribution, 0.0 elsewhere. `request`: the
    first user message. `policy_version`: the oldest of its tokens; where newer weights wrote some, `token_versions` has
    that of each sampled token, 0 elsewhere, and else it is empty and rows leave it out. `limit`: the budget that ended
    the episode, or None.
    `checks` and `details` (JSON): the environment's verdict. `fault`: what failed, if the outcome is
    `environment_error`. Statistics cluster by the problem's `split_group`. `score`: of the reward it was trained or
    rescored with; rows without one leave it out. `num_replayed_turns`: leading turns that were given, not written by
    the policy (`learning/grpo/prefixes.py`); rows without any leave it out. `num_calls` are those of its own turns.
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
    score: Score | None = None
    num_replayed_turns: int = 0
    token_versions: list[int] = field(default_factory=list)

    @property
    def own_turns(self) -> list[Turn]:
        return self.turns[self.num_replayed_turns :]

    @property
    def sampled_versions(self) -> list[int]:
        """Of each sampled token, the policy that wrote it."""
        if not self.token_versions:
            return [self.policy_version] * self.num_sampled_tokens
        tokens = zip(self.token_versions, self.sampled_mask, strict=True)
        return [version for version, is_sampled in tokens if is_sampled]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.sampled_mask)

    @property
    def num_thought_tokens(self) -> int:
        return sum(turn.num_thought_tokens for turn in self.turns)

    @property
    def is_success(self) -> bool:
        return self.outcome == "success"

    def is_of(self, *, request: str, category: str, split_group: str) -> bool:
        """Whether it plays a problem with its id. A simulated user opens with other words, so equal facts suffice."""
        facts = self.category, self.split_group
        return self.request == request or (bool(self.split_group) and facts == (category, split_group))

    def to_row(self) -> dict[str, Any]:
        """Without copying: a deep copy would visit every call."""
        row = _row(self) | {"turns": [_turn_row(turn) for turn in self.turns], "score": self.score and _row(self.score)}
        return {name: row[name] for name in row if row[name] or name not in LEFT_OUT_IF_EMPTY}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trajectory:
        score = row.get("score")
        turns = [Turn(**turn) for turn in row["turns"]]
        return cls(**{**row, "turns": turns, "score": score and Score(**score)})


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = _row(turn)
    return row if turn.thought is not None else {name: row[name] for name in row if name not in OF_A_THOUGHT}


def _row(record: Turn | Trajectory | Score) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


EQUAL_REWARDS = 1e-6  # rewards closer than this are equal


@dataclass(frozen=True, slots=True)
class Score:
    """A trajectory's reward, and the parts that add up to it: each is its value times its weight."""

    reward: float
    parts: dict[str, float]
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one problem in one draw, with scores: GRPO compares within it. `round_number`: 0 for the
    problems an iteration drew, then the rounds of dynamic sampling.
    """

    problem_id: str
    category: str
    trajectories: list[Trajectory]
    scores: list[Score]
    round_number: int = 0

    @property
    def is_prefixed(self) -> bool:
        """Whether its episodes began with replayed turns, so that their success is not of the problem as it is."""
        return any(trajectory.num_replayed_turns for trajectory in self.trajectories)
