"""The page of the validation in a browser: nothing but itself is loaded, and people who see little can read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.stages.curate.expectations import load_suite
from tasks.stages.curate.validation import CheckResult, render_page
from tests.browser.conftest import Tab
from tests.measurement.hostile import HANDLER, SCRIPT

pytestmark = [pytest.mark.browser]


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_it_loads_nothing_else_runs_nothing_and_reads_well(
    open_page: Callable[..., Tab], tmp_path: Path, color_scheme: str
) -> None:
    suite = load_suite({"num_demonstrations": 3, "num_problems": None})
    broken = {"each id is unique": [f"'{SCRIPT}' (line 4)", f"'{HANDLER}' (line 8)"]}
    results = [
        CheckResult(check, check.name not in broken, "0 of 60 rows break it", broken.get(check.name, []))
        for check in suite
    ]
    (tmp_path / "index.html").write_text(render_page(results), encoding="utf-8")
    tab = open_page(tmp_path / "index.html", color_scheme=color_scheme, without_policy=True)
    assert tab.requests == [(tmp_path / "index.html").as_uri()]
    assert tab.complaints == []
    assert tab.page.title() == "Validation of the curated data · turnwise"
    assert tab.page.get_by_text("21 of 22 expectations passed").count() == 1
    assert SCRIPT in tab.page.inner_text("li >> nth=0")
    assert tab.violations() == []
