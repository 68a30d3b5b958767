"""What a journal says all in all, entry by entry; no MLflow."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.tracking.history import ChampionHistory, anchors, summarise_journal
from tasks.tracking.journal import Entry


def summed_up(*events: tuple[str, dict[str, Any]]) -> ChampionHistory:
    entries = [Entry(str(number), kind, f"t{number}", "a@b", body) for number, (kind, body) in enumerate(events)]
    return summarise_journal(entries)


def promotions(*versions: int) -> list[tuple[str, dict[str, Any]]]:
    return [("promotion", {"champion": version, "weights": f"w{version}", "reason": "better"}) for version in versions]


def back_to(version: int, *undone: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return ("rollback", {"champion": version, "undone": list(undone), "weights": f"w{version}", "reason": "x", **more})


@pytest.mark.parametrize(
    ("events", "champion", "way_back"),
    [
        ([], None, []),
        (promotions(1, 2, 3), 3, [2, 1]),
        (promotions(1, 2, 1), 1, [2]),
        ([*promotions(1, 2, 3), back_to(2, 3)], 2, [1]),
        ([*promotions(1, 2, 3), back_to(2, 3), back_to(1, 2)], 1, []),
        ([*promotions(1, 2, 3), back_to(1, 2, 3)], 1, []),
        ([*promotions(1, 2, 3), back_to(2, 3), *promotions(4)], 4, [2, 1]),
        ([*promotions(1, 2), back_to(1, 2), back_to(2, 1)], 2, []),  # forward again, for a defect
        ([*promotions(1, 2), back_to(1, 2), back_to(2)], 2, [1]),  # forward again: 1 was not bad
        ([*promotions(1, 2, 3), back_to(1, 2, 3), back_to(3)], 3, [1]),
        ([*promotions(1, 2, 3), back_to(2, 3), *promotions(3)], 3, [2, 1]),
        ([*promotions(1, 2, 3, 1), back_to(3, 1)], 3, [2]),
        ([*promotions(1, 2), ("adoption", {"champion": 1})], 1, []),
        ([*promotions(1, 2), ("adoption", {"champion": None})], None, [2, 1]),
        ([*promotions(1, 2), ("adoption", {"champion": None, "anew": True}), *promotions(1)], 1, []),
    ],
)
def test_the_way_back_goes_along_the_champions_and_never_over_what_was_undone(
    events: list[tuple[str, dict[str, Any]]], champion: int | None, way_back: list[int]
):
    history = summed_up(*events)
    assert history.champion == champion
    assert list(history.way_back([1, 2, 3, 4].__contains__)) == way_back


def test_the_way_back_leads_past_versions_that_were_deleted():
    assert list(summed_up(*promotions(1, 2, 3, 4)).way_back([1, 2, 4].__contains__)) == [2, 1]


def test_what_a_rollback_goes_back_over_is_the_champion_and_those_between():
    history = summed_up(*promotions(1, 2, 3, 4))
    assert (history.gone_back_over(2), history.gone_back_over(3), history.gone_back_over(9)) == ([3, 4], [4], [4])


def test_a_rollback_that_is_taken_back_undoes_nothing_and_a_step_aside_does():
    """From 3 back to 1, and by name to 3 again; with 4 promoted meanwhile it is left as what was worse."""
    rolled_back = [*promotions(1, 2, 3), back_to(1, 2, 3)]
    assert summed_up(*rolled_back).gone_back_over(3) == []
    assert summed_up(*rolled_back).gone_back_over(3, defect=True) == [1]
    assert summed_up(*rolled_back, *promotions(4)).gone_back_over(3) == [4]
    again = summed_up(*rolled_back, back_to(3))
    assert again.gone_back_over(1) == [3] and again.set_aside.keys() == {"w2"}
    assert again.gone_back_over(2) == [3]  # 2 is undone too, but 3 is what turned out bad


def test_a_rollback_is_taken_back_in_two_steps():
    assert summed_up(*promotions(1, 2, 3), back_to(1, 2, 3), back_to(2)).gone_back_over(3) == []


def test_a_defect_is_one_until_somebody_promotes_it_all_the_same():
    defective = [*promotions(1, 2), back_to(1, 2, defect=True)]
    assert list(summed_up(*defective).defects) == [2]
    assert summed_up(*defective).set_aside["w2"].body["defect"]
    again = summed_up(*defective, *promotions(2))
    assert (again.defects, again.set_aside) == ({}, {})


def test_weights_that_were_rolled_back_are_known_though_the_registered_model_was_deleted():
    history = summed_up(*promotions(1, 2), back_to(1, 2), ("adoption", {"champion": None, "anew": True}))
    assert list(history.set_aside) == ["w2"]
    assert not history.was_champion(2)


def test_where_numbers_begin_again_no_version_was_champion_because_its_namesake_was():
    history = summed_up(*promotions(1, 2), ("adoption", {"champion": None, "instead_of": 2, "anew": True}))
    assert not history.was_champion(2)


def test_a_hold_lasts_until_it_is_released_and_through_an_adoption():
    hold = ("hold", {"reason": "incident"})
    held = summed_up(*promotions(1), hold, ("adoption", {"champion": None, "anew": True}))
    assert held.hold is not None and held.hold.body["reason"] == "incident"
    assert summed_up(hold, ("release", {"reason": "found"})).hold is None


def test_a_challenger_waits_until_it_is_promoted_or_withdrawn():
    waiting = ("waiting", {"version": 2})
    assert summed_up(*promotions(1), waiting).challenger == 2
    assert summed_up(*promotions(1), waiting, *promotions(3)).challenger == 2
    assert summed_up(*promotions(1), waiting, *promotions(2)).challenger is None
    assert summed_up(*promotions(1), waiting, ("withdrawal", {"version": 2})).challenger is None
    assert summed_up(*promotions(1), waiting, ("withdrawal", {"version": 7})).challenger == 2


def promotion(version: int, **body: Any) -> Entry:
    return entry("promotion", champion=version, **body)


def entry(kind: str, **body: Any) -> Entry:
    return Entry(f"{kind}{body}", kind, "2026-11-22T10:00:00.000Z", "ada@host", body)


FIRST = promotion(1, anchor=None)
CHEAPER = promotion(2, anchor=1)
BETTER = promotion(3, anchor=None)


def test_a_cheaper_champion_leaves_the_anchor_and_a_better_one_becomes_it():
    assert anchors([]) == []
    assert anchors([FIRST, CHEAPER]) == [1]
    assert anchors([FIRST, CHEAPER, BETTER]) == [1, 3]


def test_an_anchor_rolled_back_gives_way_to_the_one_before():
    back = entry("rollback", champion=2, instead_of=3, undone=[3])
    assert anchors([FIRST, CHEAPER, BETTER, back]) == [1]


def test_where_no_anchor_is_left_the_champion_is_it():
    """1 was rolled back and 2, which was cheaper, remains."""
    assert anchors([FIRST, CHEAPER, entry("rollback", champion=2, instead_of=1, undone=[1])]) == [2]


def test_what_took_the_place_of_a_deleted_anchor_keeps_it():
    """3 was deleted before 4 was promoted as cheaper, and 1 was the best that was left."""
    assert anchors([FIRST, CHEAPER, BETTER, promotion(4, anchor=1)]) == [3, 1]
    assert anchors([FIRST, CHEAPER, promotion(4, anchor=2)]) == [1, 2]


def test_what_a_person_adopts_is_the_anchor_only_where_there_is_none_or_numbers_begin_anew():
    assert anchors([FIRST, entry("adoption", champion=2)]) == [1]
    assert anchors([FIRST, entry("adoption", champion=2, anew=True)]) == [2]
    assert anchors([entry("waiting", version=4), FIRST]) == [1]
