"""A headless Chromium, and reports to open in it. Chromium's absence is a failure with the remedy, never a skip."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.measurement.report.build import build_report
from tests.measurement.hostile import write_hostile_episodes
from tests.measurement.synthetic import write_artifacts

CHROMIUM_FLAGS = [
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str:
    """The Chromium to drive: $CHROMIUM, or the machine's own."""
    names = (os.environ.get("CHROMIUM") or "", "/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if found is None:
        pytest.fail(
            "no Chromium was found, so nobody has seen the report in a browser. Install it with "
            "`apt-get install -y chromium`, or set CHROMIUM to its path, and run the tests again.",
            pytrace=False,
        )
    return found


class Tab:
    """A page in a browser, and what it complained of or asked for while it was open."""

    def __init__(self, page: Any):
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture(scope="session")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Tab]]:
    """`open_page(file, width=…, height=…, color_scheme=…)` opens a file from disk in a fresh context."""
    contexts = []

    def open_file(file: Path, *, width: int = 1280, height: int = 900, color_scheme: str = "light") -> Tab:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=color_scheme)
        contexts.append(context)
        tab = Tab(context.new_page())
        tab.page.goto(file.as_uri())
        return tab

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up run."""
    return build_report(write_artifacts(tmp_path_factory.mktemp("run"))).absolute()


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an episode whose every text tries to break the page."""
    paths = write_artifacts(tmp_path_factory.mktemp("hostile"))
    write_hostile_episodes(paths)
    return build_report(paths).absolute()
