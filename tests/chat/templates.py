"""Chat templates of the families, reduced to how they differ, and tokenizers that hold them.

Written for these tests: they raise, trim, drop and move where the published ones do, in fewer words. Where TRL is
installed, the published ones it brings are looked at as well (`published`).
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHATML_MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES_TOOLS = (
    "{% if messages[0].role == 'system' or tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}"
    "{% if tools %}{{ '\\n' }}<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>\n"
    'Call as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>{% endif %}<|im_end|>\n{% endif %}'
)
HERMES_REPLY = (
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
HERMES_CALLS = (
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
)
QWEN = (
    HERMES_TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}" + HERMES_REPLY + "{% elif m.tool_calls %}"
    + HERMES_CALLS + "{% elif not (loop.first and m.role == 'system') %}" + CHATML_MESSAGE + "{% endif %}{% endfor %}"
    + CHATML_HEADER
)  # fmt: skip
# A reply may follow calls alone, and those have a field of their own.
HERMES_STRICT = QWEN.replace(
    "{% if m.role == 'tool' %}",
    "{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'assistant' "
    "and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a reply follows a call') }}"
    "{% elif m.role == 'tool' %}",
)
HERMES_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
XML_CALLS = QWEN.replace(
    HERMES_CALL,
    "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>",
)
# Qwen3-Coder's own: text as it is, lists and objects as JSON, the rest as Python writes it.
CODER_CALLS = XML_CALLS.replace(
    "value if value is string else value | tojson",
    "value | tojson if value is mapping or (value is sequence and value is not string) else value | string",
)
GLM_CALLS = QWEN.replace(
    HERMES_CALL,
    "<tool_call>{{ c.function.name }}{{ '\n' }}{% for key, value in c.function.arguments | items %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>",
)
GLM_ONE_LINE = (
    GLM_CALLS.replace("{{ '\n' }}{% for key", "{% for key")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>")
)
# Arguments as escapes, as some tools that rewrite templates have it.
ESCAPED = QWEN.replace("c.function.arguments | tojson", "c.function.arguments | tojson(ensure_ascii=True)")
UNKNOWN_CALLS = QWEN.replace(HERMES_CALL, "!{{ c.function.name }}!").replace("<tool_call>", "<call>")
LLAMA_HEAD = "<|start_header_id|>{} <|end_header_id|>\n\n".replace(" ", "")
LLAMA = (
    "{{ bos_token }}{% set day = strftime_now('%d %b %Y') %}"
    + LLAMA_HEAD.format("system")
    + "{% if tools is not none %}Environment: ipython\n{% endif %}Today: {{ day }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>{% if tools is not none %}"
    + LLAMA_HEAD.format("user")
    + 'Respond as {"name": function, "parameters": its arguments}.\n\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ messages[0].content | trim }}<|eot_id|>"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('tool', 'ipython') %}"
    + LLAMA_HEAD.format("ipython")
    + "{{ m.content | tojson }}<|eot_id|>{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    + LLAMA_HEAD.format("assistant")
    + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>{% else %}'
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + LLAMA_HEAD.format("assistant") + "{% endif %}"
)
# Tools and the system message stand with the latest user message; replies carry an id of nine characters.
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{% if system %}{% set messages = messages[1:] %}{% endif %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if system and loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    '{% if c.id | length != 9 %}{{ raise_exception(\'nine characters\') }}{% endif %}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('nine characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Since 2025: tools come first, replies carry no id, every call has a mark of its own.
MINISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
    "{% endif %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
# Llama's Python calls: shown without quotes, but described.
PYTHONIC = LLAMA.replace(
    'Respond as {"name": function, "parameters": its arguments}.', "Respond as [func_name1(params_name1=value, ...)]."
).replace(
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "[{{ c.name }}({% for key, value in c.arguments | items %}{{ key }}={{ value }}{{ ', ' if not loop.last }}"
    "{% endfor %})]",
)
# Roles other than these three are dropped without a word, and a finished text ends with one token more.
PHI = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "<|user|>", "<|system|>",
    "<|assistant|>", "<|end|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def tokenizer(template: str) -> Any:
    """Bytes, and the tokens that structure conversations; as in Qwen's, those of tool calls are added, not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def published(name: str) -> str:
    """A template as its makers published it, from the files that TRL brings; skips the test without them."""
    package = find_spec("trl")
    folder = Path(next(iter(package.submodule_search_locations or [""]), "")) if package else Path()
    file = folder / "chat_templates" / f"{name}.jinja"
    if not re.fullmatch(r"[a-z0-9_]+", name) or not file.is_file():
        pytest.skip(f"TRL is not here, or without {name}.jinja")
    return file.read_text(encoding="utf-8")
