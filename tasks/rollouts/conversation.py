"""The environment's side of an episode: calls answered, requests followed up, the verdict, what goes on the record.

Every kind of episode shares it, whether the policy writes token ids (`episode.py`) or messages (`endpoint/episode.py`):
a subclass decides what a turn is and what else can end the episode. Nothing here waits: where a tool, or a policy
behind an endpoint, is slow, `waiting_for` holds the Future, and `resume` goes on once that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tasks.core.records import Limit, Outcome, Problem, ToolCall, Trajectory, Turn
from tasks.tools.base import Environment, EnvironmentFault, Verdict, await_in_steps, error_text

if TYPE_CHECKING:
    from tasks.rollouts.fault_log import FaultLog

Waits = Generator[Future[Any], None, None]  # yields what has to be done before it can go on
TOO_MANY = "a message may make at most {} calls; this one and those after it were not made"


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What an episode is, and so what its random numbers are: equal keys under one run seed replay each other."""

    problem: Problem
    draw: int
    sample_index: int


class Conversation:
    """One episode under way; `outcome` is set when it has ended.

    `attempt` counts from 0 how often this key was started; `fault` is what went wrong with the environment, if it did.
    The three token lists stay empty where the policy's tokens are not to be seen.
    """

    _steps: Waits  # what is left of the turn, or of the episode

    def __init__(self, key: EpisodeKey, *, environment: Environment, seed: int, stage: str, attempt: int):
        self.key, self.attempt, self.max_calls = key, attempt, environment.limits.max_calls_per_turn
        self.episode = environment.start(key.problem, stream=f"{seed}/{stage}/{key.draw}/{key.sample_index}/{attempt}")
        self.token_ids: list[int] = []
        self.sampled_mask: list[bool] = []
        self.sampler_logp: list[float] = []
        self.turns: list[Turn] = []
        self.num_calls = self.num_invalid_calls = self.num_retries = 0
        self.num_requests = 1  # of the user, so far
        self.waiting_for: Future[Any] | None = None
        self.fault: EnvironmentFault | None = None
        self.outcome: Outcome | None = None
        self.limit: Limit | None = None
        self.verdict = Verdict(False)

    def resume(self) -> None:
        """Go on as far as can be without waiting. A fault of the environment ends the episode."""
        try:
            self.waiting_for = next(self._steps, None)
        except EnvironmentFault as fault:
            self.waiting_for, self.fault, self.outcome = None, fault, "environment_error"
            self.num_retries += fault.num_retries

    def close(self) -> None:
        """The episode is over, or given up."""
        self.episode.close()

    def trajectory(self, *, fingerprint: str) -> Trajectory:
        assert self.outcome is not None
        return Trajectory(
            problem_id=self.key.problem.id,
            category=self.key.problem.category,
            request=self.key.problem.requests[0],
            draw=self.key.draw,
            sample_index=self.key.sample_index,
            policy_version=min((turn.policy_version for turn in self.turns), default=0),
            environment_fingerprint=fingerprint,
            token_ids=self.token_ids,
            sampled_mask=self.sampled_mask,
            sampler_logp=self.sampler_logp,
            turns=self.turns,
            outcome=self.outcome,
            limit=self.limit,
            checks=self.verdict.checks,
            num_calls=self.num_calls,
            num_invalid_calls=self.num_invalid_calls,
            fault=str(self.fault) if self.fault else None,
            details=self._details(),
            split_group=self.key.problem.split_group,
        )

    def _details(self) -> dict[str, Any]:
        return self.verdict.details

    @property
    def _more_requests(self) -> bool:
        """Whether the user has another request once this one is closed."""
        return self.num_requests < len(self.key.problem.requests)

    def _ask_again(self, turn: Turn, message: str) -> str:
        """The turn closed a request of the user with `message`; the next request."""
        self.episode.end_turn(message)
        turn.follow_up = self.key.problem.requests[self.num_requests]
        self.num_requests += 1
        return turn.follow_up

    def _answer(self, turn: Turn, calls: Sequence[ToolCall | None]) -> Waits:
        """The reply to each call, one after another: the second may rest on what the first changed. Those beyond the
        limit of a message are not made, and get one reply together.
        """
        for call in calls[: self.max_calls]:
            asked = self.episode.malformed_call() if call is None else self.episode.call(call.name, call.arguments)
            answer = yield from await_in_steps(asked)
            turn.calls.append({"name": call.name, "arguments": call.arguments} if call else {"malformed": True})
            turn.replies.append(answer.text)
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

    def _end(self, final_message: str | None, otherwise: Outcome, limit: Limit | None) -> Waits:
        self.verdict = yield from await_in_steps(self.episode.verdict(final_message))
        self.outcome = "success" if self.verdict.success and final_message is not None else otherwise
        self.limit = limit


ConversationT = TypeVar("ConversationT", bound=Conversation)


class EpisodeKind(Protocol[ConversationT]):
    """Opens episodes and has their turns written: by an engine, or by a model behind an endpoint. `num_turns` counts
    the turns that an engine is at; a model that is asked with a Future is one more thing its episode waits for.
    """

    num_turns: int

    def open(
        self, key: EpisodeKey, environment: Environment, *, seed: int, stage: str, attempt: int
    ) -> ConversationT: ...

    def submit(self, run: ConversationT) -> None:
        """Ask for the next turn of an episode, which neither waits nor is over."""
        ...

    def poll(self, until: Callable[[], bool]) -> list[ConversationT]:
        """The episodes that have gone on with a turn; works until there is one, or `until` is true."""
        ...

    def release(self, run: ConversationT) -> None:
        """Forget an episode that is over."""
        ...

    def lose(self, fault: EnvironmentFault, faults: FaultLog, *, num_left: int) -> None:
        """An episode was lost for good, and `num_left` are still to come; ValueError where that is one too many."""
        ...

    def counts(self) -> dict[str, float]: ...
