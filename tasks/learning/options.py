"""Settings of learning: supervised warm start and GRPO. Free of heavy imports, so all of `params.yaml` checks in a
blink.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tasks.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """AdamW, a linear warm-up in optimizer steps, then a linear decay to a share of the peak rate."""

    learning_rate: float = Field(ge=0)
    warmup_steps: int = Field(ge=0)
    final_learning_rate_share: float = Field(ge=0, le=1)
    betas: list[Beta] = Field(min_length=2, max_length=2)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)


class SupervisedSettings(OptimizerSettings):
    """Supervised fine-tuning on demonstrations; only assistant tokens carry loss."""

    num_steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class GRPOSettings(OptimizerSettings):
    """Group-relative policy optimisation. An iteration is one batch of rollouts and its `mu` optimizer steps."""

    num_iterations: int = Field(ge=1)
    problems_per_iteration: int = Field(ge=1)
    group_size: int = Field(ge=2)
    problem_sampler: Literal["uniform", "adaptive"]
    adaptive_floor: float = Field(gt=0, le=1)
    adaptive_update_rate: float = Field(gt=0, le=1)
    advantage_scale: Literal["std", "none"]
    clip_low: float = Field(ge=0, lt=1)
    clip_high: float = Field(ge=0)
    kl_weight: float = Field(ge=0)
    reference_interval: int = Field(ge=1)
    mu: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    snapshot_interval: int = Field(ge=1)


class EmbeddedModelSettings(Settings):
    """The tiny Qwen2-architecture model that is built on the spot."""

    hidden_size: int = Field(ge=8)
    intermediate_size: int = Field(ge=8)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    initializer_range: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=32)


class ModelSettings(Settings):
    """The base model: a Hugging Face folder, or `tasks/learning/embedded_model.py` for the tiny one."""

    path: str = Field(min_length=1)
    embedded: EmbeddedModelSettings
