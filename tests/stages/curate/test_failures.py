"""Failures that no row is to blame for end curation with their own remedy: a judge, a checker, a server, a tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Problem
from tasks.environments.catalog import load_environment
from tasks.stages.curate.expectations import load_suite
from tasks.stages.curate.failures import MEANT, refusing_tools
from tasks.stages.curate.references import Replays, replay_references
from tasks.stages.curate.stage import warn_of_undemonstrated
from tasks.tools.authoring import tool
from tasks.tools.base import EnvironmentFault, ErrorType, ToolReply, Verdict
from tasks.tools.chat_client import EndpointRefusal
from tasks.tools.checks import read_verdict
from tasks.tools.layer import ToolError
from tasks.tools.replay import Played, Script
from tests.sums import SumEpisode, Sums, problem, worlds
from tests.tools.judge.endpoint import Endpoint, judge_row, serve
from tests.worlds import environment_settings

__all__ = ["worlds"]

NINE = [problem(f"p{number}", target=number + 1) for number in range(9)]
REMOVE = "remove the row"


def refusal(environment: Any, problems: Any = NINE) -> str:
    with pytest.raises(ValueError) as caught:
        replay_references(Replays(environment), problems)
    said = str(caught.value)
    assert "\n" not in said and REMOVE not in said
    return said


def world(verdict: Callable[..., Any]) -> Sums:
    class Episode(SumEpisode):
        def verdict(self, final_message: str | None) -> Verdict:
            found: Verdict = verdict(self)
            return found

    class World(Sums):
        episode_class = Episode

    return World()


def fail(tool: str, message: str) -> Verdict:
    raise EnvironmentFault(message, tool=tool)


@pytest.mark.parametrize("status", [500, 401])
def test_a_judge_that_is_down_or_refuses_the_key_is_no_fault_of_the_problems(tmp_path: Path, status: int) -> None:
    with serve(Endpoint(failures=[status] * 1000)) as endpoint:
        row = judge_row(endpoint.url, tmp_path, max_retries=0)
        with closing(load_environment(environment_settings("sums", judge=row))) as environment:
            said = refusal(environment)
        assert len(endpoint.asked) < 100  # the ninth was not asked for
    if status == 500:
        assert "the judge failed in each of the first 8 reference solutions (unavailable: the endpoint failed" in said
        assert "environment.judge" in said
    else:
        assert said.startswith("environment.judge: ") and "Correct what it names" in said and "crashed" not in said


def test_a_refusal_ends_what_is_played_at_once() -> None:
    def refuse(episode: SumEpisode) -> Verdict:
        raise EndpointRefusal("environment.judge: no")

    assert refusal(world(refuse), NINE[:1]) == "environment.judge: no"


def test_a_checker_that_says_0_5_is_to_be_corrected_and_no_row_removed() -> None:
    said = refusal(world(lambda episode: read_verdict(0.5)))
    assert "the checker failed in each of the first 8 reference solutions (unavailable: it returned 0.5" in said
    assert "Correct the checker: it returns True, False" in said


def test_a_checker_that_crashes_is_told_by_its_line_without_a_word_of_tools() -> None:
    def crash(episode: SumEpisode) -> Verdict:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise EnvironmentFault("it raised", tool="checker") from error

    said = refusal(world(crash))
    assert "the checker crashed in each of the first 8" in said and "ToolError" not in said


def test_a_connection_that_an_environment_lost_is_told_by_its_line() -> None:
    def lose(episode: SumEpisode) -> Verdict:
        raise ConnectionResetError("the database is away")

    said = refusal(world(lose))
    assert "the environment crashed in each of the first 8" in said and "test_failures.py:" in said
    assert "(ConnectionResetError: the database is away)" in said and "whatever it asks itself answers" in said


def test_a_server_that_is_lost_later_is_told_with_the_first_problem_and_how_often() -> None:
    """The first eight were played; rows that come after them are as innocent."""
    said = refusal(
        world(lambda episode: fail("server", "it ended") if episode.target > 8 else Verdict(True)),
        [*NINE, problem("p9", target=10)],
    )
    assert "the server failed in 2 of 10 reference solutions, first in 'p8' (unavailable: it ended)" in said
    assert "See that the server runs" in said


def test_a_server_that_dies_in_some_of_the_first_eight_ends_curation_before_the_others_are_played() -> None:
    judged = list[int]()

    def die_on_even(episode: SumEpisode) -> Verdict:
        judged.append(episode.target)
        return fail("server", "it ended") if episode.target % 2 == 0 else Verdict(True)

    said = refusal(world(die_on_even), [problem(f"p{number}", target=number) for number in range(1, 200)])
    assert "the server failed in 4 of the first 8 reference solutions, first in 'p2' (unavailable: it ended)" in said
    assert max(judged) == 8


class CrowdedEpisode(SumEpisode):
    """As a server with one world for all of its sessions: right only where no other episode is open."""

    opened = 0

    def __init__(self, problem: Problem):
        super().__init__(problem)
        CrowdedEpisode.opened += 1

    @tool("Add an amount.")
    async def add(self, amount: int) -> str:  # type: ignore[override]
        await asyncio.sleep(0.01)
        self.total += amount if CrowdedEpisode.opened == 1 else 0
        return "added"

    def close(self) -> None:
        CrowdedEpisode.opened -= 1


class Crowded(Sums):
    name, episode_class = "crowded", CrowdedEpisode


def test_solutions_that_succeed_alone_blame_what_episodes_share_and_no_row() -> None:
    said = refusal(Crowded())
    assert "3 of 3 played again alone succeed, first 'p0': episodes side by side disturb each other" in said
    assert "by session" in said and "environment.settings.max_servers: 1" in said
    assert not replay_references(Replays(Sums()), [problem("wrong", reference=[{"calls": [], "answer": ""}])])[0].score


class StubbornEpisode(SumEpisode):
    @tool("Add an amount.")
    def add(self, amount: int) -> str:
        raise ToolError("conflict", "boom \x1b[31m" + "x" * 500)


class Stubborn(Sums):
    name, episode_class = "stubborn", StubbornEpisode


def test_what_a_tool_said_is_in_the_reason_on_one_line_and_cut() -> None:
    (replay,) = replay_references(Replays(Stubborn()), NINE[:1])
    start = 'failed checks: total; add answered {"error": {"type": "conflict", "message": "boom \\\\u001b[31mxxx'
    assert replay.fault.startswith(start.replace("\\\\", "\\"))
    assert replay.fault.isprintable() and len(replay.fault) < 200


def test_a_tool_that_answers_the_first_eight_with_one_error_ends_curation_with_its_words() -> None:
    said = refusal(Stubborn())
    assert "the tool add answers with an error in each of the first 8 reference solutions (" in said
    assert "boom" in said and "Correct the tool, or the calls of the references" in said
    assert "reset" not in said


class UselessEpisode(SumEpisode):
    """A server whose `note` lacks its data base: the references go on without it, and succeed."""

    @tool("Note a total.")
    def note(self, total: int) -> str:
        raise ToolError("conflict", "Error executing tool note")

    @tool("Look a total up.")
    def look_up(self, total: int) -> str:
        raise ToolError("conflict", f"nobody knows {total}")

    @tool("Count down.")
    def lower(self, total: int) -> str:
        if total == 2:
            raise ToolError("conflict", "too low")
        return "done"


class Useless(Sums):
    name, episode_class = "useless", UselessEpisode


def noting(number: int) -> Problem:
    sum_up = problem(f"p{number}", target=number, category="noted" if number < 3 else "easy")
    asked = [{"name": name, "arguments": {"total": number}} for name in ("lower", "look_up")]
    calls = [*asked, {"name": "add", "arguments": {"amount": number}}]
    note = [{"name": "note", "arguments": {"total": number}}] if number < 3 else []
    return problem(**{**sum_up.model_dump(), "reference": [{"calls": [*note, *calls], "answer": str(number)}]})


def test_a_tool_that_refuses_all_its_calls_is_told_though_the_references_succeed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not `lower`, which refuses one call of four, and not `look_up`, which each time says of what."""
    replays, problems = Replays(Useless()), [noting(number) for number in range(1, 5)]
    assert [replay.score for replay in replay_references(replays, problems)] == [1, 1, 1, 1]
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "lower" not in said and "look_up" not in said
    assert 'to note ({"error": {"type": "conflict", "message": "Error executing tool note"}}) is refused' in said
    assert "raise ToolError in the server" in said
    warn_of_undemonstrated(replays, problems, problems[2:])
    said = capsys.readouterr().err
    assert "no demonstration of noted (2 problems of train; note answers" in said and "executing tool note" in said


@pytest.mark.parametrize("error", ["conflict", *MEANT])
def test_what_a_reference_shows_on_purpose_is_no_tool_that_refuses(error: ErrorType) -> None:
    """A wrong call and how an agent gets over it, or an outage that the world scripts."""
    script, reply = Script.reference(noting(1)), ToolReply("not now", error=error)
    played = Played([reply for _ in script.calls], Verdict(True))
    assert set(refusing_tools([script] * 2, [played] * 2)) == (
        set() if error in MEANT else {"note", "lower", "look_up", "add"}
    )


class Kept(Stubborn):
    def starts_afresh(self) -> bool:
        return False


def test_where_episodes_do_not_start_afresh_reset_is_named_first() -> None:
    assert "set environment.settings.reset to process, scratch or tool. Else correct the tool" in refusal(Kept())

    def remedies(**given: Any) -> dict[str, str]:
        found = load_suite({"num_demonstrations": 1, "num_problems": None}, **given)
        return {check.name: check.remedy for check in found}

    plain, kept = remedies(), remedies(starts_afresh=False)
    assert [name for name in plain if plain[name] != kept[name]] == ["each reference solution scores 1"]
    assert "environment.settings.reset" in kept["each reference solution scores 1"]
