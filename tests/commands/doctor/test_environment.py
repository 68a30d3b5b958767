"""The environment: tools that crash, chance that is not from the seed, state that episodes share are found."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

from tasks.commands.doctor.doctor import CHECKS
from tasks.core.records import Problem
from tasks.drift.pin import ACCEPT_VARIABLE
from tasks.environments.travel_desk.environment import TravelDeskEpisode
from tasks.tools.authoring import tool
from tasks.tools.base import EnvironmentFault, ToolReply, Verdict
from tasks.tools.layer import ToolError, envelope
from tests.commands.doctor.project import found, in_world, look, look_at
from tests.rollouts.agents.conftest import AGENTS, agent_settings

FAULTS = {
    "seed": 0, "seen_by": "turnwise", "error_rate": 0.25, "timeout_rate": 0.0, "rate_limit_rate": 0.0,
    "latency_rate": 0.0, "latency_seconds": 0.0, "truncate_rate": 0.0, "rename_rate": 0.0,
}  # fmt: skip
LIVE = {"starts_afresh": lambda environment: False, "is_live": lambda environment: True}  # as an MCP server may be


class Crashing(TravelDeskEpisode):
    @tool("Cancel a booking; answers the refund.")
    def cancel_booking(self, booking_id: str) -> dict[str, Any]:
        raise KeyError("no database")


class Larger(TravelDeskEpisode):
    @tool("Rate a flight.")
    def rate(self, stars: Annotated[int, Field(ge=1, le=5)], note: str) -> str:
        return "thanks"


def test_problems_of_another_environment_are_not_judged(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of params.yaml whose curation failed; what plays problems is skipped."""
    name = in_world(monkeypatch, Larger)
    checks = look_at(["environment", "chat template", "tools answer"], artifacts, environment__name=name)
    found(checks[0], "fail", "tools: rate is new", "python -m tasks curate")
    assert [item.result for item in checks[1:]] == ["skip", "skip"]
    assert look("environment", artifacts).result == "pass"


class Dead(TravelDeskEpisode):
    @tool("Rate a flight.")
    def rate(self, stars: int) -> str:
        raise ToolError("unavailable", "no such server")


class Refusing(TravelDeskEpisode):
    """As a server whose back end is down, in a JSON-RPC error."""

    word_error = staticmethod(envelope)

    @tool("Cancel a booking; answers the refund.")
    def cancel_booking(self, booking_id: str) -> dict[str, Any]:
        raise ToolError("conflict", "no database")

    @tool("Rate a flight.")
    def rate(self, stars: int) -> str:
        raise ToolError("conflict", "no such server")


class Moody(TravelDeskEpisode):
    count = itertools.count()

    @tool("Cancel a booking; answers the refund.")
    def cancel_booking(self, booking_id: str) -> dict[str, Any]:
        return {"refund": next(self.count)}


class Sharing(TravelDeskEpisode):
    shelf: ClassVar[dict[str, Any]] = {}

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.shelf.clear()
        self.shelf.update(self.bookings)
        self.bookings = self.shelf


@pytest.mark.slow
def test_a_tool_that_crashes_is_named_with_what_it_said(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = in_world(monkeypatch, Crashing)
    examined = look("tools answer", artifacts, environment__name=name)
    found(examined, "fail", "1 of 6 do not answer: cancel_booking: unavailable: it crashed with KeyError", "by hand")
    lost = look("lost episodes", artifacts, environment__name=name, environment__tools__max_attempts=1)
    found(lost, "fail", "met a fault, mostly cancel_booking", "Repair what the fault names")
    # One type of eleven is lost; with three attempts each, 1/11³ is under the allowed 5%.
    assert look("lost episodes", artifacts, environment__name=name).result == "warn"
    assert look("references score 1", artifacts, environment__name=name).result == "pass"  # of those that were played


@pytest.mark.slow
def test_in_a_world_without_a_working_tool_what_plays_is_skipped(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> Any:
        raise EnvironmentFault("no such server", tool="cancel_booking")

    monkeypatch.setattr(Crashing, "call", down)
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")  # the problems are of travel_desk
    name = in_world(monkeypatch, Crashing)
    examined = look_at([*CHECKS], artifacts, environment__name=name, environment__tools__backoff_seconds=0.0)
    results = {item.check: item.result for item in examined}
    assert [name for name in results if results[name] == "fail"] == ["tools answer", "lost episodes"]
    skipped = [item for item in examined if item.result == "skip"]
    assert {item.check for item in skipped} >= {"loss mask", "references score 1", "separate episodes"}
    assert {item.finding for item in skipped} == {"not looked at, for the reason under `lost episodes`"}


@pytest.mark.slow
def test_a_tool_no_reference_uses_is_called_with_made_up_arguments(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Larger))
    found(larger, "pass", "6 of 7 when called by references, 1 with made-up arguments (rate)", "")
    dead = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Dead))
    found(dead, "fail", "rate: unavailable: no such server", "a server may be down")


