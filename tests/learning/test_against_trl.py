"""Every objective turnwise shares with TRL 1.16 equals it: loss and gradient to 1e-5, float32 on CPU.

Both sides are driven as a user would drive them and nothing of theirs is copied here. turnwise: scored groups go into
`GRPOTrainer.iterate`, and each optimizer step's loss and gradient are read just before the optimizer moves. TRL: the
same trajectories come from a `rollout_func` (its way in for a foreign engine: ids, log-probs, `env_mask` over what the
model did not write), and its own code makes old and reference log-probs, importance weights, advantages and the loss.
An iteration has two steps: the first on-policy, the second off-policy with ratios on both sides of the clip; TRL gets
the weights that turnwise had before each.

The trajectories have three turns with two real tool replies between them, and share prompts and first turns. TRL cuts
them into two accumulated batches, turnwise into more and other ones, as trees and as plain rows.

Where TRL differs by design it is told so, always through its own settings:
- it divides by std + 1e-4: rewards are in the thousands wherever std is used, which makes that a relative 1e-7;
- it multiplies KL by the ratio unless `use_bias_correction_kl` is False; it has k3 alone;
- its `epsilon_high` is the cap itself with CISPO, and there is no lower bound: clip_low 1 here;
- masking of importance weights is two-sided here, 1/cap to cap: `vllm_importance_sampling_clip_min`;
- a cut trajectory stays in its group's mean and std unless its reward is None, and with `mask_truncated_completions`
  still counts as a sequence: only the aggregations over tokens can be compared.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.learning.advantages import group_advantages
from tasks.learning.options import GRPOSettings
from tasks.learning.trainer import GRPOTrainer
from tasks.models import load_model, load_tokenizer
from tasks.records import Group, Score, Trajectory
from tasks.rollouts.chat import ChatFormat, load_chat
from tests import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's about its experimental parts, and about a vLLM it does not know
]

NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 4, 4, 3
TEMPERATURE, KL_WEIGHT, CONSTANT_LENGTH = 0.8, 0.05, 64
TOKEN_CAP, SEQUENCE_CAP = 1.3, 3.0  # of importance weights
TOLERANCE = 1e-5

OURS: dict[str, Any] = {
    "num_iterations": 1, "snapshot_interval": 1, "checkpoint_interval": 1, "problems_per_iteration": NUM_GROUPS,
    "group_size": GROUP_SIZE, "problem_sampler": "uniform", "adaptive_floor": 0.2, "adaptive_update_rate": 0.2,
    "max_replacement_rounds": 0, "equal_groups": "keep", "filter_overlong": True, "mu": 2,
    "advantage": "std", "ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token",
    "constant_length": None, "kl_weight": 0.0, "kl_estimator": "k3", "reference_interval": None, "reference_mix": 1.0,
    "mismatch_correction": "none", "mismatch_cap": TOKEN_CAP, "lora": None, "max_staleness": 0, "optimizer": "adamw",
    "learning_rate": 2e-3,
    "schedule": "constant", "warmup_steps": 0, "final_learning_rate_share": 1.0, "betas": [0.9, 0.98],
    "weight_decay": 0.0, "max_grad_norm": 1e9, "packing": "tree", "micro_batch_tokens": 300, "autocast": "none",
    "gradient_checkpointing": False,
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group",
    "use_bias_correction_kl": False, "num_iterations": 2, "num_generations": GROUP_SIZE,
    "per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE // 2, "gradient_accumulation_steps": 2,
    "temperature": TEMPERATURE, "max_completion_length": CONSTANT_LENGTH, "gradient_checkpointing": False,
    "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
ONE_BATCH = {"per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE, "gradient_accumulation_steps": 1}
KL = {"kl_weight": KL_WEIGHT}, {"beta": KL_WEIGHT}
GSPO = (
    {"ratio": "sequence", "aggregation": "sequence", "clip_low": 0.3, "clip_high": 0.4},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.3, "epsilon_high": 0.4},
)
CISPO = {"ratio": "cispo", "clip_low": 1.0, "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}
DR_GRPO = (
    {"aggregation": "constant", "constant_length": CONSTANT_LENGTH, "advantage": "mean"},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
)

Pair = tuple[dict[str, Any], dict[str, Any]]


def both(*pairs: Pair) -> Pair:
    """Settings of ours and of theirs, later pairs over earlier ones."""
    ours, theirs = OURS, THEIRS
    for our_part, their_part in pairs:
        ours, theirs = {**ours, **our_part}, {**theirs, **their_part}
    return ours, theirs


def mismatch(correction: str) -> Pair:
    """Weights of whole trajectories, a product of twenty, spread wider than a token's and get the wider cap."""
    cap = SEQUENCE_CAP if correction.startswith("sequence") else TOKEN_CAP
    theirs = {
        "vllm_importance_sampling_mode": correction,
        "vllm_importance_sampling_clip_max": cap,
        "vllm_importance_sampling_clip_min": 1 / cap if correction.endswith("mask") else None,
    }
    return {"mismatch_correction": correction, "mismatch_cap": cap}, theirs


