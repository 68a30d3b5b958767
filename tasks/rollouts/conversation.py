"""The environment's side of an episode: answer calls, follow up requests, judge, record.

Episodes of token ids (`episode.py`) and of messages (`engines/endpoint/episode.py`) share it: a subclass decides what a
turn is and what else ends the episode. Nothing here waits: `waiting_for` is the Future of a slow tool or policy, and
`resume` continues once it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tasks.core.records import Limit, Outcome, Problem, TokenSequence, ToolCall, Trajectory, Turn
from tasks.tools.base import (
    TOO_MANY,
    Environment,
    EnvironmentFault,
    Verdict,
    await_in_steps,
    error_text,
)
from tasks.tools.checks import close_episode, fault_of, judge_in_steps, without_exit

if TYPE_CHECKING:
    from tasks.rollouts.fault_log import FaultLog

Waits = Generator[Future[Any], None, None]  # yields what it waits for


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Identifies an episode and its random numbers: equal keys under one run seed replay each other.

    `prefix` are the ids of messages that the episode begins with, as if the policy had written them.
    """

    problem: Problem
    draw: int
    sample_index: int
    prefix: tuple[tuple[int, ...], ...] = ()


class Conversation:
    """One episode under way; `outcome` is set when it has ended.

    `attempt` counts the earlier starts of this key; `fault` is the environment's fault, if any. `sequences` have the
    tokens and, while they grow, the version of each; there are none where the policy's tokens are hidden.
    """

    _steps: Waits  # what is left of the turn, or of the episode

    def __init__(self, key: EpisodeKey, *, environment: Environment, seed: int, stage: str, attempt: int):
        self.key, self.attempt, self.max_calls = key, attempt, environment.limits.max_calls_per_turn
        self.environment = environment
        self.stream = f"{seed}/{stage}/{key.draw}/{key.sample_index}/{attempt}"
        self.is_started = False
        self.sequences: list[TokenSequence] = []
        self.turns: list[Turn] = []
        self.num_replayed_turns = 0
        self.num_calls = self.num_invalid_calls = self.num_retries = 0
        self.request = key.problem.requests[0]  # the user's first message, once it is known
        self.waiting_for: Future[Any] | None = None
        self.fault: EnvironmentFault | None = None
        self.outcome: Outcome | None = None
        self.limit: Limit | None = None
        self.verdict = Verdict(False)

    def resume(self) -> None:
        """Start, or continue, until something must be waited for. A fault of the environment ends the episode."""
        try:
            if not self.is_started:
                self._start()
            self.waiting_for = next(self._steps, None)
        except Exception as error:
            if (fault := fault_of(error)) is None:
                raise
            self.waiting_for, self.fault, self.outcome = None, fault, "environment_error"
            self.num_retries += fault.num_retries

    def close(self) -> None:
        if self.is_started:
            close_episode(self.episode)

    def trajectory(self, *, fingerprint: str) -> Trajectory:
        assert self.outcome is not None
        oldest = min(self._versions(), default=0)
        return Trajectory(
            problem_id=self.key.problem.id,
            category=self.key.problem.category,
            request=self.request,
            draw=self.key.draw,
            sample_index=self.key.sample_index,
            policy_version=oldest,
            environment_fingerprint=fingerprint,
            sequences=[_recorded(sequence, oldest) for sequence in self.sequences],
            turns=self.turns,
            outcome=self.outcome,
            limit=self.limit,
            checks=self.verdict.checks,
            num_calls=self.num_calls,
            num_invalid_calls=self.num_invalid_calls,
            fault=str(self.fault) if self.fault else None,
            details=self._details(),
            split_group=self.key.problem.split_group,
            num_replayed_turns=self.num_replayed_turns,
        )

    def _versions(self) -> set[int]:
        """Of its own tokens; of its own turns, where the tokens are hidden."""
        of_turns = {turn.policy_version for turn in self.turns[self.num_replayed_turns :]}
        return set[int]().union(*map(_versions_of, self.sequences)) or of_turns

    def _details(self) -> dict[str, Any]:
        return self.verdict.details

    def _start(self) -> None:
        with without_exit(self.environment, "start"):
            self.episode = self.environment.start(self.key.problem, stream=self.stream)
        self.is_started = True
        with without_exit(self.environment, "start_user"):
            self.user = self.environment.start_user(self.key.problem, stream=self.stream)

    def _hear_opening(self) -> Waits:
        with without_exit(self.user, "open"):
            self.request = yield from await_in_steps(self.user.open())

    def _hear_answer(self, turn: Turn, message: str) -> Waits:
        """What the user says to a message without a call, as `turn.follow_up`; None there: the user is done."""
        with without_exit(self.user, "answer"):
            turn.follow_up = yield from await_in_steps(self.user.answer(message))
        if turn.follow_up is not None:
            self._end_turn(message)

    def _end_turn(self, message: str | None) -> None:
        with without_exit(self.episode, "end_turn"):
            self.episode.end_turn(message)

    def _answer(self, turn: Turn, calls: Sequence[ToolCall | None]) -> Waits:
        """In order, since a call may depend on an earlier one. Calls beyond the limit per message get one joint
        reply.
        """
        for call in calls[: self.max_calls]:
            asked = self.episode.malformed_call() if call is None else self.episode.call(call.name, call.arguments)
            answer = yield from await_in_steps(asked)
            turn.calls.append({"name": call.name, "arguments": call.arguments} if call else {"malformed": True})
            turn.replies.append(answer.text if call else self._reword(answer.text))
            turn.errors.append(answer.error or (None if answer.valid else "invalid"))
            self.num_calls += 1
            self.num_invalid_calls += not answer.valid
            self.num_retries += answer.num_retries
        if len(calls) > self.max_calls:
            turn.calls.append({"malformed": True})
            turn.replies.append(error_text("invalid_arguments", TOO_MANY.format(self.max_calls)))
            turn.errors.append("invalid_arguments")
            self.num_calls += 1
            self.num_invalid_calls += 1

    def _reword(self, reply: str) -> str:
        """The reply to a malformed call, as this policy reads it."""
        return reply

    def _end(self, final_message: str | None, otherwise: Outcome, limit: Limit | None) -> Waits:
        self.verdict = yield from judge_in_steps(self.episode, final_message)
        self.outcome = "success" if self.verdict.success and final_message is not None else otherwise
        self.limit = limit


