"""Seconds, tokens a day and dollars, in numbers that add up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.learning.shared.exploration_settings import ExplorationSettings, SamplesPoint
from tasks.learning.shared.settings import StopSettings
from tasks.planning.plays import Play
from tasks.planning.seconds import (
    DAY,
    DISK_BYTES,
    GPU_BANDWIDTH_SHARE,
    GPU_EFFICIENCY,
    PCIE_BYTES,
    START_SECONDS,
    TENSOR_PARALLEL_SHARE,
    Lengths,
    Seconds,
    assumed_lengths,
    decode_costs,
    fed_token_seconds,
    plan_seconds,
    rollout_seconds,
    saving_seconds,
)
from tasks.planning.setup import Setup, evaluation_setup
from tests.planning.setups import setup
from tests.profiles import profile_params

LENGTHS = Lengths(prompt=2000, sampled=500, replies=500, longest=1500)


def test_a_run_adds_up_to_hours_tokens_and_dollars() -> None:
    run = Seconds(
        rollout=4,
        reference=1,
        update=3,
        refresh=1,
        checkpoint=1,
        warm_start=400,
        warm_start_most=1300,
        evaluate=595,
        num_iterations=260,
        sampled_tokens=1000,
    )
    assert run.iteration == 10
    assert run.total == 400 + 5 + 2600 + 595 == 3600
    assert run.tokens_per_day == 1000 / 10 * DAY
    assert run.total_most == 1300 + 5 + 2600 + 595 == 4500
    assert run.dollars(2.5) == (2.5, 3.125)


@pytest.mark.parametrize(("changed", "num_forwards"), [({}, 2), ({"train__lora": None}, 3)])
def test_an_update_is_three_forwards_two_where_the_base_is_frozen_and_one_more_with_checkpointing(
    changed: dict[str, Any], num_forwards: int
) -> None:
    """torch's counter of operations finds 3.0 for all weights, and 2.05 under LoRA of rank 16, 3.02 with
    checkpointing: 0.05 are the adapter's. A frozen weight has no gradient.
    """
    alike = {"train__updates_per_batch": 1, **changed}
    plain = setup("Qwen2.5-1.5B", "h100-80gb", train__gradient_checkpointing=False, **alike)
    again = setup("Qwen2.5-1.5B", "h100-80gb", train__gradient_checkpointing=True, **alike)
    one, other = (plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (plain, again))
    assert other.update - one.update == pytest.approx(one.reference)
    assert one.update == pytest.approx(num_forwards * one.reference, rel=0.05)


def test_an_iteration_is_the_mean_of_those_whose_samples_are_scheduled() -> None:
    """Of 4 iterations 3 have groups of 8 and one has groups of 2."""
    run: dict[str, Any] = {"train__num_iterations": 4, "train__group_size": 8}
    many = setup("Qwen2.5-1.5B", "h100-80gb", **run)
    points = [SamplesPoint(iteration=1, value=8), SamplesPoint(iteration=4, value=2)]
    nothing = {"temperature": None, "top_p": None, "keep": None, "prefixes": None}
    exploration = ExplorationSettings(**nothing, samples_per_problem=points)
    mixed = setup("Qwen2.5-1.5B", "h100-80gb", **run, train__exploration=exploration)
    eight, two, found = (
        plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (many, many.with_samples(2), mixed)
    )
    assert found.rollout == pytest.approx((3 * eight.rollout + two.rollout) / 4)
    assert found.update == pytest.approx((3 * eight.update + two.update) / 4)
    assert found.sampled_tokens == many.settings.train.problems_per_iteration * (3 * 8 + 2) / 4 * LENGTHS.sampled
    assert found.checkpoint == eight.checkpoint


def test_a_warm_start_is_three_forwards_of_each_demonstration_and_its_checkpoints() -> None:
    own: dict[str, Any] = {
        "num_steps": 100,
        "batch_size": 64,
        "checkpoint_interval": 50,
        "gradient_checkpointing": False,
        "stop": None,
    }
    wanted = setup("Qwen2.5-1.5B", "h100-80gb", **{f"warm_start__{name}": value for name, value in own.items()})
    planned = plan_seconds(wanted, LENGTHS, evaluated_episodes=0, has_warm_start=True)
    found = planned.warm_start
    assert planned.warm_start_most == found
    # 64 × 3,000 tokens through 1.31 billion weights of matrices, in float32 or TF32, at 35%; 100 steps.
    tokens, matrices, head = 64 * 3000, 1.31e9, 151_936 * 1536
    rate = GPU_EFFICIENCY * wanted.machine.rate["tf32" if wanted.settings.compute.tf32 else "float32"]
    arithmetic = 100 * 3 * (2 * matrices * tokens + 2 * head * 64 * 500) / rate
    # The model in bfloat16, 1 GB a second; two copies of 12 bytes per weight over PCIe, which are written meanwhile.
    saving = 2 * 1.543e9 / 1e9 + 2 * 12 * 1.543e9 / PCIE_BYTES
    assert arithmetic + saving < found < 1.5 * arithmetic + saving
    assert plan_seconds(wanted, LENGTHS, evaluated_episodes=0).warm_start == 0


def test_training_waits_for_the_copy_of_a_checkpoint_and_for_what_of_its_write_outlasts_the_next_iteration() -> None:
    """Weights, averages and reference: 16 bytes per weight, 20 GB a second to the host and 1 GB to the disk."""
    full: dict[str, Any] = {"train__lora": None, "train__snapshot_interval": 10**6}
    often, seldom = (setup("Qwen2.5-1.5B", "h100-80gb", **full, train__checkpoint_interval=every) for every in (1, 5))
    size = 16 * 1.543714304e9
    one, five = (plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (often, seldom))
    assert 5 * (five.iteration - five.checkpoint) > size / DISK_BYTES
    assert five.checkpoint == pytest.approx(size / PCIE_BYTES / 5, rel=1e-3)
    late = size / DISK_BYTES - (one.iteration - one.checkpoint)
    assert one.checkpoint == pytest.approx(size / PCIE_BYTES + max(0.0, late), rel=1e-3)
    short = replace(LENGTHS, prompt=20, sampled=5, replies=5, longest=15)
    brief = plan_seconds(often, short, evaluated_episodes=0)
    assert brief.checkpoint == pytest.approx(size / PCIE_BYTES + size / DISK_BYTES - brief.iteration + brief.checkpoint)
    assert saving_seconds(often) == pytest.approx((size / PCIE_BYTES, size / DISK_BYTES), rel=1e-3)


def test_a_warm_start_is_judged_on_no_more_problems_than_select_has() -> None:
    """Two of the 200 that `stop` asks for: what they take is known, and the steps are the same."""
    stop = StopSettings.model_validate(profile_params("tau2_smoke")["warm_start"]["stop"])
    assert stop.num_problems == 200 and stop.max_attempts == 4
    wanted = setup("Qwen2.5-1.5B", "h100-80gb", warm_start__stop=stop)
    two, all_of_them = (
        plan_seconds(replace(wanted, plays=plays), LENGTHS, evaluated_episodes=0, has_warm_start=True)
        for plays in ((Play("assess", 30, 4), Play("warm_start.stop", 2)), ())
    )
    checks = [
        rollout_seconds(evaluation_setup(wanted, Play("warm_start.stop", number)), LENGTHS, number)
        for number in (2, 200)
    ]
    less = checks[1] - checks[0]
    assert less > 0 and all_of_them.warm_start - two.warm_start == pytest.approx(less)
    assert all_of_them.warm_start_most - two.warm_start_most == pytest.approx(4 * less)


def test_a_warm_start_takes_one_attempt_at_least_and_all_of_them_at_most() -> None:
    stop = {"num_problems": 200, "minimum_success": 0.3, "max_attempts": 3, "rate_factor": 0.5}
    early = {"check_interval": 20, "patience": 2}  # (1 + 2) checks of 20 steps

    def seconds(num_steps: int, stop: dict[str, Any] | None) -> Seconds:
        checked = stop and StopSettings.model_validate(stop)
        own: dict[str, Any] = {"num_steps": num_steps, "checkpoint_interval": 1000, "stop": checked}
        wanted = setup("Qwen2.5-1.5B", "h100-80gb", **{f"warm_start__{name}": value for name, value in own.items()})
        return plan_seconds(wanted, LENGTHS, evaluated_episodes=0, has_warm_start=True)

    one, alone = seconds(100, {**stop, **early, "held_out_share": 0.0}), seconds(100, None).warm_start
    check = one.warm_start - alone
    assert check > 0  # 200 episodes
    assert one.warm_start_most == pytest.approx(3 * (alone - START_SECONDS + check) + START_SECONDS)
    patient = seconds(100, {**stop, **early, "held_out_share": 0.1})
    assert patient.warm_start_most == one.warm_start_most
    assert patient.warm_start == pytest.approx(seconds(60, None).warm_start + check)


def test_a_forward_is_two_operations_per_weight_and_token() -> None:
    wanted = setup("Qwen2.5-1.5B", "h100-80gb", train__autocast="bfloat16")
    forward = plan_seconds(wanted, LENGTHS, evaluated_episodes=0).reference
    # 8 prompts and 64 × 1,000 tokens through 1.31 billion weights of matrices, 64 × 500 rows of logits, at 35% of 989
    # TFLOP/s; attention and the overhead of 10 forwards come on top.
    tokens, matrices, head = 8 * 2000 + 64 * 1000, 1.31e9, 151_936 * 1536
    least = (2 * matrices * tokens + 2 * head * 64 * 500) / (GPU_EFFICIENCY * 989e12)
    assert least < forward < 2 * least


def test_under_lora_a_step_of_the_engine_reads_the_frozen_base_as_wide_as_memory_has_it() -> None:
    """2 bytes of each weight; the adapter's 4 are those of `compute.weights`."""
    wanted = setup("Qwen2.5-1.5B", "h100-80gb", compute__frozen="bfloat16", compute__weights="float32")
    assert wanted.base_bytes == 2 * wanted.shape.num_parameters
    seconds = wanted.base_bytes / (GPU_BANDWIDTH_SHARE * wanted.machine.bandwidth)
    assert decode_costs(wanted, LENGTHS).weights == pytest.approx(seconds)
    full = setup("Qwen2.5-1.5B", "h100-80gb", train__lora=None, compute__frozen="bfloat16")
    assert decode_costs(full, LENGTHS).weights == pytest.approx(2 * seconds)


