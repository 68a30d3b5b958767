"""Demonstrations told in parts: which, what the expert says meanwhile, and how a model reads them."""

from __future__ import annotations

import random

from tasks.chat.format import ChatFormat
from tasks.core.records import Demonstration, Problem
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.stages.curate.demonstrations import replay_demonstrations, tell_in_parts
from tasks.stages.curate.references import Replays
from tasks.stages.curate.settings import ShardedDemonstrationSettings
from tasks.stages.warm_start.rows import demonstration_row
from tests import tiny

DESK = TravelDesk()
QUESTION = "What else?"


def shown(count: int) -> list[tuple[Problem, Demonstration]]:
    pairs = [(problem, DESK.demonstrate(problem, random.Random(number)))
             for number, problem in enumerate(tiny.problems(count, max_level=4))]  # fmt: skip
    return [(problem, demonstration) for problem, demonstration in pairs if demonstration is not None]


def told(share: float, *, seed: int = 1) -> list[tuple[Problem, Demonstration]]:
    settings = ShardedDemonstrationSettings(share=share, question=QUESTION)
    return tell_in_parts(DESK, shown(120), settings, seed=seed)


def test_the_expert_waits_for_every_part_and_then_does_as_before() -> None:
    for (problem, before), (_, after) in zip(shown(120), told(1.0), strict=True):
        parts = DESK.shards(problem)
        waits = len(parts) - 1
        assert [after.request, *after.follow_ups] == parts
        assert after.assistant_texts == [QUESTION] * waits + before.assistant_texts
        assert after.replies == [[]] * waits + before.replies


def test_about_the_share_is_told_so_by_the_seed_alone() -> None:
    waits = [bool(item.follow_ups) for _, item in told(0.25)]
    assert waits == [bool(item.follow_ups) for _, item in told(0.25)]
    assert waits != [bool(item.follow_ups) for _, item in told(0.25, seed=2)]
    assert 0.05 < sum(waits) / len(waits) < 0.5


def test_played_again_they_end_in_success() -> None:
    assert set(replay_demonstrations(Replays(DESK), told(0.5))) == {""}


def test_a_row_without_parts_is_written_as_ever() -> None:
    (_, before), *_ = shown(20)
    assert before.model_dump(exclude_defaults=True).keys() == {"problem_id", "request", "assistant_texts", "replies"}


def test_a_model_learns_its_question_and_reads_the_parts() -> None:
    chat = ChatFormat(tiny.tokenizer(), source="test")
    (problem, demonstration), *_ = [item for item in told(1.0) if item[0].world["kind"] == "book"]
    row = demonstration_row(demonstration, chat, [])
    learnt, read = (
        chat.decode([token for token, mask in zip(row.token_ids, row.sampled_mask, strict=True) if mask is mine])
        for mine in (True, False)
    )
    assert learnt.count("What else?") == 2 and "What else?" not in read
    assert all(part in read and part not in learnt for part in DESK.shards(problem))


def test_who_thinks_has_a_thought_for_each_message() -> None:
    for _, demonstration in told(1.0):
        thoughts = DESK.thoughts(demonstration)
        assert len(thoughts) == len(demonstration.assistant_texts)
        assert thoughts[len(demonstration.follow_ups) - 1].endswith("ask")
