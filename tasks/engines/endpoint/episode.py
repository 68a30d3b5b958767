"""An episode whose policy writes messages: a model behind a chat endpoint, which shows no token ids.

The whole conversation is sent each turn. The endpoint may tokenise it differently each time, so these episodes are
never trained on. Calls come structured, or are parsed from text and answered in a user message. Tool output is sent
unchanged: the endpoint keeps messages apart, and breaking up control tokens (`chat/format.py`) needs its tokenizer.
Reasoning returned beside an answer is dropped, and then all of the text is the answer. Else a thought that the text
begins with, of a server that does not tell it apart, goes back to the endpoint with the text, and to nobody else: no
call and no answer is read from it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tasks.chat.thinking import after_thought
from tasks.core import json_text
from tasks.core.records import Problem, ToolCall, Trajectory, Turn
from tasks.core.tool_calls import CLOSE, OPEN, as_call, call_text, parse_calls
from tasks.engines.endpoint.settings import FrontierSettings
from tasks.rollouts.collect import Collector, collect_missing, measured_keys
from tasks.rollouts.conversation import Conversation, EpisodeKey, Waits
from tasks.rollouts.fault_log import FaultLog
from tasks.rollouts.finished import FinishedEpisodes
from tasks.tools.base import Environment, EnvironmentFault

Message = dict[str, Any]  # as the chat API writes it
OPEN_REPLY, CLOSE_REPLY = "<tool_response>", "</tool_response>"


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call as the endpoint sent it; `arguments` is text that should be a JSON object."""

    id: str
    name: str
    arguments: str

    def read(self) -> ToolCall | None:
        try:
            return as_call({"name": self.name, "arguments": json_text.parse(self.arguments or "{}")})
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the policy wrote in one turn. `was_cut`: at the reply's token limit. `is_withheld`: all of it, by a filter
    of the endpoint. `thought_is_apart`: the text has none. Tokens are None where not reported.
    """

    text: str
    calls: Sequence[ChatCall] = ()
    was_cut: bool = False
    is_withheld: bool = False
    thought_is_apart: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


class EndpointFault(EnvironmentFault):
    """The endpoint failed, not its model: the episode is retried, then dropped, and never scored."""


class ContextFull(Exception):
    """The conversation no longer fits the model's context."""


class ChatModel(Protocol):
    settings: FrontierSettings
    name: str
    num_answered: int

    def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Future[ChatReply]:
        """The next turn. The Future raises EndpointFault or ContextFull; ValueError where a retry cannot help."""
        ...

    def cost(self, input_tokens: int | None, output_tokens: int | None) -> float | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Usage:
    """What one episode used, failed attempts included, since they are paid for. None: the endpoint did not say."""

    num_requests: int = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0

    def add(self, reply: ChatReply) -> None:
        self.num_requests += 1
        self.input_tokens = _sum(self.input_tokens, reply.input_tokens)
        self.output_tokens = _sum(self.output_tokens, reply.output_tokens)


class MessageEpisode(Conversation):
    """One episode under way; `resume` runs it until it waits for a tool or the model, or ends.

    Only `max_turns` applies: the other limits count tokens of another tokenizer. A reply cut at the endpoint's own
    limit is answered as a malformed call if the problem has tools; a conversation that exceeds the context is overlong.
    """

    def __init__(
        self,
        key: EpisodeKey,
        *,
        model: ChatModel,
        environment: Environment,
        max_turns: int,
        seed: int,
        stage: str,
        usage: Usage,
        attempt: int,
    ):
        super().__init__(key, environment=environment, seed=seed, stage=stage, attempt=attempt)
        self.model, self.max_turns, self.usage = model, max_turns, usage
        self.tools = [tool.schema() for tool in environment.tools_for(key.problem)]
        rules = environment.rules_for(key.problem)
        self.messages: list[Message] = [{"role": "system", "content": rules}] if rules else []
        self._steps = self._play()

    def _play(self) -> Waits:
        yield from self._hear_opening()
        self.messages.append({"role": "user", "content": self.request})
        while self.outcome is None:
            try:
                asked = self.model.ask(list(self.messages), self.tools)
                yield asked
                reply = asked.result()
            except ContextFull:
                yield from self._end(None, "overlong", "max_tokens_per_episode")
                return
            self.usage.add(reply)
            if reply.is_withheld:
                raise EndpointFault("its content filter withheld the answer", tool="endpoint")
            yield from self._take_turn(reply)

    def _take_turn(self, reply: ChatReply) -> Waits:
        reply = replace(reply, calls=reply.calls[: self.max_calls + 1])  # each call sent back needs a reply
        message = reply.text if reply.thought_is_apart else after_thought(reply.text)
        calls = [call.read() for call in reply.calls] or (parse_calls(message) if self.tools else [])
        if reply.was_cut and self.tools:
            calls = calls or [None]
        turn = Turn(
            _written(message, reply.calls), stop_reason="max_tokens_per_turn" if reply.was_cut else "end_of_turn"
        )
        self.turns.append(turn)
        self.messages.append(_as_message(reply))
        if calls:
            yield from self._answer(turn, calls)
            self.messages += _reply_messages(reply, turn.replies)
        else:
            yield from self._hear_answer(turn, message)
            if turn.follow_up is None:
                yield from self._end(message, "failure", None)
                return
            self.messages.append({"role": "user", "content": turn.follow_up})
        if len(self.turns) == self.max_turns:
            yield from self._end(None, "max_turns", "max_turns")

    def close(self) -> None:
        if self.waiting_for is not None:
            self.waiting_for.cancel()
        super().close()

    def _details(self) -> dict[str, Any]:
        """Usage goes here: a field of the record would stay empty for every other policy."""
        cost = self.model.cost(self.usage.input_tokens, self.usage.output_tokens)
        return {**self.verdict.details, "usage": {**asdict(self.usage), "cost": cost}}


