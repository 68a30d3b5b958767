"""Episodes under way as rows of a checkpoint, and back.

No environment can be written to a file, so a row has what the policy wrote, and the environment answers it afresh. That
gives the same state where tools do; judges and simulated users are asked again. An episode that is now answered
otherwise is played again, with the same random numbers. Turns are whole: those under way are completed first, since no
engine says what it has of one. No agent that drives itself can be written either: its episode is played from its start.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from tasks.core.records import Problem, TokenSequence
from tasks.core.terminal import tell, warn
from tasks.core.text import counted
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.engine import TurnReply
from tasks.rollouts.episode import EngineEpisodes, EpisodeRun

Replay = Generator[Future[Any], None, bool]
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
    anew = [(number, run.key, run.attempt) for run, number in running.items() if not run.is_replayable]
    return {
        "running": [_running_row(run, number) for run, number in running.items() if run.is_replayable],
        "waiting": [
            {"number": number, **_key_row(key), "attempt": attempt}
            for number, key, attempt in [*anew, *collector.waiting]
        ],
    }


def restore(collector: Collector, rows: Rows, problems: Mapping[str, Problem]) -> None:
    """Into a collector that has begun and has none; whoever closes that closes the episodes, also after an error."""
    if rows["running"]:
        under_way = counted(len(rows["running"]), "episode")
        tell(f"{collector.stage}: going on with {under_way} under way, whose tools answer again")
    opened: dict[EpisodeRun, dict[str, Any]] = {}
    for row in rows["running"]:
        key, attempt = _read_key(row, problems), row["attempt"]
        run = collector.kind.open(
            key, collector.environment, seed=collector.seed, stage=collector.stage, attempt=attempt
        )
        collector.running[run] = row["number"]
        opened[cast(EpisodeRun, run)] = row
    fits = _answer_again({run: _take_again(run, row) for run, row in opened.items()})
    num_changed = 0
    for run, row in opened.items():
        if fits[run]:
            run.begin_anew()
            collector.ready.append(run)
            continue
        del collector.running[run]
        collector.kind.release(run)
        run.close()
        collector.waiting.append((row["number"], run.key, run.attempt))
        if run.fault is None:
            num_changed += 1
        else:
            collector.faults.restart(run.fault)
    collector.waiting.extend((row["number"], _read_key(row, problems), row["attempt"]) for row in rows["waiting"])
    _warn_of(num_changed, "got other answers from their tools than before the stop", len(opened))
    num_faults = len(opened) - sum(fits.values()) - num_changed
    _warn_of(num_faults, "met a fault of the environment when their tools answered again", len(opened))


def discard(collector: Collector) -> None:
    """Every episode under way, once the engine has completed its turns."""
    collector.complete_turns()
    for run in collector.running:
        collector.kind.release(run)
    collector.close_running()
    collector.begin()


def _answer_again(replays: Mapping[EpisodeRun, Replay]) -> dict[EpisodeRun, bool]:
    """What each replay returns. They wait for their tools side by side."""
    found: dict[EpisodeRun, bool] = {}
    answered: SimpleQueue[EpisodeRun] = SimpleQueue()
    for run in replays:
        answered.put(run)
    while len(found) < len(replays):
        run = answered.get()
        try:
            next(replays[run]).add_done_callback(partial(lambda run, _: answered.put(run), run))
        except StopIteration as end:
            found[run] = end.value
    return found


def _take_again(run: EpisodeRun, row: dict[str, Any]) -> Replay:
    """Whether what the policy wrote before fits what the environment says now; yields what it waits for."""
    for reply in row["replies"]:
        while run.waiting_for is not None:
            yield run.waiting_for
            run.resume()
        if run.outcome is not None:
            return False
        run.next_request()
        run.advance(TurnReply(run.handle, **reply))
    return len(run.sequences) >= len(row["sequences"]) and all(
        sequence.token_ids[: len(written)] == written
        for sequence, written in zip(run.sequences, row["sequences"], strict=False)
    )


def _warn_of(count: int, what: str, total: int) -> None:
    if count:
        warn(f"warning: {count} of {total} episodes that were under way {what}, so they are played from their start.")


def _running_row(run: EpisodeRun, number: int) -> dict[str, Any]:
    """`sequences`: the ids of each, up to the last that the policy wrote."""
    replies = [asdict(reply) for reply in run.replies]
    for reply in replies:
        del reply["episode"]
    return {
        "number": number,
        **_key_row(run.key),
        "attempt": run.attempt,
        "replies": replies,
        "sequences": [_written(sequence) for sequence in run.sequences],
    }


def _written(sequence: TokenSequence) -> list[int]:
    sampled = [place for place, is_sampled in enumerate(sequence.sampled_mask) if is_sampled]
    return sequence.token_ids[: sampled[-1] + 1] if sampled else []


def _key_row(key: EpisodeKey) -> dict[str, Any]:
    row = {"problem_id": key.problem.id, "draw": key.draw, "sample_index": key.sample_index}
    return {**row, "prefix": [list(message) for message in key.prefix]}


def _read_key(row: dict[str, Any], problems: Mapping[str, Problem]) -> EpisodeKey:
    prefix = tuple(map(tuple, row["prefix"]))
    return EpisodeKey(problems[row["problem_id"]], row["draw"], row["sample_index"], prefix)
