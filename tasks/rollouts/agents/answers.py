"""What the model wrote as whoever asked gets it: the message, its calls, its thought, and why it ended."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.chat.format import ChatFormat
from tasks.chat.tokens import BYTES_OF_A_CHARACTER, UNREADABLE
from tasks.core.records import Limit
from tasks.core.text import one_line
from tasks.gateway.completions import Completion, CompletionRequest, FinishReason, ProtocolError, WrittenCall
from tasks.rollouts.agents.said import Said
from tasks.rollouts.engine import Finish
from tasks.rollouts.settings import SamplingSettings

MAX_VALUE = 24  # characters of what a request sets
BUDGETS: dict[Limit, str] = {
    "max_turns": "turns of an episode",
    "max_tokens_per_episode": "tokens of a conversation",
    "max_completion_tokens": "tokens after the prompt",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """`is_malformed`: it tried to call a tool and could not be read; then all that it wrote is its text. `stop_string`:
    the one that ended it, which is not in its text.
    """

    text: str
    calls: tuple[WrittenCall, ...]
    thought: str | None
    finish: FinishReason
    is_malformed: bool
    stop_string: str | None = None

    @property
    def said(self) -> Said:
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return Said("assistant", self.text, calls, tuple(call.id for call in self.calls))


def read_answer(
    chat: ChatFormat, written: Sequence[int], request: CompletionRequest, ended_by: Finish, *, name: str
) -> Answer:
    """Of a turn's sampled ids, with its end if it has one. `ended_by` is the engine's word: it has stop strings of its
    own. `name` begins the ids of its calls, and is unique.

    No call is read from the text under `tool_choice: none`, nor where the request has no tools, since its client could
    make none: also of a model that learnt its tools and is shown none.
    """
    is_ended = written[-1] in chat.end_ids
    found = chat.read_turn(written[:-1] if is_ended else written)
    tools = [dict(tool) for tool in request.tools]
    calls = chat.calls(found.message, tools) if tools and request.tool_choice != "none" else []
    is_malformed = any(call is None for call in calls)
    if is_malformed or not calls:
        finish: FinishReason = "stop" if is_ended or ended_by == "stop_string" else "length"
        text = found.message if is_malformed else chat.call_format.answer(found.message)
        return Answer(text, (), found.thought, finish, is_malformed)
    read = tuple(
        WrittenCall(f"{name}_{number}", call.name, call.arguments) for number, call in enumerate(calls) if call
    )
    return Answer(chat.call_format.prose(found.message), read, found.thought, "tool_calls", False)


def cut_at_stop(chat: ChatFormat, written: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many of the ids a turn has that ends with the first of the strings in its message, a thought before it left
    out; None: it has none of them.
    """
    if not stop:
        return None
    start = _message_start(chat, written)
    if not _has_one(chat, written[start:], stop):
        return None
    return bisect_left(
        range(len(written)), True, lo=start + 1, key=lambda end: _has_one(chat, written[start:end], stop)
    )


def before_stop(answer: Answer, chat: ChatFormat, written: Sequence[int], stop: Sequence[str]) -> Answer:
    """Without the stop string that its ids end with, as endpoints give it; calls before it count."""
    message = chat.decode(list(written[_message_start(chat, written) :]))
    found = _first(stop, message)
    ended = _first(stop, answer.text)
    text = answer.text if ended is None else answer.text[: answer.text.find(ended)]
    return replace(answer, text=text, finish="tool_calls" if answer.calls else "stop", stop_string=found)


def _message_start(chat: ChatFormat, written: Sequence[int]) -> int:
    """How many ids the thought before the message has, with the line ends after it."""
    start = chat.read_turn(written).num_thought_tokens
    while 0 < start < len(written) and not chat.decode([written[start]]).strip("\n"):
        start += 1
    return start


def _has_one(chat: ChatFormat, message: Sequence[int], stop: Sequence[str]) -> bool:
    """Also before a character of which the last ids are a part: a decoder of byte tokens may show none before it."""
    for end in range(len(message), max(0, len(message) - BYTES_OF_A_CHARACTER), -1):
        text = chat.decode(list(message[:end]))
        if any(string in text for string in stop):
            return True
        if not text.endswith(UNREADABLE):
            return False
    return False


def _first(stop: Sequence[str], text: str) -> str | None:
    """The one that begins first in the text."""
    found = [one for one in stop if one and one in text]
    return min(found, key=text.find, default=None)


def as_completion(
    answer: Answer, chat: ChatFormat, request: CompletionRequest, written: Sequence[int], logp: Sequence[float],
    *, id: str, model: str, version: str, num_prompt_tokens: int, num_cached_tokens: int, ignored: Sequence[str],
) -> Completion:  # fmt: skip
    return Completion(
        id=id,
        model=model,
        text=answer.text,
        calls=answer.calls,
        finish=answer.finish,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        token_ids=written,
        logp=logp,
        version=version,
        thought=answer.thought,
        num_thought_tokens=chat.read_turn(written).num_thought_tokens,
        tokens=[chat.decode([token]) for token in written] if request.wants_logprobs else (),
        stop_string=answer.stop_string,
        ignored=ignored,
    )


def budget_is_used_up(limit: Limit, most: int) -> ProtocolError:
    message = f"The budget of {most} {BUDGETS[limit]} (sampling.{limit}) is used up, so the episode is over."
    return ProtocolError(400, message, code=limit)


def ignored_parameters(request: CompletionRequest, sampling: SamplingSettings, *, has_seed: bool = False) -> list[str]:
    """What a request sets and is not used: `sampling` is the distribution that is trained and measured, so it is the
    one that is served too. `has_seed`: the episode has a seed of its own.
    """
    asked = {name: getattr(request, name) for name in ("temperature", "top_p")}
    ignored = [name for name, value in asked.items() if value not in (None, getattr(sampling, name))]
    return [*ignored, "seed"] if has_seed and request.seed is not None else ignored


def describe_ignored(request: CompletionRequest, ignored: Sequence[str], sampling: SamplingSettings) -> str:
    """`temperature to 0.2 (1 is used)`."""
    used = {"temperature": f"{sampling.temperature:g}", "top_p": f"{sampling.top_p:g}", "seed": "the run's own"}
    asked = {name: one_line(getattr(request, name), MAX_VALUE) for name in ignored}
    return " and ".join(f"{name} to {value} ({used[name]} is used)" for name, value in asked.items())


def refuse_response_schema(request: CompletionRequest) -> None:
    if request.response_schema is not None:
        message = "Answers cannot be held to a JSON schema; leave response_format out, and ask for one in the prompt."
        raise ProtocolError(400, message, parameter="response_format", code="unsupported_parameter")
