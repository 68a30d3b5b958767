"""What a model writes is data: no call is run as code, none takes seconds, and no reply is longer than it may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.core.tool_calls import parse_calls
from tasks.environments.bfcl.backend import MAX_PATHS, MAX_TREE_CHARACTERS
from tasks.environments.bfcl.environment import BFCL, BFCLEpisode
from tasks.tools.base import ToolReply, block_until
from tests.conftest import ROOT
from tests.environments.bfcl_play import WORLD, with_class
from tests.environments.hostile_calls import attacks
from tests.environments.watched_attacks import LIMIT, LIMITS, NUM_ATTACKS

pytestmark = pytest.mark.slow
QUICK_SECONDS = 2.0  # of CPU time: the machine may be busy with something else


def ask(episode: BFCLEpisode, name: str, **arguments: Any) -> ToolReply:
    return block_until(episode.call(name, arguments))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the audit hook saw of the attacks, and where they were made."""
    folder: Path = tmp_path_factory.mktemp("attacked")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.environments.watched_attacks"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "left_behind": sorted(os.listdir(folder))}


def test_a_thousand_hostile_calls_run_nothing(watched: dict[str, Any]) -> None:
    """Nothing compiled, run, opened, imported or started, by each call as it is and as the text of a message."""
    assert watched["seen"] == {}
    assert watched["left_behind"] == []
    assert watched["heard_of_eval"] == ["compile", "exec"]  # the hook does hear of an eval of our own


@pytest.mark.parametrize("world", ["bfcl", "travel_desk"])
def test_each_is_an_ordinary_reply_and_a_name_or_a_key_changes_nothing(watched: dict[str, Any], world: str) -> None:
    report = watched["worlds"][world]
    assert report["wrong"] == []
    by_kind = {
        kind: sum(count for reply, count in report["kinds"].items() if reply.startswith(f"{kind}: "))
        for kind in ("name", "key", "value")
    }
    assert by_kind == {"name": 336, "key": 336, "value": 328} and sum(by_kind.values()) == NUM_ATTACKS
    assert report["kinds"]["name: unknown_tool"] == 336
    assert report["kinds"]["key: made, and did not fit" if world == "bfcl" else "key: invalid_arguments"] == 336
    assert report["slowest"][0] < QUICK_SECONDS


def test_the_attacks_are_the_same_every_time_and_no_name_is_a_tools() -> None:
    tools = WORLD.tools
    first, second = (list(attacks(tools, 300, seed=1)) for _ in range(2))
    assert repr(first) == repr(second)
    known = {tool.name for tool in tools}
    assert not [attack for attack in first if attack.kind == "name" and attack.call.name in known]
    assert all(attack.call.name in known for attack in first if attack.kind != "name")


def test_a_reply_is_capped_and_says_that_it_was(watched: dict[str, Any]) -> None:
    assert watched["worlds"]["bfcl"]["num_cut"] > 5
    episode = BFCL(LIMITS).start(with_class("GorillaFileSystem"))
    reply = ask(episode, "echo", content="x" * 100_000)
    whole = len(json.dumps({"terminal_output": "x" * 100_000}))
    assert reply.text.startswith('{"terminal_output": "xxx')
    assert reply.text.endswith(f"x\n[cut here: {whole - LIMIT:,} more characters]")
    assert len(reply.text.split("\n")[0]) == LIMIT
    assert len(episode.responses[0]) == whole  # what is judged is not what was cut


def test_arithmetic_bombs_end_at_once_and_the_next_episode_has_its_own_precision() -> None:
    math = with_class("MathAPI")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("square_root", {"number": 2, "precision": 12}),
        ("logarithm", {"value": 2, "base": 10, "precision": 12}),
    ]
    before = [ask(WORLD.start(math), name, **arguments).text for name, arguments in calls]

    episode, started = WORLD.start(math), time.process_time()
    for name, arguments in (
        ("power", {"base": 10, "exponent": 10**7}),
        ("logarithm", {"value": 2, "base": 10, "precision": 10**6}),
        ("square_root", {"number": 2, "precision": 10**6}),
    ):
        reply = ask(episode, name, **arguments)
        assert reply.text.startswith("Error during execution: ") and not reply.valid
    assert time.process_time() - started < QUICK_SECONDS

    assert [ask(WORLD.start(math), name, **arguments).text for name, arguments in calls] == before
    assert before[0] == "{'result': Decimal('1.41421356237')}"


def test_a_folder_copied_into_itself_is_not_walked() -> None:
    """Its paths would be a/a/a/…: with a name of 10,000 characters, gigabytes of them."""
    episode, name = WORLD.start(with_class("GorillaFileSystem")), "n" * 10_000
    ask(episode, "mkdir", dir_name=name)
    ask(episode, "cp", source=name, destination=name)
    started = time.process_time()
    for reply in (ask(episode, "find"), ask(episode, "find", path=f"./{name}"), ask(episode, "du")):
        assert reply.text == (
            f"Error during execution: a tree is limited to {MAX_PATHS} paths and {MAX_TREE_CHARACTERS} characters"
        )
    assert time.process_time() - started < QUICK_SECONDS
    assert episode.verdict(None).details["differing"] == ["GorillaFileSystem.root"]


def test_folders_that_double_with_every_copy_are_not_walked() -> None:
    """`cp` shares what a folder holds: 30 rounds of four calls make 2**31 paths."""
    episode = WORLD.start(with_class("GorillaFileSystem"))
    before = ask(episode, "find").text
    ask(episode, "mkdir", dir_name="d0")
    for level in range(30):
        ask(episode, "mkdir", dir_name=f"d{level + 1}")
        ask(episode, "cp", source=f"d{level}", destination=f"x{level}")
        ask(episode, "mv", source=f"d{level}", destination=f"d{level + 1}")
        ask(episode, "mv", source=f"x{level}", destination=f"d{level + 1}")
    started = time.process_time()
    assert "a tree is limited to" in ask(episode, "find").text
    assert "a tree is limited to" in ask(episode, "du", human_readable=True).text
    assert time.process_time() - started < QUICK_SECONDS
    ask(episode, "rm", file_name="d30")
    assert ask(episode, "find").text == before


def test_pages_of_white_space_and_open_tags_are_read_at_once() -> None:
    started = time.process_time()
    assert parse_calls("<tool_call>" + " " * 100_000) == [None]
    assert parse_calls("<tool_call>" * 100_000) == [None]
    assert parse_calls("<tool_call>" + " " * 100_000 + '{"name": "ls"}' + "\n" * 100_000 + "</tool_call>") != [None]
    assert time.process_time() - started < QUICK_SECONDS
