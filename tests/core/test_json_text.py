"""JSON is read and written by pydantic's parser for its speed; what it gives and refuses is what `json` does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.json_text import MAX_DEPTH, check_writable, json_row, parse

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["NaN", "-Infinity", "1e999", "\x00é😀"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
    max_leaves=20,
)


def read_by_json(text: str) -> Any:
    """ValueError where a number is not finite."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(number)
        return value

    return json.loads(text, parse_constant=finite, parse_float=finite)


@pytest.mark.slow
@given(VALUES)
def test_a_row_is_one_line_and_is_read_back_as_it_was(value: Any):
    row = json_row(value)
    assert b"\n" not in row
    assert repr(parse(row)) == repr(json.loads(row)) == repr(value)


@pytest.mark.slow
@given(VALUES, st.integers(0), st.text(max_size=2))
def test_a_text_is_read_and_refused_as_json_does(value: Any, place: int, noise: str):
    text = json.dumps(value, ensure_ascii=bool(place % 2))
    text = text[: place % (len(text) + 1)] + noise + text[place % (len(text) + 1) :]
    try:
        expected = repr(read_by_json(text))
    except ValueError:
        with pytest.raises(ValueError):
            parse(text)
    else:
        assert repr(parse(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[-Infinity]",
        "1e999",
        "[-1E+999]",
        "1.8e308",
        "9" * 310 + ".0",
        "9" * 5000,
        "[" * 65 + "]" * 65,
        "[" * 9999,
    ],
)
def test_what_no_file_can_contain_is_refused(text: str):
    with pytest.raises(ValueError):
        parse(text)


def test_an_object_with_a_name_twice_is_refused_where_names_must_be_unique():
    assert parse('{"a": 1, "a": 1000}') == {"a": 1000}  # as vLLM's servers read a model's call
    for text in ('{"a": 1, "a": 1000}', '[{"b": {"a": 1, "\\u0061": 2}}]'):
        assert parse(text)
        with pytest.raises(ValueError, match="the name 'a' twice"):
            parse(text, unique_names=True)
    assert parse('[{"a": "\\"a\\": 1"}, {"a": 2}]', unique_names=True) == [{"a": '"a": 1'}, {"a": 2}]
    for text in ("[" * 65 + "]" * 65, "[" * 9999, "NaN", "1e999"):
        with pytest.raises(ValueError):
            parse(text, unique_names=True)


def test_what_the_fast_parser_refuses_json_still_reads():
    assert parse('"\\ud800"') == "\ud800"  # as Python's; whoever writes it refuses it
    assert parse("[1e100, 1e0100]") == [1e100, 1e100]
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert parse('"é"'.encode("utf-16")) == "é"


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": -math.inf}, "\ud800", {"\udfff": 1}])
def test_a_row_with_what_no_file_can_contain_is_refused(value: Any):
    for write in (json_row, check_writable):
        with pytest.raises(ValueError):
            write(value)


def test_half_a_surrogate_pair_is_called_that():
    for value in ("\ud800", {"\udfff": 1}):
        with pytest.raises(ValueError, match="half a surrogate pair"):
            check_writable(value)
    with pytest.raises(ValueError, match="unknown type"):
        check_writable(object())


def test_words_that_look_like_numbers_are_written():
    assert json_row({"said": "NaN or Infinity", "n": 10**30}) == b'{"said":"NaN or Infinity","n":%d}' % 10**30
