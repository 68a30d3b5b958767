"""Stop strings: found from the newest tokens alone, and by the token that completes them."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.chat.format import ChatFormat
from tasks.rollouts.sampling import StopStrings
from tests import tiny


@cache
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


TEXTS = st.text(alphabet="ab é€😀\n", min_size=1, max_size=5)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=60), st.lists(TEXTS, min_size=1, max_size=3))
@example(list(range(60)), ["a"])
def test_a_turn_stops_with_the_first_token_after_which_its_text_holds_a_stop_string(
    token_ids: list[int], strings: list[str]
) -> None:
    """Held against decoding everything after each token; the texts are written so that hits are common."""
    written = token_ids + chat().encode(strings[0]) + token_ids[:5]
    stop = StopStrings(strings, chat())
    lengths = range(1, len(written) + 1)
    whole = (n for n in lengths if any(text in chat().decode(written[:n]) for text in strings))
    assert next((n for n in lengths if stop.found(written[:n])), None) == next(whole, None)


@pytest.mark.parametrize(("text", "stop"), [("€€€€😀", "😀"), ("日本語の文章です。", "。"), ("ab€€€€€€é。", "é。")])
def test_a_string_is_found_after_others_whose_characters_are_several_tokens(text: str, stop: str) -> None:
    """The last tokens that are looked at may begin within a character."""
    token_ids = chat().encode(text)
    found = [StopStrings([stop], chat()).found(token_ids[:n]) for n in range(1, len(token_ids) + 1)]
    assert found == [False] * (len(token_ids) - 1) + [True]


def test_a_string_longer_than_any_token_is_found_at_its_last_one() -> None:
    token_ids = chat().encode("zz</tool_call>yy")
    stop = StopStrings(["</tool_call>"], chat())
    found = [stop.found(token_ids[:n]) for n in range(1, len(token_ids) + 1)]
    first = found.index(True)
    assert "</tool_call>" in chat().decode(token_ids[: first + 1])
    assert "</tool_call>" not in chat().decode(token_ids[:first])
