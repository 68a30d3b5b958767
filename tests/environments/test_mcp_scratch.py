"""Folders of an MCP server's own: fresh for each episode, nobody else's, never shown, and gone afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import ReferenceTurn, ToolCall
from tasks.core.settings import Settings, load
from tasks.drift.leaks import find_leaks
from tasks.environments.mcp import scratch
from tasks.environments.mcp.environment import MCPEnvironment
from tasks.environments.mcp.settings import MCPSettings
from tasks.tools.base import EnvironmentFault, block_until
from tests.environments import mcp_server
from tests.environments.test_mcp import RAW_SERVER, WORLDLESS
from tests.worlds import as_custom

pytestmark = pytest.mark.slow

Make = Callable[..., MCPEnvironment]
OWN_FILE = {"KEPT_FILE": {"value": "{scratch}/kept.txt"}}


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder, which nothing is left in."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def keeping(**changed: Any) -> dict[str, Any]:
    """Settings of a server that keeps a file, and answers what was in it and where it is."""
    command = [sys.executable, str(RAW_SERVER), "keeps"]
    return {"command": command, "allowed_tools": None, "reset": "process", "reset_tool": None, **changed}


def say(environment: MCPEnvironment, num_calls: int = 1) -> list[str]:
    """The replies of an episode of its own, which ends."""
    episode = environment.start(WORLDLESS)
    replies = [block_until(episode.call("act", {})).text for _ in range(num_calls)]
    episode.close()
    return replies


def called(problem: Any, calls: Any, final_message: Any, call_tool: Any) -> bool:
    """A checker: something was done."""
    return bool(calls)


def test_a_server_that_keeps_its_file_leaks_until_the_file_is_its_episodes_own(mcp_world: Make, tmp_path: Path) -> None:
    """A process of its own is no fresh world where the file outlives it."""
    checked = {"checker": f"{as_custom(__name__)}:called", "max_servers": 1}
    acts = WORLDLESS.model_copy(
        update={"reference": [ReferenceTurn(calls=[ToolCall(name="act", arguments={})], answer="")]}
    )
    kept = {"KEPT_FILE": {"value": str(tmp_path / "kept.txt")}}
    (line,) = find_leaks(mcp_world(**keeping(environment=kept, **checked)), [acts])
    assert line.startswith("problem 'p': a tool first answers nothing in")
    for reset in ("process", "scratch"):
        assert find_leaks(mcp_world(**keeping(environment=OWN_FILE, reset=reset, **checked)), [acts]) == []


@pytest.mark.parametrize("reset", ["process", "scratch"])
def test_each_episode_finds_an_empty_folder_whose_path_it_never_sees(mcp_world: Make, reset: str) -> None:
    environment = mcp_world(**keeping(reset=reset, environment=OWN_FILE, max_servers=1))
    for _ in range(2):
        assert say(environment, 2) == ["nothing in {scratch}/kept.txt", "x in {scratch}/kept.txt"]


def test_a_server_that_is_kept_is_started_once(mcp_world: Make) -> None:
    environment = mcp_world(**keeping(reset="scratch", environment=OWN_FILE, max_servers=1))
    (first,) = environment.sessions.open_sessions
    for _ in range(3):
        say(environment)
    assert environment.sessions.open_sessions == {first}


def test_the_command_may_name_the_folder_and_so_may_a_call(mcp_world: Make, temporary_folder: Path) -> None:
    command = [sys.executable, str(RAW_SERVER), "keeps", "{scratch}/other.txt"]
    environment = mcp_world(**keeping(command=command))
    assert say(environment) == ["nothing in {scratch}/other.txt"]
    path = str(temporary_folder / "folder")
    arguments = {"path": "{scratch}/a", "all": [{"{scratch}": 1}], "text": "{other}"}
    assert scratch.with_path(arguments, path) == {"path": f"{path}/a", "all": [{path: 1}], "text": "{other}"}
    assert scratch.without_path(f"wrote {path}/a", path) == "wrote {scratch}/a"
    assert scratch.with_path({"text": "{scratch}"}, "") == {"text": "{scratch}"}


def test_folders_are_their_owners_alone_and_go_with_their_server(mcp_world: Make, temporary_folder: Path) -> None:
    environment = mcp_world(**keeping(environment=OWN_FILE, max_servers=2))
    episodes = [environment.start(WORLDLESS) for _ in range(2)]
    for episode in episodes:
        block_until(episode.call("act", {}))
    (root,) = temporary_folder.iterdir()
    folders = list(root.iterdir())
    assert len(folders) == 2
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, *folders)} == {0o700}
    for episode in episodes:
        episode.close()
    deadline = time.monotonic() + 120
    while list(root.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(root.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(temporary_folder: Path) -> None:
    make = (
        "from tasks.environments.mcp.scratch import ScratchRoot; root = ScratchRoot(); print(root.make(), flush=True)"
    )
    environment = {**os.environ, "TMPDIR": str(temporary_folder)}
    command = [sys.executable, "-c", f"{make}; import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "deep").mkdir()
        (left / "deep" / "file").write_text("x")
        (left / "deep").chmod(0o500)
        an_hour_ago = time.time() - 3600
        os.utime(left.parent, (an_hour_ago, an_hour_ago))
        scratch.remove_abandoned(temporary_folder)
        assert left.exists()
        process.kill()
        process.wait()
    another = scratch.ScratchRoot()
    assert another.make().parent != left.parent
    assert not left.parent.exists()
    another.close()


def test_a_folder_that_withstands_emptying_is_a_fault_and_its_server_is_replaced(
    mcp_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = mcp_world(**keeping(reset="scratch", environment=OWN_FILE, max_servers=1))
    say(environment)

    def refuse(folder: Path) -> None:
        raise OSError(f"{folder} is held")

    with monkeypatch.context() as patch:
        patch.setattr("tasks.environments.mcp.environment.empty", refuse)
        with pytest.raises(EnvironmentFault, match="could not be emptied"):
            say(environment)
    assert say(environment) == ["nothing in {scratch}/kept.txt"]


def test_a_literal_reaches_the_server_as_it_is(mcp_world: Make) -> None:
    given = {"HOTEL_STARS": {"value": "4 {stars}"}}
    environment = mcp_world(trouble=True, environment=given)
    episode = environment.start(WORLDLESS)
    assert "HOTEL_STARS" in block_until(episode.call("variables", {})).text.split()
    episode.close()


class Sections(Settings):
    mcp: MCPSettings


def refused(**changed: Any) -> str:
    good = mcp_server.environment_settings().settings
    assert good is not None
    with pytest.raises(ValueError) as refusal:
        load(Sections, {"mcp": good.model_dump() | changed})
    (line,) = str(refusal.value).splitlines()
    return line


@pytest.mark.parametrize("key", ["sk-live-0815", {"key": "sk-live-0815"}, {"value": ["sk-live-0815"]}, 815])
def test_a_key_where_a_name_belongs_is_refused_and_not_repeated(key: Any) -> None:
    line = refused(environment={"HOTEL_KEY": key})
    assert "mcp.environment: HOTEL_KEY must be the name" in line
    assert "value:" in line
    assert "815" not in line
    line = refused(environment={}, command=None, url="http://h/mcp", headers={"Authorization": key})
    assert "mcp.headers: Authorization must be the name" in line
    assert "815" not in line


def test_a_key_in_capitals_is_not_repeated_either(mcp_world: Make) -> None:
    key = "AKIA0815ABCDEFGHIJKL"
    with pytest.raises(ValueError, match=r"environment\.settings\.environment\.HOTEL_KEY .* not set") as refusal:
        mcp_world(environment={"HOTEL_KEY": key})
    assert "0815" not in str(refusal.value)


def test_to_reset_by_scratch_the_server_must_be_told_where_that_is() -> None:
    assert "Write {scratch} in" in refused(reset="scratch", reset_tool=None)