def _versions_of(sequence: TokenSequence) -> set[int]:
    assert len(sequence.token_versions) == len(sequence.sampled_mask)
    return set(compress(sequence.token_versions, sequence.sampled_mask))


def _recorded(sequence: TokenSequence, oldest: int) -> TokenSequence:
    """Without versions where the trajectory's oldest wrote all of it."""
    return sequence if _versions_of(sequence) - {oldest} else replace(sequence, token_versions=[])


ConversationT = TypeVar("ConversationT", bound=Conversation)


class EpisodeKind(Protocol[ConversationT]):
    """Opens episodes and has their turns written. `num_turns` counts those that an engine is writing."""

    num_turns: int

    def open(
        self, key: EpisodeKey, environment: Environment, *, seed: int, stage: str, attempt: int
    ) -> ConversationT: ...

    def submit(self, run: ConversationT) -> None:
        """Request the next turn of an episode that neither waits nor is over."""
        ...

    def poll(self, until: Callable[[], bool]) -> list[ConversationT]:
        """The episodes that got a turn; works until there is one, or `until` is true."""
        ...

    def release(self, run: ConversationT) -> None: ...

    def lose(self, fault: EnvironmentFault, faults: FaultLog, *, num_left: int) -> None:
        """An episode was lost for good, `num_left` remain; ValueError where too many are lost."""
        ...

    def counts(self) -> dict[str, float]: ...
