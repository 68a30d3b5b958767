"""The decision's page as a person meets it: from disk, on a desk and a phone, by day and by night."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.stages.promote.page import render_decision
from tasks.stages.promote.record import headline
from tests.browser.conftest import Tab
from tests.browser.test_report_page import SHAPES
from tests.measurement.decisions import ROWS

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["reject", "forced"])
def test_it_is_quiet_readable_and_fits_the_screen(tmp_path: Path, open_page: Callable[..., Tab], shape: str, name: str):
    file = tmp_path / "decision.html"
    file.write_text(render_decision(ROWS[name], headline(ROWS[name])), encoding="utf-8")
    tab = open_page(file, **SHAPES[shape])
    assert tab.complaints == []
    assert tab.requests == [file.as_uri()]
    assert tab.page.title() == f"travel-desk-agent, {ROWS[name]['decision']}: iteration-0010 · turnwise decision"
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert open_page(file, **SHAPES[shape], without_policy=True).violations() == []
