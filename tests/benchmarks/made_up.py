"""What the trainer is timed on where no world is needed: random Qwen3 models, and groups of random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedModel

from tasks.core.records import Group, Score, TokenSequence, Trajectory
from tasks.models.attention import ATTENTION, register_attention
from tasks.models.embedded import build_model
from tasks.models.settings import EmbeddedModelSettings

FIRST_ID = 2  # 0 pads, 1 ends a turn


def random_model(vocabulary: int, settings: EmbeddedModelSettings) -> PreTrainedModel:
    """A model of this size with random weights, in float32, that attends the way the trainer wants it to."""
    register_attention()
    model = build_model(vocabulary, settings, seed=0, end_of_turn=1)
    model.set_attn_implementation(ATTENTION)
    return model.eval()


def random_ids(count: int, vocabulary: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, vocabulary) for _ in range(count)]


def random_group(*, prompt: int, sampled: int, size: int, vocabulary: int, seed: int = 0) -> Group:
    """`size` trajectories of one prompt, each of which goes on with `sampled` tokens of its own."""
    shared = random_ids(prompt, vocabulary, seed=seed)
    turns = [random_ids(sampled, vocabulary, seed=hash((seed, number))) for number in range(size)]
    return scored_group(shared, turns, [[-1.0] * sampled] * size)


def scored_group(
    prompt_ids: list[int], sampled_ids: Sequence[list[int]], sampler_logp: Sequence[list[float]], *, number: int = 0
) -> Group:
    """Trajectories of one turn after one prompt; every second one earns 1, so that all of them carry loss."""
    rewards = [float(index % 2) for index in range(len(sampled_ids))]
    trajectories = [
        Trajectory(
            problem_id=f"p{number}", category="made up", request="", draw=0, sample_index=index, policy_version=0,
            environment_fingerprint="", sequences=[_one_turn(prompt_ids, ids, logp)], turns=[],
            outcome="success" if reward else "failure",
            limit=None, checks={}, num_calls=0, num_invalid_calls=0,
        )
        for index, (ids, logp, reward) in enumerate(zip(sampled_ids, sampler_logp, rewards, strict=True))
    ]  # fmt: skip
    return Group(f"p{number}", "made up", trajectories, [Score(reward, {}) for reward in rewards], 0)


def _one_turn(prompt_ids: list[int], ids: list[int], logp: list[float]) -> TokenSequence:
    tokens = TokenSequence()
    tokens.append_given(prompt_ids)
    tokens.append_sampled(ids, logp, [0] * len(ids))
    return tokens
