"""The anchor by the journal: who becomes it, who leaves it, and what a rollback or an adoption makes of it."""

from __future__ import annotations

from typing import Any

from tasks.tracking.history import anchor_event, anchors
from tasks.tracking.journal import Entry


def promotion(version: int, **body: Any) -> Entry:
    return entry("promotion", champion=version, **body)


def entry(kind: str, **body: Any) -> Entry:
    return Entry(f"{kind}{body}", kind, "2026-11-22T10:00:00.000Z", "ada@host", body)


FIRST = promotion(1, **anchor_event(None))
CHEAPER = promotion(2, **anchor_event(1))
BETTER = promotion(3, **anchor_event(None))


def test_a_cheaper_champion_leaves_the_anchor_and_a_better_one_becomes_it():
    assert anchors([]) == []
    assert anchors([FIRST, CHEAPER]) == [1]
    assert anchors([FIRST, CHEAPER, BETTER]) == [1, 3]


def test_an_anchor_rolled_back_gives_way_to_the_one_before():
    back = entry("rollback", champion=2, instead_of=3, undone=[3])
    assert anchors([FIRST, CHEAPER, BETTER, back]) == [1]
    assert anchors([FIRST, BETTER, entry("rollback", champion=1, instead_of=3)]) == [1]  # before `undone` was kept


def test_where_no_anchor_is_left_the_champion_is_it():
    """1 was rolled back and 2, which was cheaper, remains."""
    assert anchors([FIRST, CHEAPER, entry("rollback", champion=2, instead_of=1, undone=[1])]) == [2]


def test_what_took_the_place_of_a_deleted_anchor_keeps_it():
    """3 was deleted before 4 was promoted as cheaper, and 1 was the best that was left."""
    assert anchors([FIRST, CHEAPER, BETTER, promotion(4, **anchor_event(1))]) == [3, 1]
    assert anchors([FIRST, CHEAPER, promotion(4, **anchor_event(2))]) == [1, 2]


def test_promotions_from_before_anchors_were_kept_leave_the_last_champion():
    assert anchors([promotion(1), promotion(2), promotion(3, **anchor_event(2))]) == [2]


def test_what_a_person_adopts_is_the_anchor_only_where_there_is_none_or_numbers_begin_anew():
    assert anchors([FIRST, entry("adoption", champion=2)]) == [1]
    assert anchors([FIRST, entry("adoption", champion=2, anew=True)]) == [2]
    assert anchors([entry("waiting", version=4), FIRST]) == [1]
