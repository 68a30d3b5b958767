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
from tasks.core.text import counted
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.policy import LogProbs, prepare_for_gradients
from tasks.learning.shared.rows import Row, rows_of
from tasks.learning.shared.settings import Autocast, OptimizerSettings, Packing
from tasks.models.architecture import check_own_forward, example_ids, own_logp
from tasks.models.differences import Differences, Tolerance
from tasks.models.limits import check_trainable

NUM_COMPARED = 4  # episodes of the engine
SHARED, LENGTHS = 8, (20, 14)  # tokens of the sequences compared: the first branches off the second


def prepare_model(model: PreTrainedModel, settings: OptimizerSettings, *, max_tokens: int) -> None:
    """Set gradient checkpointing, and check the model in the form in which it is trained."""
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_trainer(model, packing=settings.packing, max_tokens=max_tokens)


def check_trainer(model: PreTrainedModel, *, packing: Packing, max_tokens: int) -> None:
    check_trainable(model.config, packing=packing, max_tokens=max_tokens)
    check_own_forward(
        model,
        lambda: _gaps_from_own_forward(model, packing),
        who="the trainer",
        harm="training would optimise another policy",
        remedy=_advice(packing),
    )


def _advice(packing: Packing) -> str:
    other = "Set packing: none, or use" if packing == "tree" else "Use"
    return f"{other} a model of another architecture."


def _gaps_from_own_forward(model: PreTrainedModel, packing: Packing) -> list[float]:
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
    return _gaps(LogProbs(model), batches, temperature=1.0, top_p=1.0, autocast="none")


def check_engine(
    log_probs: LogProbs,
    groups: Sequence[Group],
    settings: OptimizerSettings,
    *,
    policy_version: int,
    temperature: float,
    top_p: float,
    tolerance: Tolerance,
) -> bool:
    """Return False where there is nothing to compare; ValueError where the engine's log-probs of what `policy_version`
    wrote differ from the trainer's. The longest episodes are compared, since they show a wrong window or cache.
    """
    written = [item for group in groups for item in group.trajectories if item.num_sampled_tokens]
    current = [item for item in written if item.policy_version == policy_version]
    current = sorted(current, key=lambda trajectory: trajectory.num_tokens)[-NUM_COMPARED:]
    if not current:
        return False
    rows = [row for trajectory in current for row in rows_of(trajectory, advantage=0.0)]
    batches = micro_batches(
        [rows], packing=settings.packing, max_tokens=settings.micro_batch_tokens, device=log_probs.model.device
    )
    found = Differences.of(_gaps(log_probs, batches, temperature=temperature, top_p=top_p, autocast=settings.autocast))
    if not found.is_within(tolerance):
        raise ValueError(
            f"the engine's log-probs differ from the trainer's in {counted(len(current), 'episode')} (nats: {found}); "
            f"engine.probe_tolerance allows {tolerance}. Training would use episodes of another policy. Set "
            f"engine.settings.dtype to the trainer's and engine.probe_tolerance to auto, or engine.name to the other "
            f"engine."
        )
    return True


def trainer_logp(log_probs: LogProbs, sequences: Sequence[list[int]], settings: OptimizerSettings) -> list[list[float]]:
    """Log-prob (nats, temperature 1) of every token but the first, by the forward that is trained."""
    found = []
    for ids in sequences:
        row = Row(ids, [False] + [True] * (len(ids) - 1), [0.0] * len(ids), advantage=0.0)
        device = log_probs.model.device
        batches = micro_batches([[row]], packing=settings.packing, max_tokens=len(ids), device=device)
        found.append(_logp(log_probs, batches, temperature=1.0, top_p=1.0, autocast=settings.autocast).tolist())
    return found


def _gaps(
    log_probs: LogProbs, batches: Sequence[MicroBatch], *, temperature: float, top_p: float, autocast: Autocast
) -> list[float]:
    """Trainer's log-prob − sampler's of every sampled token."""
    sampler_logp = torch.cat([batch.sampler_logp_M for batch in batches])
    policy_logp = _logp(log_probs, batches, temperature=temperature, top_p=top_p, autocast=autocast)
    gaps: list[float] = (policy_logp - sampler_logp).tolist()
    return gaps


@torch.no_grad()
def _logp(
    log_probs: LogProbs, batches: Sequence[MicroBatch], *, temperature: float, top_p: float, autocast: Autocast
) -> Tensor:
    prepare_for_gradients(log_probs.model)
    parts = [log_probs(batch, temperature=temperature, top_p=top_p, autocast=autocast) for batch in batches]
    log_probs.model.eval()
    return torch.cat(parts)
