"""Seconds, tokens a day and dollars, in numbers that add up by hand."""

from __future__ import annotations

import pytest

from tasks.planning.seconds import DAY, GPU_EFFICIENCY, Lengths, Seconds, assumed_lengths, plan_seconds
from tests.planning.setups import setup

LENGTHS = Lengths(prompt=2000, sampled=500, replies=500, longest=1500)


def test_a_run_adds_up_to_hours_tokens_and_dollars() -> None:
    run = Seconds(
        rollout=4, reference=1, update=3, refresh=1, checkpoint=1, evaluate=995, num_iterations=260, sampled_tokens=1000
    )
    assert run.iteration == 10
    assert run.total == 5 + 2600 + 995 == 3600
    assert run.tokens_per_day == 1000 / 10 * DAY
    assert run.dollars(2.5) == 2.5


def test_an_update_is_three_forwards_and_with_checkpointing_four() -> None:
    plain = setup("Qwen2.5-1.5B", "h100-80gb", train__gradient_checkpointing=False, train__updates_per_batch=1)
    again = setup("Qwen2.5-1.5B", "h100-80gb", train__gradient_checkpointing=True, train__updates_per_batch=1)
    one, other = (plan_seconds(item, LENGTHS, evaluated_episodes=0) for item in (plain, again))
    assert other.update - one.update == pytest.approx(one.reference)
    assert one.update == pytest.approx(3 * one.reference, rel=0.05)


def test_a_forward_is_two_operations_per_weight_and_token() -> None:
    wanted = setup("Qwen2.5-1.5B", "h100-80gb", train__autocast="bfloat16")
    forward = plan_seconds(wanted, LENGTHS, evaluated_episodes=0).reference
    # 8 prompts and 64 × 1,000 tokens through 1.31 billion weights of matrices, 64 × 500 rows of logits, at 35% of 989
    # TFLOP/s; attention and the overhead of 10 forwards come on top.
    tokens, matrices, head = 8 * 2000 + 64 * 1000, 1.31e9, 151_936 * 1536
    least = (2 * matrices * tokens + 2 * head * 64 * 500) / (GPU_EFFICIENCY * 989e12)
    assert least < forward < 2 * least


def test_without_data_episodes_use_their_whole_budget() -> None:
    lengths = assumed_lengths(setup("Qwen2.5-1.5B", "h100-80gb"))
    assert (lengths.prompt, lengths.sampled, lengths.replies) == (2048, 1024, 1024)
    limited = assumed_lengths(setup("Qwen2.5-1.5B", "h100-80gb", sampling__max_completion_tokens=1000))
    assert (limited.prompt, limited.sampled, limited.replies) == (3096, 500, 500)


def test_a_faster_card_is_faster_in_every_phase() -> None:
    fast, slow = (
        plan_seconds(setup("Qwen2.5-7B", gpu), LENGTHS, evaluated_episodes=100) for gpu in ("h100-80gb", "a100-40gb")
    )
    assert fast.rollout < slow.rollout
    assert fast.update < slow.update
    assert fast.evaluate < slow.evaluate
