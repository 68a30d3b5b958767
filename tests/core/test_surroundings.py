"""The machine around a run: proxies that do not know our loopback, folders that take no results, clocks that jump."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httpx
import httpx2
import psutil
import pytest
import requests

from tasks.core.surroundings import (
    LOOPBACK,
    NO_PROXY,
    READ_AS_THEIR_OWN,
    SOCKS_VARIABLES,
    check_place,
    exempt_loopback,
    not_writable,
    refuse_unusable_socks,
    seconds_since_start,
)
from tasks.pipeline.cli_errors import one_line_errors
from tasks.pipeline.run_lock import only_run
from tests.conftest import ROOT

DEAD_PROXY = "http://127.0.0.1:9"
NOBODY = 65534


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One without any proxy, put back afterwards whatever is done to it."""
    for name in (*NO_PROXY, *SOCKS_VARIABLES):
        monkeypatch.setenv(name, "")  # so that it is put back even where it was not set
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_behind_a_proxy_our_loopback_is_reached_and_the_rest_goes_through_it(
    environment: pytest.MonkeyPatch, name: str
) -> None:
    environment.setenv(name, DEAD_PROXY)
    exempt_loopback()
    for host in LOOPBACK:
        url = f"http://{f'[{host}]' if ':' in host else host}:4200/api/health"
        assert not requests.utils.get_environ_proxies(url)  # what MLflow's client asks
        assert urllib.request.proxy_bypass(f"{host}:4200")  # what websockets asks, and so Prefect's events
        for http in (httpx, httpx2):  # what Prefect asks, and what asks models and MCP servers behind a URL
            with http.Client() as client:
                assert client._transport_for_url(http.URL(url)) is client._transport
                assert client._transport_for_url(http.URL("http://example.org")) is not client._transport
    assert requests.utils.get_environ_proxies("http://example.org")


@pytest.mark.parametrize(
    ("upper", "lower", "wanted"),
    [
        (None, None, ["127.0.0.1,localhost,::1"] * 2),
        ("corp.example", None, ["corp.example,127.0.0.1,localhost,::1"] * 2),
        (None, " .corp, localhost", [".corp,localhost,127.0.0.1,::1"] * 2),
        ("a", "b", ["a,127.0.0.1,localhost,::1", "b,127.0.0.1,localhost,::1"]),
        ("*", None, ["*", "*"]),
    ],
)
def test_what_was_exempt_from_the_proxy_stays_so(
    environment: pytest.MonkeyPatch, upper: str | None, lower: str | None, wanted: list[str]
) -> None:
    for name, value in zip(NO_PROXY, (upper, lower), strict=True):
        if value is not None:
            environment.setenv(name, value)
    exempt_loopback()
    exempt_loopback()  # each of the doors does it
    assert [os.environ.get(name, upper) for name in NO_PROXY] == wanted


def test_every_command_goes_through_that_door(environment: pytest.MonkeyPatch) -> None:
    with one_line_errors(debug=True):
        child = [sys.executable, "-c", "import os; print(os.environ['NO_PROXY'], os.environ['no_proxy'])"]
        said = subprocess.run(child, capture_output=True, text=True, check=True, timeout=300).stdout
    assert said.split() == ["127.0.0.1,localhost,::1"] * 2


def test_a_socks_proxy_that_nothing_here_could_speak_to_is_refused_with_both_ways_out() -> None:
    refuse_unusable_socks({"ALL_PROXY": DEAD_PROXY})
    with pytest.raises(ValueError, match=r"ALL_PROXY names a SOCKS proxy.*pip install socksio.*env -u ALL_PROXY"):
        refuse_unusable_socks({"ALL_PROXY": "socks5h://127.0.0.1:1080"})


@pytest.mark.parametrize("letter", [*READ_AS_THEIR_OWN, "\n", "\x1b", "\u202e", "\udcff"])
def test_a_folder_whose_name_a_database_or_a_template_would_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    folder = tmp_path / f"my{letter}project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="Rename the folder") as caught, only_run(Path("artifacts")):
        pass
    assert repr(letter)[1:-1] in str(caught.value)
    assert list(folder.iterdir()) == []


