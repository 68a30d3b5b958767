"""Expert episodes for a warm start: who plays them, and whether what was written down plays the same again.

A world may have an expert of its own; otherwise the reference solution of a problem is its demonstration. Which
problems are shown and how often is curation's to say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from tasks.core.records import Demonstration, Problem
from tasks.core.tool_calls import call_text, parse_calls
from tasks.stages.curate.replays import Replays
from tasks.tools.base import Expert
from tasks.tools.replay import Played, Script

LABEL = "demonstrations"


def expert(replays: Replays, problems: Sequence[Problem]) -> Expert:
    """The world's expert; where it has none, one that shows references. `problems` are what it will be asked for."""
    own = replays.environment.expert()
    if own is None:
        return _reference_expert(replays, problems)

    def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
        try:
            return own(problem, rng)
        except Exception as error:  # the expert plays a user's row, and may trip over anything in it
            raise ValueError(
                f"problem {problem.id!r}: the environment cannot demonstrate it ({type(error).__name__}: {error}), so "
                f"its row lacks something the world needs. Correct its `world`, or remove the row."
            ) from error

    return demonstrate


def _reference_expert(replays: Replays, problems: Sequence[Problem]) -> Expert:
    """Shows the reference, unless a call of it fails or it takes several requests."""

    def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
        script = Script.reference(problem)
        (played,) = replays.play([script], label=LABEL)
        return _demonstration(script, played)

    replays.play([Script.reference(problem) for problem in problems], label=LABEL)  # side by side
    return demonstrate


def _demonstration(script: Script, played: Played) -> Demonstration | None:
    problem, ((calls, answer), *_) = script.problem, script.turns
    takes_one_request = len(problem.requests) == len(problem.reference) == 1
    if not takes_one_request or played.error is not None or not all(reply.valid for reply in played.replies):
        return None
    return Demonstration(
        problem_id=problem.id,
        request=problem.requests[0],
        assistant_texts=[*(call_text(call) for call in calls if call is not None), answer or ""],
        replies=[*([reply.text] for reply in played.replies), []],
    )


def replay_demonstrations(replays: Replays, demonstrations: Sequence[tuple[Problem, Demonstration]]) -> list[str]:
    """For each, empty where the texts, parsed as a model's would be, get the recorded replies and end in success."""
    scripts = [_script(problem, demonstration) for problem, demonstration in demonstrations]
    played = replays.play(scripts, label=LABEL)
    return [_demonstration_fault(item, got) for (_, item), got in zip(demonstrations, played, strict=True)]


def _script(problem: Problem, demonstration: Demonstration) -> Script:
    *acting, closing = demonstration.assistant_texts
    return Script(problem, [([call for text in acting for call in parse_calls(text)], closing)])


def _demonstration_fault(demonstration: Demonstration, played: Played) -> str:
    replies = iter(played.replies)
    for text, recorded in zip(demonstration.assistant_texts[:-1], demonstration.replies, strict=False):
        answers = list(islice(replies, len(parse_calls(text))))
        if [reply.text for reply in answers] != recorded:
            return f"{text}: other replies than recorded"
        if not answers or not all(reply.valid for reply in answers):
            return f"{text}: an invalid call"
    if played.verdict is None:
        return f"{type(played.error).__name__}: {played.error}"
    return "" if played.verdict.success else "the episode does not end in success"
