"""GRPO steps on a real tiny model: what carries loss, the reference, dynamic sampling, roll-back, LoRA, determinism."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import Group
from tasks.learning.grpo.credit import carries_loss
from tasks.learning.grpo.mini_batches import divide
from tasks.learning.grpo.trainer import Collect, GRPOTrainer
from tasks.learning.shared.batching import micro_batches
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.host_memory import HostMemory
from tasks.learning.shared.lora import POLICY, Adapter
from tasks.learning.shared.optimizer import Step
from tasks.learning.shared.policy import prepare_for_gradients, token_logp
from tasks.learning.shared.reference import Reference
from tasks.learning.shared.rows import Row, rows_of
from tasks.learning.shared.settings import Packing
from tasks.models.folders import load_model
from tasks.models.settings import LoRASettings, on_cpu
from tests import tiny
from tests.contracts.test_families import FAMILIES, LENGTH
from tests.learning.options import NO_EXPLORATION, grpo
from tests.learning.rows import a_group, random_rows, weights

pytestmark = pytest.mark.slow
LORA = LoRASettings(rank=4, alpha=8, target_modules="all-linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def a_trainer(folder: Path, **changed: Any) -> GRPOTrainer:
    model = load_model(folder, compute=on_cpu(1))
    options = grpo(**changed)
    seed_generators(0)
    adapter = Adapter(model, options.lora, weights="float32") if options.lora else None
    return GRPOTrainer(model, options, compute=on_cpu(1), temperature=1.0, max_tokens=200, adapter=adapter)


def aggregated(by: str) -> dict[str, Any]:
    return {"aggregation": by, "constant_length": 20 if by == "constant" else None}


def reference(trainer: GRPOTrainer) -> torch.Tensor:
    assert trainer.reference is not None
    return torch.cat([tensor.flatten() for tensor in trainer.reference.tensors().values()])


def always(groups: Sequence[Group]) -> Collect:
    return lambda iteration, round_number, num_problems: groups


def fresh(rewards: list[float]) -> Collect:
    """Another group every iteration."""
    return lambda iteration, round_number, num_problems: [a_group(iteration, rewards)]


def gradients(trainer: GRPOTrainer, groups: list[Group]) -> list[torch.Tensor]:
    """The gradient of each optimizer step of an iteration, before the optimizer touches anything."""
    seen: list[torch.Tensor] = []
    take_step = trainer.optimizer.step

    def spy(**arguments: Any) -> Step:
        seen.append(torch.cat([item.grad.flatten() for item in trainer.optimizer.parameters if item.grad is not None]))
        return take_step(**arguments)

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    trainer.iterate(always(groups))
    return seen


def gradient(trainer: GRPOTrainer, groups: list[Group]) -> torch.Tensor:
    return gradients(trainer, groups)[0]


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    max_tokens=st.integers(5, 200),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    loss=st.sampled_from(["ppo", "gspo", "cispo"]),
)
def test_the_denominator_covers_the_step_so_micro_batches_and_packing_never_change_the_gradient(
    folder: Path, seed: int, max_tokens: int, aggregation: str, loss: str
) -> None:
    groups = [a_group(seed + n, [1.0, 0.0, 0.0, 1.0, 0.0]) for n in range(3)]
    options = {
        **aggregated(aggregation), "loss": loss, "kl_weight": 0.1, "learning_rate": 1e-3,
        "importance_correction": "sequence_truncate", "clip_low": 0.1, "clip_high": 0.1,
    }  # fmt: skip
    whole = gradient(a_trainer(folder, packing="none", micro_batch_tokens=10_000, **options), groups)
    cut = gradient(a_trainer(folder, packing="tree", micro_batch_tokens=max_tokens, **options), groups)
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("token", [1_000_000, -1, 2**40])
def test_a_stored_trajectory_with_tokens_of_another_model_is_refused_by_name(folder: Path, token: int) -> None:
    """Before anything runs a forward over it, and whether or not its group has a signal."""
    group = a_group(3, [1.0, 1.0])
    group.trajectories[1].sequences[0].token_ids[0] = token
    with pytest.raises(ValueError, match=rf"problem 'p3': its trajectory contains token {token} and the model has \d+"):
        a_trainer(folder).iterate(always([group]), before_update=pytest.fail)


@pytest.mark.parametrize("options", [{}, {"zero_variance_groups": "keep", "kl_weight": 0}], ids=["drop", "keep, no KL"])
def test_groups_without_signal_leave_the_weights_alone(folder: Path, options: dict[str, Any]) -> None:
    """Also after a step, whose momentum the next one would go on with."""
    trainer = a_trainer(folder, **options)
    taken = trainer.iterate(always([a_group(1, [1.0, 0.0, 0.0, 1.0])]))["optimizer_steps"]
    before = weights(trainer.model)
    row = trainer.iterate(always([a_group(1, [1.0] * 4), a_group(2, [0.0] * 4)]))
    assert torch.equal(weights(trainer.model), before)
    assert (row["informative_group_share"], row["optimizer_steps"]) == (0.0, taken)


@pytest.mark.parametrize("zero_variance_groups", ["keep", "drop"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_group_without_signal_counts_in_the_denominator(
    folder: Path, zero_variance_groups: str, aggregation: str
) -> None:
    """Without KL a second group of as many tokens and no signal halves the gradient and does nothing else, computed
    or not: otherwise the gradient would grow as one over the share of groups that still have a signal.
    """
    group, silent = a_group(1, [1.0, 0.0, 0.0, 1.0]), a_group(1, [1.0] * 4)
    options = {"kl_weight": 0, "zero_variance_groups": zero_variance_groups, **aggregated(aggregation)}
    alone, both = (gradient(a_trainer(folder, **options), groups) for groups in ([group], [group, silent]))
    assert alone.norm() > 0.01
    torch.testing.assert_close(2 * both, alone, atol=1e-6, rtol=1e-4)


def test_an_overlong_trajectory_of_a_dropped_group_leaves_the_denominator_as_any_other(folder: Path) -> None:
    group, outcomes = a_group(1, [1.0, 0.0, 0.0, 1.0]), ["success"] * 4
    silent, cut = a_group(2, [1.0] * 4, outcomes), a_group(2, [1.0] * 5, [*outcomes, "overlong"])
    one, other = (gradient(a_trainer(folder, kl_weight=0), [group, item]) for item in (silent, cut))
    assert torch.equal(one, other)


def test_a_group_that_was_replaced_is_no_part_of_the_batch(folder: Path) -> None:
    """Round 1 replaced the silent group of round 0 by another silent one, which counts, being all there is; only once
    a round has brought a signal in its place is the batch full of those that have one.
    """
    group, silent = a_group(1, [1.0, 0.0, 0.0, 1.0]), a_group(1, [1.0] * 4)
    still_silent = a_group(1, [1.0] * 4, round_number=1)
    once, twice = (gradient(a_trainer(folder, kl_weight=0), [group, *g]) for g in ([silent], [silent, still_silent]))
    assert torch.equal(once, twice)
    found = a_group(1, [1.0, 0.0, 0.0, 1.0], round_number=1)
    replaced, whole = (gradient(a_trainer(folder, kl_weight=0), g) for g in ([group, silent, found], [group, found]))
    assert torch.equal(replaced, whole)


def test_the_schedule_ends_with_the_run_though_iterations_had_no_signal(folder: Path) -> None:
    """Four iterations of two steps, linear to a share of 0, the second and third without a signal: the rates are those
    of positions 1 and 2, and 7 and 8, of 8; the last has an eighth left, not nothing.
    """
    trainer = a_trainer(folder, learning_rate=1.0, final_learning_rate_share=0.0, updates_per_batch=2, num_iterations=4)
    rates = []
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 0.0]):
        rates.append(trainer.iterate(fresh(rewards)).get("learning_rate"))
    assert rates == [pytest.approx(7 / 8), None, None, pytest.approx(1 / 8)]


SIGNAL, SILENT = [1.0, 0.0, 0.0, 1.0], [1.0] * 4


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    signals=st.lists(st.booleans(), min_size=2, max_size=6).filter(any),
    num_steps=st.integers(1, 4),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
)
def test_the_gradients_of_mini_batches_weighted_by_their_denominators_are_the_whole_batchs(
    folder: Path, seed: int, signals: list[bool], num_steps: int, aggregation: str
) -> None:
    """At rate 0, so that every step sees the same weights. The denominator of a step is the trajectories of its groups
    (`token`: their tokens), dropped groups included; no trajectory is lost and none is counted twice.
    """
    groups = [a_group(seed + n, SIGNAL if has_signal else SILENT) for n, has_signal in enumerate(signals)]
    options = {
        **aggregated(aggregation), "learning_rate": 0.0, "problems_per_iteration": len(signals),
        "updates_per_batch": 1, "kl_weight": 0.1,
    }  # fmt: skip
    trainer = a_trainer(folder, **options, steps_per_batch=min(num_steps, len(signals)))
    parts = trainer._mini_batches(groups)
    sizes = [[sum(row.sampled_mask) for rows in part.rows for row in rows] for part in parts]
    lengths = [[*size, *part.dropped_lengths] for size, part in zip(sizes, parts, strict=True)]
    shares = [sum(item) if aggregation == "token" else len(item) for item in lengths]
    found = gradients(trainer, groups)
    assert len(found) == len(parts) == min(num_steps, sum(signals))
    (whole,) = gradients(a_trainer(folder, **options), groups)
    weighted = sum(share * part for share, part in zip(shares, found, strict=True)) / sum(shares)
    torch.testing.assert_close(weighted, whole, atol=1e-6, rtol=1e-4)


def test_groups_of_one_size_sum_to_the_whole_batchs_gradient_with_a_constant_denominator(folder: Path) -> None:
    """Four groups in two steps: each step has half of the trajectories, so their mean is the whole batch's."""
    groups = [a_group(n, SIGNAL) for n in range(4)]
    options = {
        "aggregation": "constant", "constant_length": 50, "learning_rate": 0.0, "problems_per_iteration": 4,
        "updates_per_batch": 1,
    }  # fmt: skip
    one, other = gradients(a_trainer(folder, **options, steps_per_batch=2), groups)
    (whole,) = gradients(a_trainer(folder, **options), groups)
    torch.testing.assert_close((one + other) / 2, whole, atol=1e-7, rtol=1e-4)


