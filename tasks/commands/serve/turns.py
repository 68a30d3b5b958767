"""A request of the gateway as a turn of the engine. A conversation that goes on is continued token by token, as in
training (`rollouts/agents/transcript.py`), and the engine keeps what it computed of it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from tasks.commands.serve.served import Served
from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError
from tasks.rollouts.agents.answers import as_completion, before_stop, cut_at_stop, ignored_parameters, read_answer
from tasks.rollouts.agents.transcript import Place, Transcript
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest
from tasks.rollouts.settings import SamplingSettings

NUM_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn under way; the engine had `num_cached` tokens of its prompt."""

    request: CompletionRequest
    place: Place
    num_cached: int


@dataclass(slots=True)
class Conversations:
    """Those of one model, and what its engine has of them: at most `most`, under way or waiting for their user."""

    served: Served
    sampling: SamplingSettings
    name: str
    most: int
    transcript: Transcript = field(init=False)
    under_way: dict[EpisodeHandle, Begun] = field(default_factory=dict)
    _idle: OrderedDict[int, EpisodeHandle] = field(default_factory=OrderedDict)  # by sequence, the last used last
    _num_opened: int = 0

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.served.chat, most=self.most)

    @property
    def most_per_turn(self) -> int:
        """Thought and message together: here a thought has no end of its own."""
        return self.sampling.max_tokens_per_turn + (self.sampling.max_thinking_tokens_per_turn or 0)

    def begin(self, request: CompletionRequest) -> EpisodeHandle:
        """Submit its turn. ProtocolError where the history cannot be rendered, or leaves no room."""
        place = self.transcript.place(request.messages, request.tools)
        room = self.sampling.max_tokens_per_episode - len(place.prompt)
        if room < 1:
            raise ProtocolError(
                400,
                f"The conversation has {len(place.prompt)} tokens, and with the reply there is room for "
                f"{self.sampling.max_tokens_per_episode}; shorten it.",
                parameter="messages",
                code="context_length_exceeded",
            )
        handle = None if place.is_new else self._idle.pop(place.sequence, None)
        given = place.prompt if handle is None else place.given
        if handle is None:
            self._make_room()
            self._num_opened += 1
            handle = self._num_opened
        limit = min(room, self.most_per_turn, request.max_tokens or room)
        seed = secrets.randbelow(NUM_SEEDS) if request.seed is None else request.seed % NUM_SEEDS
        self.under_way[handle] = Begun(request, place, num_cached=len(place.prompt) - len(given))
        self.served.engine.submit(TurnRequest(handle, given, limit, seed))
        return handle

    def end(self, reply: TurnReply) -> Completion:
        """ProtocolError where a call was required and none was made."""
        begun, chat = self.under_way.pop(reply.episode), self.served.chat
        request, place = begun.request, begun.place
        length = cut_at_stop(chat, reply.token_ids, request.stop)
        written = reply.token_ids if length is None else reply.token_ids[:length]
        answer = read_answer(chat, written, request, reply.finish, name=f"call_{secrets.token_hex(8)}")
        answer = answer if length is None else before_stop(answer, chat, written, request.stop)
        sequence = self.transcript.record(place, written, answer.said)
        if length is None and sequence not in self._idle:
            self._idle[sequence] = reply.episode
        else:  # the engine has ids of it that nobody will continue
            self.served.engine.release(reply.episode)
        if request.tool_choice == "required" and not answer.calls:
            message = "The model made no call, and tool_choice requires one; send auto, or ask again."
            raise ProtocolError(422, message, parameter="tool_choice", code="no_call")
        return as_completion(
            answer, chat, request, written, reply.sampler_logp[: len(written)], id=secrets.token_hex(12),
            model=self.name, version=self.served.version, num_prompt_tokens=len(place.prompt),
            num_cached_tokens=begun.num_cached, ignored=ignored_parameters(request, self.sampling),
        )  # fmt: skip

    def release_all(self) -> None:
        """Before the engine gets another model; no turn is under way."""
        while self._idle:
            self._release_oldest()

    def _make_room(self) -> None:
        while self._idle and len(self._idle) + len(self.under_way) >= self.most:
            self._release_oldest()

    def _release_oldest(self) -> None:
        self.served.engine.release(self._idle.popitem(last=False)[1])
