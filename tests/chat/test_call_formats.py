"""How each family writes calls: what is read from a message, what is written into one, and that no text does harm."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.hermes import HERMES
from tasks.chat.formats.llama import LLAMA
from tasks.chat.formats.recipe import RECIPE, instructions
from tasks.core.records import ToolCall
from tasks.core.tool_calls import call_text

FORMATS = (HERMES, LLAMA, RECIPE)
ADD, LIST = ToolCall(name="add", arguments={"amount": 3}), ToolCall(name="list_all", arguments={})
ADD_JSON = '{"name": "add", "parameters": {"amount": 3}}'
LIST_JSON = '{"name": "list_all", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (ADD_JSON, [ADD]),
        (f"\n {ADD_JSON}\n", [ADD]),
        (f"<|python_tag|>{ADD_JSON}", [ADD]),
        (f"I will add. <|python_tag|>{ADD_JSON}", [ADD]),
        (f"{ADD_JSON}; {LIST_JSON}", [ADD, LIST]),
        (f"{ADD_JSON}\n{LIST_JSON}", [ADD, LIST]),
        (f"[{ADD_JSON}, {LIST_JSON}]", [ADD, LIST]),
        ('{"type": "function", "name": "add", "arguments": {"amount": 3}}', [ADD]),
        ('{"name": "list_all"}', [LIST]),
        (ADD_JSON[:-1], [None]),  # cut
        (f"{ADD_JSON} and then?", [ADD, None]),
        (f"{ADD_JSON}; {{'name': 'add'}}", [ADD, None]),
        ('{"function": "add", "parameters": {"amount": 3}}', [None]),
        ('{"name": "add", "parameters": "amount=3"}', [None]),
        ('{"name": "add", "parameters": {"amount": NaN}}', [None]),
        ('<|python_tag|>add.call(amount="3")', [None]),
        ("<|python_tag|>", [None]),
        ("Booked as B12.", []),
        ("[1] says so.", []),
        ('{"price": 5}', []),  # an answer in JSON
    ],
)
def test_llama_calls(text: str, calls: list[ToolCall | None]) -> None:
    assert LLAMA.calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool>[{"name": "add", "arguments": {"amount": 3}}]</tool>', [ADD]),
        ('<tool>\n[{"name": "add", "args": {"amount": 3}}, {"name": "list_all", "args": {}}]\n</tool>', [ADD, LIST]),
        ('<tool>[{"name": "list_all"}]</tool> <tool>{"name": "add", "args": {"amount": 3}}</tool>', [LIST, ADD]),
        ('<tool>[{"name": "add", "args": {"amount": 3}}]</tool><TASK_FINISHED>', [ADD]),
        ('<tool>[{"name": "add", "args": 3}, {"name": "list_all"}]</tool>', [None, LIST]),
        ("<tool>add(amount=3)</tool>", [None]),
        ("<tool>[]</tool>", [None]),
        ("<tool></tool>", [None]),
        ('<tool>[{"name": "list_all"}]</tool> <tool>[{"na', [LIST, None]),
        ("Booked as B12. <TASK_FINISHED>", []),
        ("Booked as B12.", []),
    ],
)  # fmt: skip
def test_recipe_calls(text: str, calls: list[ToolCall | None]) -> None:
    assert RECIPE.calls(text) == calls


def test_the_answer_of_a_closing_message_is_without_the_mark_that_ends_it() -> None:
    assert RECIPE.closing("Booked as B12.") == "Booked as B12.\n<TASK_FINISHED>"
    assert RECIPE.answer("Booked as B12.\n<TASK_FINISHED>") == RECIPE.answer("Booked as B12.") == "Booked as B12."
    for call_format in (HERMES, LLAMA):
        assert call_format.closing(" as is ") == call_format.answer(" as is ") == " as is "


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda item: item.name)
@pytest.mark.parametrize(
    "name", ["__import__('os').system('rm -rf /')", "{{ 7 * 7 }}", "../../etc/passwd", "a\nb", "<|im_end|>", "Größe"]
)
def test_a_hostile_name_comes_out_as_the_text_it_is(call_format: CallFormat, name: str) -> None:
    call = ToolCall(name=name, arguments={name: [name]})
    assert call_format.calls(call_format.text([call])) == [call]


PIECES = (
    "<tool_call>", "</tool_call>", "<tool>", "</tool>", "<TASK_FINISHED>", "<|python_tag|>", "{", "}", "[", "]", ";",
    '"name"', ": ", ", ", '"add"', '"parameters"', '"arguments"', '"args"', "NaN", "1e999", '"\\ud800"', "\\", "\n",
)  # fmt: skip
TEXTS = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
CALLS = st.builds(
    ToolCall,
    name=st.text(min_size=1) | st.sampled_from(PIECES),
    arguments=st.dictionaries(st.text() | st.sampled_from(PIECES), VALUES, max_size=4),
)


@given(text=TEXTS)
def test_no_text_raises_and_a_call_is_a_name_with_arguments(text: str) -> None:
    for call_format in FORMATS:
        for call in call_format.calls(text):
            assert call is None or ToolCall.model_validate(call.model_dump()) == call
        call_format.answer(text)


@given(calls=st.lists(CALLS, min_size=1, max_size=3))
def test_the_calls_that_were_written_are_read_again(calls: list[ToolCall]) -> None:
    for call_format in FORMATS:
        assert call_format.calls(call_format.text(calls)) == calls


@given(call=CALLS)
def test_a_stored_text_is_rewritten_for_each_format_and_stays_itself_in_hermes(call: ToolCall) -> None:
    stored = HERMES.text([call])
    assert HERMES.rewrite(stored) == stored
    for call_format in (LLAMA, RECIPE):
        assert call_format.calls(call_format.rewrite(stored)) == [call]


def test_plain_calls_are_the_bytes_that_templates_write() -> None:
    assert HERMES.text([ADD]) == call_text(ADD)
    assert HERMES.text([ADD, LIST]) == f"{call_text(ADD)}\n{call_text(LIST)}"
    assert LLAMA.text([ADD]) == ADD_JSON
    assert RECIPE.text([LIST]) == '<tool>[{"name": "list_all", "arguments": {}}]</tool>'
    assert RECIPE.rewrite("Booked as B12.") == "Booked as B12.\n<TASK_FINISHED>"
    assert LLAMA.rewrite("Booked as B12.") == "Booked as B12."


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, '[{"name": ' * 100_000])
def test_deep_nesting_is_malformed(deep: str) -> None:
    assert HERMES.calls(f"<tool_call>{deep}</tool_call>") == RECIPE.calls(f"<tool>{deep}</tool>") == [None]
    assert LLAMA.calls(f"<|python_tag|>{deep}") == [None]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda item: item.name)
@pytest.mark.parametrize(("depth", "is_read"), [(62, True), (64, False), (490, False)])
def test_a_call_is_nested_64_levels_at_most(call_format: CallFormat, depth: int, is_read: bool) -> None:
    """Deeper ones were read, and ended the stage that copied or wrote them, again on each rerun."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    call = ToolCall(name="add", arguments={"a": value})
    assert call_format.calls(call_format.text([call])) == ([call] if is_read else [None])


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda item: item.name)
@pytest.mark.parametrize("filler", [" ", "<tool_call>", "<tool>", "{", ";", "{}"])
def test_rambling_is_read_in_no_time(call_format: CallFormat, filler: str) -> None:
    """A pattern with white space around it once took a second for 1,600 spaces, and grew with their cube."""
    started = time.process_time()
    for opening in ("<tool_call>", "<tool>", "<|python_tag|>", "["):
        call_format.calls(opening + filler * (20_000 // len(filler)))
    assert time.process_time() - started < 2


def test_the_instructions_show_each_tool_and_a_call_that_parses() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("add", "größe")]
    lines = instructions(tools).splitlines()
    assert [json.loads(line) for line in lines if line.startswith("{")] == tools
    (shown,) = [line for line in lines if line.startswith("<tool>")]
    assert RECIPE.calls(shown) == [ToolCall(name="tool_name", arguments={"argument_name": "value"})]
    assert lines[-1].endswith("<TASK_FINISHED>")