def test_two_passes_of_two_steps_take_each_half_of_the_groups_twice_and_ratios_are_to_the_weights_before(
    folder: Path,
) -> None:
    """The second step's ratios differ from 1, for the first has moved the weights: they are off-policy, as in DAPO."""
    trainer = a_trainer(folder, problems_per_iteration=4, steps_per_batch=2, updates_per_batch=2, learning_rate=1e-3)
    groups = [a_group(n, SIGNAL) for n in range(4)]
    seen: list[tuple[int, float]] = []
    take_step = trainer._optimizer_step

    def spy(batches: Any, number: int) -> dict[str, Any]:
        metrics = take_step(batches, number)
        seen.append((sum(batch.tensors.num_tokens for batch in batches), metrics["ratio_max"]))
        return metrics

    trainer._optimizer_step = spy  # type: ignore[method-assign]
    row = trainer.iterate(always(groups))
    halves = groups[:2], groups[2:]
    tokens = [sum(item.num_sampled_tokens for group in half for item in group.trajectories) for half in halves]
    assert [count for count, _ in seen] == [*tokens, *tokens]
    assert seen[0][1] == 1.0
    assert all(ratio > 1.0 for _, ratio in seen[1:])
    assert row["optimizer_steps"] == 4
    assert row["ratio_max"] == max(ratio for _, ratio in seen[2:])  # the metrics are of the last pass


