"""What curation finds out about rows: how each reference solution and each demonstration fares when it is played.

Gives rows that know their replay, and the plain tables that the expectations of `validation` read. No model is
involved. Left out: what follows from a row that fails, which is the suite's to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.core.records import Demonstration, Problem
from tasks.core.tool_calls import call_text
from tasks.stages.curate.demonstrations import replay_demonstrations
from tasks.stages.curate.replays import Replays
from tasks.stages.curate.splitting import SPLITS, in_turn
from tasks.tools.base import Environment
from tasks.tools.replay import Played, Script

NUM_SAMPLED, NUM_LONGEST = 500, 50  # references kept for counting their tokens
MALFORMED = ("invalid_arguments", "unknown_tool")  # of a call; one the world declines may belong to a solution


@dataclass(frozen=True, slots=True)
class Replay:
    """What a fresh episode says to a solution: score 1 or 0, the first call it turned down, why it scored 0, and what
    it answered each call.
    """

    score: int
    invalid_call: str
    fault: str
    replies: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A problem as it came in, the place where a person finds it, and how its reference solution fares."""

    position: int
    where: str
    problem: Problem
    replay: Replay


Splits = Mapping[str, Sequence[Row]]


def replay_references(replays: Replays, problems: Sequence[Problem]) -> list[Replay]:
    """Play each reference solution on a fresh episode. Whatever the world trips over is the row's fault."""
    scripts = [Script.reference(problem) for problem in problems]
    played = replays.play(scripts, label="reference solutions")
    return [_replay(script, got) for script, got in zip(scripts, played, strict=True)]


def _replay(script: Script, played: Played) -> Replay:
    calls = zip(script.calls, played.replies, strict=False)
    invalid_call = next((call_text(call) for call, reply in calls if call and reply.error in MALFORMED), "")
    replies = tuple(reply.text for reply in played.replies)
    if played.verdict is None:
        return Replay(0, invalid_call, f"{type(played.error).__name__}: {played.error}", replies)
    failed = ", ".join(name for name, passed in played.verdict.checks.items() if not passed)
    is_solved = played.verdict.success
    return Replay(int(is_solved), invalid_call, "" if is_solved else f"failed checks: {failed}", replies)


def sample_of_references(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What tools answered some references, for `rollouts.budgets`: the longest, and problems of each category in turn.

    Which are longest in tokens is the model's business; in characters the same ones are near the top.
    """
    longest = sorted(rows, key=_characters, reverse=True)[:NUM_LONGEST]
    chosen = [*longest, *in_turn(rows, category=lambda row: row.problem.category)]
    unique = list({row.position: row for row in chosen}.values())[:NUM_SAMPLED]
    return [{"problem_id": row.problem.id, "replies": list(row.replay.replies)} for row in unique]


def _characters(row: Row) -> int:
    said = [*row.problem.requests, *row.replay.replies, *(turn.answer for turn in row.problem.reference)]
    return sum(map(len, said))


def problem_table(
    environment: Environment, rows: Sequence[Row], splits: Splits, *, apart: Sequence[str]
) -> list[dict[str, Any]]:
    """One line a raw row with what the suite reads; `split` is empty for a duplicate and for what a cap left out.
    `num_sides` is of the splits that are kept `apart`.
    """
    split_of = {row.position: name for name in SPLITS for row in splits[name]}
    sides: dict[str, set[str]] = defaultdict(set)
    for name in apart:
        for row in splits[name]:
            sides[row.problem.split_group].add(name)
    return [
        {
            "id": row.problem.id,
            "where": row.where,
            "category": row.problem.category,
            "level": row.problem.level,
            "split_group": row.problem.split_group,
            "split": split_of.get(row.position, ""),
            "num_sides": len(sides.get(row.problem.split_group, ())),
            "num_requests": len(row.problem.requests),
            "num_reference_turns": len(row.problem.reference),
            "unknown_tools": ", ".join(_unknown_tools(environment, row.problem)),
            "invalid_call": row.replay.invalid_call,
            "reference_score": row.replay.score,
            "fault": row.replay.fault,
        }
        for row in rows
    ]


def _unknown_tools(environment: Environment, problem: Problem) -> dict[str, None]:
    """What a reference calls and no tool is named, each once, in the order of use. The first request is answered with
    the tools shown for it; a later one may bring others of the world.
    """
    everywhere = {tool.name for tool in environment.tools}
    try:
        shown = {tool.name for tool in environment.tools_for(problem)}
    except Exception:  # the world reads a user's row, and may trip over anything in it; its replay says over what
        shown = everywhere
    calls = [(call.name, number) for number, turn in enumerate(problem.reference) for call in turn.calls]
    return dict.fromkeys(name for name, number in calls if name not in (everywhere if number else shown))


def demonstration_table(
    replays: Replays, demonstrations: Sequence[tuple[Problem, Demonstration]], splits: Splits
) -> list[dict[str, Any]]:
    """One line a demonstration: the split its problem is in, and what is wrong when its texts are played again."""
    split_of = {row.problem.id: name for name in SPLITS for row in splits[name]}
    faults = replay_demonstrations(replays, demonstrations)
    return [
        {
            "id": demonstration.problem_id,
            "where": f"demonstration {number}",
            "split": split_of.get(demonstration.problem_id, ""),
            "fault": fault,
        }
        for number, ((_, demonstration), fault) in enumerate(zip(demonstrations, faults, strict=True), start=1)
    ]
