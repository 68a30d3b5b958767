"""Memory of several trainers, in numbers that add up by hand, and the longest episode that one card computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.planning.hardware import GPUS
from tasks.planning.memory import plan_memory
from tasks.planning.nearest import check_size, longest_episode
from tasks.planning.parts import Memory
from tasks.planning.setup import Setup
from tests.planning.setups import setup
from tests.profiles import profile_params

COUNT = 7_615_616_512  # of Qwen2.5-7B
HEAD = 152_064 * 3_584


def updating(memory: Memory) -> dict[str, float]:
    return {part.name: part.update for part in memory.parts}


def of_ranks(number: int, *, is_gpu: bool = True, **changed: Any) -> Setup:
    full = {"train__lora": None, "train__kl_weight": 0.001, **changed}
    one = setup("Qwen2.5-7B", "h200-141gb", profile="bfcl_qwen2.5_7b", **full)
    launch = one.settings.launch.model_copy(update={"num_trainers": number})
    machine = replace(one.machine, is_gpu=is_gpu)
    return replace(one, settings=one.settings.model_copy(update={"launch": launch}), machine=machine)


def test_each_of_four_trainers_has_a_quarter_of_all_that_mirrors_the_weights_and_its_own_activations() -> None:
    one, four = (updating(plan_memory(of_ranks(number))) for number in (1, 4))
    assert four["weights"] == four["gradients"] == four["reference"] == COUNT
    assert four["optimizer"] == 2 * COUNT
    assert four["activations"] == one["activations"]
    assert 2 * 4 * 2 * HEAD < four["layers in one piece"] < 13e9  # both ends, with gradients, and a few layers of 28
    assert plan_memory(of_ranks(4)).host - plan_memory(of_ranks(1)).host == 4 * COUNT  # rank 0's whole policy


def test_weights_that_are_computed_in_bfloat16_are_cut_in_float32_and_are_the_masters_themselves() -> None:
    """One trainer has 2 bytes, 4 of a master and 8 of averages; of four each has (4 + 8) / 4 = 3."""
    four = updating(plan_memory(of_ranks(4, compute__weights="bfloat16", compute__frozen="bfloat16")))
    assert four["weights"] == COUNT
    assert four["optimizer"] == pytest.approx(2 * COUNT)
    assert four["reference"] == COUNT / 2


def test_trainers_that_share_a_machines_memory_are_counted_together() -> None:
    two = updating(plan_memory(of_ranks(2, is_gpu=False)))
    one = updating(plan_memory(of_ranks(1, is_gpu=False)))
    assert two["weights"] == one["weights"] and two["activations"] == 2 * one["activations"]
    assert two["rank 0's whole policy"] == 4 * COUNT


def test_the_longest_episode_is_the_last_that_fits_and_more_trainers_only_make_room_for_it() -> None:
    longest = longest_episode(of_ranks(3))
    for tokens, does_fit in ((longest, True), (longest + 1, False)):
        made = of_ranks(3, sampling__max_tokens_per_episode=tokens)
        assert (plan_memory(made).peak <= made.machine.memory) is does_fit
    assert longest_episode(of_ranks(1)) == 0
    assert longest < longest_episode(of_ranks(64)) < 2 * longest


def test_an_episode_that_no_card_can_compute_is_refused_with_the_longest_that_one_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = profile_params("bfcl_qwen2.5_7b")
    params["sampling"] |= {"max_tokens_per_episode": 1_000_000, "max_completion_tokens": None}
    params["launch"] |= {"launcher": "external", "num_trainers": 64, "max_restarts": 0}
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["h200-141gb"])
    monkeypatch.setattr("tasks.planning.setup.shape_of", lambda model: of_ranks(1).shape)
    with pytest.raises(ValueError, match=r"One card computes a whole episode.*max_tokens_per_episode to \d{6} or less"):
        check_size(params)
