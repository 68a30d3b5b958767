"""Calls as the families' own templates write them are read back, with the types of the tools' schemas.

The templates are the published ones that TRL brings; where none is installed the family is reduced in `templates.py`.
Mistral's text is that of its own tokenizer package.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.chat.formats.glm_xml import GLM_XML, GLM_XML_ONE_LINE
from tasks.chat.formats.harmony import HARMONY
from tasks.chat.formats.hermes import HERMES
from tasks.chat.formats.llama import LLAMA
from tasks.chat.formats.mistral import MISTRAL, MISTRAL_LIST
from tasks.chat.formats.pythonic import LFM_PYTHONIC, PYTHONIC
from tasks.chat.formats.qwen_xml import QWEN_XML
from tasks.chat.template import USER, ChatTemplate
from tasks.core.records import ToolCall
from tests.chat import templates

PUBLISHED = {
    "qwen2_5": HERMES, "qwen3": HERMES, "qwen3_instruct_2507": HERMES, "qwen3_vl": HERMES, "qwen3_5_nothink": QWEN_XML,
    "qwen3_5_think": QWEN_XML, "qwen3_6": QWEN_XML, "qwen3_8": QWEN_XML, "nemotron_3_nano": QWEN_XML,
    "nemotron_3_super": QWEN_XML, "glm4moe": GLM_XML, "gptoss": HARMONY, "llama3_1": LLAMA, "llama3_2": LLAMA,
    "lfm2_2_5": LFM_PYTHONIC, "lfm2_2_5_v2": LFM_PYTHONIC, "lfm2_v2": LFM_PYTHONIC,
}  # fmt: skip
REDUCED = {
    "XML_CALLS": QWEN_XML, "GLM_CALLS": GLM_XML, "GLM_ONE_LINE": GLM_XML_ONE_LINE, "MINISTRAL": MISTRAL,
    "PYTHONIC": PYTHONIC, "ESCAPED": HERMES.escaping(),
}  # fmt: skip
KINDS = {
    "text": "string", "code": "string", "empty": "string", "count": "integer", "share": "number", "paid": "boolean",
    "nothing": "null", "seats": "array", "place": "object",
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "text": "Zürich – 東京 “ok”\nnext line ", "code": "007", "empty": "", "count": -3, "share": 0.25, "paid": True,
    "nothing": None, "seats": [1, 2], "place": {"a b": {"c": [True, None]}},
}  # fmt: skip
QUOTED = {"text": 'It\'s "5 < 6" \\ </b>\n\n', "code": " true "}  # LFM's template writes text without escapes
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": name} for name, kind in KINDS.items()},
            "required": [],
        },
    },
}


def render(template: ChatTemplate, arguments: dict[str, Any]) -> str:
    """What the template writes for a call, without what follows the request."""
    call = {"id": "nine0char", "type": "function", "function": {"name": "book", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    text, prompt = template.render([USER, message], tools=[TOOL]), template.render([USER], tools=[TOOL], continues=True)
    written = text[len(prompt) :] if text.startswith(prompt) else text.rpartition(USER["content"])[2]
    return written.removesuffix(template.after_assistant)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_writes_calls_that_are_read_as_they_were(name: str) -> None:
    template = ChatTemplate(templates.tokenizer(templates.published(name)), source=name)
    assert template.call_format == PUBLISHED[name]
    samples = [ARGUMENTS, {}] if template.call_format is LFM_PYTHONIC else [ARGUMENTS, QUOTED, {}]
    for arguments in samples:
        call = ToolCall(name="book", arguments=arguments)
        assert template.call_format.calls(render(template, arguments), [TOOL]) == [call]


@pytest.mark.parametrize("name", REDUCED)
def test_so_does_a_reduced_one(name: str) -> None:
    template = ChatTemplate(templates.tokenizer(getattr(templates, name)), source=name)
    assert template.call_format == REDUCED[name]
    for arguments in [] if name == "PYTHONIC" else [ARGUMENTS, QUOTED, {}]:  # which shows values without quotes
        call = ToolCall(name="book", arguments=arguments)
        assert template.call_format.calls(render(template, arguments), [TOOL]) == [call]


@pytest.mark.parametrize("version", ["V3", "V7", "V11", "V13"])
def test_mistrals_own_tokenizers_write_calls_that_are_read_as_they_were(version: str) -> None:
    """One call, and two in a message; each version with the marks of its own, over a tokenizer of whole texts."""
    instruct = pytest.importorskip("mistral_common.tokens.tokenizers.instruct")
    messages = pytest.importorskip("mistral_common.protocol.instruct.messages")
    kind = getattr(instruct, f"InstructTokenizer{version}")
    writer = kind.__new__(kind)
    writer.TOOL_CALLS, writer.ARGS, writer.CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    writer.tokenizer = SimpleNamespace(encode=lambda text, *, bos, eos: [text])
    for samples in ([ARGUMENTS], [QUOTED, {}]):
        function = [{"name": "book", "arguments": json.dumps(sample, ensure_ascii=False)} for sample in samples]
        asked = messages.AssistantMessage(tool_calls=[{"id": "nine0char", "function": item} for item in function])
        text = "".join(writer._encode_tool_calls_in_assistant_message(asked))
        calls = [ToolCall(name="book", arguments=sample) for sample in samples]
        assert MISTRAL.calls(text) == MISTRAL_LIST.calls(text) == calls
        if version == "V13":
            assert MISTRAL.text(calls) == text
