"""The families whose layers our C code computes: which modules they are made of."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

FAMILIES = {
    "LlamaForCausalLM": ("LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"),
    "Qwen2ForCausalLM": ("Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP", "Qwen2RMSNorm"),
    "Qwen3ForCausalLM": ("Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"),
}


def has_known_modules(model: PreTrainedModel) -> bool:
    """Whether all of its modules are those of a family, in float32, and no layer has a window."""
    names, tensors = FAMILIES.get(type(model).__name__), [*model.parameters()]
    if names is None or any(item.dtype != torch.float32 for item in tensors):
        return False
    known = {type(model).__name__, *names, f"{names[0].removesuffix('Model')}RotaryEmbedding"}
    known |= {"Linear", "Embedding", "ModuleList", "SiLUActivation"}
    return (
        {type(module).__name__ for module in model.modules()} <= known
        and all(item.is_contiguous() for item in tensors)
        and set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )
