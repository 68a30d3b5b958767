"""Calls as the families' own templates write them are what we write, and are read back with the types of the schemas.

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
from tasks.chat.formats.qwen_xml import QWEN_XML, QWEN_XML_PYTHON
from tasks.chat.template import USER, ChatTemplate
from tasks.core.records import ToolCall
from tests.chat import templates

PUBLISHED = {
    "qwen2_5": HERMES, "qwen3": HERMES, "qwen3_instruct_2507": HERMES, "qwen3_vl": HERMES, "qwen3_6": QWEN_XML,
    "qwen3_8": QWEN_XML, "qwen3_5_nothink": QWEN_XML_PYTHON, "qwen3_5_think": QWEN_XML_PYTHON,
    "nemotron_3_nano": QWEN_XML_PYTHON, "nemotron_3_super": QWEN_XML_PYTHON, "nemotron_3_ultra": QWEN_XML_PYTHON,
    "nemotron_3_5_lightning": QWEN_XML_PYTHON, "glm4moe": GLM_XML, "gptoss": HARMONY, "llama3_1": LLAMA,
    "llama3_2": LLAMA, "lfm2_2_5": LFM_PYTHONIC, "lfm2_2_5_v2": LFM_PYTHONIC, "lfm2_2_5_vl": LFM_PYTHONIC,
    "lfm2_v2": LFM_PYTHONIC,
}  # fmt: skip
REDUCED = {
    "XML_CALLS": QWEN_XML, "CODER_CALLS": QWEN_XML_PYTHON, "GLM_CALLS": GLM_XML, "GLM_ONE_LINE": GLM_XML_ONE_LINE,
    "MINISTRAL": MISTRAL, "PYTHONIC": PYTHONIC, "ESCAPED": HERMES.escaping(),
}  # fmt: skip
KINDS = {
    "text": "string", "code": "string", "empty": "string", "count": "integer", "share": "number", "paid": "boolean",
    "nothing": "null", "seats": "array", "place": "object",
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "text": "Zürich – 東京 “ok”\nnext line ", "code": "007", "empty": "", "count": -3, "share": 0.25, "paid": True,
    "nothing": None, "seats": [1, 2], "place": {"a b": {"c": [True, None]}},
}  # fmt: skip
QUOTED = {"text": 'It\'s "5 < 6" \\ </b>\n\n', "code": " true "}
TYPED: dict[str, Any] = {
    "code": "None", "count": 10**20, "share": 1e300, "paid": False, "seats": [True, None, "it's", {"a": "ü\u2028"}],
    "place": {"a": "<b>\\", "b": [], "c": {}},
}  # fmt: skip
SAMPLES = [ARGUMENTS, QUOTED, TYPED, {}]
# LFM 2.5 writes text without escapes, and a list as Python does: {argument: what we write, what it does}.
WRITTEN_OTHERWISE = {
    "text": (r"'a\nb'", "'a\nb'"), "code": (r"'it\'s'", "'it's'"), "seats": ('[true, "a"]', "[True, 'a']"),
}  # fmt: skip
EXCEPTIONS = ("lfm2_2_5", "lfm2_2_5_v2")  # as decision 0040 says
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


def samples_of(name: str) -> list[dict[str, Any]]:
    """All but an exception's: those are read as they were where they contain none of its differences."""
    if name not in EXCEPTIONS:
        return SAMPLES
    plain = {key: value for sample in SAMPLES for key, value in sample.items() if key not in WRITTEN_OTHERWISE}
    return [{**plain, "text": "Zürich – 東京 “ok”", "code": "007", "seats": [1, 2.5]}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PUBLISHED, *REDUCED])
def test_calls_are_written_as_the_template_writes_them_and_read_as_they_were(name: str) -> None:
    """Letter for letter; only text that spells a format's own tags differs, see test_call_formats.py."""
    text = getattr(templates, name) if name in REDUCED else templates.published(name)
    template = ChatTemplate(templates.tokenizer(text), source=name)
    assert template.call_format == {**PUBLISHED, **REDUCED}[name]
    for arguments in samples_of(name) if name != "PYTHONIC" else []:  # its template shows values without quotes
        call, rendered = ToolCall(name="book", arguments=arguments), render(template, arguments)
        assert template.call_format.text([call]) in rendered
        assert template.call_format.calls(rendered, [TOOL]) == [call]


@pytest.mark.parametrize("key", WRITTEN_OTHERWISE)
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_differs_where_the_template_could_not_be_read_or_is_read_alike(name: str, key: str) -> None:
    template = ChatTemplate(templates.tokenizer(templates.published(name)), source=name)
    arguments = {key: {"text": "a\nb", "code": "it's", "seats": [True, "a"]}[key]}
    call, rendered = ToolCall(name="book", arguments=arguments), render(template, arguments)
    ours, theirs = WRITTEN_OTHERWISE[key]
    assert f"{key}={ours})" in template.call_format.text([call]) and f"{key}={theirs})" in rendered
    assert template.call_format.calls(rendered, [TOOL]) == ([None] if key == "code" else [call])
    assert template.call_format.calls(template.call_format.text([call]), [TOOL]) == [call]


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
