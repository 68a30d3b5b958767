"""One episode as a state machine: prompt, then assistant turns and tool replies until something ends it.

It asks for turns and is told what the policy wrote; it never waits, so any number of episodes interleave: where a tool
is slow, `waiting_for` holds its Future, and `resume` goes on once that is done. A closing message answers the request
at hand; the next one follows, and after the last the episode ends. It also ends on a limit (turns: an ordinary failure;
tokens: overlong), or on a fault of the environment. A turn cut at its own token limit does not end it: that message is
answered as a malformed call.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from tasks.environments.base import Environment, EnvironmentFault, Verdict, waited
from tasks.records import Limit, Outcome, Problem, StopReason, ToolCall, Trajectory, Turn
from tasks.rollouts.chat import ChatFormat
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest
from tasks.rollouts.options import SamplingSettings
from tasks.rollouts.seeds import stream_seed

TokenBudget = Literal["max_tokens_per_episode", "max_completion_tokens"]
Waits = Generator[Future[Any], None, None]  # yields what has to be done before it can go on


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What an episode is, and so what its random numbers are: equal keys under one run seed replay each other."""

    problem: Problem
    draw: int
    sample_index: int


class EpisodeRun:
    """One episode under way. `next_request` asks for a turn, `advance` takes it; `outcome` is set when it has ended.

    `attempt` counts from 0 how often this key was started; `fault` is what went wrong with the environment, if it did.
    """

    def __init__(
        self,
        key: EpisodeKey,
        handle: EpisodeHandle,
        *,
        environment: Environment,
        chat: ChatFormat,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        seed: int,
        stage: str,
        attempt: int = 0,
    ):
        self.key, self.handle, self.attempt = key, handle, attempt
        self.chat, self.sampling = chat, sampling
        self.seed_key = (seed, stage, key.draw, key.problem.id, key.sample_index)
        self.episode = environment.start(key.problem, stream=f"{seed}/{stage}/{key.draw}/{key.sample_index}/{attempt}")
        self.token_ids: list[int] = []
        self.sampled_mask: list[bool] = []
        self.sampler_logp: list[float] = []
        self.turns: list[Turn] = []
        self.num_calls = self.num_invalid_calls = self.num_retries = 0
        self.waiting_for: Future[Any] | None = None
        self.fault: EnvironmentFault | None = None
        self.outcome: Outcome | None = None
        self.limit: Limit | None = None
        self.verdict = Verdict(False)
        self.num_requests = 1  # of the user, so far
        self.token_limit = sampling.token_limit(len(prompt_ids))
        self._append(prompt_ids)

    def next_request(self) -> TurnRequest:
        room = self.token_limit - len(self.token_ids)
        seed = stream_seed(*self.seed_key, len(self.turns))
        return TurnRequest(self.handle, self._unsent, min(self.sampling.max_tokens_per_turn, room), seed)

    def advance(self, reply: TurnReply) -> None:
        """Take what the policy wrote, let the tools answer, and decide whether and how the episode ends."""
        self.token_ids += reply.token_ids
        self.sampled_mask += [True] * len(reply.token_ids)
        self.sampler_logp += reply.sampler_logp
        self._steps = self._take_turn(reply)
        self.resume()

    def resume(self) -> None:
        """Go on as far as can be without waiting. A fault of the environment ends the episode."""
        try:
            self.waiting_for = next(self._steps, None)
        except EnvironmentFault as fault:
            self.waiting_for, self.fault, self.outcome = None, fault, "environment_error"
            self.num_retries += fault.num_retries

    def _take_turn(self, reply: TurnReply) -> Waits:
        turn = self._read_turn(reply)
        self.turns.append(turn)
        calls = self.chat.calls(turn.text)
        if turn.stop_reason == self._token_budget:
            yield from self._end(None, "overlong", self._token_budget)
            return
        if turn.stop_reason == "max_tokens_per_turn":
            calls = calls or [None]
        closing = [] if reply.finish == "end_of_turn" else [self.chat.end_of_turn]
        if calls:
            yield from self._answer(turn, calls)
            self._append([*closing, *self.chat.reply_ids(tuple(turn.replies))])
        elif self.num_requests < len(self.key.problem.requests):
            self._ask_again(turn, closing)
        else:
            yield from self._end(self.chat.call_format.answer(turn.text), "failure", None)
            return
        if len(self.turns) == self.sampling.max_turns:
            yield from self._end(None, "max_turns", "max_turns")
        elif len(self.token_ids) >= self.token_limit:
            yield from self._end(None, "overlong", self._token_budget)

    def _ask_again(self, turn: Turn, closing: list[int]) -> None:
        """The turn closed a request of the user, who makes the next."""
        self.episode.end_turn(self.chat.call_format.answer(turn.text))
        turn.follow_up = self.key.problem.requests[self.num_requests]
        self.num_requests += 1
        self._append([*closing, *self.chat.request_ids(turn.follow_up)])

    @property
    def _token_budget(self) -> TokenBudget:
        """Which of the two limits on an episode's tokens is the one it can meet."""
        is_whole = self.token_limit == self.sampling.max_tokens_per_episode
        return "max_tokens_per_episode" if is_whole else "max_completion_tokens"

    def _answer(self, turn: Turn, calls: Sequence[ToolCall | None]) -> Waits:
        """The reply to each call, one after another: the second may rest on what the first changed."""
        for call in calls:
            asked = self.episode.malformed_call() if call is None else self.episode.call(call.name, call.arguments)
            answer = yield from waited(asked)
            turn.calls.append({"name": call.name, "arguments": call.arguments} if call else {"malformed": True})
            turn.replies.append(answer.text)
            turn.errors.append(answer.error or (None if answer.valid else "invalid"))
            self.num_calls += 1
            self.num_invalid_calls += not answer.valid
            self.num_retries += answer.num_retries

    def _read_turn(self, reply: TurnReply) -> Turn:
        """The turn as text. Cut at its own limit it is closed for the policy, and the episode goes on: an agent that
        rambles is told so and can recover, and if it never does, it fails by its turns and learns from that.
        """
        written, version = reply.token_ids, reply.policy_version
        if reply.finish == "end_of_turn":
            return Turn(self.chat.decode(written[:-1]), policy_version=version)
        at_turn_limit = len(written) == self.sampling.max_tokens_per_turn
        cut: StopReason = "max_tokens_per_turn" if at_turn_limit else self._token_budget
        stop_reason: StopReason = "stop_string" if reply.finish == "stop_string" else cut
        return Turn(self.chat.decode(written), stop_reason=stop_reason, policy_version=version)

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
            details=self.verdict.details,
        )

    def _append(self, token_ids: list[int]) -> None:
        """Ids the policy did not choose: in the context, out of the loss."""
        self._unsent = token_ids
        self.token_ids += token_ids
        self.sampled_mask += [False] * len(token_ids)
        self.sampler_logp += [0.0] * len(token_ids)

    def _end(self, final_message: str | None, otherwise: Outcome, limit: Limit | None) -> Waits:
        self.verdict = yield from waited(self.episode.verdict(final_message))
        self.outcome = "success" if self.verdict.success and final_message is not None else otherwise
        self.limit = limit