def over_gpus(number: int) -> Setup:
    wanted = setup("Qwen2.5-7B", "h100-80gb", profile="bfcl_qwen2.5_7b")
    return replace(wanted, settings=wanted.settings.changed("engine.settings.tensor_parallel_size", number))


def test_an_engine_over_four_gpus_reads_and_multiplies_as_fast_as_their_assumed_share() -> None:
    one, four = (over_gpus(number) for number in (1, 4))
    costs, found = (decode_costs(item, LENGTHS) for item in (one, four))
    factor = 4 * TENSOR_PARALLEL_SHARE
    for name in ("weights", "row", "row_arithmetic"):
        assert getattr(costs, name) / getattr(found, name) == pytest.approx(factor)
    assert found.overhead == costs.overhead
    assert fed_token_seconds(one, LENGTHS) / fed_token_seconds(four, LENGTHS) == pytest.approx(factor)
    fast, slow = (plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (four, one))
    assert fast.rollout < slow.rollout and fast.update == slow.update


def test_autocast_makes_the_trainer_faster_and_not_the_engine_that_generates_in_float32() -> None:
    plain, autocast = (
        setup("Qwen2.5-1.5B", "h100-80gb", train__lora=None, train__autocast=name) for name in ("none", "bfloat16")
    )
    assert decode_costs(autocast, LENGTHS) == decode_costs(plain, LENGTHS)
    assert fed_token_seconds(autocast, LENGTHS) == fed_token_seconds(plain, LENGTHS)
    one, other = (plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (plain, autocast))
    assert one.update > 1.5 * other.update


