"""Stored trajectories: of one sequence, of several, and rows of before, whose tokens are beside their other fields."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.report.episodes import shown_episode
from tasks.report.token_heat import Numbers, TokenReader
from tasks.rewards.stored import turn_tokens
from tests.measurement.synthetic import trajectory

BEFORE: dict[str, Any] = {
    "problem_id": "td-7-004983", "category": "cancel/none", "request": "Cancel booking B90.", "draw": 0,
    "sample_index": 0, "policy_version": 3, "environment_fingerprint": "b90788db", "token_ids": [5, 6, 7, 8],
    "sampled_mask": [False, True, False, True], "sampler_logp": [0.0, -0.5, 0.0, -0.25],
    "turns": [
        {"text": "a", "calls": [], "replies": [], "errors": [], "stop_reason": "end_of_turn", "follow_up": "And?",
         "policy_version": 3},
        {"text": "b", "calls": [], "replies": [], "errors": [], "stop_reason": "end_of_turn", "follow_up": None,
         "policy_version": 4},
    ],
    "outcome": "success", "limit": None, "checks": {"state": True}, "num_calls": 0, "num_invalid_calls": 0,
    "fault": None, "details": {}, "split_group": "booking B90", "token_versions": [0, 3, 0, 4],
}  # fmt: skip
OF_TOKENS = ("token_ids", "sampled_mask", "sampler_logp", "token_versions")


def test_a_row_of_before_is_read_as_one_sequence_and_written_as_rows_are_now() -> None:
    read = Trajectory.from_row(BEFORE)
    assert read.sequences == [TokenSequence(*(BEFORE[name] for name in OF_TOKENS))]
    assert read.sampled_versions(read.sequences[0]) == [3, 4]
    now = {name: value for name, value in BEFORE.items() if name not in OF_TOKENS}
    assert read.to_row() == now | {"sequences": [{name: BEFORE[name] for name in OF_TOKENS}]}
    behind_an_endpoint = BEFORE | {"token_ids": [], "sampled_mask": [], "sampler_logp": [], "token_versions": []}
    assert Trajectory.from_row(behind_an_endpoint).sequences == []


def test_a_row_without_any_tokens_is_refused_and_is_no_endpoints() -> None:
    cut = {name: value for name, value in BEFORE.items() if name not in OF_TOKENS}
    with pytest.raises(KeyError, match="sequences"):
        Trajectory.from_row(cut)


def with_a_helper() -> Trajectory:
    """It asks, its helper is asked and answers, and it answers: 2 + 1 sampled tokens in one sequence, 2 in another."""
    own = TokenSequence([1, 2, 3, 4, 5], [False, True, True, False, True], [0.0, -0.5, -1.5, 0.0, -0.25])
    helper = TokenSequence([8, 9, 6], [False, True, True], [0.0, -1.0, -2.0], begun="another_agent")
    turns = [Turn("ask"), Turn("help", sequence=1), Turn("answer")]
    return replace(trajectory(turns=turns), sequences=[own, helper])


def test_an_episode_of_several_sequences_is_read_as_it_was_written() -> None:
    episode = with_a_helper()
    row = json.loads(json.dumps(episode.to_row()))
    assert Trajectory.from_row(row) == episode
    assert [item.get("begun") for item in row["sequences"]] == [None, "another_agent"]
    assert [turn.get("sequence") for turn in row["turns"]] == [None, 1, None]
    assert (episode.num_tokens, episode.num_sampled_tokens) == (8, 5)


def test_each_turn_has_the_tokens_of_its_own_sequence() -> None:
    episode = with_a_helper()
    found = [(item.prompt_ids, item.sampled_ids, item.sampler_logp) for item in turn_tokens(episode)]
    assert found == [([1], [2, 3], [-0.5, -1.5]), ([8], [9, 6], [-1.0, -2.0]), ([1, 2, 3, 4], [5], [-0.25])]
    assert TokenReader(None, Numbers()).turns(episode) == [([0, 1], [50, 150]), ([2, 3], [100, 200]), ([4], [25])]
    episode.turns[2].sequence = 1  # more turns there than it has runs of sampled tokens
    assert turn_tokens(episode) == []


def test_the_page_says_where_another_sequence_begins_and_why() -> None:
    shown = shown_episode(with_a_helper(), line=1)
    assert [turn.get("sequence_note") for turn in shown["turns"]] == [
        "sequence 1 begins", "sequence 2 began: another agent", "sequence 1 goes on",
    ]  # fmt: skip
    assert [turn["num_tokens"] for turn in shown["turns"]] == [2, 2, 1]
    assert all("sequence_note" not in turn for turn in shown_episode(trajectory(), line=1)["turns"])
