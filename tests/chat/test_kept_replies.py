"""The ids of tool replies that are kept for when a reply comes again."""

from __future__ import annotations

import tracemalloc

import pytest

from tasks.chat.format import MAX_LONG_REPLIES, SHORT_REPLY, ChatFormat
from tests import tiny

LONG = 20_000  # characters, as `max_reply_characters` of params.yaml
MIB = 1 << 20


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> ChatFormat:
    """Its replies have a token per four characters; writing one takes no time."""
    found = ChatFormat(tiny.tokenizer(), source="test")
    monkeypatch.setattr(found, "replies", lambda texts: texts)
    monkeypatch.setattr(found, "_ids_after_a_turn", lambda texts, **what: [7] * (len(texts[0]) // 4))
    return found


def kept_bytes(chat: ChatFormat, num_replies: int, num_characters: int) -> int:
    tracemalloc.start()
    try:
        for number in range(num_replies):
            assert len(chat.reply_ids((f"{number:{num_characters}}",))) == num_characters // 4
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_replies_that_all_differ_take_a_bounded_memory(chat: ChatFormat):
    """40 KB each, text and ids: the last 256 take 10 MiB, and all of these would take 60."""
    assert kept_bytes(chat, 6 * MAX_LONG_REPLIES, LONG) < 12 * MIB


def test_a_short_reply_is_written_once_whatever_came_between(chat: ChatFormat):
    kept_bytes(chat, 2 * MAX_LONG_REPLIES, SHORT_REPLY)
    kept_bytes(chat, 2 * MAX_LONG_REPLIES, LONG)
    kept_bytes(chat, 2 * MAX_LONG_REPLIES, SHORT_REPLY)
    assert chat._short_replies.cache_info().misses == 2 * MAX_LONG_REPLIES


def test_whoever_changes_the_ids_changes_only_their_own(chat: ChatFormat):
    chat.reply_ids(("done",)).append(9)
    assert chat.reply_ids(("done",)) == [7]