def test_tokens_with_which_all_prompts_begin_are_computed_once_a_forward() -> None:
    """8 prompts of 2,000 tokens, of which 1,800 are the same, and 64 × 1,000 of episodes: 67,400 instead of 80,000."""

    def seconds(shared: float, room: int, packing: str = "tree") -> float:
        wanted = setup("Qwen2.5-1.5B", "h100-80gb", train__micro_batch_tokens=room, train__packing=packing)
        return plan_seconds(wanted, replace(LENGTHS, shared=shared), evaluated_episodes=0).reference

    assert seconds(1800, 80_000) / seconds(0, 80_000) == pytest.approx(67_400 / 80_000, abs=0.04)
    assert seconds(1800, 80_000, "none") == seconds(0, 80_000, "none")


def test_without_data_episodes_use_their_whole_budget() -> None:
    lengths = assumed_lengths(setup("Qwen2.5-1.5B", "h100-80gb"))
    assert (lengths.prompt, lengths.sampled, lengths.replies) == (2048, 1024, 1024)
    limited = assumed_lengths(setup("Qwen2.5-1.5B", "h100-80gb", sampling__max_completion_tokens=1000))
    assert (limited.prompt, limited.sampled, limited.replies) == (3096, 500, 500)


def test_evaluate_plays_with_its_own_number_of_episodes_at_once() -> None:
    """Of 1,000 episodes: 256 at once, not the 16 of a batch, which read the weights for as many tokens 16 times."""
    lengths = Lengths(prompt=20, sampled=500, replies=10, longest=510)
    wide: dict[str, Any] = {"engine__max_concurrent_episodes": 256, "compute__weights": "bfloat16"}
    one = setup("Qwen2.5-1.5B", "h100-80gb", **wide, train__problems_per_iteration=4, train__group_size=4)
    many, few = (replace(one, plays=(Play("evaluate", 8), Play("evaluate", problems, 2))) for problems in (500, 8))
    quick, slow = (plan_seconds(item, lengths, evaluated_episodes=1000) for item in (many, few))
    assert quick.evaluate < 0.5 * slow.evaluate
    assert quick.rollout == slow.rollout
    large = setup("Qwen2.5-1.5B", "h100-80gb", **wide, train__problems_per_iteration=64)
    of_large = plan_seconds(replace(large, plays=many.plays), lengths, evaluated_episodes=1000)
    assert of_large.evaluate == quick.evaluate


def test_a_faster_card_is_faster_in_every_phase() -> None:
    fast, slow = (
        plan_seconds(setup("Qwen2.5-7B", gpu), LENGTHS, evaluated_episodes=100) for gpu in ("h100-80gb", "a100-40gb")
    )
    assert fast.rollout < slow.rollout
    assert fast.update < slow.update
    assert fast.evaluate < slow.evaluate
