"""One episode of an agent that drives itself: it waits until the agent asks for a turn, calls a tool, or ends.

Requests are answered one after another in the order in which they arrive; the seed of a turn is its number, as in
`EpisodeRun`, so an agent whose history only grows gets the ids that our own loop would give it. A request goes on in
the sequence that it extends (`transcript.py`). The engine has one sequence of an episode at a time.

Temperature, top-p and seed are the trainer's. `stop` ends a turn after the token that completes it: what the engine
sampled beyond is dropped, as if it had stopped there. What ends the episode by a budget is told to the agent as an
error that names the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from tasks.chat.format import ChatFormat
from tasks.core.records import Limit, Outcome, TokenSequence, Turn
from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError
from tasks.rollouts.agents.answers import (
    Answer,
    as_completion,
    before_stop,
    budget_is_used_up,
    cut_at_stop,
    ignored_parameters,
    read_answer,
    refuse_response_schema,
)
from tasks.rollouts.agents.inbox import Asked, Called, Ended, Inbox
from tasks.rollouts.agents.said import Said
from tasks.rollouts.agents.transcript import Place, Transcript
from tasks.rollouts.agents.unheard import Unheard
from tasks.rollouts.conversation import EpisodeKey, Waits
from tasks.rollouts.engine import EpisodeHandle, TurnReply
from tasks.rollouts.episode import EpisodeRun, Prompt
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment, EnvironmentFault, ToolReply, await_in_steps
from tasks.tools.driven import AgentEnd, DrivenEpisode, Endpoint

NO_ROOM = "its first request leaves no room for the policy"


class AgentRun(EpisodeRun):
    """`endpoint` is told to the agent; `by_key` has the run from then until it is over, and what is asked with its key
    is put into the `inbox`. `is_elsewhere`: the engine has not the sequence of the next turn.
    """

    is_replayable = False
    episode: DrivenEpisode

    def __init__(
        self,
        key: EpisodeKey,
        handle: EpisodeHandle,
        *,
        environment: Environment,
        chat: ChatFormat,
        sampling: SamplingSettings,
        seed: int,
        stage: str,
        attempt: int,
        endpoint: Endpoint,
        by_key: dict[str, AgentRun],
    ):
        self.endpoint, self.by_key, self.usual = endpoint, by_key, sampling
        self.offered = environment.tools_for(key.problem)
        self.inbox, self.transcript, self.unheard = Inbox(), Transcript(chat), Unheard()
        self.asked: Asked | None = None  # whose turn is being written
        self.place: Place | None = None
        self.last: Answer | None = None
        self.last_refusal = ""
        self.is_elsewhere = False
        self.numbered: dict[int, TokenSequence] = {}  # by number in the transcript
        self.limits: dict[int, int] = {}
        self.last_turn: dict[int, Turn] = {}
        self.answered: list[tuple[Said, Turn]] = []
        self.called: list[tuple[Called, ToolReply]] = []  # whose replies no request has shown yet
        super().__init__(
            key, handle, environment=environment, chat=chat, prompt=_no_prompt, tools=[], sampling=sampling, seed=seed,
            stage=stage, attempt=attempt,
        )  # fmt: skip

    def close(self) -> None:
        self.by_key.pop(self.endpoint.key, None)
        self.inbox.close()
        if self.asked is not None:
            self._refuse(self.asked, ProtocolError(503, "The episode was given up while this turn was written."))
        super().close()

    def _open(self, prompt: Prompt) -> Waits:
        self.by_key[self.endpoint.key] = self
        ended = self.episode.launch(replace(self.endpoint, model=self.episode.models[0]))
        ended.add_done_callback(lambda end: self.inbox.put(Ended(end)))
        yield from self._attend()

    def _attend(self) -> Waits:
        """Until the agent asks for a turn, or has ended."""
        while self.asked is None and self.outcome is None:
            taking = self.inbox.take()
            yield taking
            event = taking.result()
            if isinstance(event, Asked):
                yield from self._begin(event)
            elif isinstance(event, Called):
                yield from self._call(event)
            else:
                yield from self._finish(event.end.result)

    def _begin(self, asked: Asked) -> Waits:
        if not asked.answer.set_running_or_notify_cancel() or self.unheard.answers(asked):
            return
        try:
            refuse_response_schema(asked.request)
            place = self.transcript.place(asked.request.messages, asked.request.tools)
        except ProtocolError as error:
            self._refuse(asked, error)
            return
        limit = self.limits.setdefault(place.sequence, self.usual.token_limit(len(place.prompt)))
        self._note_replies(place)
        if not place.is_new:
            self._use(place)
        self.token_limit = limit
        if len(self.turns) >= self.usual.max_turns:
            yield from self._run_out(asked, "max_turns", "max_turns")
        elif len(place.prompt) >= limit and not self.turns:
            self._refuse(asked, ProtocolError(400, NO_ROOM, code="context_length_exceeded"))
            raise EnvironmentFault(NO_ROOM, tool="agent")
        elif len(place.prompt) >= limit:
            yield from self._run_out(asked, "overlong", self._token_budget)
        else:
            if place.is_new:
                self._use(place)
            most = min(self.usual.max_tokens_per_turn, asked.request.max_tokens or self.usual.max_tokens_per_turn)
            self.sampling = self.usual.model_copy(update={"max_tokens_per_turn": most})
            if (thought := self.usual.max_thinking_tokens_per_turn) and self._budget is not None:
                self._budget = min(thought, asked.request.max_tokens or thought)
            self.asked, self.place = asked, place

    def _use(self, place: Place) -> None:
        """Go on in the sequence of this place, with what the request adds to it."""
        if place.is_new:
            sequence = self.numbered[place.sequence] = TokenSequence(begun=place.begun)
            sequence.append_given(place.held)
            self.sequences.append(sequence)
        if self.sequence is not self.numbered[place.sequence]:
            self.sequence, self.is_elsewhere = self.numbered[place.sequence], True
        self._append(place.given)

    def begin_anew(self) -> None:
        super().begin_anew()
        self.is_elsewhere = False

    def _goes_on_after(self, reply: TurnReply) -> bool:
        assert self.asked is not None
        goes_on = super()._goes_on_after(reply)
        return goes_on and cut_at_stop(self.chat, self._written, self.asked.request.stop) is None

    def _take_turn(self, reply: TurnReply) -> Waits:
        asked, place = self.asked, self.place
        assert asked is not None
        assert place is not None
        reply = self._cut(reply, asked.request)
        turn = self._read_turn(reply)
        (turn.sequence,) = (number for number, item in enumerate(self.sequences) if item is self.sequence)
        self.turns.append(turn)
        written, self.asked = self._written, None
        self._begin_turn()
        if turn.stop_reason == self._token_budget:
            yield from self._run_out(asked, "overlong", self._token_budget)
            return
        answer = read_answer(self.chat, written, asked.request, reply.finish, name=f"call_{len(self.turns) - 1}")
        if turn.stop_reason == "stop_string":
            answer = before_stop(answer, self.chat, written, asked.request.stop)
        self._note_answer(turn, answer, place.sequence)
        self.transcript.record(place, written, answer.said)
        if asked.request.tool_choice == "required" and not answer.calls:
            message = "The model made no call, and tool_choice requires one; the episode has failed by that."
            self._refuse(asked, ProtocolError(422, message, parameter="tool_choice", code="no_call"))
            yield from self._end(None, "failure", None)
            return
        self.unheard.tell(asked, self._completion(asked.request, place, reply, written, answer))
        yield from self._attend()

    def _cut(self, reply: TurnReply, request: CompletionRequest) -> TurnReply:
        """The reply up to the first of the request's stop strings. The engine then has ids that never were."""
        num_before = len(self._written) - len(reply.token_ids)
        num_kept = (cut_at_stop(self.chat, self._written, request.stop) or 0) - num_before
        if num_kept <= 0:
            return reply
        if num_dropped := len(reply.token_ids) - num_kept:
            self.sequence.drop_last(num_dropped)
            del self._written[-num_dropped:]
            self._num_message_tokens -= num_dropped
            self.is_elsewhere = True
        return replace(
            reply,
            token_ids=reply.token_ids[:num_kept],
            sampler_logp=reply.sampler_logp[:num_kept],
            token_versions=reply.token_versions[:num_kept],
            finish="stop_string",
        )

    def _note_answer(self, turn: Turn, answer: Answer, number: int) -> None:
        self.last, self.last_turn[number] = answer, turn
        self.answered.append((answer.said, turn))
        counted = answer.calls[: self.max_calls + 1]  # as many as a turn of our own loop may count
        turn.calls = [{"name": call.name, "arguments": call.arguments} for call in counted]
        if answer.is_malformed:
            turn.calls = [{"malformed": True}]
            self.num_invalid_calls += 1
        turn.message = turn.text if turn.calls else answer.text
        self.num_calls += len(turn.calls)

    def _note_replies(self, place: Place) -> None:
        """What the request says to the turn that it answers: the replies to its calls, or a further request."""
        turn, new = self._answered_turn(place)
        if turn is None or turn.replies or turn.follow_up is not None:
            return
        replies = {message.number: message.text for message in new if message.role == "tool"}
        for number, call in enumerate(turn.calls if replies else []):
            self._note_error(turn, self._reply_to(call) if number in replies else None)
            turn.replies.append(replies.get(number, ""))
        turn.follow_up = next((message.text for message in new if message.role == "user"), None)
        if turn.follow_up is not None and not turn.calls:
            self._end_turn(turn.message)

    def _answered_turn(self, place: Place) -> tuple[Turn | None, list[Said]]:
        """The turn that a request goes on after, and what it says to it. A client that has rewritten what was before
        still sends the last answer as it got it.
        """
        number = max((number for number, item in enumerate(place.said) if item.role == "assistant"), default=-1)
        sent, new = place.said[number], place.said[number + 1 :]
        if not place.is_new:
            return self.last_turn[place.sequence], new
        return next((turn for said, turn in reversed(self.answered) if said.is_sent_as(sent)), None), new

    def _note_error(self, turn: Turn, reply: ToolReply | None) -> None:
        """Of a call that the policy made: what an agent calls on its own, or again, is no mistake of the policy."""
        error = None
        if reply is not None:
            error = reply.error or (None if reply.valid else "invalid")
            self.num_invalid_calls += not reply.valid
        turn.errors.append(error)

    def _reply_to(self, call: dict[str, Any]) -> ToolReply | None:
        """What the endpoint replied, if the agent made the call there."""
        for place, (called, reply) in enumerate(self.called):
            if (called.name, dict(called.arguments)) == (call.get("name"), call.get("arguments")):
                del self.called[place]
                return reply
        return None

    def _call(self, called: Called) -> Waits:
        if not called.answer.set_running_or_notify_cancel():
            return
        try:
            reply = yield from await_in_steps(self.episode.call(called.name, called.arguments))
        except Exception as error:
            called.answer.set_exception(ProtocolError(503, f"The tool failed: {error}"))
            raise
        self.called.append((called, reply))
        self.num_retries += reply.num_retries
        called.answer.set_result(reply)

    def _finish(self, end: Callable[[], AgentEnd]) -> Waits:
        """EnvironmentFault where the agent crashed, or never asked for anything."""
        try:
            answer = end().answer
        except EnvironmentFault as fault:
            if self.last_refusal:
                fault.message += f" (the last that the endpoint refused it: {self.last_refusal})"
            raise
        if self.last is None:
            raise EnvironmentFault("it ended without a turn of the policy", tool="agent")
        yield from self._end(self.last.text if answer is None else answer, "failure", None)

    def _run_out(self, asked: Asked, outcome: Outcome, limit: Limit) -> Waits:
        self._refuse(asked, budget_is_used_up(limit, getattr(self.usual, limit)))
        yield from self._end(None, outcome, limit)

    def _end(self, final_message: str | None, otherwise: Outcome, limit: Limit | None) -> Waits:
        """A call that ended the episode got no reply: what the agent did with it is its own."""
        for turn in self.turns:
            num_missing = len(turn.calls) - len(turn.replies)
            turn.replies += [""] * num_missing
            turn.errors += [None] * num_missing
        self.episode.read_turns(self.turns)
        yield from super()._end(final_message, otherwise, limit)

    def _refuse(self, asked: Asked, error: ProtocolError) -> None:
        self.last_refusal = error.message
        asked.answer.set_exception(error)

    def _completion(
        self, request: CompletionRequest, place: Place, reply: TurnReply, written: list[int], answer: Answer
    ) -> Completion:
        logp = self.sequence.sampler_logp[-len(written) :]
        return as_completion(
            answer, self.chat, request, written, logp, id=f"turn-{uuid4().hex}", model=request.model,
            version=str(reply.policy_version), num_prompt_tokens=len(place.prompt), num_cached_tokens=len(place.held),
            ignored=ignored_parameters(request, self.usual, has_seed=True),
        )  # fmt: skip


def _no_prompt(request: str) -> Any:
    raise AssertionError("an agent writes its own prompt")
