"""Every objective turnwise shares with TRL 1.16 equals it: loss and gradient to 1e-5, float32 on CPU.

Both sides are driven as a user would drive them and nothing of theirs is copied here. turnwise: scored groups go into
`GRPOTrainer.iterate`, and each optimizer step's loss and gradient are read just before the optimizer moves. TRL: the
same trajectories come from a `rollout_func` (its way in for a foreign engine: ids, log-probs, `env_mask` over what the
model did not write), and its own code makes old and reference log-probs, importance weights, advantages and the loss.
An iteration has two steps: the first on-policy, the second off-policy with ratios on both sides of the clip; TRL gets
the weights that turnwise had before each.

The trajectories have three turns with two real tool replies between them, and share prompts and first turns. TRL cuts
them into two accumulated batches, turnwise into more and other ones, as trees and as plain rows.
The settings of each comparison are in `trl_variants.py`, the two sides in `trl_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.core.records import Group, Score, TokenSequence
from tasks.learning.grpo.advantages import group_advantages
from tasks.models.folders import load_model, load_tokenizer
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.trl_steps import (
    Stage,
    Step,
    a_group,
    copied_weights,
    our_steps,
    plain_logp,
    rows_of,
    their_rollouts,
    their_steps,
)
from tests.learning.trl_variants import (
    EVERYTHING,
    GROUP_SIZE,
    KL,
    KL_WEIGHT,
    NUM_GROUPS,
    ONE_BATCH,
    SEQUENCE_CAP,
    THEIRS,
    TOKEN_CAP,
    VARIANTS,
    Pair,
    both,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's about its experimental parts, and about a vLLM it does not know
]

TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("models")
    reference, policy = (tiny.model_folder(folder / name, seed=seed) for seed, name in enumerate(("ref", "policy")))
    model, chat = load_model(policy, compute=on_cpu(1)), load_chat(policy)
    rewards = [[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.25, 0.0, 1.0, 0.0]]
    groups = [a_group(number, values, model, chat) for number, values in enumerate(rewards)]
    return Stage(reference, policy, copied_weights(model), groups)


def assert_equal(ours: Sequence[Step], theirs: Sequence[Step]) -> None:
    """Loss and every entry of the gradient to 1e-5; the gradient as a whole also relative to its own length."""
    assert len(ours) == len(theirs) == 2
    for our_step, their_step in zip(ours, theirs, strict=True):
        assert our_step.loss == pytest.approx(their_step.loss, abs=TOLERANCE)
        assert our_step.gradient.keys() == their_step.gradient.keys()
        our_gradient, their_gradient = (
            torch.cat([step.gradient[name].flatten() for name in our_step.gradient]) for step in (our_step, their_step)
        )
        assert their_gradient.abs().max() > 100 * TOLERANCE, "a gradient this small would equal anything"
        torch.testing.assert_close(our_gradient, their_gradient, atol=TOLERANCE, rtol=0)
        assert (our_gradient - their_gradient).norm() < TOLERANCE * their_gradient.norm()


def compare(variant: Pair, stage: Stage, groups: Sequence[Group], scratch: Path) -> None:
    ours = our_steps(variant[0], stage, groups)
    assert ours[0].clip_share == 0 and 0.1 < ours[1].clip_share < 0.7
    assert_equal(ours, their_steps(variant[1], stage, groups, [step.weights for step in ours], scratch))


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_equal_trls(name: str, packing: str, stage: Stage, tmp_path: Path) -> None:
    ours, theirs = VARIANTS[name]
    groups = stage.scored(1000.0 if ours["advantage"] == "std" else 1.0)
    compare(({**ours, "packing": packing}, theirs), stage, groups, tmp_path)


@pytest.mark.parametrize("packing", ["tree", "none"])
def test_a_trajectory_cut_by_a_token_limit_is_left_out_as_trl_leaves_it_out(
    packing: str, stage: Stage, tmp_path: Path
) -> None:
    """One cut trajectory, which would have had the best reward: no loss, no part in mean, std or token count."""
    groups = stage.scored(1000.0)
    cut = groups[0].trajectories[1]
    (whole,) = cut.sequences
    shorter = TokenSequence(whole.token_ids[:-2], whole.sampled_mask[:-2], whole.sampler_logp[:-2])
    overlong = replace(cut, sequences=[shorter], outcome="overlong")
    others = groups[0].trajectories
    groups[0] = Group(
        groups[0].problem_id, "c", [others[0], overlong, *others[2:]],
        [groups[0].scores[0], Score(9000.0, {}), *groups[0].scores[2:]],
    )  # fmt: skip
    variant = both(KL, ({"packing": packing}, {"mask_truncated_completions": True}))
    compare(variant, stage, groups, tmp_path)


@pytest.fixture(scope="module")
def their_answer(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """TRL's steps of one variant with everything in it, at the weights turnwise has with the same settings."""
    ours, theirs = both(*EVERYTHING)
    groups = stage.scored(1000.0)
    weights = [step.weights for step in our_steps(ours, stage, groups)]
    return their_steps(theirs, stage, groups, weights, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"clip_low": 0.21}, {"clip_high": 0.29}, {"aggregation": "sequence"}, {"loss": "cispo"},
        {"advantage": "mean"}, {"zero_variance_groups": "drop"},
        {"kl_weight": 1.02 * KL_WEIGHT}, {"kl_estimator": "k2"},
        {"importance_cap": 1.31}, {"importance_correction": "token_mask"}, {"importance_correction": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_is_slightly_off_is_noticed(
    changed: dict[str, Any], stage: Stage, their_answer: list[Step]
) -> None:
    """So the batch exercises every part: equal without a change, unequal with any one."""
    ours = our_steps(both(*EVERYTHING, (changed, {}))[0], stage, stage.scored(1000.0))
    if not changed:
        assert_equal(ours, their_answer)
        return
    with pytest.raises(AssertionError):
        assert_equal(ours, their_answer)


def test_the_second_step_has_ratios_inside_and_on_both_sides_of_the_clip(stage: Stage) -> None:
    """Of about 300 sampled tokens at least ten each are held above, held below, and free to move."""
    groups = stage.scored(1000.0)
    first, second = our_steps(both()[0], stage, groups)
    model = load_model(stage.policy, compute=on_cpu(1))
    above = below = free = 0
    for group in groups:
        reward = torch.tensor([[score.reward for score in group.scores]])
        advantages = group_advantages(reward, torch.ones_like(reward, dtype=torch.bool), baseline="std")[0]
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            logps = []
            for step in (first, second):
                model.load_state_dict(step.weights)
                logps.append(torch.tensor(plain_logp(model, trajectory.sequences[0].token_ids)))
            ratio = (logps[1] - logps[0]).exp()[torch.tensor(trajectory.sequences[0].sampled_mask)]
            above += int((ratio > 1.28).sum()) if advantage > 0 else 0
            below += int((ratio < 0.8).sum()) if advantage < 0 else 0
            free += int(((ratio > 0.8) & (ratio < 1.28)).sum())
    assert min(above, below, free) >= 10, (above, below, free)


def test_engine_and_trainer_differ_on_both_sides_of_the_cap(stage: Stage) -> None:
    """Of tokens and of trajectories some have weights above their cap, some below its inverse, some between."""
    model = load_model(stage.policy, compute=on_cpu(1))
    tokens: list[float] = []
    sequences: list[float] = []
    for trajectory in (trajectory for group in stage.groups for trajectory in group.trajectories):
        (sequence,) = trajectory.sequences
        logp = plain_logp(model, sequence.token_ids)
        differences = [
            old - sampler
            for old, sampler, is_sampled in zip(logp, sequence.sampler_logp, sequence.sampled_mask, strict=True)
            if is_sampled
        ]
        tokens += differences
        sequences.append(sum(differences))
    for log_weights, cap in ((tokens, TOKEN_CAP), (sequences, SEQUENCE_CAP)):
        weight = torch.tensor(log_weights).exp()
        above, below = int((weight > cap).sum()), int((weight < 1 / cap).sum())
        assert min(above, below, len(weight) - above - below) >= 2, (above, below, len(weight))


def test_leave_one_out_advantages_equal_trls_rloo_trainer(stage: Stage, tmp_path: Path) -> None:
    """RLOO in TRL is a trainer of its own with another loss (a ratio of whole-sequence probabilities); the advantages
    are the part shared. Rewards 1 0 0 ½ against the mean of the others: 1 − ⅙ = ⅚ for the first.
    """
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    shared = ("per_device_train_batch_size", "num_generations", "use_cpu", "bf16", "gradient_checkpointing")
    options = {name: {**THEIRS, **ONE_BATCH}[name] for name in shared}
    rewards = [score.reward for group in stage.groups for score in group.scores]
    trainer = RLOOTrainer(
        model=str(stage.policy),
        reward_funcs=lambda **_: rewards,
        args=RLOOConfig(output_dir=str(tmp_path), beta=0.0, report_to="none", **options),
        train_dataset=Dataset.from_list(rows_of(stage.groups)),
        processing_class=load_tokenizer(stage.policy),
    )
    rollouts = their_rollouts(stage.groups)
    texts = [[{"role": "assistant", "content": ""}]] * len(rewards)
    trainer._generate = lambda _: (rollouts["prompt_ids"], rollouts["completion_ids"], texts)
    theirs = trainer._generate_and_score_completions([dict(row) for row in rows_of(stage.groups)])["advantages"]
    reward_NG = torch.tensor(rewards).view(NUM_GROUPS, GROUP_SIZE)
    ours = group_advantages(reward_NG, torch.ones_like(reward_NG, dtype=torch.bool), baseline="leave_one_out")
    torch.testing.assert_close(ours.flatten(), theirs, atol=1e-6, rtol=0)
    assert ours[0, 0].item() == pytest.approx(5 / 6)
