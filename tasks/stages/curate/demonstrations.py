"""Expert episodes for a warm start: played by the environment's expert, or else from the reference solutions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from tasks.core.records import Demonstration, Problem
from tasks.core.tool_calls import parse_calls
from tasks.stages.curate.references import Replays, Row, first_blank
from tasks.stages.curate.settings import ShardedDemonstrationSettings
from tasks.stages.curate.splitting import SPLITS, Splits, in_turn
from tasks.tools.base import Environment, Expert
from tasks.tools.replay import Played, Script, demonstration_of
from tasks.tools.user.hidden import shards_of

LABEL = "demonstrations"


def expert_episodes(
    replays: Replays, problems: Sequence[Problem], *, num: int, seed: int
) -> list[tuple[Problem, Demonstration]]:
    """`num` error-free expert episodes; fewer where the expert has declined each problem: it is not asked again for
    one that it declined. Level n is shown n times per cycle: there is more to imitate.
    """
    episodes: list[tuple[Problem, Demonstration]] = []
    by_turns = in_turn(problems, category=lambda problem: problem.category)
    willing, draw = [problem for problem in by_turns for _ in range(problem.level)], 0
    demonstrate = _find_expert(replays, willing[:num])
    while willing and len(episodes) < num:
        tried = ((problem, random.Random(f"{seed}/curate/{draw}/{place}")) for place, problem in enumerate(willing))
        played = ((problem, demonstrate(problem, rng)) for problem, rng in tried)
        made = ((problem, demonstration) for problem, demonstration in played if demonstration is not None)
        cycle = list(islice(made, num - len(episodes)))
        episodes += cycle
        willing, draw = [problem for problem, _ in cycle], draw + 1
    return episodes


def _find_expert(replays: Replays, problems: Sequence[Problem]) -> Expert:
    own = replays.environment.expert()
    if own is None:
        return _reference_expert(replays, problems)

    def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
        try:
            return own(problem, rng)
        except Exception as error:  # the expert plays a user's row, in which anything may be wrong
            raise ValueError(
                f"problem {problem.id!r}: the environment cannot demonstrate it ({type(error).__name__}: {error}), so "
                f"its row lacks something the environment needs. Correct its `world`, or remove the row."
            ) from error

    return demonstrate


def _reference_expert(replays: Replays, problems: Sequence[Problem]) -> Expert:
    """Shows the reference, unless it is no solution, one of its calls fails or a request has no turn of its own."""

    def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
        if not replays.environment.knows_solution(problem):
            return None
        script = Script.reference(problem)
        (played,) = replays.play([script], label=LABEL)
        return demonstration_of(script, played)

    replays.play([Script.reference(problem) for problem in problems], label=LABEL)  # all at once, since that is faster
    return demonstrate


def replay_demonstrations(replays: Replays, demonstrations: Sequence[tuple[Problem, Demonstration]]) -> list[str]:
    """The fault of each demonstration; empty where its texts get the recorded replies and end in success."""
    parsed = [_steps(demonstration) for _, demonstration in demonstrations]
    scripts = [_script(problem, steps) for (problem, _), steps in zip(demonstrations, parsed, strict=True)]
    played = zip(demonstrations, parsed, replays.play(scripts, label=LABEL), strict=True)
    return [_demonstration_fault(steps, demonstration.replies, got) for (_, demonstration), steps, got in played]


def tell_in_parts(
    environment: Environment,
    demonstrations: Sequence[tuple[Problem, Demonstration]],
    settings: ShardedDemonstrationSettings,
    *,
    seed: int,
) -> list[tuple[Problem, Demonstration]]:
    """About `share` of those whose problem has parts are told in them; which ones depends on the seed alone."""
    told = []
    for number, (problem, demonstration) in enumerate(demonstrations):
        is_chosen = random.Random(f"{seed}/curate/parts/{number}").random() < settings.share
        parts = shards_of(environment, problem) if is_chosen else ()
        told.append((problem, _wait_for(parts, demonstration, settings.question) if len(parts) > 1 else demonstration))
    return told


def _wait_for(parts: Sequence[str], demonstration: Demonstration, question: str) -> Demonstration:
    """The expert answers every part but the last with `question`, and then does as before."""
    waits = len(parts) - 1
    return demonstration.model_copy(
        update={
            "request": parts[0],
            "assistant_texts": [question] * waits + demonstration.assistant_texts,
            "replies": [[]] * waits + demonstration.replies,
            "follow_ups": [*parts[1:], *demonstration.follow_ups],
        }
    )


class _Step(NamedTuple):
    """A text of the assistant: the calls in it, and whether the user answers it."""

    text: str
    calls: Sequence[Any]
    is_closing: bool


def _steps(demonstration: Demonstration) -> list[_Step]:
    """The user answers the first texts without a call, one per follow-up; the last text is answered by nobody."""
    steps, left = list[_Step](), len(demonstration.follow_ups)
    for text in demonstration.assistant_texts:
        calls = parse_calls(text)
        steps.append(_Step(text, calls, left > 0 and not calls and len(steps) < len(demonstration.assistant_texts) - 1))
        left -= steps[-1].is_closing
    return steps


def _script(problem: Problem, steps: Sequence[_Step]) -> Script:
    turns, calls = list[tuple[list[Any], str]](), list[Any]()
    for step in steps[:-1]:
        if step.is_closing:
            turns.append((calls, step.text))
            calls = []
        else:
            calls += step.calls
    return Script(problem, [*turns, (calls, steps[-1].text)])


def _demonstration_fault(steps: Sequence[_Step], replies: Sequence[Sequence[str]], played: Played) -> str:
    *before, last = steps
    given = iter(played.replies)
    for step, recorded in zip(before, replies, strict=False):
        if step.is_closing:
            continue
        answers = list(islice(given, len(step.calls)))
        if [reply.text for reply in answers] != recorded:
            return f"{step.text}: replies differ from the recorded ones"
        if not answers or not all(reply.valid for reply in answers):
            return f"{step.text}: an invalid call"
    if last.calls:
        return f"{last.text}: a call as the closing message, which nothing answers"
    if played.verdict is None:
        return f"{type(played.error).__name__}: {played.error}"
    return "" if played.verdict.success else "the episode does not end in success"


def demonstration_table(
    replays: Replays, demonstrations: Sequence[tuple[Problem, Demonstration]], splits: Splits[Row]
) -> list[dict[str, Any]]:
    """One row per demonstration: the split of its problem, and its fault when played again."""
    split_of = {row.problem.id: name for name in SPLITS for row in splits[name]}
    faults = replay_demonstrations(replays, demonstrations)
    return [
        {
            "id": demonstration.problem_id,
            "where": f"demonstration {number}",
            "split": split_of.get(demonstration.problem_id, ""),
            "fault": fault,
            "blank_answer": first_blank("message", demonstration.assistant_texts),
        }
        for number, ((_, demonstration), fault) in enumerate(zip(demonstrations, faults, strict=True), start=1)
    ]
