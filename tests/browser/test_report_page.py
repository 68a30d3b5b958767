"""The overview as a person meets it: opened from disk in a real browser, on a desk and a phone, by day and by night."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tasks.report.script_files import address_of
from tests.browser.conftest import Tab, find_chromium
from tests.measurement.hostile import HANDLER, SCRIPT

pytestmark = pytest.mark.browser

SHAPES = {
    "desk": {"width": 1280, "height": 900, "color_scheme": "light"},
    "desk at night": {"width": 1280, "height": 900, "color_scheme": "dark"},
    "phone": {"width": 390, "height": 844, "color_scheme": "light"},
    "phone at night": {"width": 390, "height": 844, "color_scheme": "dark"},
}
Open = Callable[..., Tab]
BROKEN_WORDS = """() => [...document.querySelectorAll('th[scope=row]:not(:has(wbr))')].flatMap(name =>
  [...name.textContent.matchAll(/\\S+/g)].filter(({ 0: word, index }) => {
    const range = document.createRange();
    range.setStart(name.firstChild, index);
    range.setEnd(name.firstChild, index + word.length);
    return new Set([...range.getClientRects()].map(line => line.top)).size > 1 && !word.includes('-');
  }).map(([word]) => word))"""


@pytest.mark.parametrize("shape", SHAPES)
def test_the_report_opens_from_disk_without_complaint_or_request_off_its_folder(
    report: Path, open_page: Open, shape: str
):
    tab = open_page(report, **SHAPES[shape])
    assert tab.complaints == []
    assert tab.requests
    assert all(address.startswith(report.parent.as_uri() + "/") for address in tab.requests)
    assert tab.page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


@pytest.mark.parametrize(
    ("shape", "picture"),
    [
        ("desk", "progress.png"),
        ("desk at night", "progress-dark.png"),
        ("phone", "progress-narrow.png"),
        ("phone at night", "progress-narrow-dark.png"),
    ],
)
def test_the_chart_fits_the_screen_and_the_hour(report: Path, open_page: Open, shape: str, picture: str):
    tab = open_page(report, **SHAPES[shape])
    assert tab.page.evaluate("document.images[0].currentSrc") == (
        report.parent / address_of(report.parent / picture)
    ).as_uri().replace("%3F", "?")


def test_the_page_is_dark_when_the_reader_asks_for_dark(report: Path, open_page: Open):
    brightness = {
        scheme: open_page(report, color_scheme=scheme).page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
        )
        for scheme in ("light", "dark")
    }
    assert brightness["dark"] < 100 < 600 < brightness["light"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_overview_passes_the_accessibility_check(report: Path, open_page: Open, shape: str):
    assert open_page(report, **SHAPES[shape], without_policy=True).violations() == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_sideways_on_small_screens(hostile_report: Path, open_page: Open, width: int):
    page = open_page(hostile_report, width=width, height=800).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_column_of_numbers_presses_the_names_beside_it_into_a_letter_a_line(
    report: Path, open_page: Open, width: int
):
    page = open_page(report, width=width, height=800).page
    widths = page.evaluate("[...document.querySelectorAll('th[scope=row]')].map(name => name.offsetWidth)")
    assert len(widths) > 10 and min(widths) >= 104  # pixels
    assert page.evaluate(BROKEN_WORDS) == []
    reached = page.evaluate(
        "[...document.querySelectorAll('.panel:has(table)')].map(panel => [panel.tabIndex, panel.ariaLabel])"
    )
    assert all(order == 0 and label for order, label in reached)  # whoever scrolls with keys can scroll each table


def test_a_count_of_the_overview_opens_the_list_it_counts(report: Path, open_page: Open):
    page = open_page(report).page
    count = page.locator(".doors b").first.inner_text()
    page.locator(".doors a").first.click()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#status").inner_text() == f"{count} of 110 problems"
    assert page.locator("input[name=change]:checked").get_attribute("value") == "improved"


def test_headings_are_in_order_and_every_picture_has_words(report: Path, open_page: Open):
    page = open_page(report).page
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(heading => +heading.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.evaluate("[...document.images].every(image => image.alt.length > 20)")


def test_the_pages_policy_would_stop_a_script_that_slipped_through(report: Path, open_page: Open, tmp_path: Path):
    folder = shutil.copytree(report.parent, tmp_path / "report")
    page = (folder / "index.html").read_text(encoding="utf-8").replace("<main>", f"<main>{SCRIPT}{HANDLER}", 1)
    (folder / "index.html").write_text(page, encoding="utf-8")
    tab = open_page(folder / "index.html")
    assert tab.page.title() != "owned"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_a_machine_without_chromium_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="apt-get install -y chromium"):
        find_chromium()
