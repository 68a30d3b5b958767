"""What each of several ranks does in `test_ranks.py`: it trains a tiny policy on made-up groups, once per case.

Rank 0 writes what each case gave, to compare with that of one rank alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.files import write_json
from tasks.core.records import Group
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.ranks import END, Ranks
from tasks.models.folders import load_model
from tasks.models.settings import ComputeSettings, on_cpu
from tests.learning.options import grpo
from tests.learning.rows import a_group, in_sequences

SIGNAL, SILENT = [1.0, 0.0, 0.0, 1.0], [1.0] * 4
LORA = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}
BFLOAT16 = on_cpu(1).model_copy(update={"weights": "bfloat16", "frozen": "bfloat16"})
MANY = {"num_iterations": 10, "learning_rate": 1e-3, "max_grad_norm": 0.5, "kl_weight": 0.1}  # 20 steps, clipped
CASES: dict[str, dict[str, Any]] = {
    "padded rows of several sequences": {"packing": "none", "aggregation": "sequence"},
    "packed trees": {"micro_batch_tokens": 60, "importance_correction": "token_truncate"},
    "gspo, and two steps a batch": {
        "loss": "gspo", "clip_low": 0.001, "clip_high": 0.001, "steps_per_batch": 2, "updates_per_batch": 1,
        "reference_mix": 0.5,
    },
    "an adapter": {"lora": LORA},
    "layers computed again": {"gradient_checkpointing": True, "aggregation": "constant", "constant_length": 20},
    "one group, so that only one rank has work": {"reference_interval": None},
    "muon": {"optimizer": "muon", "learning_rate": 1e-4},
    "bfloat16": {},
    "an adapter in bfloat16": {"lora": LORA},
    "groups without a signal, in several sequences": {"zero_variance_groups": "keep"},
}  # fmt: skip


def groups_of(case: str, iteration: int) -> list[Group]:
    """Uneven groups, of 2 to 5 trajectories, one of them without a signal; or one group, which is one tree. Where the
    case says so, each turn of an episode is in one of three sequences.
    """
    rewards = [SIGNAL, [0.0, 1.0], SILENT, [1.0, 0.0, 0.0, 0.0, 1.0]]
    if case.startswith("one group"):
        rewards = rewards[:1]
    groups = [a_group(10 * iteration + number, item) for number, item in enumerate(rewards)]
    if "several sequences" not in case:
        return groups
    return [
        replace(group, trajectories=[in_sequences(item, [0, 1, 0, 2] * 8) for item in group.trajectories])
        for group in groups
    ]


def a_trainer(folder: Path, ranks: Ranks, *, compute: ComputeSettings | None = None, **changed: Any) -> GRPOTrainer:
    compute = compute or on_cpu(1)
    model = load_model(folder, compute=compute)
    options = grpo(**{**MANY, **changed})
    seed_generators(0)
    adapter = Adapter(model, options.lora, weights=compute.weights) if options.lora else None
    return GRPOTrainer(model, options, compute=compute, temperature=1.0, max_tokens=200, adapter=adapter, ranks=ranks)


def train_cases(ranks: Ranks, folder: str, cases: list[str]) -> None:
    """Rank 0 writes FOLDER/SIZE-CASE.json for each."""
    for case in cases:
        compute = BFLOAT16 if "bfloat16" in case else None
        trainer = a_trainer(Path(folder) / "model", ranks, compute=compute, **CASES[case])
        if not ranks.leads:
            trainer.follow()
            continue
        rows = [trainer.iterate(lambda number, *_, case=case: groups_of(case, number)) for _ in range(10)]
        weights = {name: float(tensor.double().norm()) for name, tensor in trainer.policy_tensors().items()}
        found = {"rows": rows, "weights": weights, "probe": trainer.logp_of([[*range(20, 50)]])[0]}
        write_json(Path(folder) / f"{ranks.size}-{case}.json", found)
        ranks.announce(END)