@pytest.mark.slow
def test_a_tool_that_refuses_every_call_is_named_with_what_it_said(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that references call. Of one that is called with made-up arguments a refusal is an answer."""
    examined = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Refusing))
    refused = 'cancel_booking: {"error": {"type": "conflict", "message": "no database"}}'
    found(examined, "warn", f"6 of 7 answer; refused every call: {refused}", "lacks its data or a key answers so")
    monkeypatch.setattr(Refusing, "verdict", lambda self, final_message: Verdict(True))
    succeeding = look("tools answer", artifacts, environment__name="broken")
    assert succeeding.finding == examined.finding and "ToolError" not in succeeding.remedy

    class Meant(Refusing):
        @tool("Cancel a booking; answers the refund.")
        def cancel_booking(self, booking_id: str) -> dict[str, Any]:
            raise ToolError("conflict", f"nobody knows {booking_id}")

    named = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Meant))
    assert "refused every call" not in named.finding  # references that succeed may show how to get over that


@pytest.mark.slow
def test_a_refusal_that_hides_its_reason_names_the_exception_to_raise(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDK for Python answers any exception but its ToolError; here for one call, and then the tool works."""
    refused = itertools.chain([True], itertools.repeat(False))
    text = envelope("conflict", "get_flight_cost", "Error executing tool get_flight_cost")

    class Hiding(TravelDeskEpisode):
        def call(self, name: str, arguments: Any) -> Any:
            if name == "get_flight_cost" and next(refused):
                return ToolReply(text, valid=False, error="conflict")
            return super().call(name, arguments)

    examined = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Hiding))
    told = "6 of 6 answer; refused without a reason: get_flight_cost: "
    found(examined, "warn", told, "raise ToolError in the server")


@pytest.mark.slow
def test_a_world_that_cannot_be_reset_gets_no_made_up_call(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = look("tools answer", artifacts, environment__name=in_world(monkeypatch, Dead, **LIVE))
    found(examined, "warn", "6 of 7 answer; not called, as in no reference: rate", "never reset")


@pytest.mark.slow
def test_a_limit_that_loses_most_episodes_warns(artifacts: Path) -> None:
    examined = look("lost episodes", artifacts, environment__tools__max_dropped_share=0.9)
    found(examined, "warn", "up to 90% may be", "Set environment.tools.max_dropped_share")


@pytest.mark.slow
def test_an_episode_that_differs_the_second_time_fails(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = in_world(monkeypatch, Moody)
    found(
        look("same seed", artifacts, environment__name=name), "fail", "at turn 1 the tool says", "Derive all randomness"
    )
    live = look("same seed", artifacts, environment__name=in_world(monkeypatch, Moody, **LIVE))
    found(live, "warn", "tools answer differently the second time", "can be recorded")  # a server may tell the time
    name = in_world(monkeypatch, Moody)
    # The types whose tools are sound still show that episodes stay apart.
    assert look("separate episodes", artifacts, environment__name=name).result == "pass"


@pytest.mark.slow
def test_episodes_that_share_state_fail(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = in_world(monkeypatch, Sharing)
    assert look("same seed", artifacts, environment__name=name).result == "pass"
    examined = look("separate episodes", artifacts, environment__name=name)
    found(examined, "fail", "differ when others run beside them", "Keep all state in the Episode")


def test_faults_on_purpose_are_left_out_and_a_strict_cache_leaves_nothing_to_play(artifacts: Path) -> None:
    assert look("references score 1", artifacts, environment__faults=FAULTS).result == "pass"
    strict = {"mode": "strict", "folder": str(artifacts / "none"), "frozen": None}
    found(look("same seed", artifacts, environment__cache=strict), "warn", "tools are switched off", "replay or off")


@pytest.mark.slow
def test_an_agent_is_started_once_before_training_depends_on_it(artifacts: Path) -> None:
    """By default there is none; here one plays a cancellation, and one raises."""
    found(look("agent", artifacts), "pass", "our own loop", "")
    world: dict[str, Any] = {"environment__name": "agent", "environment__settings": agent_settings()}
    found(look("agent", artifacts, **world), "pass", "success after 2 turns, in 1 sequence", "")
    world["environment__settings"] = agent_settings(object=f"{AGENTS}:crashes")
    found(look("agent", artifacts, **world), "fail", "raised KeyError", "every such episode")
