"""Worlds in which an episode finds what an earlier one left are found out, and live replies are no such thing."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from tasks.core.records import Problem
from tasks.drift.leaks import MOST_PROBLEMS, find_leaks
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Verdict
from tests.sums import SumEpisode, Sums
from tests.sums import problem as sum_problem


class NoteEpisode(ToolEpisode):
    """Writes notes down; `kept` is shared by all episodes where a test says so."""

    answer: ClassVar[Callable[[NoteEpisode], Any]] = staticmethod(lambda episode: "noted")
    kept: ClassVar[list[str] | None] = None

    def __init__(self, problem: Problem):
        super().__init__(problem)
        kept = type(self).kept
        self.notes: list[str] = [] if kept is None else kept

    @tool("Write a note down.")
    def note(self, text: str) -> Any:
        self.notes.append(text)
        return type(self).answer(self)

    @tool("What is on the notes.", read_only=True)
    def look(self) -> Any:
        return type(self).answer(self)

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(self.problem.world["text"] in self.notes)


def world(answer: Callable[[Any], Any] = lambda episode: "noted", kept: list[str] | None = None) -> ToolEnvironment:
    episode = type("Episode", (NoteEpisode,), {"answer": staticmethod(answer), "kept": kept})
    return type("Notes", (ToolEnvironment,), {"name": "notes", "episode_class": episode})()


def problem(number: int, name: str = "note", **arguments: Any) -> Problem:
    text = f"milk {number}"
    given = arguments or ({"text": text} if name == "note" else {})
    return Problem.model_validate(
        {
            "id": f"p{number}", "category": "c", "level": 1, "requests": ["Note it."], "world": {"text": text},
            "reference": [{"calls": [{"name": name, "arguments": given}], "answer": "Done."}], "split_group": "g",
        }
    )  # fmt: skip


def test_a_world_that_starts_afresh_each_time_has_no_leak() -> None:
    assert find_leaks(world(lambda episode: {"notes": list(episode.notes)}), [problem(1)]) == []
    assert find_leaks(Sums(), [sum_problem(f"{n}", target=n) for n in (1, 2, 3)]) == []


def test_what_stays_in_the_replies_is_found() -> None:
    (line,) = find_leaks(world(lambda episode: {"notes": list(episode.notes)}, kept=[]), [problem(1, "note", text="a")])
    assert "problem 'p1'" in line
    assert '["a"]' in line.split(" and then, ")[0]
    assert '["a", "a"]' in line.split(" and then, ")[1]


def fills_up(episode: Any) -> Any:
    if len(episode.notes) > 8:
        raise RuntimeError("the notebook is full")
    return {"notes": list(episode.notes)}


def starts_again(episode: Any) -> Any:
    if len(episode.notes) > 10:
        del episode.notes[:10]
    return {"notes": list(episode.notes)}


@pytest.mark.parametrize("answer", [fills_up, starts_again])
def test_a_leak_is_found_though_the_server_fills_up_or_starts_again(answer: Callable[[Any], Any]) -> None:
    assert len(find_leaks(world(answer, kept=[]), [problem(1, "note", text="a")])) == 1


def test_a_log_of_the_last_entries_is_found_whatever_their_length() -> None:
    def log(episode: Any) -> Any:
        episode.notes[-1] = "x" * drawn.randint(1, 6)
        return {"log": "; ".join(episode.notes[-8:])}

    for seed in range(20):
        drawn = random.Random(seed)
        assert find_leaks(world(log, kept=[]), [problem(1, "note", text="a")])


def test_what_stays_in_the_verdict_alone_is_found() -> None:
    (line,) = find_leaks(world(kept=[]), [problem(1)])
    assert line == "problem 'p1': doing nothing ends in False, and the second time in True"


def test_a_world_full_of_solutions_from_the_start_is_found_by_what_doing_nothing_is_worth() -> None:
    """As a published server is whose file earlier runs have filled: all plays are alike."""
    full = [f"milk {number}" for number in range(9)]
    (line,) = find_leaks(world(kept=full), [problem(1)])
    assert line.startswith("doing nothing succeeds on all problems tried (1)")
    assert "always true" in line


def test_a_call_of_a_tool_that_is_not_there_changes_nothing_and_is_left_to_the_replay() -> None:
    class Trusting(SumEpisode):
        def verdict(self, final_message: str | None) -> Verdict:
            return Verdict(True)

    class Trust(Sums):
        episode_class = Trusting

    turn = sum_problem("a").reference[0]
    calls = [call.model_copy(update={"name": "of_the_agent"}) for call in turn.calls]
    unknown = sum_problem("a").model_copy(update={"reference": [turn.model_copy(update={"calls": calls})]})
    assert find_leaks(Trust(), [unknown]) == []
    assert "doing nothing succeeds" in find_leaks(Trust(), [sum_problem("a")])[0]


def test_silence_that_is_right_now_and_then_is_no_leak() -> None:
    """A problem whose solution only looks, solved by doing nothing, beside one that is not."""

    class Episode(SumEpisode):
        @tool("The total.", read_only=True)
        def look(self) -> str:
            return f"{self.total}"

        def verdict(self, final_message: str | None) -> Verdict:
            return Verdict(self.total == self.target)

    looks = sum_problem("look", target=0, reference=[{"calls": [{"name": "look", "arguments": {}}], "answer": "0"}])
    quiet = type("Quiet", (Sums,), {"episode_class": Episode})()
    assert find_leaks(quiet, [looks]) == []
    assert find_leaks(quiet, [looks, sum_problem("add", target=2)]) == []


_count, _light = itertools.count(5), itertools.cycle(["on", "off"])


@pytest.mark.parametrize(
    "answer",
    [
        lambda episode: {"id": next(_count)},
        lambda episode: {"id": f"order-{next(_count):04d}"},
        lambda episode: f"Saved as number {next(_count)}.",
        lambda episode: {"saved": True, "remaining": str(5000 - next(_count))},
    ],
)
def test_a_number_that_runs_on_is_told_and_no_leak_for_it_alone(
    answer: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_leaks(world(answer), [problem(1)]) == []
    assert "warning: a number runs on from one episode to the next: problem 'p1': a tool" in capsys.readouterr().err


def test_a_number_that_runs_on_beside_a_switch_that_was_left_is_a_leak(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = find_leaks(world(lambda episode: {"id": next(_count), "light": next(_light)}), [problem(1)])
    assert "a tool first answers" in line
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "answer",
    [
        lambda episode: {"id": str(uuid.uuid4()), "luck": random.random()},
        lambda episode: f"Saved as {uuid.uuid4()}.",
        lambda episode: {"now": datetime.now(UTC).isoformat(), "seconds": int(datetime.now(UTC).timestamp())},
        lambda episode: f"It is {datetime.now(UTC):%H:%M:%S}.",
    ],
)
def test_what_is_drawn_or_read_off_a_clock_is_no_leak(answer: Callable[[Any], Any]) -> None:
    assert find_leaks(world(answer), [problem(1)]) == []


@pytest.mark.parametrize(
    "live",
    [
        ["9ms", "12ms", "11ms", "13ms", "10ms"],
        ["sunny", "sunny", "cloudy", "sunny", "sunny"],
        [21.5, 21.7, 21.5, 21.9, 21.6],
        [["a", "b"], ["a"], ["a", "b", "c"], [], ["a"]],
        ["3 hits: ab", "12 hits: ab cd", "4 hits: ab", "9 hits: ab cd e", "4 hits: ab"],
    ],
)
def test_what_a_live_service_reads_is_no_leak(live: list[Any]) -> None:
    """A search, the weather, a queue: plays differ, and nothing of an episode is left in them."""
    replies = iter(live)
    assert find_leaks(world(lambda episode: {"reading": next(replies)}), [problem(1)]) == []


@pytest.mark.parametrize(
    "kept",
    [
        ["new", "there already"],
        [0, 1],
        [["a"] * times for times in range(1, 99)],
        ["nothing", *(", ".join("a" * times) for times in range(1, 99))],
        ["nothing", *(", ".join("a" * times) for times in range(1, 9))],  # a server that keeps the last eight
    ],
)
def test_what_stays_as_an_episode_left_it_or_grows_is_found(kept: list[Any]) -> None:
    replies = itertools.chain(kept, itertools.repeat(kept[-1]))
    (line,) = find_leaks(world(lambda episode: {"state": next(replies)}), [problem(1)])
    assert "a tool first answers" in line


@pytest.mark.parametrize("written", ["Saturday", "28 November 2026", "2026-11-28"])
def test_a_log_that_grows_is_found_though_each_line_begins_with_the_date(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.drift.probes.without_now", lambda text: text.replace(written, "⟨now⟩"))
    log: list[str] = []

    def answer(episode: Any) -> dict[str, str]:
        log.append(f"{written}: note {len(log) % 2 + 5}")
        return {"log": "; ".join(log)}

    assert find_leaks(world(answer), [problem(1)])


def test_a_switch_that_stays_as_it_was_left_is_found() -> None:
    states = itertools.cycle(["on", "off"])
    (line,) = find_leaks(world(lambda episode: {"light": next(states)}), [problem(1)])
    assert '"on"' in line
    assert '"off"' in line


def test_only_a_handful_of_problems_is_played_whatever_there_is() -> None:
    plays = []

    class Counted(Sums):
        def start(self, problem: Problem, *, stream: str = "") -> Any:
            plays.append(problem.id)
            return super().start(problem, stream=stream)

    many = [sum_problem(f"{n}", category=f"{n % 9}", marker=n) for n in range(300)]
    assert find_leaks(Counted(), many) == []
    assert len(plays) == 4 * len(set(plays)) <= 4 * MOST_PROBLEMS


def test_rows_the_world_trips_over_say_nothing_here() -> None:
    assert (
        find_leaks(Sums(), [sum_problem(world={}), sum_problem("silent", reference=[{"calls": [], "answer": ""}])])
        == []
    )
