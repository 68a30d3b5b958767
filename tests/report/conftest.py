"""Pages without their pictures, which are most of a report's time; tests that look at those ask for `pictures`."""

from __future__ import annotations

import pytest


@pytest.fixture
def pictures() -> None:
    """Have the report draw them."""


@pytest.fixture(autouse=True)
def draw_no_others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("tasks.report.build.progress_chart", lambda paths, file, style: file.touch())
