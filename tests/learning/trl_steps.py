"""The two sides of the comparison with TRL: trajectories made up for both, and the steps each takes with them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.chat.format import ChatFormat
from tasks.core.records import Group, Score, TokenSequence, Trajectory
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.folders import load_model, load_tokenizer
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.trl_variants import (
    NUM_GROUPS,
    NUM_TURNS,
    TEMPERATURE,
)


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
        environment_fingerprint="", sequences=[TokenSequence(ids, mask, sampler_logp)], turns=[],
        outcome="failure", limit=None, checks={}, num_calls=2, num_invalid_calls=0,
    )  # fmt: skip


@torch.no_grad()
def plain_logp(model: Any, ids: list[int]) -> list[float]:
    """Log-prob of every token at the temperature, by the model's own forward; 0 for the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE
    return [0.0, *logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


def our_steps(settings: dict[str, Any], stage: Stage, groups: Sequence[Group]) -> list[Step]:
    """What turnwise's trainer does with these groups, step by step. The reference is another model than the policy."""
    model = load_model(stage.reference, compute=on_cpu(1))
    trainer = GRPOTrainer(
        model,
        GRPOSettings.model_validate(settings),
        compute=on_cpu(1),
        temperature=TEMPERATURE,
        max_tokens=tiny.EMBEDDED.max_position_embeddings,
    )
    model.load_state_dict(stage.policy_weights)
    steps: list[Step] = []
    move, take_step = trainer.optimizer.step, trainer._optimizer_step

    def watched_move(**arguments: Any) -> Any:
        steps.append(Step(copied_weights(model), gradients(model)))
        return move(**arguments)

    def watched_step(*batches: Any) -> Any:
        metrics = take_step(*batches)
        steps[-1].loss, steps[-1].clip_share = metrics["loss"], metrics["clip_share"]
        return metrics

    trainer.optimizer.step = watched_move  # type: ignore[method-assign]
    trainer._optimizer_step = watched_step  # type: ignore[method-assign,assignment]
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
        start = trajectory.sequences[0].sampled_mask.index(True)
        rollouts["prompt_ids"].append(trajectory.sequences[0].token_ids[:start])
        rollouts["completion_ids"].append(trajectory.sequences[0].token_ids[start:])
        rollouts["logprobs"].append(trajectory.sequences[0].sampler_logp[start:])
        rollouts["env_mask"].append([int(is_sampled) for is_sampled in trajectory.sequences[0].sampled_mask[start:]])
    return rollouts


def copied_weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
