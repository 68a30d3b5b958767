"""Raw rows with the result of playing their reference solutions: what the validation reads. No model is involved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.core.files import json_hash
from tasks.core.progress import progress_bar, spell
from tasks.core.records import Problem
from tasks.core.splits import content_key
from tasks.core.terminal import tell
from tasks.core.text import is_blank
from tasks.core.tool_calls import call_text
from tasks.stages.curate.failures import (
    MALFORMED,
    first_refusal,
    refuse_disturbed,
    refuse_equal_failures,
    refuse_failures_outside,
    refusing_tools,
    warn_of_refusing_tools,
)
from tasks.stages.curate.splitting import SPLITS, Splits, in_turn
from tasks.tools.base import Environment
from tasks.tools.replay import Played, Script, play

NUM_SAMPLED, NUM_LONGEST = 500, 50  # references kept for counting their tokens
SAMPLE = 8  # scripts that are timed, side by side, to estimate the rest
WORTH_TELLING_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a solution in a fresh episode. `score` is 1 or 0; `fault` says why it is 0."""

    score: int
    invalid_call: str
    fault: str
    replies: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A problem, where a person finds it in the source, and the result of its reference solution."""

    position: int
    where: str
    problem: Problem
    replay: Replay


class Replays:
    """Plays each distinct script once: 2,000 demonstrations may be 300 scripts, and an episode may take seconds."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self._played: dict[str, Played] = {}

    def play(self, scripts: Sequence[Script], *, label: str) -> list[Played]:
        """What each script got, in order. `label` names them in the progress bar and the estimate."""
        keys = [_key(script) for script in scripts]
        new = {key: script for key, script in zip(keys, scripts, strict=True) if key not in self._played}
        if new:
            self._played |= zip(new, self._play(list(new.values()), label), strict=True)
        return [self._played[key] for key in keys]

    def first_refusals(self, problems: Sequence[Problem]) -> dict[str, str]:
        """For each category the first tool that refuses a call of a reference, and its words; empty: none does."""
        told = dict.fromkeys((problem.category for problem in problems), "")
        scripts = [Script.reference(problem) for problem in problems]
        for script, got in zip(scripts, self.play(scripts, label="reference solutions"), strict=True):
            tool, said = first_refusal(script, got)
            told[script.problem.category] = told[script.problem.category] or (tool and f"; {tool} answers {said}")
        return told

    def _play(self, scripts: Sequence[Script], label: str) -> list[Played]:
        played = self._play_timed(scripts, label)
        refuse_failures_outside(scripts, played, label)
        refuse_disturbed(self.environment, scripts, played, label)
        return played

    def _play_timed(self, scripts: Sequence[Script], label: str) -> list[Played]:
        """The first few are not timed: they start what starts only once, such as servers. The next few are."""
        first, timed, rest = scripts[:SAMPLE], scripts[SAMPLE : 2 * SAMPLE], scripts[2 * SAMPLE :]
        played = play(self.environment, first)
        if len(played) == SAMPLE:
            refuse_equal_failures(self.environment, first, played, label)
        refuse_failures_outside(scripts, played, label)  # at once, before all the others wait for it too
        started = time.monotonic()
        played += play(self.environment, timed)
        refuse_failures_outside(scripts, played, label)
        seconds = (time.monotonic() - started) / SAMPLE * len(rest)
        if seconds < WORTH_TELLING_SECONDS:
            return played + play(self.environment, rest)
        if not any(item.error for item in played[SAMPLE:]):  # a fault is retried with pauses, and tells of no other
            why = self.environment.cheaper_starts()
            told = f"curate: {len(rest):,} more {label} to play, which takes about {spell(seconds)}"
            tell(f"{told}. {why}." if why else told)
        with progress_bar(label, total=len(scripts), done=len(played)) as bar:
            return played + play(self.environment, rest, after_each=bar.advance)