def test_old_log_probs_of_every_mini_batch_are_noted_before_the_first_step(folder: Path) -> None:
    """They equal those of the weights before the iteration; with one step a batch no forward is added for them."""
    groups = [a_group(n, SIGNAL) for n in range(3)]
    forwards = {}
    for num_steps in (1, 3):
        trainer = a_trainer(
            folder, problems_per_iteration=3, steps_per_batch=num_steps, updates_per_batch=1, kl_weight=0
        )
        count: list[int] = []
        trainer.model.model.layers[0].register_forward_pre_hook(lambda *_, count=count: count.append(1))
        parts = [trainer._micro_batches(part) for part in trainer._mini_batches(groups)]
        with torch.no_grad():
            expected = [token_logp(trainer.model, batch.tensors) for part in parts for batch in part]
        count.clear()
        trainer.iteration = 1
        trainer._update(parts)
        forwards[num_steps] = len(count)
        for batch, logp in zip([batch for part in parts for batch in part], expected, strict=True):
            assert torch.equal(batch.old_logp_M, logp)
    assert forwards == {1: 1, 3: 3 + 2}


def test_the_schedule_ends_with_the_run_with_several_steps_a_batch(folder: Path) -> None:
    """Two iterations of two passes of two steps, linear to 0: the last step is at position 8 of 8. An iteration with a
    signal in one group alone takes one step a pass, and its last pass is at position 3 of 8.
    """
    options = {"steps_per_batch": 2, "num_iterations": 2, "learning_rate": 1.0, "final_learning_rate_share": 0.0}
    trainer = a_trainer(folder, **options)
    first = trainer.iterate(always([a_group(1, SIGNAL), a_group(2, SILENT)]))
    second = trainer.iterate(always([a_group(3, SIGNAL), a_group(4, SIGNAL)]))
    assert (first["optimizer_steps"], second["optimizer_steps"]) == (2, 6)
    assert first["learning_rate"] == pytest.approx(6 / 8)
    assert second["learning_rate"] == pytest.approx(1 / 8)


