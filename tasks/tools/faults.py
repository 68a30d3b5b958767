"""Injected faults: errors, latency, rate limits, truncated replies and renamed fields, at given rates, from a seed.

`FailingEnvironment` (innermost) makes environment faults, which retries and restarts must absorb: a run with them gives
the same trajectories. It also delays calls. `DegradedEnvironment` (outermost) makes what a policy may meet in
production: error replies, truncated text, renamed fields. It is another environment, with another fingerprint.

Faults depend on the seed, the problem, the stream and the number of the call, never on time. An environment fault is
drawn again for each attempt, or it would always return; what the model meets is not, since a lost attempt must leave no
trace.
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
    """The faults of one call; None: does not happen. `cut` is the share of the reply that remains; `renamed` and
    `new_name` choose a field and its new name, as shares.
    """

    error: FaultType | None
    latency_seconds: float
    cut: float | None
    renamed: float | None
    new_name: float


def draw(settings: FaultSettings, problem_id: str, stream: str, number: int) -> Chance:
    """Deterministic in its arguments; `number` counts the calls of the stream."""
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
    """The faults of one episode's calls, in order; errors only if `party` meets them."""

    def __init__(self, settings: FaultSettings, problem_id: str, stream: str, *, party: Literal["turnwise", "model"]):
        self.settings, self.problem_id, self.stream, self.party = settings, problem_id, stream, party
        self.num_drawn = 0

    def next(self) -> Chance:
        chance = draw(self.settings, self.problem_id, self.stream, self.num_drawn)
        self.num_drawn += 1
        return chance if self.settings.seen_by == self.party else replace(chance, error=None)


def _draw_error(chance: float, settings: FaultSettings) -> FaultType | None:
    """At most one of the three: they exclude each other, so their rates add up."""
    types: tuple[FaultType, ...] = ("unavailable", "timeout", "rate_limited")
    ends = accumulate((settings.error_rate, settings.timeout_rate, settings.rate_limit_rate))
    return next((type for type, end in zip(types, ends, strict=True) if chance < end), None)


class FailingEnvironment(EnvironmentWrapper):
    """Delays calls, and raises errors if `seen_by` is turnwise."""

    def __init__(self, inner: Environment, settings: FaultSettings):
        super().__init__(inner)
        self.settings = settings
        self.harmless = {tool.name: tool.may_repeat for tool in inner.tools}

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        chances = Chances(self.settings, problem.id, stream, party="turnwise")
        return FailingEpisode(self.inner.start(problem, stream=stream), self.harmless, chances)


class FailingEpisode(EpisodeWrapper):
    """Errors and rate limits come before the tool acts. A timeout comes after, since a booking that timed out may have
    booked; but before a harmless tool, so that an error which a problem scripts for the first call reaches the model.
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
        fault = EnvironmentFault("an injected fault", tool=name, type=error)
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
    """Replies as on a bad day in production; `describe` includes the rates."""

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
    """Errors and rate limits replace the call, timeouts the reply. Error envelopes stay unchanged."""

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
    if envelope is not None:
        return replace(envelope, num_retries=reply.num_retries)
    if reply.error is not None or (chance.cut is None and chance.renamed is None):
        return reply
    text = reply.text if chance.renamed is None else _rename_field(reply.text, chance.renamed, chance.new_name)
    return replace(reply, text=text if chance.cut is None else text[: int(chance.cut * len(text))])


def _rename_field(text: str, which: float, new_name: float) -> str:
    """A JSON object with one top-level field renamed in place; other text unchanged."""
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