class EndpointEpisodes:
    """Episodes whose turns a model behind an endpoint writes; an EpisodeKind. Usage is summed over attempts."""

    num_turns = 0  # of an engine: there is none

    def __init__(self, model: ChatModel, *, max_turns: int):
        self.model, self.max_turns, self.num_lost = model, max_turns, 0
        self.usage: defaultdict[tuple[str, int, int], Usage] = defaultdict(Usage)

    def open(self, key: EpisodeKey, environment: Environment, *, seed: int, stage: str, attempt: int) -> MessageEpisode:
        return MessageEpisode(
            key,
            model=self.model,
            environment=environment,
            max_turns=environment.budgets_for(key.problem).get("max_turns", self.max_turns),
            seed=seed,
            stage=stage,
            usage=self.usage[key.problem.id, key.draw, key.sample_index],
            attempt=attempt,
        )

    def submit(self, run: MessageEpisode) -> None:
        run.resume()

    def poll(self, until: Callable[[], bool]) -> list[MessageEpisode]:
        return []

    def release(self, run: MessageEpisode) -> None:
        """Nothing to free."""

    def lose(self, fault: EnvironmentFault, faults: FaultLog, *, num_left: int) -> None:
        if not isinstance(fault, EndpointFault):
            return
        self.num_lost += 1
        share, num_episodes = faults.limits.max_dropped_share, faults.num_finished + 1 + num_left
        if (faults.num_finished or self.model.num_answered) and self.num_lost <= share * num_episodes:
            return
        raise ValueError(
            f"evaluate.frontier: the endpoint of {self.model.name!r} lost {self.num_lost} of {num_episodes} episodes "
            f"after {self.model.num_answered} answers ({fault}); environment.tools.max_dropped_share allows "
            f"{share:.0%}, and the rest is no fair sample. Repair the endpoint, or set evaluate.frontier to null."
        )

    def counts(self) -> dict[str, float]:
        return {}


def play_endpoint(
    model: ChatModel,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    max_turns: int,
    seed: int,
    label: str,
    finished: FinishedEpisodes | None = None,
) -> list[Trajectory]:
    """Play the first problems with a model behind an endpoint; order is problems × samples.

    The stage is that of other models' test episodes, so tools draw the same random numbers. `finished` episodes are
    paid for and not repeated; new ones are added to them.
    """
    settings = model.settings
    collector = Collector(
        EndpointEpisodes(model, max_turns=max_turns),
        environment,
        max_concurrent_episodes=settings.max_concurrent_episodes,
        seed=seed,
        stage="test",
    )
    keys = measured_keys(problems[: settings.num_problems], settings.samples_per_problem)
    return collect_missing(collector, keys, finished, label=label)


def _written(message: str, calls: Sequence[ChatCall]) -> str:
    texts = [message] if message else []
    for call in calls:
        read = call.read()
        as_it_came = f"{OPEN}\n" + json.dumps({"name": call.name, "arguments": call.arguments}) + f"\n{CLOSE}"
        texts.append(call_text(read) if read else as_it_came)
    return "\n".join(texts)


def _as_message(reply: ChatReply) -> Message:
    """The turn as history. Endpoints refuse arguments that are no JSON, so those go back as text in an object."""
    if not reply.calls:
        return {"role": "assistant", "content": reply.text}
    calls = []
    for call in reply.calls:
        arguments = (call.arguments or "{}") if call.read() else json.dumps({"unreadable": call.arguments})
        function = {"name": call.name or "unnamed", "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {"role": "assistant", "content": reply.text or None, "tool_calls": calls}


def _reply_messages(reply: ChatReply, texts: Sequence[str]) -> list[Message]:
    if reply.calls:
        pairs = zip(reply.calls, texts, strict=True)
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in pairs]
    replies = (text.replace(CLOSE_REPLY, f"{CLOSE_REPLY[0]} {CLOSE_REPLY[1:]}") for text in texts)
    return [{"role": "user", "content": "\n".join(f"{OPEN_REPLY}\n{text}\n{CLOSE_REPLY}" for text in replies)}]


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more
