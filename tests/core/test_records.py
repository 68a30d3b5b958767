"""Stored trajectories, of one sequence and of several."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.report.episodes import shown_episode
from tasks.report.token_heat import Numbers, TokenReader
from tasks.rewards.stored import turn_tokens
from tests.measurement.synthetic import trajectory


def test_a_row_without_any_tokens_is_refused_and_is_no_endpoints() -> None:
    row = trajectory().to_row()
    del row["sequences"]
    with pytest.raises(KeyError, match="sequences"):
        Trajectory.from_row(row)


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
