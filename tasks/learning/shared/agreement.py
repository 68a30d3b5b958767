"""Two comparisons before training: the trainer with the model's own forward, and the engine with the trainer.

Without them a trainer that computes another distribution than the model's shows plausible numbers (losses fall, ratios
are near 1) while it trains the wrong policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.core.records import Group
from tasks.core.text import one_line
from tasks.learning.shared.batching import MicroBatch, Packing, Row, micro_batches
from tasks.learning.shared.policy import prepare_for_gradients, token_logp
from tasks.learning.shared.settings import OptimizerSettings
from tasks.models.architecture import TOLERANCE, example_ids, own_logp
from tasks.models.attention import UnknownAttention
from tasks.models.limits import check_trainable

NUM_COMPARED = 4  # episodes of the engine
SHARED, LENGTHS = 8, (20, 14)  # tokens of the sequences compared: the first branches off the second


def prepare_model(model: PreTrainedModel, settings: OptimizerSettings, *, max_tokens: int) -> None:
    """Set gradient checkpointing, and check the model in the form in which it is trained."""
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_trainer(model, packing=settings.packing, max_tokens=max_tokens)


def check_trainer(model: PreTrainedModel, *, packing: Packing, max_tokens: int) -> None:
    name = model.config.model_type
    check_trainable(model.config, packing=packing, max_tokens=max_tokens)
    try:
        difference = _difference_from_own_forward(model, packing)
    except (UnknownAttention, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: the trainer cannot run this architecture ({type(error).__name__}: {one_line(error)}). "
            f"{_advice(packing)}"
        ) from error
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{name}: the trainer's log-probs differ by up to {difference:.2g} nats from those of the model's own "
            f"forward (at most {TOLERANCE:g} is allowed), so training would optimise another policy. "
            f"{_advice(packing)}"
        )


def _advice(packing: Packing) -> str:
    other = "Set packing: none, or use" if packing == "tree" else "Use"
    return f"{other} a model of another architecture."


def _difference_from_own_forward(model: PreTrainedModel, packing: Packing) -> float:
    shared = example_ids(model.config, SHARED)
    sequences = [
        shared + example_ids(model.config, length - SHARED, start=100 * number)
        for number, length in enumerate(LENGTHS, start=1)
    ]
    own = own_logp(model, sequences)
    rows = [
        Row(ids, [False] + [True] * (len(ids) - 1), [0.0, *logp], advantage=0.0)
        for ids, logp in zip(sequences, own, strict=True)
    ]
    batches = micro_batches([rows], packing=packing, max_tokens=sum(LENGTHS), device=model.device)
    return _differences(model, batches, temperature=1.0).max().item()


def check_engine(
    model: PreTrainedModel,
    groups: Sequence[Group],
    settings: OptimizerSettings,
    *,
    policy_version: int,
    temperature: float,
    tolerance: float,
) -> bool:
    """Return False where there is nothing to compare; ValueError where the engine's log-probs of what `policy_version`
    wrote differ from the trainer's.

    `tolerance` (nats) applies to the mean over tokens: a 16-bit engine is far off on a rare one. The longest episodes
    are compared, since they show a wrong window or cache.
    """
    written = [item for group in groups for item in group.trajectories if item.num_sampled_tokens]
    current = [item for item in written if item.policy_version == policy_version]
    current = sorted(current, key=lambda trajectory: len(trajectory.token_ids))[-NUM_COMPARED:]
    if not current:
        return False
    rows = [Row.of(trajectory, advantage=0.0) for trajectory in current]
    batches = micro_batches(
        [rows], packing=settings.packing, max_tokens=settings.micro_batch_tokens, device=model.device
    )
    difference_M = _differences(model, batches, temperature=temperature)
    mean = difference_M.mean().item()
    if not mean <= tolerance:
        raise ValueError(
            f"the engine's log-probs differ from the trainer's by {mean:.2g} nats on average over "
            f"{len(difference_M)} tokens of {len(rows)} episodes (at most {difference_M.max().item():.2g}); "
            f"engine.probe_tolerance allows {tolerance:g}. Training would use episodes of another policy. Set "
            f"engine.settings.dtype to the trainer's (a 16-bit one needs a tolerance near 0.1), or engine.name "
            f"to the other engine."
        )
    return True


@torch.no_grad()
def _differences(model: PreTrainedModel, batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
    """|trainer's log-prob − sampler's| of every sampled token, without autocast; infinite for NaN."""
    prepare_for_gradients(model)
    parts = [token_logp(model, batch, temperature=temperature) - batch.sampler_logp_M for batch in batches]
    model.eval()
    return torch.cat(parts).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