def test_warm_up_waits_for_steps_that_are_taken(folder: Path) -> None:
    """The optimizer's averages are empty until then; two steps of four are taken in the second iteration."""
    trainer = a_trainer(folder, learning_rate=1.0, warmup_steps=4)
    assert "learning_rate" not in trainer.iterate(fresh([1.0] * 4))
    assert trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))["learning_rate"] == pytest.approx(2 / 4)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_an_overlong_trajectory_carries_no_loss_and_leaves_every_denominator(folder: Path, aggregation: str) -> None:
    """The same batch with a fifth, overlong trajectory beside the four gives the same weights; and it is counted."""
    four = (["success", "failure", "failure", "success"], [1.0, 0.0, 0.0, 1.0])
    after, rows = [], []
    for outcomes, rewards in (four, ([*four[0], "overlong"], [*four[1], 0.0])):
        trainer = a_trainer(folder, **aggregated(aggregation))
        rows.append(trainer.iterate(always([a_group(1, rewards, outcomes)])))
        after.append(weights(trainer.model))
    torch.testing.assert_close(*after)
    assert [row["overlong_share"] for row in rows] == [0.0, 0.2]


def test_without_the_filter_an_overlong_trajectory_is_a_failure(folder: Path) -> None:
    group = a_group(1, [1.0, 0.0], ["success", "overlong"])
    for is_filtered, steps in ((True, 0), (False, 2)):
        assert a_trainer(folder, filter_overlong=is_filtered).iterate(always([group]))["optimizer_steps"] == steps


def test_running_out_of_turns_is_an_ordinary_failure(folder: Path) -> None:
    row = a_trainer(folder).iterate(always([a_group(1, [1.0, 0.0], ["success", "max_turns"])]))
    assert (row["optimizer_steps"], row["max_turns_share"]) == (2, 0.5)


def test_groups_of_unequal_size_train_together(folder: Path) -> None:
    """A group that lost an episode to the environment is smaller than the rest."""
    row = a_trainer(folder).iterate(always([a_group(1, [1.0, 0.0, 0.0]), a_group(2, [1.0, 0.0, 0.0, 0.0])]))
    assert row["optimizer_steps"] == 2


def test_an_iteration_takes_mu_optimizer_steps_and_the_reference_follows_at_its_interval(folder: Path) -> None:
    trainer = a_trainer(folder)
    assert trainer.reference is not None
    start = weights(trainer.model)
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert torch.equal(reference(trainer), start)
    row = trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert row["optimizer_steps"] == 4
    assert torch.equal(reference(trainer), weights(trainer.model))
    assert not torch.equal(weights(trainer.model), start)


@pytest.mark.parametrize("changed", [{}, {"steps_per_batch": 2}, {"lora": LORA.model_dump()}, {"packing": "none"}])
def test_a_reference_equal_to_the_policy_is_not_computed_and_gives_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """It is computed in iterations 2 and 4: before 1 both are equal, and after 2 it has moved to the policy."""
    groups = [a_group(number, [1.0, 0.0, 0.0]) for number in range(2)]
    forward, computed = Reference.logps, []

    def counted(self: Reference, *of: Any, **named: Any) -> list[torch.Tensor]:
        computed.append(trainer.iteration)
        return forward(self, *of, **named)

    monkeypatch.setattr(Reference, "logps", counted)
    found = []
    for is_compared in (True, False):
        if not is_compared:
            monkeypatch.setattr(Reference, "is_policy", lambda _: False)
        trainer = a_trainer(folder, reference_interval=2, kl_weight=0.1, updates_per_batch=2, **changed)
        metrics = [trainer.iterate(always(groups)) for _ in range(4)]
        found.append((metrics, weights(trainer.model), sorted({*computed})))
        computed.clear()
    (metrics, one, some), (same, other, every) = found
    assert some == [2, 4] and every == [1, 2, 3, 4]
    assert metrics == same and torch.equal(one, other)


def test_a_mixed_reference_moves_its_share_of_the_way(folder: Path) -> None:
    trainer = a_trainer(folder, reference_interval=1, reference_mix=0.25)
    assert trainer.reference is not None
    start = weights(trainer.model)
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    expected = 0.75 * start + 0.25 * weights(trainer.model)
    torch.testing.assert_close(reference(trainer), expected, atol=1e-6, rtol=0)


def test_a_fixed_reference_never_moves(folder: Path) -> None:
    trainer = a_trainer(folder, reference_interval=None)
    assert trainer.reference is not None
    start = weights(trainer.model)
    for _ in range(3):
        trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert torch.equal(reference(trainer), start)


def test_kl_weight_zero_loads_no_reference_model_and_reports_no_kl(folder: Path) -> None:
    """Steps that move the policy: a KL of 0 would say that they did not."""
    trainer = a_trainer(folder, kl_weight=0)
    row = trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert trainer.reference is None and row["ratio_max"] > 1 and "kl" not in row
    assert "kl" in a_trainer(folder).iterate(fresh([1.0, 0.0, 0.0, 0.0]))


