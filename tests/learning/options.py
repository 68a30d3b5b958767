"""Complete settings of learning for tests: small numbers, any of them changed by name."""

from __future__ import annotations

from typing import Any

from tasks.learning.shared.settings import GRPOSettings, SupervisedSettings

OPTIMIZER: dict[str, Any] = {
    "optimizer": "adamw", "learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 0,
    "final_learning_rate_share": 1.0, "betas": [0.9, 0.98], "weight_decay": 0.0, "max_grad_norm": 1e9,
    "packing": "tree", "micro_batch_tokens": 400, "autocast": "none", "gradient_checkpointing": False,
    "checkpoint_interval": 1,
}  # fmt: skip
GRPO: dict[str, Any] = {
    **OPTIMIZER, "num_iterations": 4, "snapshot_interval": 1, "problems_per_iteration": 2, "group_size": 4,
    "problem_sampler": "adaptive", "adaptive_floor": 0.1, "adaptive_update_rate": 0.2, "max_replacement_rounds": 0,
    "band": {"low": 0.1, "high": 0.9, "uniform_share": 0.1, "prior_strength": 4.0, "half_life": 10.0, "levels": None},
    "zero_variance_groups": "drop", "filter_overlong": True, "updates_per_batch": 2, "steps_per_batch": 1,
    "advantage": "std", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.28,
    "aggregation": "token", "constant_length": None, "kl_weight": 0.001,
    "kl_estimator": "k3", "reference_interval": 2, "reference_mix": 1.0,
    "importance_correction": "none", "importance_cap": 2.0,
    "lora": None, "max_staleness": 0, "streaming": None, "exploration": None,
}  # fmt: skip
NO_EXPLORATION = dict.fromkeys(("temperature", "top_p", "samples_per_problem", "keep", "prefixes"))


def grpo(**changed: Any) -> GRPOSettings:
    if changed.get("kl_weight") == 0 and "reference_interval" not in changed:
        changed["reference_interval"] = None
    return GRPOSettings.model_validate({**GRPO, **changed})


def supervised(**changed: Any) -> SupervisedSettings:
    return SupervisedSettings.model_validate({**OPTIMIZER, "num_steps": 12, "batch_size": 4, "stop": None, **changed})
