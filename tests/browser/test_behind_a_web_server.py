"""A report behind a static web server, which says nothing about how long a browser may keep what it got."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from tasks.core.files import write_jsonl
from tasks.core.records import Turn
from tasks.report.browser import build_browser
from tasks.report.build import build_report
from tasks.report.script_files import address_of
from tests.browser.conftest import Tab
from tests.measurement.small_world import small_episode, small_policies
from tests.measurement.synthetic import write_artifacts

pytestmark = pytest.mark.browser
Open = Callable[..., Tab]


def test_any_static_server_shows_the_same(small: Path, open_page: Open):
    with served(small.parent) as (address, _):
        tab = open_page(f"{address}/trajectories.html", "problem=p-better")
        assert tab.page.locator(".side").count() == 2
        assert tab.complaints == []
        assert all(request.startswith(f"{address}/") for request in tab.requests)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a static web server of the folder, and what it is asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def let_age(folder: Path) -> None:
    """Ten days: browsers keep what they got for a tenth of its age, where the server says nothing about it."""
    for file in folder.rglob("*"):
        os.utime(file, (time.time() - 10 * 86400,) * 2)


def test_behind_a_web_server_a_report_that_was_built_again_is_shown_once_the_page_is_reloaded(
    tmp_path: Path, open_page: Open
):
    policies = small_policies(tmp_path)[:2]

    def build(word: str) -> Path:
        for policy in policies:
            episodes = [small_episode(policy.name, problem, 0, True) for problem in ("p-same", "p-mixed")]
            for episode in episodes:
                episode.request, episode.turns = f"{word} request", [Turn(text=f"{word} " + "x " * 140_000)]
            write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
        return build_browser(tmp_path / "report", policies, title=word).absolute()

    def shown(problem: str) -> set[str]:
        page.evaluate("problem => { location.hash = `problem=${problem}`; }", problem)
        page.wait_for_selector(f".where:has-text('{problem}')")
        text = page.locator("body").inner_text()
        return {word for word in ("old", "new") if f"{word} request" in text or f"{word} x" in text}

    let_age(build("old").parent)
    with served(tmp_path / "report") as (address, _):
        page = open_page(f"{address}/trajectories.html").page
        assert shown("p-same") == {"old"}  # p-mixed is in another file
        build("new")
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert shown("p-same") == {"new"}
        assert shown("p-mixed") == {"new"}
        script = tmp_path / "report" / "main.js"  # a newer turnwise
        script.write_text(script.read_text(encoding="utf-8").replace("Trajectories ·", "Newer ·"), encoding="utf-8")
        page_file = tmp_path / "report" / "trajectories.html"
        text = re.sub(r'"main\.js[^"]*"', f'"{address_of(script)}"', page_file.read_text(encoding="utf-8"))
        page_file.write_text(text, encoding="utf-8")
        os.utime(page_file, (time.time() + 2,) * 2)  # the server tells versions apart by the second
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert page.title().startswith("Newer")


def test_behind_a_web_server_the_overview_asks_for_a_chart_that_was_drawn_again(
    tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
):
    def build(drawn: bytes) -> Path:
        monkeypatch.setattr("tasks.report.build.progress_chart", lambda paths, file, style: file.write_bytes(drawn))
        return build_report(paths).parent.absolute()

    def charts() -> list[str]:
        return [path for path in asked if path.startswith("/progress")]

    paths = write_artifacts(tmp_path / "run")
    folder = build(b"one")
    let_age(folder)
    with served(folder) as (address, asked):
        page = open_page(f"{address}/index.html").page
        (first,) = charts()
        assert urlsplit(first).path == "/progress.png"
        build(b"two")
        asked.clear()
        page.reload(wait_until="networkidle")
        assert [urlsplit(path).path for path in asked if path != "/favicon.ico"] == ["/index.html", "/progress.png"]
        assert charts() != [first]
        page.locator(".doors a").first.click()
        page.wait_for_selector("html[data-ready]")
        assert f"/{address_of(folder / 'trajectories.html')}" in asked  # the list of an older report may be kept
