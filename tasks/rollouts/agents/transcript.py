"""From the messages of a request to token ids: a request that extends a recorded conversation continues its ids.

An agent sends its whole history each time. Rendering that anew would change past tokens under their log-probs, so a
request whose messages are those of a recorded sequence, our answers among them, and more, gets the recorded ids and
those that `ChatFormat` writes for what is new. Any other begins a sequence, with the reason: another system prompt or
other tools (`another_agent`), a second answer to what was answered (`parallel`), a shorter history (`compaction`), or a
changed one (`edited_history`). A new sequence keeps the ids up to the last answer that it shares with a recorded one,
and the rest is rendered. Nothing here knows episodes: what serves a model uses it too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from tasks.chat.format import ChatFormat
from tasks.core.records import Begun
from tasks.core.text import one_line
from tasks.gateway.completions import Message, ProtocolError
from tasks.rollouts.agents.said import Said, canonical_tools, prefix_hashes, read_messages, shared_length

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """A sequence that ends with an answer of ours. `answers`: of each, how many messages and ids there are up to its
    end.
    """

    tools: str
    said: list[Said]
    token_ids: list[int]
    answers: list[tuple[int, int]]

    @cached_property
    def system(self) -> list[str]:
        return [message.text for message in self.said if message.role == "system"]

    @cached_property
    def hashes(self) -> list[int]:
        return prefix_hashes(self.said)

    def shared_length(self, sent: Sequence[Said], hashes: Sequence[int]) -> int:
        """How many messages a request begins with as this sequence does. An agent may ask as many times as there are
        messages, with a history that it changed each time, so messages are compared only from where hashes differ.
        """
        most = min(len(self.hashes), len(hashes))
        start = bisect_left(range(most), True, key=lambda place: self.hashes[place] != hashes[place])
        return shared_length(self.said, sent, start=start)

    def num_answers_within(self, length: int) -> int:
        """How many there are in its first messages."""
        return bisect_right(self.answers, length, key=lambda answer: answer[0])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on. `held` are ids that were there before, of which a new sequence has those it shares with
    an earlier one; `given` are those to append. `begun` says why a new sequence is one, "" for the first.
    """

    sequence: int
    is_new: bool
    begun: Begun
    held: list[int]
    given: list[int]
    said: list[Said] = field(repr=False)
    tools: str = field(repr=False)
    answers: list[tuple[int, int]] = field(repr=False)

    @property
    def prompt(self) -> list[int]:
        return [*self.held, *self.given]


class Transcript:
    """The sequences of one agent's conversations, by number; beyond `most` the one that was used least recently is
    forgotten.
    """

    def __init__(self, chat: ChatFormat, *, most: int | None = None):
        self.chat, self.most = chat, most
        self.recorded: dict[int, Recorded] = {}  # the last used is the last
        self.num_begun = 0

    def place(self, messages: Sequence[Message], tools: Tools = ()) -> Place:
        """Changes no sequence. ProtocolError 400 where no template renders the history."""
        said, shown = read_messages(messages), canonical_tools(tools)
        if not said or said[-1].role == "assistant":
            raise ProtocolError(400, "the last message is the assistant's, so there is nothing to answer")
        hashes = prefix_hashes(said)
        shared = {
            number: known.shared_length(said, hashes) for number, known in self.recorded.items() if known.tools == shown
        }
        whole = [number for number, length in shared.items() if length == len(self.recorded[number].said)]
        longest = max(whole, key=lambda number: (shared[number], -number), default=None)
        if longest is not None:
            known, new = self.recorded[longest], said[shared[longest] :]
            if all(message.role != "assistant" for message in new):
                given = self._render(new, tools, held=known.token_ids)
                return Place(
                    longest, False, "", [*known.token_ids], given, [*known.said, *new], shown, [*known.answers]
                )
        return self._begin(said, tools, shown, shared)

    def record(self, place: Place, written: Sequence[int], answer: Said) -> int:
        """The sequence that now ends with these ids, our `answer` to what was placed; another one than was placed where
        that went on meanwhile.
        """
        number, known = place.sequence, self.recorded.get(place.sequence)
        if known is not None and len(known.token_ids) != len(place.held):
            number = self._next_number()
        said, token_ids = [*place.said, answer], [*place.prompt, *written]
        self.recorded.pop(number, None)
        self.recorded[number] = Recorded(place.tools, said, token_ids, [*place.answers, (len(said), len(token_ids))])
        if self.most is not None and len(self.recorded) > self.most:
            del self.recorded[next(iter(self.recorded))]
        return number

    def _begin(self, said: list[Said], tools: Tools, shown: str, shared: Mapping[int, int]) -> Place:
        answers, known, held = self._last_shared_answer(shared)
        new, begun = said[len(known) :], self._why_new(said, shared)
        given = self._render(new, tools, held=held)
        return Place(self._next_number(), True, begun, held, given, [*known, *new], shown, answers)

    def _last_shared_answer(self, shared: Mapping[int, int]) -> tuple[list[tuple[int, int]], list[Said], list[int]]:
        """The answers, messages and ids up to the last answer that a request shares with any sequence."""
        found: tuple[list[tuple[int, int]], list[Said], list[int]] = [], [], []
        for number, length in shared.items():
            known = self.recorded[number]
            num_answers = known.num_answers_within(length)
            if num_answers > len(found[0]):
                num_said, num_ids = known.answers[num_answers - 1]
                found = known.answers[:num_answers], known.said[:num_said], known.token_ids[:num_ids]
        return found

    def _why_new(self, said: list[Said], shared: Mapping[int, int]) -> Begun:
        if not self.recorded:
            return ""
        system = [message.text for message in said if message.role == "system"]
        same = [number for number in shared if self.recorded[number].system == system]
        if not same:
            return "another_agent"
        if any(shared[number] == len(said) for number in same):
            return "parallel"
        nearest = max(same, key=lambda number: (shared[number], number))
        return "compaction" if len(said) < len(self.recorded[nearest].said) - 1 else "edited_history"

    def _render(self, new: Sequence[Said], tools: Tools, *, held: Sequence[int]) -> list[int]:
        """Ids of messages after `held`, which end with an answer or are empty, up to where the next turn begins."""
        try:
            return self._rendered(new, tools, held)
        except ValueError as error:
            told = one_line(str(error).removeprefix(f"{self.chat.source}: "))
            raise ProtocolError(400, f"this history cannot be rendered for the model: {told}") from None

    def _rendered(self, new: Sequence[Said], tools: Tools, held: Sequence[int]) -> list[int]:
        chat, given = self.chat, list[int]()
        for is_answer, block in groupby(new, key=lambda message: message.role == "assistant"):
            messages = list(block)
            before = given or held
            if is_answer:
                if not before:
                    raise ValueError("it begins with the assistant")
                given += chat.given_ids(messages[0].text, messages[0].tool_calls)
            elif not before:
                given += chat.opening_ids([message.message for message in messages], [dict(tool) for tool in tools])
            else:
                if before[-1] not in chat.end_ids:  # a turn that was cut
                    given.append(chat.end_of_calls if messages[0].role == "tool" else chat.end_of_turn)
                given += chat.following_ids([message.message for message in messages])
        return given

    def _next_number(self) -> int:
        self.num_begun += 1
        return self.num_begun - 1
