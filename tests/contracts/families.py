"""What the contract over model families declares: tiny random models, what of turnwise refuses which of them and why,
and the rows of the table in infra/benchmarks.md.

The cases are families people train, and those that once trained or played another distribution unnoticed: by what they
do to logits, by windows of 8 tokens, by what they ask of attention, by positions that depend on the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH, WINDOW = 40, 8
SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWED = {"tree": "sliding_window", "engine": "sliding_window"}  # transformers' own masks are right for rows
LINEAR = {"tree": "linear_attention", "engine": "linear_attention"}  # right for rows as well: what pads one comes last
EVERYWHERE = ("tree", "none", "engine")
HEAD = {"head_dim": 8}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
HALF_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, **HEAD,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A config, and what in the reason each of trainer (by packing) and engine refuses it with; none is agreement."""

    model_type: str
    changed: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from tasks.models.attention import ATTENTION, register_attention

        register_attention()
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **{**SMALL, **self.changed})
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).float().eval()


def capped(**changed: Any) -> dict[str, Any]:
    return {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, **changed}


def experts(**changed: Any) -> dict[str, Any]:
    return {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None, **changed}


FAMILIES = {
    "granite": Family("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere": Family("cohere", {"logit_scale": 0.1}),
    "gemma2": Family("gemma2", capped(sliding_window=LENGTH, attn_logit_softcapping=0.5)),
    "gemma2, window": Family("gemma2", capped(sliding_window=WINDOW, attn_logit_softcapping=None), WINDOWED),
    "gemma2, logits capped alone": Family("gemma2", capped(sliding_window=LENGTH, attn_logit_softcapping=None)),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral, window": Family("mistral", {"sliding_window": WINDOW}, WINDOWED),
    "mistral, window of an episode": Family("mistral", {"sliding_window": LENGTH}),
    "phi3": Family("phi3"),
    "phi3, window": Family("phi3", {"sliding_window": WINDOW}, WINDOWED),
    "phi3, longrope": Family(
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        dict.fromkeys(EVERYWHERE, "longrope"),
    ),
    "starcoder2, dropout": Family("starcoder2", {"residual_dropout": 0.3, "attention_dropout": 0.3}),
    "starcoder2, window": Family("starcoder2", {"sliding_window": WINDOW}, WINDOWED),
    "stablelm": Family("stablelm", {}, {"tree": "nats", "engine": "stablelm"}),  # hands no plan on to its attention
    "gpt_oss": Family("gpt_oss", experts(sliding_window=LENGTH)),
    "gpt_oss, window": Family("gpt_oss", experts(sliding_window=WINDOW), WINDOWED),
    "granite_swa": Family("granite_swa", {"sliding_window": LENGTH}),
    "llama": Family("llama"),
    "qwen2_moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": Family("qwen3", HEAD),
    "qwen3_moe": Family("qwen3_moe", {**HEAD, **EXPERTS}),
    "qwen3_next": Family("qwen3_next", {**EXPERTS, **HALF_LINEAR}, LINEAR),
    "qwen3_5": Family("qwen3_5_text", HALF_LINEAR, LINEAR),
    "qwen3_5_moe": Family("qwen3_5_moe_text", {**EXPERTS, **HALF_LINEAR}, LINEAR),
    "ministral3": Family("ministral3", HEAD),
    "mixtral": Family("mixtral", EXPERTS),
    "granitemoe": Family("granitemoe", EXPERTS),
    "gemma": Family("gemma", HEAD),
    "gemma3": Family("gemma3_text", {**HEAD, "sliding_window": LENGTH}),
    "gemma3, window": Family("gemma3_text", {**HEAD, "sliding_window": WINDOW}, WINDOWED),
    "gemma4": Family("gemma4_text", {**HEAD, "sliding_window": LENGTH}),
    "cohere2": Family("cohere2", {**HEAD, "sliding_window": LENGTH}),
    "cohere2, window": Family("cohere2", {**HEAD, "sliding_window": WINDOW, "layer_types": None}, WINDOWED),
    "glm4": Family("glm4", HEAD),
    "glm4_moe": Family("glm4_moe", {**HEAD, **EXPERTS}),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {"sliding_window": LENGTH}),
    "olmo3, window": Family("olmo3", {"sliding_window": WINDOW}, WINDOWED),
    "smollm3": Family("smollm3"),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}, {"tree": "conv", "engine": "conv"}),
    "deepseek_v2": Family("deepseek_v2", {**EXPERTS, **LATENT}),
    "deepseek_v3": Family("deepseek_v3", {**EXPERTS, **LATENT}),
    "llama4": Family("llama4_text", {**HEAD, **EXPERTS}, {"tree": "cannot run", "none": "cannot run"}),
    "qwen2": Family("qwen2", {"sliding_window": WINDOW}),  # use_sliding_window is false, as in every Qwen 2 there is
    "qwen2, window": Family(
        "qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, WINDOWED
    ),
    "llama, dynamic": Family(
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        dict.fromkeys(EVERYWHERE, "dynamic"),
    ),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: cases of FAMILIES within and beyond the window, and the template that shows calls.

    `template` is a published one (TRL brings it), or, in capitals, one reduced in tests/chat/templates.py.
    """

    shown: str
    case: str
    template: str | None = None
    calls: str = "recipe"
    thinks: bool = False
    beyond: str | None = None


ROWS = (
    Row("Llama 3.1–3.3", "llama", "llama3_1", "llama"),
    Row("Llama 4", "llama4", "PYTHONIC", "pythonic"),
    Row("Qwen 2 and 2.5", "qwen2", "qwen2_5", "hermes"),
    Row("Qwen 2 MoE", "qwen2_moe"),
    Row("Qwen 3", "qwen3", "qwen3", "hermes", thinks=True),
    Row("Qwen 3 Instruct 2507, and MoE", "qwen3_moe", "qwen3_instruct_2507", "hermes"),
    Row("Qwen 3 Coder Next", "qwen3_next", "CODER_CALLS", "qwen xml, python's words"),
    Row("Qwen 3.5", "qwen3_5", "qwen3_5_think", "qwen xml, python's words", thinks=True),
    Row("Qwen 3.5 and 3.6 MoE", "qwen3_5_moe", "qwen3_6", "qwen xml", thinks=True),
    Row("Mistral before 2025", "mistral", "MISTRAL", beyond="mistral, window"),
    Row("Ministral 3", "ministral3", "MINISTRAL", "mistral"),
    Row("Mixtral", "mixtral"),
    Row("Phi 3.5 and 4", "phi3", "phi3_5", beyond="phi3, window"),
    Row("Phi 3, longrope beyond its first context", "phi3, longrope", "phi3"),
    Row("Granite 3", "granite"),
    Row("Granite 3 MoE", "granitemoe"),
    Row("Granite SWA", "granite_swa"),
    Row("Gemma", "gemma", "gemma"),
    Row("Gemma 2", "gemma2", beyond="gemma2, window"),
    Row("Gemma 3", "gemma3", "gemma3", beyond="gemma3, window"),
    Row("Gemma 4", "gemma4", "gemma4_v5"),
    Row("Cohere", "cohere", "cohere"),
    Row("Cohere 2", "cohere2", "cohere2", beyond="cohere2, window"),
    Row("gpt-oss", "gpt_oss", "gptoss", "harmony", thinks=True, beyond="gpt_oss, window"),
    Row("GLM 4", "glm4"),
    Row("GLM 4.5", "glm4_moe", "glm4moe", "glm xml", thinks=True),
    Row("OLMo 2", "olmo2"),
    Row("OLMo 3", "olmo3", beyond="olmo3, window"),
    Row("SmolLM 3", "smollm3"),
    Row("LFM 2.5", "lfm2", "lfm2_2_5", "pythonic in tags", thinks=True),
    Row("DeepSeek V2", "deepseek_v2"),
    Row("DeepSeek V3 and R1", "deepseek_v3", "deepseekv3", thinks=True),
    Row("DeepSeek R1 distills (Qwen, Llama)", "qwen2", "deepseek_r1_distill", thinks=True),
    Row("StarCoder 2", "starcoder2, dropout", beyond="starcoder2, window"),
    Row("StableLM", "stablelm"),
)


def table() -> str:
    """The rows as Markdown; no model is run."""
    head = "| family | `packing: tree` | `packing: none` | engine in process | calls | thinks |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_line, ROWS)])


def _line(row: Row) -> str:
    places = " | ".join(_cell(row, place) for place in EVERYWHERE)
    calls = row.calls if row.template else "not looked at"
    thinks = ("yes" if row.thinks else "no") if row.template else ""
    return f"| {row.shown} (`{FAMILIES[row.case].model_type}`) | {places} | {calls} | {thinks} |".replace("|  |", "| |")


def _cell(row: Row, place: str) -> str:
    if reason := FAMILIES[row.case].refused.get(place):
        return f"refused: {reason}"
    return "yes, in its window" if row.beyond and place in FAMILIES[row.beyond].refused else "yes"