VARIANTS: dict[str, Pair] = {
    "token ratio, mean over all tokens (DAPO)": both(),
    "token ratio, mean over all tokens (BNPO, one batch)": both(({}, {"loss_type": "bnpo", **ONE_BATCH})),
    "token ratio, mean over trajectories (GRPO)": both(({"aggregation": "sequence"}, {"loss_type": "grpo"})),
    "token ratio, constant length, no std (Dr. GRPO)": both(DR_GRPO),
    "token ratio, no std": both(({"advantage": "mean"}, {"scale_rewards": "none"})),
    "token ratio, narrow and lopsided clip": both(
        ({"clip_low": 0.02, "clip_high": 0.3}, {"epsilon": 0.02, "epsilon_high": 0.3})
    ),
    "sequence ratio (GSPO)": both(GSPO),
    "sequence ratio, mean over all tokens": both(GSPO, ({"aggregation": "token"}, {"loss_type": "dapo"})),
    "sequence ratio, summed over tokens (LUSPO)": both(
        GSPO, ({"aggregation": "constant", "constant_length": 1}, {"loss_type": "luspo"})
    ),
    "CISPO": both(CISPO),
    "k3 with DAPO": both(KL),
    "k3 with GRPO": both(KL, ({"aggregation": "sequence"}, {"loss_type": "grpo"})),
    "k3 with Dr. GRPO": both(DR_GRPO, KL),
    "k3 with GSPO": both(GSPO, KL),
    "k3 with CISPO": both(CISPO, KL),
    "mismatch token_truncate": both(mismatch("token_truncate")),
    "mismatch token_mask": both(mismatch("token_mask")),
    "mismatch sequence_truncate": both(mismatch("sequence_truncate")),
    "mismatch sequence_mask": both(mismatch("sequence_mask")),
    "mismatch token_mask with GRPO and k3": both(
        mismatch("token_mask"), KL, ({"aggregation": "sequence"}, {"loss_type": "grpo"})
    ),
    "mismatch sequence_truncate with GSPO and k3": both(mismatch("sequence_truncate"), GSPO, KL),
    "mismatch token_truncate with CISPO": both(mismatch("token_truncate"), CISPO),
}


EVERYTHING = mismatch("token_truncate"), KL


@dataclass
class Step:
    """One optimizer step: the weights before it, the gradient of every parameter, its loss; of ours, the share of
    tokens the clip holds back.
    """

    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    loss: float = math.nan
    clip_share: float = math.nan


@dataclass
class Stage:
    """What every test here starts from: two different models in folders, and three-turn trajectories of the first."""

    reference: Path
    policy: Path
    policy_weights: dict[str, Tensor]
    groups: list[Group]

    def scored(self, scale: float) -> list[Group]:
        """The groups with their rewards times `scale`."""
        return [
            Group(g.problem_id, g.category, g.trajectories, [Score(scale * s.reward, s.parts) for s in g.scores])
            for g in self.groups
        ]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("models")
    reference, policy = (tiny.model_folder(folder / name, seed=seed) for seed, name in enumerate(("ref", "policy")))
    model, chat = load_model(policy, num_threads=1), load_chat(policy)
    rewards = [[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.25, 0.0, 1.0, 0.0]]
    groups = [a_group(number, values, model, chat) for number, values in enumerate(rewards)]
    return Stage(reference, policy, copied_weights(model), groups)


def a_group(number: int, rewards: Sequence[float], model: Any, chat: ChatFormat) -> Group:
    """One problem's trajectories: a real prompt, three turns of random tokens, two real tool replies; every second
    trajectory repeats the first one's first turn.
    """
    rng = random.Random(f"group/{number}")
    problem = tiny.problems(NUM_GROUPS)[number]
    prompt, first_turn = chat.prompt_ids(problem.requests[0], []), a_turn(rng, chat)
    trajectories = []
    for sample in range(len(rewards)):
        ids, mask = list(prompt), [False] * len(prompt)
        for turn in range(NUM_TURNS):
            written = first_turn if turn == 0 and sample % 2 == 0 else a_turn(rng, chat)
            answer = json.dumps({"status": "ok", "cost": rng.randint(10, 99)})
            reply = chat.reply_ids((answer,)) if turn < NUM_TURNS - 1 else []
            ids, mask = [*ids, *written, *reply], [*mask, *[True] * len(written), *[False] * len(reply)]
        trajectories.append(a_trajectory(problem.id, sample, ids, mask, model, rng))
    return Group(problem.id, problem.category, trajectories, [Score(reward, {}) for reward in rewards])


def a_turn(rng: random.Random, chat: ChatFormat) -> list[int]:
    return [*(rng.randrange(2, 300) for _ in range(rng.randint(2, 9))), chat.end_of_turn]


def a_trajectory(
    problem_id: str, sample: int, ids: list[int], mask: list[bool], model: Any, rng: random.Random
) -> Trajectory:
    """The sampler's log-probs are the policy's plus noise: an engine that computes a little differently."""
    logp = plain_logp(model, ids)
    sampler_logp = [lp + rng.gauss(0, 0.25) if m else 0.0 for lp, m in zip(logp, mask, strict=True)]
    return Trajectory(
        problem_id=problem_id, category="c", request="", draw=1, sample_index=sample, policy_version=0,
        environment_fingerprint="", token_ids=ids, sampled_mask=mask, sampler_logp=sampler_logp, turns=[],
        outcome="failure", limit=None, checks={}, num_calls=2, num_invalid_calls=0,
    )  # fmt: skip


@torch.no_grad()
def plain_logp(model: Any, ids: list[int]) -> list[float]:
    """Log-prob of every token at the temperature, by the model's own forward; 0 for the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE
    return [0.0, *logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


def our_steps(settings: dict[str, Any], stage: Stage, groups: Sequence[Group]) -> list[Step]:
    """What turnwise's trainer does with these groups, step by step. The reference is another model than the policy."""
    model = load_model(stage.reference, num_threads=1)
    trainer = GRPOTrainer(model, GRPOSettings.model_validate(settings), temperature=TEMPERATURE)
    model.load_state_dict(stage.policy_weights)
    steps: list[Step] = []
    move, take_step = trainer.optimizer.step, trainer._optimizer_step

    def watched_move(**arguments: Any) -> Any:
        steps.append(Step(copied_weights(model), gradients(model)))
        return move(**arguments)

    def watched_step(batches: Any) -> Any:
        metrics = take_step(batches)
        steps[-1].loss, steps[-1].clip_share = metrics["loss"], metrics["clip_share"]
        return metrics

    trainer.optimizer.step, trainer._optimizer_step = watched_move, watched_step  # type: ignore[method-assign]
    trainer.iterate(lambda *_: groups)
    return steps


def their_steps(
    settings: dict[str, Any], stage: Stage, groups: Sequence[Group], weights: Sequence[dict[str, Tensor]], scratch: Path
) -> list[Step]:
    """What TRL's trainer makes of these groups, sampled with the first of `weights`, at each of `weights`."""
    from trl.trainer.utils import split_tensor_dict

    trainer = their_trainer(settings, stage, groups, scratch)
    model = trainer.model.train()
    model.load_state_dict(weights[0])
    inputs = trainer._generate_and_score_completions([dict(row) for row in rows_of(groups)])
    assert inputs["tool_mask"].logical_and(inputs["completion_mask"]).sum() < inputs["completion_mask"].sum()
    steps = []
    for now in weights:
        model.load_state_dict(now)
        model.zero_grad()
        loss = 0.0
        for part in split_tensor_dict(inputs, trainer.args.steps_per_generation):
            share = trainer.compute_loss(model, part)
            share.backward()
            loss += share.item()
        steps.append(Step(now, gradients(model), loss))
    return steps


