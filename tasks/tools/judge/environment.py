"""An environment whose episodes a judge reads when they are over. Its opinion is left in the verdict's details as
`judge`: {success, score, soundness, votes}, from 0 to 1, which the parts `judge` and `soundness` of the reward read.
With `decides` success takes the judge's yes beside the environment's own verdict, as the check `judge`.

The judge reads the calls and replies as the policy saw them; of an episode that an agent drives, the turns that were
recorded, since the agent has tools and words of its own. `final_message` is in the opinion where it is not the message
of the last turn. An episode that ended on a limit has no final message; it gets zeros, and nobody is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.records import Problem, Turn
from tasks.tools.base import REPLAY, Answer, Environment, Episode, User, Verdict, block_until
from tasks.tools.judge.evidence import measured_agreement
from tasks.tools.judge.judge import UNASKED, Judge, Judgement
from tasks.tools.judge.prompt import Judged, events_of
from tasks.tools.judge.settings import JudgeSettings
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper


class JudgedEnvironment(EnvironmentWrapper):
    """`is_asked`: false where only an opinion that decides is worth its price, as when references are played."""

    def __init__(self, inner: Environment, settings: JudgeSettings, *, is_asked: bool):
        super().__init__(inner)
        self.agreement = measured_agreement(settings)
        self.judge, self.is_asked = Judge(settings), is_asked or settings.decides
        # By problem and stream, so that what the user of an episode says is heard; gone with the episode.
        self._open: WeakValueDictionary[tuple[str, str], JudgedEpisode] = WeakValueDictionary()

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        inner = self.inner.start(problem, stream=stream)
        if not self.is_asked:
            return inner
        episode = JudgedEpisode(inner, problem, self.judge)
        self._open[problem.id, stream] = episode
        return episode

    def start_user(self, problem: Problem, *, stream: str = "") -> User:
        user = self.inner.start_user(problem, stream=stream)
        episode = self._open.get((problem.id, stream.partition(REPLAY)[0]))
        return user if episode is None else HeardUser(user, episode)

    def describe(self) -> dict[str, Any]:
        decides = self.judge.settings.decides
        judge = {**self.judge.describe(), "decides": decides, "agreement": self.agreement}
        return {**self.inner.describe(), "judge": judge}

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def counts(self) -> dict[str, int]:
        return {**self.inner.counts(), **self.judge.counts()}

    def close(self) -> None:
        self.inner.close()
        background.run(self.judge.close()).result()


class JudgedEpisode(EpisodeWrapper):
    def __init__(self, inner: Episode, problem: Problem, judge: Judge):
        super().__init__(inner)
        self.problem, self.judge = problem, judge
        self.events: list[dict[str, Any]] = []  # a reply that is waited for is a Future until it is there
        self.opening: Any = problem.requests[0]  # of the user, as `open` gave it
        self.answers: list[Any] = []  # as `answer` gave them
        self.turns: Sequence[Turn] = ()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        answer = self.inner.call(name, arguments)
        self.events.append({"tool": name, "arguments": dict(arguments), "reply": answer})
        return answer

    def malformed_call(self) -> Answer:
        reply = self.inner.malformed_call()
        self.events.append({"malformed_call": True, "reply": reply})
        return reply

    def end_turn(self, message: str | None) -> None:
        heard = {"user": block_until(self.answers[-1])} if self.answers else {}
        self.events.append({"message": message, **heard})
        self.inner.end_turn(message)

    def read_turns(self, turns: Sequence[Turn]) -> None:
        """Judge by what was recorded, instead of what came in by the methods above."""
        self.turns = turns

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        found = self.inner.verdict(final_message)
        return background.run(self._verdict(found, final_message))

    async def _verdict(self, found: Verdict | Future[Verdict], final_message: str | None) -> Verdict:
        verdict = await asyncio.wrap_future(found) if isinstance(found, Future) else found
        if final_message is None:
            return self._with(verdict, UNASKED.to_row())
        judgement = await self._ask(final_message)
        is_its_own = bool(self.turns) and self.turns[-1].message != final_message
        told = {"final_message": final_message} if is_its_own else {}
        return self._with(verdict, {**judgement.to_row(), **told})

    async def _ask(self, final_message: str) -> Judgement:
        events = events_of(self.turns) if self.turns else [_finished(event) for event in self.events]
        opening = block_until(self.opening)
        show_reference = self.judge.settings.show_reference
        judged = Judged.of(self.problem, opening, events, final_message, show_reference=show_reference)
        return await self.judge.judge(judged)

    def _with(self, verdict: Verdict, opinion: Mapping[str, Any]) -> Verdict:
        details = {**verdict.details, "judge": opinion}
        if not self.judge.settings.decides:
            return Verdict(verdict.success, verdict.checks, details)
        checks = {**verdict.checks, "judge": opinion["success"]}
        return Verdict(verdict.success and opinion["success"], checks, details)


class HeardUser:
    """A user whose words the judge reads too."""

    def __init__(self, inner: User, episode: JudgedEpisode):
        self.inner, self.episode = inner, episode

    def open(self) -> Any:
        self.episode.opening = said = self.inner.open()
        return said

    def answer(self, message: str) -> Any:
        said = self.inner.answer(message)
        self.episode.answers.append(said)
        return said

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _finished(event: Mapping[str, Any]) -> dict[str, Any]:
    """With the text of the reply, which the episode has waited for."""
    return {**event, "reply": block_until(event["reply"]).text} if "reply" in event else dict(event)
