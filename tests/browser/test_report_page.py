"""The report as a person meets it: opened from disk in a real browser, on a desk and a phone, by day and by night."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.browser.conftest import Tab, find_chromium
from tests.measurement.hostile import HANDLER, PROBLEM, SCRIPT

pytestmark = pytest.mark.browser

SHAPES = {
    "desk": {"width": 1280, "height": 900, "color_scheme": "light"},
    "desk at night": {"width": 1280, "height": 900, "color_scheme": "dark"},
    "phone": {"width": 390, "height": 844, "color_scheme": "light"},
    "phone at night": {"width": 390, "height": 844, "color_scheme": "dark"},
}
Open = Callable[..., Tab]
CONTRAST = """() => {
  // WCAG 2 contrast of each visible text against the nearest background that is painted.
  const parse = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !parent.checkVisibility()) continue;
    const style = getComputedStyle(parent);
    const [light, dark] = [luminance(parse(style.color)), luminance(behind(parent))].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) faint.push(walker.currentNode.data.trim().slice(0, 40) + ' ' + ratio.toFixed(2));
  }
  return faint;
}"""


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
    assert tab.page.evaluate("document.images[0].currentSrc").endswith("/" + picture)


def test_the_page_is_dark_when_the_reader_asks_for_dark(report: Path, open_page: Open):
    brightness = {
        scheme: open_page(report, color_scheme=scheme).page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
        )
        for scheme in ("light", "dark")
    }
    assert brightness["dark"] < 100 < 600 < brightness["light"]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_text_stands_out_from_its_background_by_4_5_to_1(report: Path, open_page: Open, shape: str):
    page = open_page(report, **SHAPES[shape]).page
    page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_sideways_on_small_screens(hostile_report: Path, open_page: Open, width: int):
    page = open_page(hostile_report, width=width, height=800).page
    page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_turns_of_the_two_sides_stand_level_on_a_desk_and_one_side_follows_the_other_on_a_phone(
    report: Path, open_page: Open
):
    tops = """[...document.querySelectorAll('#episode-1 .side')]
      .map(side => side.querySelector('.turn').getBoundingClientRect().top)"""
    left, right = open_page(report).page.evaluate(tops)
    assert left == pytest.approx(right, abs=1)
    left, right = open_page(report, width=390, height=844).page.evaluate(tops)
    assert right > left + 50


def test_pairs_open_and_close_from_the_keyboard_alone(report: Path, open_page: Open):
    page = open_page(report).page
    assert page.locator("details.pair[open]").count() == 1
    second = page.locator("#episode-2 > summary")
    second.focus()
    page.keyboard.press("Enter")
    assert page.locator("#episode-2 .turn").first.is_visible()
    page.keyboard.press("Space")
    assert not page.locator("#episode-2 .turn").first.is_visible()


def test_headings_are_in_order_and_every_picture_has_words(report: Path, open_page: Open):
    page = open_page(report).page
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(heading => +heading.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.evaluate("[...document.images].every(image => image.alt.length > 20)")


def test_what_models_and_tools_wrote_is_inert_and_readable(hostile_report: Path, open_page: Open):
    tab = open_page(hostile_report)
    page = tab.page
    page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    pair = page.locator("details.pair", has_text=PROBLEM)
    assert pair.count() == 1
    for text in (SCRIPT, HANDLER, "card⟨U+202E⟩8_drac", "… 996,000 more characters", "مرحبا"):
        assert text in pair.inner_text()
    for call in pair.locator(".call, .turn pre, .request").all():
        call.dispatch_event("mouseover")
    assert "owned" not in page.title()
    assert page.locator("script, pre h1, .call img").count() == 0
    assert tab.complaints == []
    assert all(address.startswith("file://") for address in tab.requests)


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
