"""The judge: votes of a model on an episode, each stored under the hash of everything that it depends on.

Success is what most votes say, score and soundness are medians. An answer that is not of the schema is asked for again
with another seed; after `max_attempts`, or where the endpoint fails, the episode has an environment fault, never a
verdict. Votes that arrived are stored, so a repeated episode asks for the others only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from pydantic import ValidationError

from tasks.core.files import json_hash
from tasks.core.text import encodable, one_line
from tasks.tools.base import EnvironmentFault
from tasks.tools.cache.store import Entry, StoredReply, ToolStore, cache_key
from tasks.tools.chat_client import ChatAnswer
from tasks.tools.judge.client import JudgeClient, request_options
from tasks.tools.judge.opinion import Opinion, answer_schema, read_opinion
from tasks.tools.judge.prompt import FORM, Judged, messages_for
from tasks.tools.judge.settings import JudgeSettings


@dataclass(frozen=True, slots=True)
class Judgement:
    success: bool
    score: float
    soundness: float
    votes: Sequence[Opinion]

    @classmethod
    def of(cls, votes: Sequence[Opinion]) -> Judgement:
        return cls(
            success=sum(vote.success for vote in votes) > len(votes) / 2,
            score=median(vote.score for vote in votes),
            soundness=median(vote.soundness for vote in votes),
            votes=votes,
        )

    def to_row(self) -> dict[str, Any]:
        """As it is left on a trajectory."""
        votes = [vote.model_dump() for vote in self.votes]
        return {"success": self.success, "score": self.score, "soundness": self.soundness, "votes": votes}


UNASKED = Judgement(success=False, score=0.0, soundness=0.0, votes=())  # of an episode that ended on a limit


class Model(Protocol):
    """Behind a judge: at an endpoint, or in this process."""

    async def answer(self, messages: list[dict[str, str]], *, seed: int) -> ChatAnswer:
        """EnvironmentFault where there is none."""
        ...

    async def close(self) -> None: ...


class Judge:
    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.rubric = read_rubric(settings.rubric_file)
        self.model, self.request = open_model(settings), describe_request(settings)
        self.store = ToolStore(Path(settings.cache_folder))
        self.num_asked = self.num_stored = self.num_invalid = 0
        self._asking: dict[str, asyncio.Task[Opinion]] = {}  # by key: equal episodes wait for one answer

    async def judge(self, judged: Judged) -> Judgement:
        """EnvironmentFault where a vote cannot be had."""
        messages = await asyncio.to_thread(  # of a long episode it takes seconds, in which tools of others answer
            messages_for, judged, rubric=self.rubric, max_characters=self.settings.max_characters
        )
        found = await asyncio.gather(
            *(self._vote(messages, number) for number in range(self.settings.num_votes)), return_exceptions=True
        )
        for vote in found:
            if isinstance(vote, BaseException):  # once all have ended, so that each that came is stored
                raise vote
        return Judgement.of([vote for vote in found if isinstance(vote, Opinion)])

    async def _vote(self, messages: list[dict[str, str]], number: int) -> Opinion:
        key = cache_key("judge", self.settings.url, self.request, messages, self._seed(number, 0))
        stored = self._stored(key)
        if stored is not None:
            self.num_stored += 1
            return stored
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask(key, messages, number))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(self._asking[key])

    async def _ask(self, key: str, messages: list[dict[str, str]], number: int) -> Opinion:
        answer = ChatAnswer(None, None)
        for attempt in range(self.settings.max_attempts):
            self.num_asked += 1
            answer = await self.model.answer(messages, seed=self._seed(number, attempt))
            try:
                opinion = read_opinion(answer.text)
            except ValueError:  # includes pydantic's
                self.num_invalid += 1
                continue
            text = encodable(opinion.model_dump_json())
            self.store.put(key, Entry(reply=StoredReply(text=text, valid=True, error=None)))
            return opinion
        raise EnvironmentFault(one_line(self._explain(answer)), tool="judge")

    def _explain(self, answer: ChatAnswer) -> str:
        """Why there is no opinion, after the last attempt."""
        settings = self.settings
        cut = f", cut at {settings.max_output_tokens} tokens (raise environment.judge.max_output_tokens)"
        why = cut if answer.finish_reason == "length" else ""
        return f"its answer is not the requested JSON, {settings.max_attempts} times in a row{why}: {answer.text!r}"

    def _seed(self, number: int, attempt: int) -> int:
        return self.settings.seed + number * self.settings.max_attempts + attempt

    def _stored(self, key: str) -> Opinion | None:
        entry = self.store.get(key)
        if entry is None or entry.reply is None:
            return None
        try:
            return Opinion.model_validate_json(entry.reply.text)
        except ValidationError:  # of an older schema
            return None

    def describe(self) -> dict[str, Any]:
        """What a verdict depends on, as JSON."""
        return describe_judge(self.settings)

    def counts(self) -> dict[str, int]:
        return {
            "judge_requests": self.num_asked,
            "judge_stored_votes": self.num_stored,
            "judge_invalid_answers": self.num_invalid,
        }

    async def close(self) -> None:
        await self.model.close()
        self.store.close()


def open_model(settings: JudgeSettings) -> Model:
    if settings.url is not None:
        return JudgeClient(settings)
    from tasks.tools.judge.frozen import FrozenJudge

    return FrozenJudge(settings)


def describe_request(settings: JudgeSettings) -> dict[str, Any]:
    """All of a request that is the same for every episode; of a model in this process, the hash of its weights."""
    if settings.url is not None:
        return request_options(settings)
    from tasks.tools.judge.frozen import frozen_request

    return frozen_request(settings)


def describe_judge(settings: JudgeSettings) -> dict[str, Any]:
    """The rubric's hash covers the instructions around it."""
    rubric = hashlib.sha256((read_rubric(settings.rubric_file) + FORM).encode()).hexdigest()
    names = ("model", "url", "show_reference", "num_votes", "temperature", "seed", "max_characters")
    return {
        **{name: getattr(settings, name) for name in names},
        "rubric": rubric,
        "schema": json_hash(answer_schema()),
        "structured": settings.structured,
        **(describe_request(settings) if settings.url is None else {}),
    }


def read_rubric(file: Path) -> str:
    """ValueError where it is no text."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"environment.judge.rubric: {file} cannot be read ({type(error).__name__}), so the judge would not know "
            f"what to judge by. Write the rubric there, or name tasks/tools/judge/rubric.md, which comes with turnwise."
        ) from None
    if not text:
        raise ValueError(
            f"environment.judge.rubric: {file} is empty, so the judge would not know what to judge by. Write down "
            f"what success, score and soundness are; tasks/tools/judge/rubric.md is an example."
        )
    return text
