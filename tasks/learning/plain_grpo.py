"""GRPO over a multi-turn environment from nothing: the file to read first. It needs only torch and two records.

An episode is one list of token ids, or several where an agent begins anew. The policy chose some (`sampled_mask` is
True); the prompt and the tools wrote the others. The model reads all of them; only those the policy chose are trained.
Each iteration:

    play       every problem G times with the current policy
    advantage  compare each reward with the other rewards of the same problem
    loss       make better episodes likelier, within a clip, and stay close to a reference
    step       take one or more optimizer steps on the same episodes, each on all of them

The trainer (`grpo/trainer.py`) computes the same loss and gradient with `steps_per_batch: 1`
(tests/learning/test_plain_grpo.py); it adds packing, mini- and micro-batches, other losses, adapters and exact resume.
Shapes: T tokens of an episode, M of them sampled, V vocabulary, G episodes of a problem.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tasks.core.records import Problem, TokenSequence, Trajectory

Model = Callable[[Tensor], Tensor]  # token ids [T] → logits [T, V]; the logits at a position predict the next token


class Environment(Protocol):
    """The environment with its tools; `turns` contains the token ids of each turn the policy wrote so far."""

    def prompt(self, problem: Problem) -> list[int]: ...

    def reply(self, problem: Problem, turns: list[list[int]]) -> list[int] | None: ...  # None ends the episode

    def is_solved(self, problem: Problem, turns: list[list[int]]) -> bool: ...


@dataclass(frozen=True)
class Sample:
    trajectory: Trajectory
    advantage: float
    old_logp_M: Tensor
    reference_logp_M: Tensor


@torch.no_grad()
def play(model: Model, environment: Environment, problem: Problem, *, end_of_turn: int, max_tokens: int) -> Trajectory:
    """One episode: the policy writes a turn, the tools reply, until the environment or `max_tokens` ends it."""
    token_ids = list(environment.prompt(problem))
    sampled_mask, sampler_logp = [False] * len(token_ids), [0.0] * len(token_ids)
    turns: list[list[int]] = [[]]
    while len(token_ids) < max_tokens:
        logp_V = model(torch.tensor(token_ids))[-1].log_softmax(-1)
        token = int(torch.multinomial(logp_V.exp(), 1))
        token_ids.append(token)
        sampled_mask.append(True)
        sampler_logp.append(float(logp_V[token]))
        turns[-1].append(token)
        if token != end_of_turn:
            continue
        reply = environment.reply(problem, turns)
        if reply is None:
            break
        token_ids += reply
        sampled_mask += [False] * len(reply)  # read, never trained
        sampler_logp += [0.0] * len(reply)
        turns.append([])
    return Trajectory(
        problem_id=problem.id, category=problem.category, request=problem.requests[0], draw=0,
        sample_index=0, policy_version=0, environment_fingerprint="",
        sequences=[TokenSequence(token_ids, sampled_mask, sampler_logp)], turns=[],
        outcome="success" if environment.is_solved(problem, turns) else "failure", limit=None, checks={}, num_calls=0,
        num_invalid_calls=0,
    )  # fmt: skip


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """A = (r − mean(r)) / std(r) over the episodes of one problem; zeros where all rewards are equal."""
    reward_G = torch.tensor(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    return list(((reward_G - reward_G.mean()) / reward_G.std()).tolist())


def sampled_logps(model: Model, trajectory: Trajectory) -> Tensor:
    """log p(token | everything before it in its sequence) of each token the policy chose; [M]."""
    parts = []
    for sequence in trajectory.sequences:
        ids_T = torch.tensor(sequence.token_ids)
        logp_TV = model(ids_T).log_softmax(-1)
        next_logp_T = logp_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
        parts.append(next_logp_T[torch.tensor(sequence.sampled_mask[1:])])
    return torch.cat(parts)


def clipped_surrogate(logp_M: Tensor, old_logp_M: Tensor, advantage: float, *, low: float, high: float) -> Tensor:
    """−min(r·A, clip(r, 1 − low, 1 + high)·A) with r = p / p_old: a token earns nothing beyond the clip; [M]."""
    ratio_M = (logp_M - old_logp_M).exp()
    return -torch.minimum(ratio_M * advantage, ratio_M.clamp(1 - low, 1 + high) * advantage)


def kl_to_reference(logp_M: Tensor, reference_logp_M: Tensor) -> Tensor:
    """eᵈ − d − 1 with d = log p_ref − log p (k3): unbiased for KL(policy ‖ reference), and never negative; [M]."""
    difference_M = reference_logp_M - logp_M
    return difference_M.exp() - difference_M - 1


def grpo_loss(
    model: Model, samples: Sequence[Sample], *, clip_low: float = 0.2, clip_high: float = 0.28, kl_weight: float = 0.001
) -> Tensor:
    parts = []
    for sample in samples:
        logp_M = sampled_logps(model, sample.trajectory)
        surrogate_M = clipped_surrogate(logp_M, sample.old_logp_M, sample.advantage, low=clip_low, high=clip_high)
        parts.append(surrogate_M + kl_weight * kl_to_reference(logp_M, sample.reference_logp_M))
    return torch.cat(parts).mean()


def train(
    policy: torch.nn.Module, environment: Environment, problems: Sequence[Problem], *, end_of_turn: int,
    max_tokens: int, num_iterations: int, problems_per_iteration: int = 4, group_size: int = 8,
    updates_per_batch: int = 2, learning_rate: float = 1e-3, seed: int = 0,
) -> Iterator[float]:  # fmt: skip
    """Train `policy` in place; yield the share of solved episodes after each iteration."""
    rng, reference = random.Random(seed), copy.deepcopy(policy)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    for _ in range(num_iterations):
        samples: list[Sample] = []
        for problem in rng.sample(list(problems), min(problems_per_iteration, len(problems))):
            group = [
                play(policy, environment, problem, end_of_turn=end_of_turn, max_tokens=max_tokens)
                for _ in range(group_size)
            ]
            advantages = group_advantages([float(trajectory.is_success) for trajectory in group])
            with torch.no_grad():
                samples += [
                    Sample(item, advantage, sampled_logps(policy, item), sampled_logps(reference, item))
                    for item, advantage in zip(group, advantages, strict=True)
                ]
        for _ in range(updates_per_batch):  # the first is on-policy: every ratio is 1
            optimizer.zero_grad()
            grpo_loss(policy, samples).backward()
            optimizer.step()
        yield sum(sample.trajectory.is_success for sample in samples) / len(samples)
