"""Episodes under way as rows of a checkpoint, and back.

No environment can be written to a file, so a row has what the policy wrote, and the environment answers it afresh. That
gives the same state where tools do; an episode that a tool or a user now answers otherwise is played again, with the
same random numbers. Turns are whole: those under way are completed first, since no engine says what it has of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import asdict
from typing import Any, cast

from tasks.core.records import Problem
from tasks.core.terminal import warn
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.engine import TurnReply
from tasks.rollouts.episode import EngineEpisodes, EpisodeRun

Rows = dict[str, list[dict[str, Any]]]


def suspend(collector: Collector) -> Rows:
    """Complete the turns under way, and withdraw all episodes from the engine. They go on with the next step, exactly
    as those do that `restore` made of the rows.
    """
    collector.complete_turns()
    kind = cast(EngineEpisodes, collector.kind)
    running = {cast(EpisodeRun, run): number for run, number in collector.running.items()}
    collector.ready = [run for run in running if run in collector.ready]
    for run in running:
        kind.withdraw(run)
    return {
        "running": [_running_row(run, number) for run, number in running.items()],
        "waiting": [
            {"number": number, **_key_row(key), "attempt": attempt} for number, key, attempt in collector.waiting
        ],
    }


def restore(collector: Collector, rows: Rows, problems: Mapping[str, Problem]) -> None:
    """Into a collector that has begun and has none."""
    num_changed = 0
    for row in rows["running"]:
        key, attempt = _read_key(row, problems), row["attempt"]
        run = cast(
            EpisodeRun,
            collector.kind.open(
                key, collector.environment, seed=collector.seed, stage=collector.stage, attempt=attempt
            ),
        )
        if _take_again(run, row):
            run.begin_anew()
            collector.running[run] = row["number"]
            collector.ready.append(run)
        else:
            collector.kind.release(run)
            run.close()
            collector.waiting.append((row["number"], key, attempt))
            num_changed += 1
    collector.waiting.extend((row["number"], _read_key(row, problems), row["attempt"]) for row in rows["waiting"])
    if num_changed:
        warn(
            f"warning: {num_changed} of {len(rows['running'])} episodes that were under way got other answers from "
            f"their tools than before the stop, so they are played again from their start."
        )


def discard(collector: Collector) -> None:
    """Every episode under way, once the engine has completed its turns."""
    collector.complete_turns()
    for run in collector.running:
        collector.kind.release(run)
    collector.close_running()
    collector.begin()


def _take_again(run: EpisodeRun, row: dict[str, Any]) -> bool:
    """Whether what the policy wrote before fits what the environment says now."""
    for reply in row["replies"]:
        _await_tools(run)
        if run.outcome is not None:
            return False
        run.next_request()
        run.advance(TurnReply(run.handle, **reply))
    written: list[int] = row["token_ids"]
    return run.token_ids[: len(written)] == written


def _await_tools(run: EpisodeRun) -> None:
    while run.waiting_for is not None:
        wait([run.waiting_for])
        run.resume()


def _running_row(run: EpisodeRun, number: int) -> dict[str, Any]:
    """`token_ids`: up to the last that the policy wrote."""
    replies = [asdict(reply) for reply in run.replies]
    for reply in replies:
        del reply["episode"]
    num_written = max((place + 1 for place, is_sampled in enumerate(run.sampled_mask) if is_sampled), default=0)
    return {
        "number": number,
        **_key_row(run.key),
        "attempt": run.attempt,
        "replies": replies,
        "token_ids": run.token_ids[:num_written],
    }


def _key_row(key: EpisodeKey) -> dict[str, Any]:
    row = {"problem_id": key.problem.id, "draw": key.draw, "sample_index": key.sample_index}
    return {**row, "prefix": [list(message) for message in key.prefix]}


def _read_key(row: dict[str, Any], problems: Mapping[str, Problem]) -> EpisodeKey:
    prefix = tuple(map(tuple, row["prefix"]))
    return EpisodeKey(problems[row["problem_id"]], row["draw"], row["sample_index"], prefix)
