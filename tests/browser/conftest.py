"""A headless Chromium, and reports to open in it. Chromium's absence is a failure with the remedy, never a skip."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, write_json
from tasks.report.browser import build_browser
from tasks.report.build import build_report
from tests.measurement.hostile import write_hostile_episodes
from tests.measurement.small_world import small_policies
from tests.measurement.synthetic import write_artifacts
from tests.report.test_told_in_parts import tell_in_parts

CHROMIUM_FLAGS = [
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

PATIENCE = 300_000  # milliseconds: a busy machine may take its time over a page


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

    def violations(self) -> list[str]:
        """What axe-core finds wrong for people who see little, see no colours, hear the page or type in it."""
        from axe_playwright_python.base import AXE_SCRIPT

        self.page.evaluate(AXE_SCRIPT)
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


@pytest.fixture(scope="module")  # a second Playwright cannot start while one is open, and test_serve.py has its own
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, headless=True, args=CHROMIUM_FLAGS, timeout=PATIENCE
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Tab]]:
    """`open_page(file, "problem=p-1", width=…)` opens a file from disk, at a place in it, in a fresh context.

    `without_policy` lifts the page's content policy, for checks that bring a script of their own.
    """
    contexts = []

    def open_file(
        file: Path | str, place: str = "", *, width: int = 1280, height: int = 900, color_scheme: str = "light",
        without_policy: bool = False,
    ) -> Tab:  # fmt: skip
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=color_scheme, bypass_csp=without_policy
        )
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        tab = Tab(context.new_page())
        address = file if isinstance(file, str) else file.as_uri()
        tab.page.goto(f"{address}#{place}" if place else address)
        if "trajectories.html" in address:
            tab.page.wait_for_selector("html[data-ready]")
        return tab

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up run, whose requests were told in parts too."""
    return build_report(tell_in_parts(write_artifacts(tmp_path_factory.mktemp("run")))).absolute()


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an episode whose every text tries to break the page."""
    paths = tell_in_parts(write_artifacts(tmp_path_factory.mktemp("hostile")))
    write_hostile_episodes(paths)
    decision = paths.stage("promote") / "decision.json"
    row = read_json(decision)
    write_json(decision, {**row, "reasons": [*row["reasons"], f"Measured again ({'code.tasks/core/' * 20})."]})
    return build_report(paths).absolute()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectory browser of four problems and five policies (small_world.py)."""
    folder = tmp_path_factory.mktemp("small")
    return build_browser(folder / "report", small_policies(folder), title="a small world").absolute()