def their_trainer(settings: dict[str, Any], stage: Stage, groups: Sequence[Group], scratch: Path) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig
    from trl import GRPOTrainer as TheirTrainer

    rewards = [score.reward for group in groups for score in group.scores]
    overlong = [trajectory.outcome == "overlong" for group in groups for trajectory in group.trajectories]
    trainer = TheirTrainer(
        model=str(stage.reference),
        reward_funcs=lambda **_: [None if cut else reward for reward, cut in zip(rewards, overlong, strict=True)],
        args=GRPOConfig(output_dir=str(scratch), **settings),
        train_dataset=Dataset.from_list(rows_of(groups)),
        processing_class=load_tokenizer(stage.policy),
        rollout_func=lambda *_: their_rollouts(groups),
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # set by `train` otherwise
    if "vllm_importance_sampling_mode" in settings:  # the rollouts' log-probs are then taken for another engine's
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    return trainer


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": g.problem_id}]} for g in groups for _ in g.trajectories]


def their_rollouts(groups: Sequence[Group]) -> dict[str, Any]:
    """Trajectories as TRL's `rollout_func` returns them: the completion starts with the first sampled token."""
    rollouts: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        start = trajectory.sampled_mask.index(True)
        rollouts["prompt_ids"].append(trajectory.token_ids[:start])
        rollouts["completion_ids"].append(trajectory.token_ids[start:])
        rollouts["logprobs"].append(trajectory.sampler_logp[start:])
        rollouts["env_mask"].append([int(is_sampled) for is_sampled in trajectory.sampled_mask[start:]])
    return rollouts


def copied_weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


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
    assert ours[0].clip_share == 0 and 0.1 < ours[1].clip_share < 0.6
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
    end = len(cut.token_ids) - 2
    shorter = {name: getattr(cut, name)[:end] for name in ("token_ids", "sampled_mask", "sampler_logp")}
    overlong = Trajectory.from_row({**cut.to_row(), **shorter, "outcome": "overlong"})
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
        {}, {"clip_low": 0.21}, {"clip_high": 0.29}, {"aggregation": "sequence"}, {"ratio": "cispo"},
        {"advantage": "mean"}, {"equal_groups": "drop"}, {"kl_weight": 1.02 * KL_WEIGHT}, {"kl_estimator": "k2"},
        {"mismatch_cap": 1.31}, {"mismatch_correction": "token_mask"}, {"mismatch_correction": "none"},
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
    model = load_model(stage.policy, num_threads=1)
    above = below = free = 0
    for group in groups:
        reward = torch.tensor([[score.reward for score in group.scores]])
        advantages = group_advantages(reward, torch.ones_like(reward, dtype=torch.bool), baseline="std")[0]
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            logps = []
            for step in (first, second):
                model.load_state_dict(step.weights)
                logps.append(torch.tensor(plain_logp(model, trajectory.token_ids)))
            ratio = (logps[1] - logps[0]).exp()[torch.tensor(trajectory.sampled_mask)]
            above += int((ratio > 1.28).sum()) if advantage > 0 else 0
            below += int((ratio < 0.8).sum()) if advantage < 0 else 0
            free += int(((ratio > 0.8) & (ratio < 1.28)).sum())
    assert min(above, below, free) >= 10, (above, below, free)


def test_engine_and_trainer_differ_on_both_sides_of_the_cap(stage: Stage) -> None:
    """Of tokens and of trajectories some have weights above their cap, some below its inverse, some between."""
    model = load_model(stage.policy, num_threads=1)
    tokens: list[float] = []
    sequences: list[float] = []
    for trajectory in (trajectory for group in stage.groups for trajectory in group.trajectories):
        logp = plain_logp(model, trajectory.token_ids)
        differences = [
            old - sampler
            for old, sampler, is_sampled in zip(logp, trajectory.sampler_logp, trajectory.sampled_mask, strict=True)
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
