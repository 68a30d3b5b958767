"""Thoughts: what a model writes before its message, between marks of its family.

A thought is the policy's own text, so it is sampled, trained on and kept in context; it is not its message, so no call
and no answer is read from it. A prompt may open the thought itself (`<think>` at its end: DeepSeek, QwQ, Qwen3.5), and
may close it at once (thinking switched off). In Harmony (gpt-oss) thoughts are messages of the channel `analysis`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks.core.tool_calls import CLOSE, OPEN

SPACES, LINE_ENDS = re.compile(r"\s*"), re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """`lead` is written before `opening`, `before` between a thought and `closing`, `after` between that and the
    message. `ends_thoughts_only`: `closing` ends nothing else, so what precedes it is a thought even where `opening` is
    missing.
    """

    opening: str
    closing: str
    before: str
    after: str
    ends_thoughts_only: bool
    lead: str = ""

    @property
    def closed(self) -> str:
        """What closes a thought that was cut."""
        return f"{self.before}{self.closing}{self.after}"

    def are_in(self, template: str) -> bool:
        return self.opening in template or (self.ends_thoughts_only and self.closing in template)

    def is_open(self, text: str) -> bool:
        """Whether the text of a prompt ends within a thought. Text of tools and users has no such mark."""
        return text.rstrip().endswith(self.opening)

    def split(self, text: str, *, is_open: bool) -> tuple[list[str], str]:
        """The thoughts of a turn and its message; `is_open`: the prompt opened the first. An unclosed thought has no
        message.

        By places in the text: a copy of the rest for each thought takes minutes where a model repeats its marks.
        """
        thoughts, place = list[str](), 0
        is_open = is_open or (self.ends_thoughts_only and self.closing in text)
        while is_open or text.startswith(self.opening, _skip(SPACES, text, place)):
            end = text.find(self.closing, place)
            thought, place = (text[place:], len(text)) if end < 0 else (text[place:end], end + len(self.closing))
            thoughts.append(thought.strip().removeprefix(self.opening).strip())
            place += len(self.after) if text.startswith(self.after, place) else 0
            place, is_open = _skip(LINE_ENDS, text, place), False
        return thoughts, text[place:]

    def strip(self, text: str) -> str:
        """A rendered conversation without its thoughts, closed or at its end."""
        opening, closing = re.escape(self.opening), re.escape(self.closing + self.after.rstrip("\n"))
        return re.sub(
            rf"{re.escape(self.lead)}{opening}(?:(?!{opening}).)*?(?:{closing}\s*|\Z)", "", text, flags=re.DOTALL
        )


def _skip(what: re.Pattern[str], text: str, place: int) -> int:
    """The place after `what`, of which there may be none."""
    found = what.match(text, place)
    return found.end() if found else place


def in_tags(opening: str, closing: str) -> ThoughtMarks:
    return ThoughtMarks(opening, closing, before="\n", after="\n\n", ends_thoughts_only=True)


HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>", "<|end|>", before="", after="<|start|>assistant", ends_thoughts_only=False
)
CALL = "<|call|>"  # ends a turn of Harmony that calls a tool
MARKS = (HARMONY, in_tags("<think>", "</think>"), in_tags("[THINK]", "[/THINK]"))


def without_thoughts(text: str) -> str:
    """What a simulated user says, of a model whose family nobody told: from the last thought that was closed to one
    that begins after it. So no part of a thought is left, wherever it is and if its opening is missing.
    """
    for marks in MARKS:
        text = text.rpartition(marks.closing)[2].partition(marks.opening)[0]
    return text


def after_thought(text: str) -> str:
    """What a policy says, of a family that nobody told, after the thought that it begins with. Marks elsewhere are its
    own words: in an answer that names them, or within a call.
    """
    for marks in MARKS:
        if text.lstrip().startswith(marks.opening) or _closes_a_thought(text, marks):
            text = marks.split(text, is_open=True)[1]
    return text.lstrip("\n")


def _closes_a_thought(text: str, marks: ThoughtMarks) -> bool:
    """Whether it ends a thought that the prompt opened: it has no opening, is within no call, and a message follows."""
    thought, _, message = text.partition(marks.closing)
    is_lone = marks.ends_thoughts_only and marks.opening not in thought and thought.count(OPEN) <= thought.count(CLOSE)
    return is_lone and bool(message.strip())


def find_marks(template: str) -> ThoughtMarks | None:
    """The marks that the text of a chat template names; None for a model that does not think."""
    return next((marks for marks in MARKS if marks.are_in(template)), None)