def test_a_learning_rate_of_zero_changes_nothing(folder: Path) -> None:
    trainer = a_trainer(folder, learning_rate=0.0)
    start = weights(trainer.model)
    rows = [trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0])) for _ in range(3)]
    assert torch.equal(weights(trainer.model), start)
    assert all(row["kl"] == 0 and row["ratio_max"] == 1 for row in rows)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_good_trajectory_becomes_likelier(folder: Path, optimizer: str) -> None:
    trainer = a_trainer(folder, kl_weight=0, clip_high=9.0, optimizer=optimizer, learning_rate=1e-3)
    group = a_group(4, [1.0, 0.0, 0.0, 0.0])
    rows = [rows_of(group.trajectories[0], 1.0)]
    (best,) = micro_batches(rows, packing="tree", max_tokens=100, device=trainer.model.device)
    with torch.no_grad():
        before = token_logp(trainer.model, best).sum()
        with torch.enable_grad():
            trainer.iterate(always([group]))
        assert token_logp(trainer.model, best).sum() > before


class Rounds:
    """A `collect` whose rounds have the given rewards; it notes what was asked for."""

    def __init__(self, *rounds: list[list[float]]):
        self.rounds, self.asked = rounds, []  # type: ignore[var-annotated]

    def __call__(self, iteration: int, round_number: int, num_problems: int) -> list[Group]:
        self.asked.append((round_number, num_problems))
        rewards = self.rounds[round_number]
        return [a_group(10 * round_number + n, item, round_number=round_number) for n, item in enumerate(rewards)]


def test_dynamic_sampling_replaces_groups_of_equal_reward_until_none_is_missing(folder: Path) -> None:
    """Two problems an iteration: none, then one of them has signal; the second round asks for the missing one only."""
    collect = Rounds([[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0]])
    row = a_trainer(folder, max_replacement_rounds=3).iterate(collect)
    assert collect.asked == [(0, 2), (1, 2), (2, 1)]
    assert row["num_replaced_groups"] == 3
    assert row["informative_group_share"] == 0.0  # of what the iteration drew: replacements must not flatter success


@pytest.mark.parametrize(
    ("rewards", "outcomes"),
    [
        ([1.0, 1.0, 1.0, 0.0], ["success", "success", "success", "overlong"]),  # what differs is filtered
        ([0.1 + 0.2, 0.3, 0.3, 0.3], ["failure"] * 4),  # 5e-17 apart
    ],
)
def test_a_group_is_informative_only_where_the_trainer_learns_from_it(
    folder: Path, rewards: list[float], outcomes: list[str]
) -> None:
    """Beside a group with one success of four: one of two has signal."""
    groups = [a_group(1, rewards, outcomes), a_group(2, [1.0, 0.0, 0.0, 0.0])]
    row = a_trainer(folder, filter_overlong=True).iterate(always(groups))
    assert row["informative_group_share"] == 0.5


def test_an_iteration_that_lost_all_its_episodes_measures_nothing_of_the_policy(folder: Path) -> None:
    row = a_trainer(folder).iterate(always([]))
    assert row == {"iteration": 1, "optimizer_steps": 0, "num_episodes": 0, "num_replaced_groups": 0}


def test_dynamic_sampling_is_bounded(folder: Path) -> None:
    collect = Rounds(*[[[1.0, 1.0], [0.0, 0.0]]] * 3)
    row = a_trainer(folder, max_replacement_rounds=2).iterate(collect)
    assert [asked for asked, _ in collect.asked] == [0, 1, 2]
    assert row["optimizer_steps"] == 0


def test_the_optimizers_state_comes_before_the_steps_and_goes_after_them_and_no_gradient_stays(folder: Path) -> None:
    trainer = a_trainer(folder, problems_per_iteration=2, steps_per_batch=2, updates_per_batch=1)
    calls: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(trainer.optimizer, name)

        def note_and_call(**arguments: Any) -> Any:
            calls.append(name)
            return call(**arguments)

        return note_and_call

    for name in ("load_to_device", "step", "offload"):
        setattr(trainer.optimizer, name, noted(name))
    trainer.iterate(always([a_group(1, SIGNAL), a_group(2, SIGNAL)]))
    trainer.iterate(always([a_group(1, SILENT)]))  # nothing to update, nothing to move
    assert calls == ["load_to_device", "step", "step", "offload"]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_reported(folder: Path) -> None:
    trainer = a_trainer(folder)
    before = weights(trainer.model)
    group = a_group(1, [float("inf"), 0.0, 0.0, 0.0])
    row = trainer.iterate(always([group]))
    assert row["non_finite"]
    assert row["grad_norm"] is None
    assert torch.equal(weights(trainer.model), before)


