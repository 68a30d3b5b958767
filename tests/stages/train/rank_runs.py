"""Short runs of `train_policy` on the ranks that are there.

The reward is one that an untrained model earns, so that weights move.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.settings import load
from tasks.engines.vllm.nccl import copies
from tasks.learning.shared.ranks import END, Ranks
from tasks.learning.shared.whole_policy import WholePolicy
from tasks.models.policy_weights import PolicyWeights
from tasks.stages.train import groups as grouping
from tasks.stages.train.policy import build_trainer, follow_leader, load_policy
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import train_policy
from tests import tiny
from tests.pipeline.training_worker import CHANGED, unwatched
from tests.profiles import profile_params

LORA = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter, ahead": {"lora": LORA, "max_staleness": 1, "importance_correction": "token_truncate"},
    "streaming": {
        "max_staleness": 3,
        "importance_correction": "token_truncate",
        "streaming": {"groups_under_way": 6, "batch_deadline_seconds": None, "least_batch_share": 0.5},
    },
}


def settings(name: str) -> TrainSections:
    params = profile_params("test")
    params["train"] |= {**CHANGED, "num_iterations": 2, "snapshot_interval": 1, "schedule": "constant", **RUNS[name]}
    params["sentinel"] |= unwatched(params["sentinel"])
    return load(TrainSections, params)


def train_runs(ranks: Ranks, start: str, place: str) -> None:
    """Rank 0 leaves each run's output in PLACE/NAME."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "reward", tiny.reward_of_any_text)
        for name in RUNS:
            _train(ranks, Path(start), Path(place), name)


def write_sent(ranks: Ranks, start: str, file: str) -> None:
    """Rank 0 writes what it sends to servers by NCCL; torch's device without numbers stands for its GPU."""
    given = settings("full")
    model, adapter = load_policy(given, Path(start))
    policy = WholePolicy(model, adapter, ranks, in_host_memory=True)
    trainer = build_trainer(given, model, adapter, ranks)
    if not ranks.leads:
        trainer.follow()
        return
    policy.take(trainer.policy_tensors())
    ranks.announce(END)
    weights = PolicyWeights.of(policy.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        sent = copies(replace(weights, device=torch.device("meta")), torch.bfloat16)
    torch.save(sent, file)


def _train(ranks: Ranks, start: Path, place: Path, name: str) -> None:
    if not ranks.leads:
        follow_leader(settings(name), start, ranks)
        return
    train_policy(
        settings(name), start=start, problems=tiny.problems(40), output=place / name,
        resume=place / f"{name}-resume", alarms=place / "alarms", ranks=ranks,
    )  # fmt: skip
    ranks.announce(END)
