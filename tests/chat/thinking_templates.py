"""Chat templates of models that think, reduced to how they treat thoughts, and what ends a turn in their family."""

from __future__ import annotations

from typing import Any

from tests.chat.templates import CHATML_HEADER, CHATML_MESSAGE, QWEN, tokenizer

# Where the last request of the user is; thoughts before it are left out.
LAST_REQUEST = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)
SAID = "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
THOUGHT = (
    "{% set thought = m.reasoning_content or "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content) %}"
)
SWITCHED_OFF = "<think>\\n\\n</think>\\n\\n"


def _chatml(message: str, prompt: str) -> str:
    header = "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    said = "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + message + "<|im_end|>\n{% else %}"
    parts = QWEN.replace(CHATML_MESSAGE, said + CHATML_MESSAGE + "{% endif %}").replace(CHATML_HEADER, header)
    return LAST_REQUEST + parts


# Hybrid Qwen3: the thought of the current request is kept, an empty one is added to the last message.
QWEN3 = _chatml(
    THOUGHT + "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought or '' }}\n</think>\n\n"
    "{% endif %}" + SAID,
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '" + SWITCHED_OFF + "' }}{% endif %}",
)
# Qwen3.5: every message of the current request has a thought, if an empty one, and the prompt opens it.
QWEN3_5 = _chatml(
    THOUGHT + "{% if loop.index0 > ns.asked %}<think>\n{{ thought or '' }}\n</think>\n\n{% endif %}" + SAID,
    "{{ '" + SWITCHED_OFF + "' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}",
)
# QwQ: thoughts are dropped from every message but the prompt opens the next.
QWQ = _chatml(SAID, "<think>\n")
# A distill of DeepSeek-R1 knows tools from its base alone: replies open a list that is never closed the same way twice.
R1_DISTILL = (
    "{{ bos_token }}{% set ns = namespace(listed=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
    "<|end_of_sentence|>{% elif m.role == 'tool' %}{% if not ns.listed %}<|outputs|>{% endif %}"
    "{% set ns.listed = true %}<|output|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|><think>\n{% endif %}"
)
# GLM: no token closes a message; the header of the next one does.
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    + LAST_REQUEST
    + "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking }}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|assistant|>\n"
    + THOUGHT
    + "<think>{{ thought.strip() if thought and loop.index0 > ns.asked else '' }}</think>\n"
    "{{ m.content.split('</think>')[-1].strip() }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
# Harmony: a turn is several messages; what ended it is written as another token once something follows.
HARMONY = (
    "<|start|>system<|message|>Effort: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('give the thought apart') }}{% endif %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role in ('user', 'developer') %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPECIAL = (
    "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|outputs|>", "<|output|>", "<|observation|>", "[gMASK]",
    "<sop>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
ENDS = ("<|im_end|>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>", "Paris")  # the last is no special one


def thinking_tokenizer(template: str) -> tuple[Any, list[int]]:
    """The tokenizer, and the ids that its generation_config.json would name."""
    from tokenizers import AddedToken

    words = tokenizer(template)
    words.add_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL], special_tokens=True)
    return words, [words.encode(text, add_special_tokens=False)[0] for text in ENDS]
