"""The records everything shares: Problem, Turn, Trajectory, Score, Group.

Problem and Trajectory are also file formats: one JSON object per line. A stored trajectory can be scored again, browsed
and trained on without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Annotated, Any, Literal
from unicodedata import normalize

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from tasks.core.record_rows import row_of, without_empty

Outcome = Literal["success", "failure", "max_turns", "overlong", "environment_error"]
StopReason = Literal[
    "end_of_turn", "stop_string", "max_tokens_per_turn", "max_tokens_per_episode", "max_completion_tokens"
]
BY_ENVIRONMENT = "success_by_environment"  # in a row of metrics: success rate by name, of a mixture
MEAN_PARTS = "mean_parts"  # in a row of metrics: what each part of the reward added, by name
EQUAL_REWARDS = 1e-6  # rewards closer than this are equal
COMPOSED = AfterValidator(partial(normalize, "NFC"))
OF_A_THOUGHT = ("thought", "num_thought_tokens", "thought_was_cut")
Limit = Literal["max_turns", "max_tokens_per_episode", "max_completion_tokens"]
Gate = Literal["skip_rl", "rl", "warm_start"]
DecisionKind = Literal["promote", "hold", "reject"]
Metrics = dict[str, Any]  # a row of metrics.jsonl
Begun = Literal["", "edited_history", "compaction", "another_agent", "parallel"]


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
    Problems with the same `split_group` depend on the same facts and are in the same split; outer spaces do not count.
    """

    id: str = Field(min_length=1)
    category: str = Field(min_length=1)
    level: int = Field(ge=1, le=100)
    requests: list[str] = Field(min_length=1)
    world: dict[str, Any]
    reference: list[ReferenceTurn] = Field(min_length=1)
    split_group: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), COMPOSED]


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
    `thought_was_cut`: by its own budget. Rows of turns without a thought leave the three out. `errors`: per reply, the
    error type, or None. `follow_up`: the user's next request, if the turn closed one. `policy_version`: iterations
    behind the weights that wrote its last token; 0 when a model is only measured. `sequence`: which of the trajectory's
    sequences has its tokens; rows leave out the first, 0. `answer`: what the user read of a message without a call,
    where marks of its call format are in `text`; rows leave out None.
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
    sequence: int = 0
    answer: str | None = None

    @property
    def message(self) -> str:
        """`text` as the user reads it."""
        return self.text if self.answer is None else self.answer

    @message.setter
    def message(self, read: str) -> None:
        self.answer = None if read == self.text else read


@dataclass(slots=True)
class TokenSequence:
    """What one forward reads: ids that were only ever appended to. Each list has one entry per token.

    `sampled_mask`: True only where the policy chose the token; prompts and tool replies are attended to, but not in the
    loss. `sampler_logp`: the engine's log-prob (nats) under its sampling distribution, 0.0 elsewhere. `token_versions`:
    the policy that wrote each sampled token, 0 elsewhere; empty where the trajectory's `policy_version` wrote all of
    them, and then rows leave it out. `begun`: why it did not continue an earlier sequence; "" for the first.
    """

    token_ids: list[int] = field(default_factory=list)
    sampled_mask: list[bool] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    begun: Begun = ""

    def append_given(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.sampled_mask += [False] * len(token_ids)
        self.sampler_logp += [0.0] * len(token_ids)
        self.token_versions += [0] * len(token_ids)

    def append_sampled(self, token_ids: Sequence[int], logp: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.sampled_mask += [True] * len(token_ids)
        self.sampler_logp += logp
        self.token_versions += versions

    def drop_last(self, num_tokens: int) -> None:
        for values in (self.token_ids, self.sampled_mask, self.sampler_logp, self.token_versions):
            del values[-num_tokens:]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.sampled_mask)

    @property
    def sampled_ids(self) -> list[int]:
        return [*compress(self.token_ids, self.sampled_mask)]


@dataclass(slots=True)
class Trajectory:
    """One episode: its turns in order, the tokens of them all in one or more `sequences`, one outcome.

    An agent that only appends to its conversation has one sequence; another begins wherever it asks the policy
    something that continues none. An endpoint without token ids has no sequence, and its token counts are in
    `details["usage"]`. `request`: the first user message. `policy_version`: the oldest of its tokens. `limit`: the
    budget that ended the episode, or None.
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
    sequences: list[TokenSequence]
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

    @property
    def own_turns(self) -> list[Turn]:
        return self.turns[self.num_replayed_turns :]

    def sampled_versions(self, sequence: TokenSequence) -> list[int]:
        """Of each sampled token of one of its sequences, the policy that wrote it."""
        if not sequence.token_versions:
            return [self.policy_version] * sequence.num_sampled_tokens
        return [*compress(sequence.token_versions, sequence.sampled_mask)]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sequence.num_sampled_tokens for sequence in self.sequences)

    @property
    def num_thought_tokens(self) -> int:
        return sum(turn.num_thought_tokens for turn in self.turns)

    @property
    def has_thoughts(self) -> bool:
        return any(turn.thought is not None for turn in self.turns)

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def is_success(self) -> bool:
        return self.outcome == "success"

    @property
    def is_lost(self) -> bool:
        """Whether the environment failed, which is our fault and no evidence about the policy."""
        return self.outcome == "environment_error"

    def is_of(self, *, request: str, category: str, split_group: str) -> bool:
        """Whether it plays a problem with its id. A simulated user opens with other words, so equal facts suffice."""
        facts = self.category, self.split_group
        return self.request == request or (bool(self.split_group) and facts == (category, split_group))

    def to_row(self) -> dict[str, Any]:
        """Without copying: a deep copy would visit every call."""
        row = row_of(self)
        row["sequences"] = [without_empty(row_of(sequence)) for sequence in self.sequences]
        row["turns"] = [_turn_row(turn) for turn in self.turns]
        row["score"] = self.score and row_of(self.score)
        return without_empty(row)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Trajectory:
        """KeyError or TypeError for a row that lacks a field."""
        score = row.get("score")
        turns = [Turn(**turn) for turn in row["turns"]]
        sequences = [TokenSequence(**sequence) for sequence in row["sequences"]]
        return cls(**{**row, "sequences": sequences, "turns": turns, "score": score and Score(**score)})


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = row_of(turn)
    if turn.thought is None:
        for name in OF_A_THOUGHT:
            del row[name]
    if turn.sequence == 0:
        del row["sequence"]
    if turn.answer is None:
        del row["answer"]
    return row


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