def test_a_roll_back_puts_weights_back_and_halves_the_rate(folder: Path) -> None:
    trainer = a_trainer(folder)
    good = {name: tensor.clone() for name, tensor in trainer.tensors()["policy"].items()}
    start = weights(trainer.model)
    rate = trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))["learning_rate"]
    trainer.roll_back(good, step_factor=0.5)
    assert torch.equal(weights(trainer.model), start)
    assert trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))["learning_rate"] == pytest.approx(rate / 2)
    assert trainer.iteration == 2


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    groups = [a_group(1, [1.0, 0.0, 0.0, 1.0])]
    plain, recomputed = (gradient(a_trainer(folder, gradient_checkpointing=on), groups) for on in (False, True))
    torch.testing.assert_close(plain, recomputed, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("has_lora", [False, True])
def test_with_checkpointing_each_layer_keeps_its_input_alone(tmp_path: Path, has_lora: bool) -> None:
    """The model stays in eval mode, in which transformers checkpoints nothing by itself."""

    def kept(num_layers: int, *, is_recomputed: bool) -> int:
        """Bytes that a forward keeps for backward, per position; of weights the graph keeps no copy."""
        embedded = tiny.EMBEDDED.model_copy(update={"num_hidden_layers": num_layers})
        folder = tmp_path / str(num_layers)
        if not folder.exists():
            tiny.model_folder(folder, embedded=embedded)
        trainer = a_trainer(
            folder, gradient_checkpointing=is_recomputed, packing="none", lora=LORA.model_dump() if has_lora else None
        )
        rows = [row for item in a_group(1, [1.0, 0.0]).trajectories for row in rows_of(item, 1.0)]
        (batch,) = micro_batches([rows], packing="none", max_tokens=10_000, device=trainer.model.device)
        weights = {item.untyped_storage().data_ptr() for item in trainer.model.parameters()}
        found: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        prepare_for_gradients(trainer.model)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            token_logp(trainer.model, batch).sum()
        assert not any(isinstance(module, torch.nn.Dropout) and module.training for module in trainer.model.modules())
        return sum(found.values()) // batch.ids_BT.numel()

    hidden = 4 * tiny.EMBEDDED.hidden_size
    assert kept(3, is_recomputed=True) - kept(1, is_recomputed=True) <= 2 * 2 * hidden
    assert kept(3, is_recomputed=False) - kept(1, is_recomputed=False) >= 2 * 8 * hidden


def test_a_model_that_would_be_trained_on_another_distribution_is_refused_before_any_step() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        GRPOTrainer(FAMILIES["llama, dynamic"].model(), grpo(), compute=on_cpu(1), temperature=1.0, max_tokens=LENGTH)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_no_dropout_of_the_model_enters_a_ratio(is_recomputed: bool) -> None:
    """With a rate of 0 the second step finds every ratio at 1. Its dropout is by function, which no module switches."""
    model = FAMILIES["starcoder2, dropout"].model()
    options = grpo(updates_per_batch=2, learning_rate=0.0, gradient_checkpointing=is_recomputed)
    trainer = GRPOTrainer(model, options, compute=on_cpu(1), temperature=1.0, max_tokens=200)
    forwards: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    row = trainer.iterate(always([small_ids(a_group(1, [1.0, 0.0, 0.0, 1.0]))]))
    assert (row["ratio_max"], row["clip_share"]) == (1.0, 0.0)
    assert len(forwards) == (4 if is_recomputed else 2)  # one per step, one more for gradients


def small_ids(group: Group) -> Group:
    """Within the 200 ids of the families' models."""
    for trajectory in group.trajectories:
        trajectory.sequences[0].token_ids[:] = [token % 200 for token in trajectory.sequences[0].token_ids]
    return group


class TestLoRA:
    @pytest.mark.parametrize("modules", [["q_proj", "embed_tokens"], ["lm_head"]])
    def test_embeddings_are_refused_for_they_would_be_merged_wrong_and_not_saved(
        self, folder: Path, modules: list[str]
    ) -> None:
        with pytest.raises(ValueError, match=modules[-1]):
            a_trainer(folder, lora={**LORA.model_dump(), "target_modules": modules})

    def test_only_the_adapter_learns_and_the_base_stays(self, folder: Path) -> None:
        trainer = a_trainer(folder, lora=LORA.model_dump())
        base = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
        before = {name: tensor.clone() for name, tensor in trainer.tensors()["policy"].items()}
        for _ in range(2):
            trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
        after = trainer.tensors()["policy"]
        assert all("lora_" in name for name in after)
        assert any(not torch.equal(before[name], after[name]) for name in after)
        assert all(torch.equal(base[name], p) for name, p in trainer.model.named_parameters() if name in base)

    def test_merged_weights_give_the_log_probs_of_the_adapter(self, folder: Path) -> None:
        served = load_model(folder, compute=on_cpu(1))
        trainer = a_trainer(folder, lora=LORA.model_dump())
        for _ in range(2):
            trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
        assert trainer.adapter is not None
        served.load_state_dict(dict(trainer.adapter.merged(POLICY)))
        rows = [rows_of(item, 1.0) for item in a_group(7, [1.0, 0.0]).trajectories]
        (batch,) = micro_batches(rows, packing="tree", max_tokens=100, device=served.device)
        with torch.no_grad():
            torch.testing.assert_close(token_logp(served, batch), token_logp(trainer.model, batch), atol=1e-5, rtol=0)

    def test_the_reference_is_a_second_adapter_that_follows(self, folder: Path) -> None:
        trainer = a_trainer(folder, lora=LORA.model_dump(), reference_interval=2, kl_weight=0.1)
        rows = [trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0])) for _ in range(3)]
        assert rows[1]["kl"] > 0
        assert trainer.reference is not None
        assert all("lora_" in name for name in trainer.reference.tensors())


