"""Settings of the base model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.core.settings import Settings

Dtype = Literal["float32", "bfloat16"]


class ComputeSettings(Settings):
    """Where and in which precision a model computes.

    `device: auto` is CUDA where torch finds it. `weights` is the dtype of what is trained or played; with bfloat16 the
    optimizer keeps float32 master weights. `frozen` is that of weights which never change: the reference, and a base
    under LoRA. `offload: optimizer` keeps the optimizer's state in pinned host memory between updates. `tf32` lets CUDA
    round the factors of float32 products to 10 bits, which is faster; a CPU never does.
    """

    device: Literal["auto", "cpu", "cuda"]
    num_threads: int = Field(ge=1)
    weights: Dtype
    frozen: Dtype
    offload: Literal["none", "optimizer"]
    tf32: bool


def on_cpu(num_threads: int) -> ComputeSettings:
    return ComputeSettings(
        device="cpu", num_threads=num_threads, weights="float32", frozen="float32", offload="none", tf32=False
    )


class EmbeddedModelSettings(Settings):
    """It learns its tools from demonstrations; `tools_in_prompt` describes them too, so prompts are of realistic
    length.
    """

    hidden_size: int = Field(ge=8)
    intermediate_size: int = Field(ge=8)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    initializer_range: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=32)
    tools_in_prompt: bool


class ModelSettings(Settings):
    path: str = Field(min_length=1)
    embedded: EmbeddedModelSettings
