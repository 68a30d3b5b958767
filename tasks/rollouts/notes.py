"""Attempts that begin with notes on earlier ones, and the notes, which the policy writes itself.

A note is the policy's answer to a question at the end of a failed episode, whose tokens it still sees. The next attempt
at the problem begins with the newest notes, before the request. Notes are on top of the episode's token budget, so an
attempt with notes has as much room as one without. Source: Reflexion, Shinn et al., arXiv:2303.11366.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.core.seeds import stream_seed
from tasks.core.text import one_line
from tasks.rollouts.engine import Engine, TurnReply, TurnRequest
from tasks.rollouts.episode import EngineEpisodes, Opening
from tasks.rollouts.settings import SamplingSettings

PREFACE = "Notes on earlier attempts:"
MAX_NOTE_CHARACTERS = 2000  # whatever a tokenizer's longest token is
FIRST_HANDLE = 1 << 32  # beyond those of episodes
Notes = Mapping[str, Sequence[str]]  # by problem id, the oldest first


class RememberingEpisodes(EngineEpisodes):
    """Episodes of an engine that begin with the notes in `notes`; a problem without any is played as ever."""

    def __init__(self, engine: Engine, chat: ChatFormat, sampling: SamplingSettings, *, max_memory_tokens: int):
        super().__init__(engine, chat, sampling)
        self.max_memory_tokens = max_memory_tokens
        self.notes: Notes = {}

    def remember(self, notes: Notes) -> None:
        self.notes = notes

    def _prompt(self, problem: Problem, request: str, opening: Opening) -> tuple[list[int], SamplingSettings]:
        prompt, sampling = super()._prompt(problem, request, opening)
        longer = self._with_notes(self.notes.get(problem.id, ()), request, prompt, opening)
        most = sampling.max_tokens_per_episode + len(longer) - len(prompt)
        return longer, sampling.model_copy(update={"max_tokens_per_episode": most})

    def _with_notes(self, given: Sequence[str], request: str, prompt: list[int], opening: Opening) -> list[int]:
        """The prompt with the newest notes that fit."""
        notes = list(given)
        while notes:
            listed = "\n".join(f"- {note}" for note in notes)
            longer = self.chat.prompt_ids(f"{PREFACE}\n{listed}\n\n{request}", opening.tools, opening.rules)
            if len(prompt) <= len(longer) <= len(prompt) + self.max_memory_tokens:
                return longer
            notes.pop(0)
        return prompt


def room_for_notes(chat: ChatFormat, question: str, *, max_memory_tokens: int, max_note_tokens: int) -> int:
    """Tokens beyond an episode's budget that an engine needs to play with notes and to write them."""
    return max_memory_tokens + len(_asked(chat, question)) + max_note_tokens


def write_notes(
    engine: Engine,
    chat: ChatFormat,
    failed: Sequence[Trajectory],
    question: str,
    *,
    max_note_tokens: int,
    max_episode_tokens: int,
    max_at_once: int,
    seed: int,
) -> list[tuple[str, int]]:
    """What the policy notes on each failed episode, in one line (empty where it wrote nothing), and its tokens.

    The stream derives from the episode's draw, problem and sample, so a note depends on no other.
    """
    written: dict[int, TurnReply] = {}
    for start in range(0, len(failed), max_at_once):
        some = range(start, min(start + max_at_once, len(failed)))
        for number in some:
            item = failed[number]
            seen = item.sequences[item.turns[-1].sequence].token_ids[:max_episode_tokens]
            request_ids = [*seen, *_asked(chat, question, is_ended=seen[-1] in chat.end_ids)]
            key = stream_seed(seed, "note", item.draw, item.problem_id, item.sample_index)
            engine.submit(TurnRequest(FIRST_HANDLE + number, request_ids, max_note_tokens, key))
        while not all(number in written for number in some):
            for reply in engine.poll():
                written[reply.episode - FIRST_HANDLE] = reply
                engine.release(reply.episode)
    return [_read(chat, written[number]) for number in range(len(failed))]


def _asked(chat: ChatFormat, question: str, *, is_ended: bool = False) -> list[int]:
    """The ids of the question after an episode, whose last message is closed where it was not."""
    return [*([] if is_ended else [chat.end_of_turn]), *chat.request_ids(question)]


def _read(chat: ChatFormat, reply: TurnReply) -> tuple[str, int]:
    ids = reply.token_ids[:-1] if reply.token_ids[-1] in chat.end_ids else reply.token_ids
    message = "" if chat.is_within_thought(ids) else chat.read_turn(ids).message
    return one_line(message, limit=MAX_NOTE_CHARACTERS), len(reply.token_ids)
