"""Settings of the base model."""

from __future__ import annotations

from pydantic import Field

from tasks.core.settings import Settings


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
