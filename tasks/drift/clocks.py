"""Finds what a clock wrote in a text: today's date in the forms that people and servers write, and the time of now.

Such a part is blanked before replies of two days are compared, and only that part. A day early or late counts as today,
since a server may be in another time zone. A time counts within minutes of now in UTC or here; beside today's date, any
does.
"""

from __future__ import annotations

import re
import time
from calendar import day_abbr, day_name, month_abbr, month_name
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache

MARK = "⟨now⟩"
DAY_SECONDS = 86_400
MINUTES_OFF = 5  # between a reply and the look at it

# A time of day that belongs to the date before it: 2026-11-28T0900, 2026-11-28_09-00, 28/Nov/2026:09:00:00
WITH_TIME = r"(?:[T_-]\d\d[-h.:]?\d\d(?:[-.:]?\d\d(?:[.,]\d+)?)?|:\d\d:\d\d:\d\d| \d\dh\d\d)?"
# Patterns, in which the parts of a date are written as for `strftime`; numbers with or without a zero before them.
DATES = (
    r"%a %b +%d [\d:]{5,8} (?:[A-Z]{3,4} )?%Y",  # Sat Nov 28 11:32:58 2026, as `date` and asctime write it
    r"(?:%a, )?%d[ -/]%b[ -/]%Y" + WITH_TIME,  # Sat, 28 Nov 2026, as in HTTP and mail; 28/Nov/2026:09:00:00 in logs
    r"%b +%d [\d:]{5,8}",  # Nov 28 11:32:58, as in syslog
    r"%d\.? %B,? %Y",  # 28 November 2026
    r"(?:%B|%b) %d(?:st|nd|rd|th)?,? %Y",  # November 28, 2026
    r"%Y-%m-%d" + WITH_TIME,
    r"%Y/%m/%d",
    r"%Y%m%d" + WITH_TIME,
    r"%Y-%j",  # 2026-332, the day of the year
    r"%d\.%m\.%Y",
    r"%d/%m/%Y",
    r"%m/%d/%Y",
)
WEEKDAYS = (r"%A", r"^%a$")
TIMES = (r"%I:%M(?::\d\d)?\s?%p", r"%H:%M(?::\d\d(?:[.,]\d+)?)?(?!:\d|\s?[AaPp]\.?[Mm])")

Parts = Mapping[str, str]  # of a moment or of any: what matches `%Y`, `%m`, …
ANY: Parts = {
    "%Y": r"\d{4}",
    "%m": r"\d?\d",
    "%d": r"\d?\d",
    "%j": r"\d{3}",
    "%B": "|".join(month_name[1:]),
    "%b": "|".join(month_abbr[1:]),
    "%A": "|".join(day_name),
    "%a": "|".join(day_abbr),
    "%H": r"\d?\d",
    "%I": r"\d?\d",
    "%M": r"\d\d",
    "%p": r"[AaPp]\.?[Mm]\.?",
}


def without_now(text: str) -> str:
    """The text with a mark for each date of today, its weekday and each time of now."""
    dates, weekdays, times = _patterns_of(datetime.now(UTC).replace(second=0, microsecond=0))
    blanked, num_dates = dates.subn(MARK, text)
    return (ANY_TIME if num_dates else times).sub(MARK, weekdays.sub(MARK, blanked))


def is_now(number: float) -> bool:
    """Whether a number is today ± 1 day: (milli)seconds since 1970, or 20261128."""
    is_recent = any(abs(number - unit * int(time.time())) < unit * DAY_SECONDS for unit in (1, 1000))
    return is_recent or without_now(str(number)) == MARK


def same_but_for_clocks(one: str, other: str) -> bool:
    """Whether two texts of `without_now` differ only where one has the mark and the other a date or time.

    What is now on one day is not on another: `open until 17:00` has the mark at 16:58 alone.
    """
    parts, others = ANY_CLOCK.split(one), ANY_CLOCK.split(other)
    return len(parts) == len(others) and all(
        part == counterpart or MARK in (part, counterpart) for part, counterpart in zip(parts, others, strict=True)
    )


@lru_cache(maxsize=2)
def _patterns_of(minute: datetime) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Of the dates, weekdays and times that count as now."""
    days = [_parts_of(minute + timedelta(days=number)) for number in (-1, 0, 1)]
    offsets = [timedelta(minutes=number) for number in range(-MINUTES_OFF, MINUTES_OFF + 1)]
    minutes = [_parts_of(here + offset) for here in (minute, minute.astimezone()) for offset in offsets]
    return _pattern(DATES, days), _pattern(WEEKDAYS, days), _pattern(TIMES, minutes)


def _parts_of(moment: datetime) -> Parts:
    names = {part: f"{moment:{part}}" for part in ("%Y", "%j", "%B", "%b", "%A", "%a", "%M")}
    numbers = {"%m": moment.month, "%d": moment.day, "%H": moment.hour, "%I": moment.hour % 12 or 12}
    half = "[Aa]" if moment.hour < 12 else "[Pp]"
    return {**names, **{part: f"0?{number}" for part, number in numbers.items()}, "%p": rf"{half}\.?[Mm]\.?"}


def _pattern(forms: Sequence[str], moments: Sequence[Parts]) -> re.Pattern[str]:
    written = [_written(form, parts) for form in forms for parts in moments]
    return re.compile(rf"(?<![\d:.])(?:{'|'.join(written)})(?!\d)")


def _written(form: str, parts: Parts) -> str:
    """Names end where letters do: May is not the beginning of Maybe."""
    return re.sub("%[A-Za-z]", lambda part: _part(part[0], parts[part[0]]), form)


def _part(name: str, pattern: str) -> str:
    return rf"\b(?:{pattern})\b" if name in ("%A", "%a", "%B", "%b") else pattern


ANY_TIME = _pattern(TIMES, [ANY])
ANY_CLOCK = re.compile(f"({MARK}|{_pattern((*DATES, *WEEKDAYS, *TIMES), [ANY]).pattern})")
