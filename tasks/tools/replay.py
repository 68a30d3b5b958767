"""Plays known solutions on fresh episodes, many at once where tools take time. No model is involved.

Curation plays references, `drift/pin.py` its probes, `score` what somebody wrote down, and evaluation scripted
baselines. An environment fault starts a script over in a fresh episode, as in a rollout. Any other error is returned
beside the replies before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.tools.base import Environment, EnvironmentFault, ToolReply, Verdict, await_in_steps


@dataclass(frozen=True, slots=True)
class Script:
    """For each user request its calls in order (None is a message that cannot be read as a call), and the message that
    closes it, if any.
    """

    problem: Problem
    turns: Sequence[tuple[Sequence[ToolCall | None], str | None]]

    @property
    def calls(self) -> list[ToolCall | None]:
        """All calls in order, as `Played.replies` has them."""
        return [call for calls, _ in self.turns for call in calls]

    @classmethod
    def reference(cls, problem: Problem) -> Script:
        """The problem's own solution."""
        return cls.of(problem, problem.reference)

    @classmethod
    def of(cls, problem: Problem, turns: Sequence[ReferenceTurn]) -> Script:
        """A solution, right or wrong."""
        return cls(problem, [(turn.calls, turn.answer) for turn in turns])


@dataclass(frozen=True, slots=True)
class Played:
    """What a script got: a reply a call and the verdict, or the error that ended it."""

    replies: list[ToolReply]
    verdict: Verdict | None
    error: Exception | None = None


Steps = Generator[Future[Any], None, Played]  # yields what has to be done before it can go on


def play(
    environment: Environment, scripts: Sequence[Script], *, after_each: Callable[[], None] = lambda: None
) -> list[Played]:
    """What each script got, in order; at most `limits.max_workers` of them wait for tools at the same time."""
    running: dict[int, Steps] = {}
    finished: dict[int, Played] = {}
    answered: SimpleQueue[int] = SimpleQueue()

    def advance(number: int) -> None:
        try:
            future = next(running[number])
        except StopIteration as end:
            finished[number] = end.value
            del running[number]
            after_each()
        else:
            future.add_done_callback(lambda _: answered.put(number))

    try:
        for number, script in enumerate(scripts):
            running[number] = _play(environment, script)
            advance(number)
            while len(running) >= environment.limits.max_workers:
                advance(answered.get())
        while running:
            advance(answered.get())
    finally:
        for steps in running.values():  # an error is on its way; servers must not outlive it
            steps.close()
    return [finished[number] for number in range(len(scripts))]


def _play(environment: Environment, script: Script) -> Steps:
    played = Played([], None)
    for attempt in range(environment.limits.max_attempts):
        played = yield from _attempt(environment, script, stream=f"script/{attempt}")
        if not isinstance(played.error, EnvironmentFault):
            break
    return played


def _attempt(environment: Environment, script: Script, *, stream: str) -> Steps:
    replies: list[ToolReply] = []
    try:
        episode = environment.start(script.problem, stream=stream)
    except Exception as error:  # the environment reads a user's row, which may hold anything
        return Played(replies, None, error)
    try:
        for number, (calls, _) in enumerate(script.turns):
            if number:
                episode.end_turn(script.turns[number - 1][1])
            for call in calls:
                answer = episode.malformed_call() if call is None else episode.call(call.name, call.arguments)
                replies.append((yield from await_in_steps(answer)))
        verdict = yield from await_in_steps(episode.verdict(script.turns[-1][1]))
        return Played(replies, verdict)
    except Exception as error:
        return Played(replies, None, error)
    finally:
        episode.close()
