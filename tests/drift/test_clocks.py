"""Today and now are found in the forms that people and servers write, and nothing else is taken for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tasks.drift import clocks
from tasks.drift.clocks import is_now, same_but_for_clocks, without_now

NOW = datetime(2026, 11, 8, 15, 4, 9, tzinfo=UTC)  # a Sunday


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Stopped:
            return cls.fromtimestamp(NOW.timestamp(), tz)

    monkeypatch.setattr(clocks, "datetime", Stopped)


@pytest.mark.parametrize(
    ("text", "blanked"),
    [
        ("Today is 2026-11-08.", "Today is ⟨now⟩."),
        ("2026-11-08T15:04:09.123+00:00", "⟨now⟩+⟨now⟩"),
        ("run_2026-11-08_15-04.log", "run_⟨now⟩.log"),
        ("backup-2026-11-08T1504.tar", "backup-⟨now⟩.tar"),
        ("2026-11-08 15h04", "⟨now⟩"),
        ("[08/Nov/2026:15:04:09 +0000]", "[⟨now⟩ +0000]"),
        ("Nov  8 15:04:09 host app", "⟨now⟩ host app"),
        ("2026-11-08-7 of 9", "⟨now⟩-7 of 9"),
        ("2026/11/08", "⟨now⟩"),
        ("8.11.2026", "⟨now⟩"),
        ("08/11/2026", "⟨now⟩"),
        ("11/8/2026", "⟨now⟩"),
        ("log-20261108.txt", "log-⟨now⟩.txt"),
        ("20261108T150409Z", "⟨now⟩Z"),
        ("8 November 2026", "⟨now⟩"),
        ("November 8, 2026", "⟨now⟩"),
        ("Nov 8th, 2026", "⟨now⟩"),
        ("08-Nov-2026", "⟨now⟩"),
        ("Sun, 08 Nov 2026 15:04:09 GMT", "⟨now⟩ ⟨now⟩ GMT"),
        ("Sun Nov  8 15:04:09 UTC 2026", "⟨now⟩"),
        ("2026-312", "⟨now⟩"),
        ("Sunday", "⟨now⟩"),
        ("Sun", "⟨now⟩"),
        ("It is 15:04.", "It is ⟨now⟩."),
        ("It is 15:04:09.", "It is ⟨now⟩."),
        ("3:04 PM", "⟨now⟩"),
        ("03:04:09 p.m.", "⟨now⟩"),
    ],
)
def test_a_date_of_today_and_a_time_of_now_are_blanked(text: str, blanked: str):
    assert without_now(text) == blanked


def test_a_day_early_or_late_is_today_and_two_are_not():
    assert [without_now(f"2026-11-0{day}") for day in (7, 9)] == ["⟨now⟩"] * 2
    assert [without_now(text) for text in ("2026-11-06", "2026-11-10")] == ["2026-11-06", "2026-11-10"]


def test_five_minutes_early_or_late_are_now_and_six_are_not():
    assert [without_now(text) for text in ("14:59", "15:09")] == ["⟨now⟩"] * 2
    assert [without_now(text) for text in ("14:58", "15:10")] == ["14:58", "15:10"]


def test_any_time_beside_todays_date_is_a_clocks_in_another_zone():
    assert without_now("2026-11-09 00:04 in Tokyo") == "⟨now⟩ ⟨now⟩ in Tokyo"


@pytest.mark.parametrize(
    "text",
    ["3:04 AM", "15:04:09 AM", "115:04", "202611080", "12026-11-08", "Sun and rain", "Novembers 8, 2026", "2026"],
)
def test_what_only_resembles_them_stays(text: str):
    assert without_now(text) == text


def test_a_number_is_now_as_seconds_milliseconds_or_a_date():
    assert [is_now(20261108), is_now(20261110), is_now(15), is_now(1.5)] == [True, False, False, False]


def test_a_mark_equals_a_date_or_time_and_no_other_words():
    assert same_but_for_clocks("open until ⟨now⟩", "open until 17:00")
    assert same_but_for_clocks("from ⟨now⟩ to 17:00", "from 09:00 to ⟨now⟩")
    assert not same_but_for_clocks("open until ⟨now⟩", "closed until 17:00")
    assert not same_but_for_clocks("open until 18:00", "open until 17:00")


@pytest.mark.parametrize("form", [*("%Y-%m-%d", "%d %B %Y", "%b %d, %Y", "%a, %d %b %Y", "%d.%m.%Y", "%H:%M", "%A")])
def test_what_a_clock_writes_on_two_days_is_the_same(form: str, monkeypatch: pytest.MonkeyPatch):
    first = without_now(f"Now: {NOW:{form}}")
    later = NOW + timedelta(days=23, hours=5)
    monkeypatch.setattr(f"{__name__}.NOW", later)
    assert same_but_for_clocks(first, without_now(f"Now: {later:{form}}"))