def test_the_set_up_refuses_such_a_folder_before_it_installs_anything(tmp_path: Path) -> None:
    for file in ("infra/locks/install.py", "tasks/core/surroundings.py"):
        (tmp_path / "wh?t" / file).parent.mkdir(parents=True)
        (tmp_path / "wh?t" / file).write_text((ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "wh?t/infra/locks/install.py", "demo"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "Rename the folder" in line
    assert sorted(path.name for path in (tmp_path / "wh?t").iterdir()) == ["infra", "tasks"]


@pytest.mark.parametrize("name", ["a b", "ü漢", "h#sh", "br[a]ck", "qu'ote", "st*r", "am&p;x", "back\\slash", "~x@y"])
def test_any_other_name_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with only_run(Path("artifacts")):
        assert Path("artifacts/.flow.lock").read_text().split()[0] == str(os.getpid())


def test_a_link_or_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("linked").symlink_to("elsewhere")
    Path("dangling").symlink_to("nowhere")
    Path("file").write_text("mine")
    for artifacts in ("linked", "linked/deeper", "dangling"):
        with pytest.raises(ValueError, match=r"is a link to .*mount --bind"):
            check_place(Path(artifacts))
    with pytest.raises(ValueError, match=r"file is a file.*set paths\.artifacts"):
        check_place(Path("file"))
    assert not list(Path("elsewhere").iterdir()) and Path("file").read_text() == "mine"
    Path("project").symlink_to(tmp_path / "elsewhere")  # above the project a link is nobody's business
    monkeypatch.chdir("project")
    check_place(Path("artifacts"))


AS_NOBODY = f"""
import os, sys
from pathlib import Path
from tasks.pipeline.cli_errors import one_line_errors
from tasks.pipeline.run_lock import only_run
if os.getuid() == 0:
    os.setgid({NOBODY}); os.setuid({NOBODY})
with one_line_errors(debug=False), only_run(Path(sys.argv[1])):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["read_only", "foreign", "foreign_inside", "foreign_lock"])
def test_a_folder_that_may_not_be_written_is_one_line_with_the_command_that_helps(tmp_path: Path, case: str) -> None:
    if os.getuid() != 0 and case != "read_only":
        pytest.skip("only root can give a folder to somebody else")
    shared = Path("/tmp") / f"turnwise-{tmp_path.parent.name}-{case}-{os.getpid()}"  # pytest's own is its user's alone
    artifacts = shared / "artifacts"
    artifacts.mkdir(parents=True)
    shared.chmod(0o755)
    try:
        place = artifacts
        if os.getuid() == 0 and case != "foreign":
            os.chown(artifacts, NOBODY, NOBODY)
        if case == "read_only":
            artifacts.chmod(0o555)
        if case == "foreign_inside":
            place = artifacts / "train"
            place.mkdir()
        if case == "foreign_lock":
            place = artifacts / ".flow.lock"
            place.write_text("1")
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(artifacts)],
            cwd=shared, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        remedy = f"chmod -R u+rwX {place}" if case == "read_only" else f"sudo chown -R nobody {place}"
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {place} cannot be read or written (")
        assert f"Run `{remedy}`" in line
    finally:
        artifacts.chmod(0o755)
        for path in sorted(shared.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        shared.rmdir()


def test_no_command_is_given_for_what_is_not_the_projects_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest folder that exists may be `/`: `sudo chown -R me /` was advised. A mount belongs to others too."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "artifacts").mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(project)
    Path("linked").symlink_to(elsewhere)

    def told(place: Path | str) -> str:
        return not_writable(PermissionError(errno.EACCES, "Permission denied", str(place))) or ""

    def is_refused(place: Path | str) -> bool:
        assert ("chmod -R" in told(place)) != ("choose another folder (paths.artifacts" in told(place))
        assert "\n" not in told(place) and "cannot be read or written" in told(place)
        return "chmod" not in told(place) and "chown" not in told(place)

    outside = (
        "/nothing/artifacts",
        "/tmp/nothing/x",
        "/usr/lib",
        elsewhere,
        "../elsewhere",
        "linked",
        "..",
        "/proc/self",
    )
    assert [place for place in outside if not is_refused(place)] == []
    assert [place for place in ("artifacts", "artifacts/train/new", project) if is_refused(place)] == []
    assert "Run `chmod -R u+rwX artifacts`" in told("artifacts")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: Path(path).name == "artifacts")
        assert is_refused("artifacts") and not is_refused(project)
    monkeypatch.chdir("/")
    assert is_refused("usr") and is_refused(project / "artifacts") and is_refused("/")


def test_the_seconds_of_a_process_do_not_depend_on_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seconds_since_start()
    assert abs(before - (time.time() - psutil.Process().create_time())) < 60  # what the time of day says
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= seconds_since_start() < before + 600
