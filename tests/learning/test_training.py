"""Supervised and GRPO steps on a real tiny model: masks, micro-batches, the reference, determinism."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.learning.batching import Row, micro_batches
from tasks.learning.curriculum import ProblemSampler
from tasks.learning.options import GRPOSettings, SupervisedSettings
from tasks.learning.policy import token_logp
from tasks.learning.supervised import fine_tune
from tasks.learning.trainer import GRPOTrainer
from tasks.models import load_model
from tasks.records import Group, Score, Trajectory
from tests import tiny

pytestmark = pytest.mark.slow
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-2, "warmup_steps": 0, "final_learning_rate_share": 1.0, "betas": [0.9, 0.98],
    "weight_decay": 0.0, "max_grad_norm": 1e9,
}  # fmt: skip
GRPO: dict[str, Any] = {
    **OPTIMIZER, "num_iterations": 4, "problems_per_iteration": 2, "group_size": 4, "problem_sampler": "adaptive",
    "adaptive_floor": 0.1, "adaptive_update_rate": 0.2, "advantage_scale": "std", "clip_low": 0.2, "clip_high": 0.28,
    "kl_weight": 0.001, "reference_interval": 2, "mu": 2, "micro_batch_size": 8, "snapshot_interval": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def grpo(**changed: Any) -> GRPOSettings:
    return GRPOSettings.model_validate({**GRPO, **changed})


def random_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        length = rng.randint(4, 30)
        mask = [False] + [rng.random() < 0.6 for _ in range(length - 2)] + [True]
        ids = [rng.randrange(2, 300) for _ in range(length)]
        rows.append(Row(ids, mask, [-rng.random() * 5 for _ in ids], rng.choice([-1.0, 0.5, 2.0])))
    return rows


def a_group(number: int, rewards: list[float], outcomes: list[str] | None = None) -> Group:
    rows = random_rows(number, len(rewards))
    trajectories = [
        Trajectory(
            problem_id=f"p{number}", category="c", request="", draw=1, sample_index=i, policy_version=0,
            environment_fingerprint="", token_ids=row.token_ids, sampled_mask=row.sampled_mask,
            sampler_logp=row.sampler_logp, turns=[], outcome=(outcomes or ["success"] * 9)[i],  # type: ignore[arg-type]
            limit=None, checks={}, num_calls=0, num_invalid_calls=0,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return Group(f"p{number}", "c", trajectories, [Score(reward, {"outcome": reward}) for reward in rewards])


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(folder: Path, rows: list[Row], micro_batch_size: int) -> torch.Tensor:
    """The gradient of one GRPO step over `rows`, before the optimizer touches anything."""
    model = load_model(folder, num_threads=1)
    trainer = GRPOTrainer(model, grpo(learning_rate=0.0, kl_weight=0.0), temperature=1.0)
    seen: list[torch.Tensor] = []
    take_step = trainer.optimizer.step

    def spy() -> tuple[float, float]:
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return take_step()

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    batches = micro_batches(rows, rows=micro_batch_size, device=model.device)
    trainer._optimizer_step(batches, [None] * len(batches))
    return seen[0]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), micro_batch_size=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_micro_batches_and_order_never_change_the_gradient(
    folder: Path, seed: int, micro_batch_size: int, order: random.Random
) -> None:
    rows = random_rows(seed, 9)
    shuffled = order.sample(rows, len(rows))
    torch.testing.assert_close(
        gradient(folder, rows, 9), gradient(folder, shuffled, micro_batch_size), atol=1e-5, rtol=1e-4
    )


def test_padding_never_changes_a_log_prob(folder: Path) -> None:
    model, rows = load_model(folder, num_threads=1), random_rows(1, 5)
    with torch.no_grad():
        (together,) = micro_batches(rows, rows=5, device=model.device)
        alone = [token_logp(model, batch) for batch in micro_batches(rows, rows=1, device=model.device)]
        torch.testing.assert_close(token_logp(model, together), torch.cat(alone), atol=1e-5, rtol=0)


def test_a_tool_reply_is_attended_to_but_carries_no_gradient_of_its_own(folder: Path) -> None:
    """Change a token outside the mask: later log-probs move; the loss counts only the sampled ones."""
    model = load_model(folder, num_threads=1)
    ids = list(range(10, 22))
    mask = [False] * 4 + [True] * 3 + [False] * 3 + [True] * 2
    changed = [*ids[:8], 99, *ids[9:]]
    with torch.no_grad():
        first, second = (
            token_logp(model, micro_batches([Row(x, mask, [0.0] * 12, 1.0)], rows=1, device=model.device)[0])
            for x in (ids, changed)
        )
    assert len(first) == 5
    torch.testing.assert_close(first[:3], second[:3])
    assert (first[3:] - second[3:]).abs().max() > 1e-4


def test_supervised_steps_lower_the_loss_and_repeat_bitwise(folder: Path) -> None:
    runs = []
    for _ in range(2):
        model = load_model(folder, num_threads=1)
        options = SupervisedSettings.model_validate({**OPTIMIZER, "num_steps": 12, "batch_size": 4})
        losses = [row["loss"] for row in fine_tune(model, random_rows(3, 8), options, seed=1)]
        assert losses[-1] < losses[0]
        runs.append(weights(model))
    assert torch.equal(*runs)


def test_groups_without_signal_leave_the_weights_alone(folder: Path) -> None:
    model = load_model(folder, num_threads=1)
    before = weights(model)
    trainer = GRPOTrainer(model, grpo(), temperature=1.0)
    row = trainer.iterate(lambda _: [a_group(1, [1.0] * 4), a_group(2, [0.0] * 4)])
    assert torch.equal(weights(model), before)
    assert (row["signal_share"], row["optimizer_steps"]) == (0.0, 0)


def test_an_overlong_trajectory_carries_no_loss(folder: Path) -> None:
    """The same batch with a fifth, overlong trajectory beside the four gives the same weights."""
    after = []
    for rewards, outcomes in (
        ([1.0, 0.0, 0.0, 1.0], ["success", "failure", "failure", "success"]),
        ([1.0, 0.0, 0.0, 1.0, 0.0], ["success", "failure", "failure", "success", "overlong"]),
    ):
        model = load_model(folder, num_threads=1)
        trainer = GRPOTrainer(model, grpo(), temperature=1.0)
        trainer.iterate(lambda _, r=rewards, o=outcomes: [a_group(1, r, o)])  # type: ignore[misc]
        after.append(weights(model))
    torch.testing.assert_close(*after)


def test_an_iteration_takes_mu_optimizer_steps_and_the_reference_follows_at_its_interval(folder: Path) -> None:
    model = load_model(folder, num_threads=1)
    trainer = GRPOTrainer(model, grpo(), temperature=1.0)
    start = weights(model)
    trainer.iterate(lambda i: [a_group(i, [1.0, 0.0, 0.0, 0.0])])
    assert torch.equal(weights(trainer.reference), start)
    row = trainer.iterate(lambda i: [a_group(i, [1.0, 0.0, 0.0, 0.0])])
    assert row["optimizer_steps"] == 4
    assert torch.equal(weights(trainer.reference), weights(model))
    assert not torch.equal(weights(model), start)


def test_kl_weight_zero_keeps_no_reference_model(folder: Path) -> None:
    assert GRPOTrainer(load_model(folder, num_threads=1), grpo(kl_weight=0.0), temperature=1.0).reference is None


def test_a_good_trajectory_becomes_likelier(folder: Path) -> None:
    model = load_model(folder, num_threads=1)
    group = a_group(4, [1.0, 0.0, 0.0, 0.0])
    (best,) = micro_batches([Row.of(group.trajectories[0], 1.0)], rows=1, device=model.device)
    with torch.no_grad():
        before = token_logp(model, best).sum()
    GRPOTrainer(model, grpo(kl_weight=0.0, clip_high=9.0), temperature=1.0).iterate(lambda _: [group])
    with torch.no_grad():
        assert token_logp(model, best).sum() > before


def test_the_adaptive_sampler_turns_to_what_fails() -> None:
    """After a category is always solved and another never, draws go to the second about 11 times as often."""
    problems = [p for p in tiny.problems(200) if p.category in ("cancel/none", "book/declined")]
    sampler = ProblemSampler(problems, grpo(adaptive_update_rate=1.0, problems_per_iteration=8), seed=0)
    solved = a_group(1, [1.0] * 4, ["success"] * 4)
    failed = a_group(2, [0.0] * 4, ["failure"] * 4)
    sampler.learn([Group("a", "cancel/none", solved.trajectories, solved.scores)])
    sampler.learn([Group("b", "book/declined", failed.trajectories, failed.scores)])
    drawn = [p.category for i in range(100) for p in sampler.draw(i)]
    assert sampler.success == {"book/declined": 0.0, "cancel/none": 1.0}
    assert 0.82 < drawn.count("book/declined") / len(drawn) < 0.95


def test_a_draw_depends_on_the_iteration_alone_and_repeats_no_problem() -> None:
    sampler = ProblemSampler(tiny.problems(60), grpo(problems_per_iteration=20), seed=3)
    assert sampler.draw(5) == sampler.draw(5)
    assert sampler.draw(5) != sampler.draw(6)
    assert len({p.id for p in sampler.draw(5)}) == 20
