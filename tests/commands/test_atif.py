"""Documents of the interchange format: each is valid against its published schema, and nothing said is lost in it.

The schema is the models of the package `atif` 1.8, which follow the format's own (the package `harbor` wants Python
3.12 and a hundred others). What `harbor` 0.25 asks beyond them is checked here too: a known version, at least one step.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any

import atif
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.commands.export.atif import AGENT_VERSION, SCHEMA_VERSION, Document, Origin, document_text, to_document
from tasks.core.records import Score, TokenSequence, Trajectory, Turn
from tasks.core.text import encodable
from tasks.rewards.stored import turn_tokens
from tests.conftest import ROOT
from tests.measurement.synthetic import REQUEST, call_turn, trajectory

ORIGIN = Origin("iteration-0100", {"weights_hash": "c2"}, "test", 11)
IDS = st.lists(st.integers(0, 999), min_size=1, max_size=4)
ANY_TEXT = st.text(st.characters(), max_size=30)  # half surrogate pairs included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.just({"malformed": True}) | st.fixed_dictionaries(
    {"name": ANY_TEXT.filter(bool), "arguments": st.dictionaries(st.text(max_size=9), JSON, max_size=3)}
)
ANSWERED = st.tuples(CALLS, ANY_TEXT, st.none() | st.sampled_from(["invalid", "timeout"]))


@st.composite
def turns(draw: Any) -> Turn:
    answered = draw(st.lists(ANSWERED, max_size=3))
    return Turn(
        text=draw(ANY_TEXT),
        calls=[call for call, _, _ in answered],
        replies=[reply for _, reply, _ in answered],
        errors=[error for _, _, error in answered],
        stop_reason=draw(st.sampled_from(["end_of_turn", "max_tokens_per_turn"])),
        follow_up=draw(st.none() | ANY_TEXT),
        policy_version=draw(st.integers(0, 9)),
    )


@st.composite
def trajectories(draw: Any) -> Trajectory:
    """Of any length, with tokens or, as from behind an endpoint, without."""
    episode = trajectory(turns=draw(st.lists(turns(), max_size=4)))
    episode.request = draw(ANY_TEXT)
    episode.details = draw(st.dictionaries(st.text(max_size=5), JSON, max_size=2))
    if draw(st.booleans()):
        episode.outcome, episode.fault = "environment_error", draw(ANY_TEXT)
    episode.sequences = []
    if draw(st.booleans()):
        episode.sequences = [TokenSequence(), TokenSequence(begun="compaction")]
        for turn in episode.turns:
            turn.sequence = draw(st.integers(0, 1))
            tokens = episode.sequences[turn.sequence]
            tokens.append_given(draw(IDS))
            ids = draw(IDS)
            tokens.append_sampled(ids, [-0.5] * len(ids), [0] * len(ids))
    return episode


def document_of(episode: Trajectory, *, score: Score | None = None, with_tokens: bool = True) -> Document:
    """The document as a reader gets it: written, checked against the schema, read."""
    document = to_document(episode, ORIGIN, document_id="best/p0", score=score, with_tokens=with_tokens)
    text = document_text(document)
    text.encode("utf-8")
    assert text.count("\n") == 1
    checked = atif.Trajectory.model_validate_json(text)
    assert checked.schema_version == SCHEMA_VERSION == "ATIF-v1.8"
    assert checked.steps
    read: Document = json.loads(text)
    return read


def retold(document: Document) -> tuple[str, list[Turn], str | None]:
    """The record again, from a document alone: request, turns, and the fault."""
    first, *steps = document["steps"]
    told: list[Turn] = []
    fault = None
    for step in steps:
        if step["source"] == "user":
            told[-1].follow_up = step["message"]
        elif step["source"] == "system":
            fault = step["message"]
        else:
            told.append(_turn(step))
    return first["message"], told, fault


def _turn(step: Document) -> Turn:
    calls = {call["tool_call_id"]: call for call in step.get("tool_calls", [])}
    turn = Turn(step["message"], **step["extra"])
    for result in step.get("observation", {"results": []})["results"]:
        call = calls.get(result.get("source_call_id"))
        extra = result.get("extra", {})
        turn.calls.append({"name": call["function_name"], "arguments": call["arguments"]} if call else extra["call"])
        turn.replies.append(result["content"])
        turn.errors.append(extra.get("error"))
    return turn


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(trajectories())
def test_any_trajectory_is_a_valid_document_from_which_texts_calls_and_replies_can_be_told_again(episode: Trajectory):
    document = document_of(episode)
    whole = Trajectory.from_row(json.loads(encodable(json.dumps(episode.to_row(), ensure_ascii=False))))
    assert retold(document) == (whole.request, whole.turns, whole.fault)
    assert document["extra"]["details"] == whole.details
    metrics = [step["metrics"] for step in document["steps"] if "metrics" in step]
    sampled = [number for item in metrics for number in item["completion_token_ids"]]
    assert sorted(sampled) == sorted(number for item in whole.sequences for number in item.sampled_ids)
    assert document["extra"].get("sequences_begun", []) == [item.begun for item in whole.sequences]


def test_a_call_a_malformed_one_and_two_requests_are_steps_with_linked_observations():
    asked = call_turn("check_card", {"card_id": "card_3"}, '{"status": "ok"}')
    asked.calls.append({"malformed": True})
    asked.replies.append('{"status": "invalid"}')
    asked.errors = [None, "invalid_arguments"]
    episode = trajectory(turns=[asked, Turn("It works.", follow_up="And card_8?"), Turn("No.")])
    user, agent, answer, second, last = document_of(episode)["steps"]

    assert [step["source"] for step in (user, agent, answer, second, last)] == [
        "user",
        "agent",
        "agent",
        "user",
        "agent",
    ]
    assert (user["message"], second["message"]) == (REQUEST, "And card_8?")
    assert agent["tool_calls"] == [
        {"tool_call_id": "turn-1-call-1", "function_name": "check_card", "arguments": {"card_id": "card_3"}}
    ]
    assert agent["observation"]["results"] == [
        {"source_call_id": "turn-1-call-1", "content": '{"status": "ok"}'},
        {
            "content": '{"status": "invalid"}',
            "extra": {"error": "invalid_arguments", "call": {"malformed": True}},
        },
    ]


def test_a_turn_carries_its_tokens_and_the_document_their_sums_the_reward_and_the_seeds():
    """2 tokens of prompt, 2 sampled, 1 of a reply, 1 sampled: the turns read 2 and 5 tokens and write 2 and 1."""
    episode = trajectory(turns=[call_turn("check_card", {}, "ok"), Turn("Done.")], num_calls=1)
    mask = [False, False, True, True, False, True]
    episode.sequences = [TokenSequence([1, 2, 3, 4, 5, 6], mask, [0.0, 0.0, -0.5, -1.5, 0.0, -0.25])]
    score = Score(1.1, {"outcome": 1.0, "format": 0.1})
    document = document_of(episode, score=score)

    assert document["steps"][2]["metrics"] == {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "completion_token_ids": [6],
        "logprobs": [-0.25],
    }
    assert document["final_metrics"] == {
        "total_steps": 3,
        "total_prompt_tokens": 7,
        "total_completion_tokens": 3,
        "extra": {"num_calls": 1, "num_invalid_calls": 0},
    }
    assert document["agent"]["model_name"] == "iteration-0100"
    assert document["extra"]["reward"] == {"total": 1.1, "parts": {"outcome": 1.0, "format": 0.1}}
    assert document["extra"]["seeds"] == {"run": 11, "stage": "test", "draw": 0, "sample_index": 0}
    assert document["extra"]["environment_fingerprint"] == "f00d"
    counts = document_of(episode, with_tokens=False)["steps"][2]["metrics"]
    assert counts == {"prompt_tokens": 5, "completion_tokens": 1}


def test_an_episode_from_behind_an_endpoint_has_the_endpoints_sums_and_no_ids():
    episode = trajectory(turns=[Turn("Done.")])
    episode.sequences = []
    episode.details = {"usage": {"num_requests": 1, "input_tokens": 90, "output_tokens": 7, "cost": None}}
    document = document_of(episode)
    assert "metrics" not in document["steps"][1]
    assert document["final_metrics"]["total_prompt_tokens"] == 90
    assert document["final_metrics"]["total_completion_tokens"] == 7
    assert "total_cost_usd" not in document["final_metrics"]


def test_an_episode_lost_before_its_first_turn_is_the_request_and_the_fault():
    episode = trajectory(turns=[], outcome="environment_error")
    episode.fault = "check_card: no answer in 30 s"
    steps = document_of(episode)["steps"]
    assert [(step["source"], step["message"]) for step in steps] == [("user", REQUEST), ("system", episode.fault)]


def test_tokens_that_do_not_fit_the_turns_are_told_of_none():
    """One run of sampled tokens and seven turns: whose they are cannot be told."""
    episode = trajectory()
    assert turn_tokens(episode) == []
    assert document_of(episode)["final_metrics"]["total_completion_tokens"] == 3


def test_the_version_of_the_agent_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == AGENT_VERSION
