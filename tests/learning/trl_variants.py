"""Each objective turnwise shares with TRL 1.16, in the settings of both.

Where TRL differs by design it is told so, always through its own settings:
- it divides by std + 1e-4: rewards are in the thousands wherever std is used, which makes that a relative 1e-7;
- it multiplies KL by the ratio unless `use_bias_correction_kl` is False; it has k3 alone;
- its `epsilon_high` is the cap itself with CISPO, and there is no lower bound: clip_low 1 here;
- masking of importance weights is two-sided here, 1/cap to cap: `vllm_importance_sampling_clip_min`;
- a cut trajectory stays in its group's mean and std unless its reward is None, and with `mask_truncated_completions`
  still counts as a sequence: only the aggregations over tokens can be compared.
"""

from __future__ import annotations

from typing import Any

NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 4, 4, 3
TEMPERATURE, KL_WEIGHT, CONSTANT_LENGTH = 0.8, 0.05, 64
TOKEN_CAP, SEQUENCE_CAP = 1.3, 3.0  # of importance weights

OURS: dict[str, Any] = {
    "num_iterations": 1, "snapshot_interval": 1, "checkpoint_interval": 1, "problems_per_iteration": NUM_GROUPS,
    "group_size": GROUP_SIZE, "problem_sampler": "uniform", "adaptive_floor": 0.2, "adaptive_update_rate": 0.2,
    "band": {"low": 0.1, "high": 0.9, "uniform_share": 0.1, "prior_strength": 4.0, "half_life": 10.0, "levels": None},
    "max_replacement_rounds": 0, "zero_variance_groups": "keep", "filter_overlong": True, "updates_per_batch": 2,
    "steps_per_batch": 1,
    "advantage": "std", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token",
    "constant_length": None, "kl_weight": 0.0, "kl_estimator": "k3", "reference_interval": None, "reference_mix": 1.0,
    "importance_correction": "none", "importance_cap": TOKEN_CAP, "lora": None, "max_staleness": 0, "streaming": None,
    "exploration": None,
    "optimizer": "adamw", "learning_rate": 2e-3,
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
# The means of whole sequences move little, so its clip is a tenth of a token's here, and so is the step.
GSPO = (
    {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.03, "clip_high": 0.04, "learning_rate": 2e-4},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.03, "epsilon_high": 0.04},
)
CISPO = {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}
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
    return {"importance_correction": correction, "importance_cap": cap}, theirs


VARIANTS: dict[str, Pair] = {
    "token ratio, mean over all tokens (DAPO)": both(),
    "token ratio, mean over all tokens (BNPO, one batch)": both(({}, {"loss_type": "bnpo", **ONE_BATCH})),
    "token ratio, a group of equal rewards not computed": both(({"zero_variance_groups": "drop"}, {})),
    "token ratio, mean over trajectories, a group of equal rewards not computed": both(
        ({"zero_variance_groups": "drop", "aggregation": "sequence"}, {"loss_type": "grpo"})
    ),
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