def _key(script: Script) -> str:
    turns = [([call and call.model_dump() for call in calls], answer) for calls, answer in script.turns]
    return json_hash([script.problem.model_dump(), turns])


def replay_references(replays: Replays, problems: Sequence[Problem]) -> list[Replay]:
    scripts = [Script.reference(problem) for problem in problems]
    played = replays.play(scripts, label="reference solutions")
    warn_of_refusing_tools(refusing_tools(scripts, played))
    return [_replay(script, got) for script, got in zip(scripts, played, strict=True)]


def _replay(script: Script, played: Played) -> Replay:
    calls = zip(script.calls, played.replies, strict=False)
    invalid_call = next((call_text(call) for call, reply in calls if call and reply.error in MALFORMED), "")
    replies = tuple(reply.text for reply in played.replies)
    if played.verdict is None:
        return Replay(0, invalid_call, f"{type(played.error).__name__}: {played.error}", replies)
    if played.verdict.success:
        return Replay(1, invalid_call, "", replies)
    failed = ", ".join(name for name, passed in played.verdict.checks.items() if not passed)
    tool, said = first_refusal(script, played)
    return Replay(0, invalid_call, f"failed checks: {failed}{f'; {tool} answered {said}' if tool else ''}", replies)


def sample_of_references(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The replies to some references, for `rollouts.budgets`: the longest, and some of each category."""
    longest = sorted(rows, key=_characters, reverse=True)[:NUM_LONGEST]
    chosen = [*longest, *in_turn(rows, category=lambda row: row.problem.category)]
    unique = list({row.position: row for row in chosen}.values())[:NUM_SAMPLED]
    return [{"problem_id": row.problem.id, "replies": list(row.replay.replies)} for row in unique]


def _characters(row: Row) -> int:
    said = [*row.problem.requests, *row.replay.replies, *(turn.answer for turn in row.problem.reference)]
    return sum(map(len, said))


def problem_table(
    environment: Environment, rows: Sequence[Row], splits: Splits[Row], *, apart: Sequence[str]
) -> list[dict[str, Any]]:
    """One row per raw row, with what the suite reads; `split` is empty for duplicates and for what a cap left out.
    `num_splits` counts the splits with the row's split group, `num_sides` only those among `apart`.
    """
    split_of = {row.position: name for name in SPLITS for row in splits[name]}
    sides: dict[str, set[str]] = defaultdict(set)
    for name in SPLITS:
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
            "num_splits": len(sides[row.problem.split_group]),
            "num_sides": len(sides[row.problem.split_group].intersection(apart)),
            "blank_request": first_blank("request", row.problem.requests),
            "num_requests": len(row.problem.requests),
            "num_reference_turns": len(row.problem.reference),
            "unknown_tools": ", ".join(_unknown_tools(environment, row.problem)),
            "invalid_call": row.replay.invalid_call,
            "reference_score": row.replay.score if environment.knows_solution(row.problem) else None,
            "fault": row.replay.fault,
        }
        for row in rows
    ]


def first_blank(what: str, texts: Sequence[str]) -> str:
    """`request 2`, where the second text is the first in which nothing can be read; "" where each can."""
    return next((f"{what} {number}" for number, text in enumerate(texts, start=1) if is_blank(text)), "")


def _unknown_tools(environment: Environment, problem: Problem) -> dict[str, None]:
    """In order of use. The first request is answered with the tools shown for it; a later one may bring other tools."""
    everywhere = {tool.name for tool in environment.tools}
    try:
        shown = {tool.name for tool in environment.tools_for(problem)}
    except Exception:  # anything may be wrong in a user's row; the replay says what
        shown = everywhere
    calls = [(call.name, number) for number, turn in enumerate(problem.reference) for call in turn.calls]
    return dict.fromkeys(name for name, number in calls if name not in (everywhere if number else shown))


def first_of_each(rows: Sequence[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(content_key(row.problem), row)
    return list(first.values())