def run_of(trainer: GRPOTrainer, count: int) -> list[dict[str, Any]]:
    return [trainer.iterate(fresh([1.0, 0.0, 0.5, 0.0])) for _ in range(count)]


@pytest.mark.parametrize(
    "changed", [{}, {"optimizer": "muon"}, {"lora": LORA.model_dump()}, {"kl_weight": 0, "schedule": "cosine"}]
)
def test_a_trainer_written_down_and_put_back_goes_on_bitwise(folder: Path, changed: dict[str, Any]) -> None:
    whole = a_trainer(folder, **changed)
    expected = run_of(whole, 4)
    first = a_trainer(folder, **changed)
    rows = run_of(first, 2)
    kept = {part: {name: t.clone() for name, t in named.items()} for part, named in first.tensors().items()}
    second = a_trainer(folder, **changed)
    second.load(kept, first.state())
    rows += run_of(second, 2)
    assert rows == expected
    for part, named in whole.tensors().items():
        assert all(torch.equal(tensor, second.tensors()[part][name]) for name, tensor in named.items()), part


BFLOAT16 = on_cpu(1).model_copy(update={"weights": "bfloat16", "offload": "optimizer"})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_16_bit_weights_move_by_their_masters_which_a_checkpoint_brings_back_bitwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Rates of 1e-5 would move no bfloat16 weight near 1; the masters move, and some weights follow. The state waits in
    buffers between the iterations, as it would in the host's memory.
    """
    monkeypatch.setattr(
        "tasks.learning.grpo.trainer.prepare_model", lambda *_, **__: None
    )  # its tolerance is float32's

    def in_bfloat16() -> GRPOTrainer:
        model = load_model(folder, compute=BFLOAT16)
        options = grpo(optimizer=optimizer, learning_rate=1e-5, kl_weight=0.0)
        trainer = GRPOTrainer(model, options, compute=BFLOAT16, temperature=1.0, max_tokens=200)
        trainer.optimizer.host = HostMemory(torch.device("cpu"))
        return trainer

    whole, first, second = in_bfloat16(), in_bfloat16(), in_bfloat16()
    start = whole.optimizer.tensors()["master.0"].clone()
    expected = run_of(whole, 4)
    rows = run_of(first, 2)
    kept = {part: {name: t.clone() for name, t in named.items()} for part, named in first.tensors().items()}
    second.load(kept, first.state())
    assert rows + run_of(second, 2) == expected
    for part, named in whole.tensors().items():
        assert all(torch.equal(tensor, second.tensors()[part][name]) for name, tensor in named.items()), part
    masters, parameters = whole.optimizer.masters, whole.optimizer.parameters
    assert {tensor.dtype for tensor in masters} == {torch.float32}
    assert not torch.equal(masters[0], start)
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(parameters, masters, strict=True))


def test_a_roll_back_of_16_bit_weights_takes_the_masters_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.learning.grpo.trainer.prepare_model", lambda *_, **__: None)
    model = load_model(folder, compute=BFLOAT16)
    trainer = GRPOTrainer(model, grpo(kl_weight=0.0), compute=BFLOAT16, temperature=1.0, max_tokens=200)
    good = {name: tensor.clone() for name, tensor in trainer.tensors()["policy"].items()}
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    trainer.roll_back(good, step_factor=0.5)
    masters, parameters = trainer.optimizer.masters, trainer.optimizer.parameters
    assert all(torch.equal(m, p.float()) for p, m in zip(parameters, masters, strict=True))
    assert all(torch.equal(tensor, good[name]) for name, tensor in trainer.tensors()["policy"].items())


def test_what_is_left_out_carries_no_loss_and_is_not_in_the_denominator(folder: Path) -> None:
    """Of rewards 0, 1, 0, 0 the pair that differs is kept, and the step is the one of that pair alone."""
    group = a_group(1, [0.0, 1.0, 0.0, 0.0])
    trainer = a_trainer(folder, exploration={**NO_EXPLORATION, "keep": 2})
    kept = [number for number, is_kept in enumerate(carries_loss(group, trainer.settings)) if is_kept]
    assert len(kept) == 2 and 1 in kept
    pair = dataclasses.replace(
        group,
        trajectories=[group.trajectories[number] for number in kept],
        scores=[group.scores[number] for number in kept],
    )
    assert torch.equal(gradient(trainer, [group]), gradient(a_trainer(folder), [pair]))


@pytest.mark.parametrize("packing", ["tree", "none"])
def test_in_a_nucleus_the_policy_is_the_model_over_the_likeliest_tokens_renormalised(
    folder: Path, packing: Packing
) -> None:
    """After 5, 6, 7 those inside get p / their sum; a sampled one that rounding puts outside is finite."""
    model = load_model(folder, compute=on_cpu(1))

    def logps(*tokens: int) -> torch.Tensor:
        rows = [Row([5, 6, 7, token], [False] * 3 + [True], [0.0] * 4, 1.0) for token in tokens]
        (batch,) = micro_batches([rows], packing=packing, max_tokens=99, device=model.device)
        return token_logp(model, batch, temperature=0.3, top_p=0.5)[batch.sequence_M.argsort()]

    probability = (model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].detach() / 0.3).softmax(-1)
    order = probability.argsort(descending=True).tolist()
    inside = order[: int((probability[order].cumsum(0) < 0.5).sum()) + 1]
    assert 1 < len(inside) < len(order) - 1
    found, whole = logps(inside[0], inside[-1]), probability[inside].sum()
    assert found.tolist() == pytest.approx(
        [float((probability[t] / whole).log()) for t in (inside[0], inside[-1])], abs=1e-4
    )
    (gradient,) = torch.autograd.grad(found[0], model.get_output_embeddings().weight)
    assert gradient.isfinite().all() and gradient.any()
    assert logps(order[-1]).isfinite().all()


@pytest.mark.parametrize("exploration", [
    {"top_p": [{"iteration": 1, "value": 0.5}]}, {"temperature": [{"iteration": 1, "value": 0.3}]},
])  # fmt: skip
@pytest.mark.parametrize("packing", ["tree", "none"])
def test_where_a_schedule_says_what_is_drawn_the_entropy_is_of_the_whole_distribution_at_the_usual_temperature(
    folder: Path, exploration: dict[str, Any], packing: Packing
) -> None:
    """All logits are 0, so each token has 1 / V: log V nats, whatever the tokens were drawn from."""
    model = load_model(folder, compute=on_cpu(1))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    options = grpo(exploration=NO_EXPLORATION | exploration, updates_per_batch=1, packing=packing)
    trainer = GRPOTrainer(model, options, compute=on_cpu(1), temperature=1.0, max_tokens=200)
    row = trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert row["entropy"] == pytest.approx(math.log(model.config.vocab_size), abs=1e-5)
    assert trainer.iterate(fresh([1.0, 1.0, 1.0, 1.0]))["entropy"] is not None  # without signal too


def test_a_credit_per_turn_reaches_its_own_tokens(folder: Path) -> None:
    """Two trajectories part after their first turn: at it they are alike but for the reward."""
    group = a_group(1, [1.0, 0.0])
    trainer = a_trainer(folder, advantage="turn_leave_one_out")
    (found,), _ = divide([group], trainer.settings, iteration=1)
    assert [np.unique(row.advantage).tolist() for row in found.rows] == [[1.0], [-1.0]]
    assert torch.allclose(
        gradient(trainer, [group]), gradient(a_trainer(folder, advantage="leave_one_out"), [group]), atol=1e-6
    )


def test_an_advantage_of_each_token_is_read_in_the_order_of_the_tokens(folder: Path) -> None:
    row = random_rows(3, 1)[0]
    count = sum(row.sampled_mask)
    each = dataclasses.replace(row, advantage=[float(number) for number in range(count)])
    for packing in ("tree", "none"):
        (batch,) = micro_batches([[each]], packing=packing, max_tokens=400, device=torch.device("cpu"))
        assert batch.advantage_M.tolist() == each.advantage
