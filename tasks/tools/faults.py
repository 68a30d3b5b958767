"""Faults on purpose: errors, latency, rate limits, truncated replies and renamed fields at given rates, from a seed.

Two wrappers add them, because two parties meet them. `FailingEnvironment`, innermost, makes faults of ours, which
retries and restarts must absorb: a run with them gives the trajectories of a run without. It also makes calls slow.
`DegradedEnvironment`, outermost, makes what a policy may meet in production: an error as a reply, a text that breaks
off, a field under another name. It is another environment, with another fingerprint.

The faults of a call follow from the seed, the problem, the stream and the number of the call, never from the time. A
fault of ours is drawn anew for each attempt, or it would come back for ever; what the model meets is not, since an
attempt that we lost must leave no trace.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from tasks.core import background, json_text
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.tools.base import Answer, Environment, EnvironmentFault, Episode, FaultType, ToolReply, error_text
from tasks.tools.settings import FaultSettings
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper

NEW_NAMES = ("{}_", "{}Value", "new_{}")


@dataclass(frozen=True, slots=True)
class Chance:
    """What befalls one call. `cut` is the share of the reply that is left; `renamed` and `new_name` choose, as shares,
    a field and what it is called instead. None: it does not happen.
    """

    error: FaultType | None
    latency_seconds: float
    cut: float | None
    renamed: float | None
    new_name: float


def draw(settings: FaultSettings, problem_id: str, stream: str, number: int) -> Chance:
    """A function of its arguments alone; `number` is that of the call within the stream."""
    rng = random.Random(json.dumps([settings.seed, problem_id, stream, number]))
    error, late, is_cut, cut, is_renamed, renamed, new_name = (rng.random() for _ in range(7))
    return Chance(
        error=_draw_error(error, settings),
        latency_seconds=settings.latency_seconds if late < settings.latency_rate else 0.0,
        cut=cut if is_cut < settings.truncate_rate else None,
        renamed=renamed if is_renamed < settings.rename_rate else None,
        new_name=new_name,
    )


class Chances:
    """What befalls the calls of one episode, one after the other; an error only where it is `party` that meets it."""

    def __init__(self, settings: FaultSettings, problem_id: str, stream: str, *, party: Literal["turnwise", "model"]):
        self.settings, self.problem_id, self.stream, self.party = settings, problem_id, stream, party
        self.num_drawn = 0

    def next(self) -> Chance:
        chance = draw(self.settings, self.problem_id, self.stream, self.num_drawn)
        self.num_drawn += 1
        return chance if self.settings.seen_by == self.party else replace(chance, error=None)


def _draw_error(chance: float, settings: FaultSettings) -> FaultType | None:
    """One of the three or none: they exclude each other, so their rates lie end to end."""
    types: tuple[FaultType, ...] = ("unavailable", "timeout", "rate_limited")
    ends = accumulate((settings.error_rate, settings.timeout_rate, settings.rate_limit_rate))
    return next((type for type, end in zip(types, ends, strict=True) if chance < end), None)


class FailingEnvironment(EnvironmentWrapper):
    """Calls fail where `seen_by` is turnwise, and are late."""

    def __init__(self, inner: Environment, settings: FaultSettings):
        super().__init__(inner)
        self.settings = settings
        self.harmless = {tool.name: tool.may_repeat for tool in inner.tools}

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        chances = Chances(self.settings, problem.id, stream, party="turnwise")
        return FailingEpisode(self.inner.start(problem, stream=stream), self.harmless, chances)


class FailingEpisode(EpisodeWrapper):
    """Errors and rate limits strike before the tool does anything. A timeout strikes after it, since a booking that
    timed out may have booked; but before it where a repeat is harmless, so that an error which a problem scripts
    for the first call reaches the model and is not lost with the reply.
    """

    def __init__(self, inner: Episode, harmless: Mapping[str, bool], chances: Chances):
        super().__init__(inner)
        self.harmless, self.chances = harmless, chances

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if name not in self.harmless:
            return self.inner.call(name, arguments)
        chance = self.chances.next()
        if chance.latency_seconds:
            return background.run(self._call_late(name, arguments, chance))
        return self._call(name, arguments, chance.error)

    def _call(self, name: str, arguments: Mapping[str, Any], error: FaultType | None) -> Answer:
        if error is None:
            return self.inner.call(name, arguments)
        fault = EnvironmentFault("a fault on purpose", tool=name, type=error)
        if error != "timeout" or self.harmless[name]:
            raise fault
        answer = self.inner.call(name, arguments)
        if isinstance(answer, Future):
            return background.run(_lose_reply(answer, fault))
        raise fault

    async def _call_late(self, name: str, arguments: Mapping[str, Any], chance: Chance) -> ToolReply:
        await asyncio.sleep(chance.latency_seconds)
        answer = self._call(name, arguments, chance.error)
        return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer


async def _lose_reply(answer: Future[ToolReply], fault: EnvironmentFault) -> ToolReply:
    await asyncio.wrap_future(answer)
    raise fault


class DegradedEnvironment(EnvironmentWrapper):
    """Replies of a bad day in production; `describe` says so."""

    def __init__(self, inner: Environment, settings: FaultSettings):
        super().__init__(inner)
        self.settings = settings
        self.known = frozenset(tool.name for tool in inner.tools)

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        episode = stream.rpartition("/")[0] or stream  # its last part is the attempt
        chances = Chances(self.settings, problem.id, episode, party="model")
        return DegradedEpisode(self.inner.start(problem, stream=stream), self.known, chances)

    def describe(self) -> dict[str, Any]:
        changes = self.settings.changes_for_the_policy()
        return {**self.inner.describe(), **({"faults": changes} if changes else {})}

    def fingerprint(self) -> str:
        return json_hash(self.describe())


class DegradedEpisode(EpisodeWrapper):
    """An error or a rate limit is answered in the tool's place; a timeout replaces what it answered. Error envelopes
    are turnwise's own, not production's, and stay whole.
    """

    def __init__(self, inner: Episode, known: Collection[str], chances: Chances):
        super().__init__(inner)
        self.known, self.chances = known, chances

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if name not in self.known:
            return self.inner.call(name, arguments)
        chance = self.chances.next()
        envelope = ToolReply(error_text(chance.error, name), error=chance.error) if chance.error else None
        if envelope and chance.error != "timeout":
            return envelope
        answer = self.inner.call(name, arguments)
        if isinstance(answer, Future):
            return background.run(_degrade_later(answer, chance, envelope))
        return _degrade_reply(answer, chance, envelope)


async def _degrade_later(answer: Future[ToolReply], chance: Chance, envelope: ToolReply | None) -> ToolReply:
    return _degrade_reply(await asyncio.wrap_future(answer), chance, envelope)


def _degrade_reply(reply: ToolReply, chance: Chance, envelope: ToolReply | None) -> ToolReply:
    """What the model reads instead of a reply."""
    if envelope is not None:
        return replace(envelope, num_retries=reply.num_retries)
    if reply.error is not None or (chance.cut is None and chance.renamed is None):
        return reply
    text = reply.text if chance.renamed is None else _rename_field(reply.text, chance.renamed, chance.new_name)
    return replace(reply, text=text if chance.cut is None else text[: int(chance.cut * len(text))])


def _rename_field(text: str, which: float, new_name: float) -> str:
    """A JSON object with one of its own fields under another name, in the same place; any other text as it is."""
    try:
        value = json_text.parse(text)
    except ValueError:
        return text
    if not isinstance(value, dict) or not value:
        return text
    old = list(value)[int(which * len(value))]
    new = NEW_NAMES[int(new_name * len(NEW_NAMES))].format(old)
    if new in value:
        return text
    return json.dumps({new if name == old else name: item for name, item in value.items()}, ensure_ascii=False)
