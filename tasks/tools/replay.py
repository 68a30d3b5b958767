"""Plays known solutions on new episodes, many at once if tools wait, without a model. Used by curation, drift probes,
`score` and scripted baselines.

An environment fault restarts a script in a new episode, as in a rollout. Any other error is returned with the replies
before it; only an endpoint that refuses every request ends all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from tasks.core.records import Demonstration, Problem, ReferenceTurn, ToolCall
from tasks.core.tool_calls import call_text
from tasks.tools.base import Environment, EnvironmentFault, ToolReply, Verdict, await_in_steps
from tasks.tools.chat_client import EndpointRefusal
from tasks.tools.checks import close_episode, fault_of, judge_in_steps, without_exit


@dataclass(frozen=True, slots=True)
class Script:
    """For each user request: its calls (None: an unreadable message) and the closing message, if any."""

    problem: Problem
    turns: Sequence[tuple[Sequence[ToolCall | None], str | None]]

    @property
    def calls(self) -> list[ToolCall | None]:
        """All calls in order, matching `Played.replies`."""
        return [call for calls, _ in self.turns for call in calls]

    @classmethod
    def reference(cls, problem: Problem) -> Script:
        return cls.of(problem, problem.reference)

    @classmethod
    def of(cls, problem: Problem, turns: Sequence[ReferenceTurn]) -> Script:
        return cls(problem, [(turn.calls, turn.answer) for turn in turns])


@dataclass(frozen=True, slots=True)
class Played:
    """One reply per call and the verdict, or the error that ended the script."""

    replies: list[ToolReply]
    verdict: Verdict | None
    error: Exception | None = None


Steps = Generator[Future[Any], None, Played]  # yields the Futures it waits for


def play(
    environment: Environment, scripts: Sequence[Script], *, after_each: Callable[[], None] = lambda: None
) -> list[Played]:
    """The result of each script, in order; at most `limits.max_workers` wait for tools at once."""
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
        for steps in running.values():  # after an error: end the servers too
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
        with without_exit(environment, "start"):
            episode = environment.start(script.problem, stream=stream)
    except Exception as error:  # the user's row may contain anything
        return Played(replies, None, fault_of(error) or error)
    try:
        for number, (calls, _) in enumerate(script.turns):
            if number:
                with without_exit(episode, "end_turn"):
                    episode.end_turn(script.turns[number - 1][1])
            for call in calls:
                answer = episode.malformed_call() if call is None else episode.call(call.name, call.arguments)
                replies.append((yield from await_in_steps(answer)))
        verdict = yield from judge_in_steps(episode, script.turns[-1][1])
        return Played(replies, verdict)
    except EndpointRefusal:
        raise
    except Exception as error:
        return Played(replies, None, fault_of(error) or error)
    finally:
        close_episode(episode)


def demonstrate_reference(environment: Environment, problem: Problem) -> Demonstration | None:
    """The reference solution as a demonstration, played now; None where it is none."""
    if not environment.knows_solution(problem):
        return None
    script = Script.reference(problem)
    (played,) = play(environment, [script])
    return demonstration_of(script, played)


def demonstration_of(script: Script, played: Played) -> Demonstration | None:
    """What a script and its replies show; None where a call failed or a request has no turn of its own."""
    problem, replies = script.problem, iter(played.replies)
    has_turn_each = len(problem.requests) == len(script.turns)
    if not has_turn_each or played.error is not None or not all(reply.valid for reply in played.replies):
        return None
    texts, replied = list[str](), list[list[str]]()
    for calls, answer in script.turns:
        texts += [*(call_text(call) for call in calls if call is not None), answer or ""]
        replied += [*([next(replies).text] for _ in calls), []]
    return Demonstration(
        problem_id=problem.id,
        request=problem.requests[0],
        assistant_texts=texts,
        replies=replied,
        follow_ups=problem.requests[1:],
    )
