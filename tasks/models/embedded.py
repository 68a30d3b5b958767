"""The embedded model: a tiny Qwen3 architecture with its own tokenizer, built on the spot from the curated data.

It lets the whole pipeline run on a laptop. Two choices make 0.4 million parameters enough: one entity is one token, so
copying a city or a card is one step; and attention starts as copying (`v_proj` has orthonormal rows, `o_proj` is its
transpose): else copying appears only after 300 to 500 supervised steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.models.folders import THOUGHTS_ARE_LEARNT, TOOLS_ARE_LEARNT, save_snapshot
from tasks.models.settings import ComputeSettings, EmbeddedModelSettings, TemplateSettings
from tasks.models.template import state_template
from tasks.models.torch_setup import prepare_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PATH = Path("tasks/models/embedded.py")
END_OF_TURN, PAD, UNKNOWN = "<|im_end|>", "<|endoftext|>", "<unk>"
HEADERS = [f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool")]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: a thought that the model wrote is left out once the user has asked again; it may be switched off.
THINK, END_OF_THOUGHT = "<think>", "</think>"
THINKING_TEMPLATE = (
    "{% set ns = namespace(asked=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 < ns.asked %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ message.content }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS_MESSAGE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'A call: <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>{% endif %}'
)
# Pieces of Hermes-style chat text: a JSON key with its punctuation is one piece, a word takes the space after it.
PIECES = (
    r'"?\}\}\n</tool_call>', r'<tool_call>\n\{"name": "', r"\n</tool_call>", r'", "arguments": \{', r"\}\}",
    r'"?, "[a-z_]+": "?', r'\{?"[a-z_]+": "?', r'"\}', r'"', r"\d\d?", r" ?[a-z][a-z_]* ?",
    r"[A-Z][A-Za-z]*", r"[^\w\s]", r"\s",
)  # fmt: skip
# A longer word of a text is told in characters: encoding takes time by its length times that of what it begins with.
LONGEST_PIECE = 100


def is_embedded(model_path: str) -> bool:
    return Path(model_path) == PATH


def build_embedded_model(
    folder: Path,
    *,
    texts: Iterable[str],
    vocabulary: Sequence[str],
    settings: EmbeddedModelSettings,
    template: TemplateSettings,
    seed: int,
    compute: ComputeSettings,
) -> None:
    """Write model and tokenizer to `folder`. `vocabulary` has the entities and phrases beyond `texts`."""
    prepare_torch(compute)
    tokenizer = build_tokenizer(texts, vocabulary, settings)
    state_template(tokenizer, template)
    save_snapshot(
        folder, build_model(len(tokenizer), settings, seed=seed, end_of_turn=tokenizer.eos_token_id), tokenizer
    )


def build_tokenizer(
    texts: Iterable[str], vocabulary: Sequence[str], settings: EmbeddedModelSettings
) -> PreTrainedTokenizerBase:
    """A Unigram tokenizer with equal scores, so the fewest pieces win; unknown text falls back to characters, then
    bytes.

    With `tools_in_prompt` its template describes the tools; else its files say that the model learnt them. With
    `thinks` it has the marks of a thought, each one token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        re.escape(word)
        for word in sorted(vocabulary, key=lambda word: (-len(word), word))
        if re.search("[a-z]", word) and " " not in word
    ]
    pattern = "|".join([*words, *PIECES])
    found = {piece for text in [*texts, *vocabulary] for piece in re.findall(pattern, text)}
    pieces = {piece for piece in found if len(piece) <= LONGEST_PIECE or piece in vocabulary}
    characters = {chr(code) for code in range(32, 127)} | {"\n"} | {str(number) for number in range(100)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [(token, 0.0) for token in (PAD, UNKNOWN)]
    vocab += [(piece, -1.0) for piece in sorted(pieces | characters)] + [(token, -100.0) for token in byte_tokens]
    backend = Tokenizer(models.Unigram(vocab, unk_id=1, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (END_OF_TURN, *HEADERS)])
    if settings.thinks:
        backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in (THINK, END_OF_THOUGHT)])
    conversation = THINKING_TEMPLATE if settings.thinks else CHAT_TEMPLATE
    learnt = {TOOLS_ARE_LEARNT: not settings.tools_in_prompt, THOUGHTS_ARE_LEARNT: settings.thinks}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=TOOLS_MESSAGE + conversation if settings.tools_in_prompt else conversation,
        clean_up_tokenization_spaces=False,
        **{key: True for key, is_so in learnt.items() if is_so},
    )


def build_model(vocab_size: int, settings: EmbeddedModelSettings, *, seed: int, end_of_turn: int) -> PreTrainedModel:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.hidden_size // settings.num_attention_heads,
        initializer_range=settings.initializer_range,
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=end_of_turn,
    )
    model = Qwen3ForCausalLM(config).float()
    _start_as_copying(model)
    return model


def _start_as_copying(model: PreTrainedModel) -> None:
    """In every layer, o_proj = v_projᵀ per head, with orthonormal rows in v_proj: a head returns what it attends to."""
    import torch

    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    head_size = width // heads
    with torch.no_grad():
        for layer in model.model.layers:
            values = torch.nn.init.orthogonal_(torch.empty(kv_heads * head_size, width))
            a_query_head = values.view(kv_heads, 1, head_size, width).expand(-1, heads // kv_heads, -1, -1)
            layer.self_attn.v_proj.weight.copy_(values)
            layer.self_attn.o_proj.weight.copy_(a_query_head.reshape(heads * head_size, width).T)
