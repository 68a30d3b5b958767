"""10,000 trajectories: the page opens within two seconds and stays smooth. Prints what it measured.

The promise is for a machine of one's own; here others compete for two cores, so the limits are many times as wide as
what is promised and the figures are printed (`-s`, or `make bench` for the build).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.measurement.report.browser import build_browser
from tests.browser.conftest import Tab
from tests.measurement.small_world import many_policies

pytestmark = pytest.mark.browser
NUM_TRAJECTORIES = 10_000
FRAMES = """async () => {
  // The longest time between two frames, in milliseconds, while the list is scrolled from end to end.
  const list = document.getElementById('list');
  let longest = 0, rows = 0, before = await new Promise(requestAnimationFrame);
  for (let i = 0; i <= 60; i++) {
    list.scrollTop = list.scrollHeight * i / 60;
    const now = await new Promise(requestAnimationFrame);
    longest = Math.max(longest, now - before);
    rows = Math.max(rows, document.querySelectorAll('.row').length);
    before = now;
  }
  return [longest, rows];
}"""
SEARCH = """async query => {
  const start = performance.now();
  const found = await turnwise.search(query);
  const seconds = (performance.now() - start) / 1000;
  return [seconds, found.reduce((sum, flag) => sum + flag, 0)];
}"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    policies = many_policies(folder, NUM_TRAJECTORIES, tokens_per_turn=2)
    return build_browser(folder / "report", policies, title="many").absolute()


def test_ten_thousand_trajectories_open_search_and_scroll_without_a_wait(many: Path, open_page: Callable[..., Tab]):
    start = time.perf_counter()
    tab = open_page(many)
    opened = time.perf_counter() - start
    page = tab.page
    assert page.locator("#changes b").first.inner_text() == "1,250"  # problems, two samples each, four policies
    searched, found = page.evaluate(SEARCH, "request 77 ok")
    again, _ = page.evaluate(SEARCH, "book_flight timeout")
    longest_frame, most_rows = page.evaluate(FRAMES)
    start = time.perf_counter()
    page.locator(".row").last.click()
    page.wait_for_selector(".side")
    shown = time.perf_counter() - start
    sizes = [file.stat().st_size for file in (many.parent / "data").iterdir()]
    print(
        f"\n{NUM_TRAJECTORIES:,} trajectories: open {opened:.2f} s, search {searched:.3f} s and {again:.3f} s, longest "
        f"frame while scrolling {longest_frame:.0f} ms, a problem {shown:.2f} s; "
        f"index {(many.parent / 'data' / 'index.js').stat().st_size / 1e3:.0f} kB of {sum(sizes) / 1e6:.0f} MB"
    )
    assert found >= 8  # "77" begins 771 and 77x too
    assert most_rows < 40
    assert opened < 5 * 2.0
    assert max(searched, again) < 10 * 0.3
    assert longest_frame < 10 * 100
    assert shown < 10 * 0.5
    assert tab.complaints == []
    assert max(sizes) < 1_000_000
