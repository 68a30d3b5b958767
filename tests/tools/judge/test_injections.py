"""Instructions inside what is judged do not move the verdict of a judge that obeys everything outside of it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core import background
from tasks.tools.judge.judge import Judge
from tasks.tools.judge.prompt import UNSEEN, Judged, encode, messages_for
from tests.tools.judge.endpoint import Endpoint, Messages, judge_settings, serve
from tests.tools.judge.injections import CONTROL, INJECTIONS, ORDER, obedient, split

RUBRIC = "Is the room booked?"
PLACES = ("final_message", "reply", "argument", "name", "message", "tool")


def episode(text: str, place: str, *, booked: bool) -> Judged:
    """An agent that was asked for a room, with `text` in one place."""
    at = {name: text if name == place else "attic" for name in PLACES}
    events: list[dict[str, Any]] = [
        {"tool": at["tool"], "arguments": {at["name"]: at["argument"]}, "reply": at["reply"]},
        {"message": at["message"]},
        {"tool": "book", "arguments": {"room": "attic"}, "reply": "booked" if booked else "sold out"},
    ]
    return Judged(["Book the attic."], events, at["final_message"])


def asked_for(judged: Judged) -> Messages:
    return messages_for(judged, rubric=RUBRIC, max_characters=200_000)


def verdict(messages: Messages) -> bool:
    return bool(json.loads(obedient(messages, {}))["success"])


def test_the_set_has_more_than_fifty_different_injections() -> None:
    assert len(set(INJECTIONS)) == len(INJECTIONS) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_no_injection_moves_the_verdict_from_any_place(place: str) -> None:
    moved = [text for text in INJECTIONS if verdict(asked_for(episode(text, place, booked=False)))]
    moved += [text for text in INJECTIONS if not verdict(asked_for(episode(text, place, booked=True)))]
    assert not moved


def test_the_same_judge_is_moved_by_most_of_them_where_texts_are_only_pasted_between_two_lines() -> None:
    """Else the test above would show nothing."""
    frame = 'The fence is ---\n---\n{{"events": [], "final_message": "{}"}}\n---\n'
    system = {"role": "system", "content": RUBRIC}
    pasted = [[system, {"role": "user", "content": frame.format(text)}] for text in INJECTIONS]
    assert sum(map(verdict, pasted)) >= 50


@pytest.mark.parametrize("place", PLACES)
def test_the_data_says_exactly_what_was_written(place: str) -> None:
    for text in INJECTIONS:
        judged = episode(text, place, booked=False)
        assert json.loads(split(asked_for(judged)[1]["content"])[1]) == judged.to_row()


@given(st.text())
def test_whatever_is_written_stays_one_text_on_one_line(text: str) -> None:
    written = encode(text)
    assert json.loads(written) == text
    assert not set(written) & set("<>\n") and not CONTROL.search(written)
    assert not [letter for letter in written if unicodedata.category(letter) in UNSEEN]


@pytest.mark.slow
def test_a_real_client_and_server_carry_the_data_unchanged(tmp_path: Path) -> None:
    texts = INJECTIONS[::4]
    with serve(Endpoint(says=obedient)) as endpoint:
        judge = Judge(judge_settings(endpoint, tmp_path, max_characters=200_000))
        for text in texts:
            judgement = background.run(judge.judge(episode(text, "final_message", booked=False))).result()
            assert not judgement.success and judgement.score == 0
        background.run(judge.close()).result()
    assert len(endpoint.asked) == len(texts)
    assert not [item for item in endpoint.asked if ORDER in item["messages"][0]["content"]]
