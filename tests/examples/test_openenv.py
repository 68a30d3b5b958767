"""Servers of the package `openenv`, which nobody here wrote for turnwise, played from their tasks to the verdict."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Problem
from tasks.environments.openenv.environment import OpenEnvEnvironment
from tasks.tools.base import EnvironmentFault, Verdict, block_until
from tasks.tools.replay import Script, play
from tests.agents_of_others import python_of
from tests.conftest import ROOT
from tests.environments import openenv_server
from tests.worlds import as_custom

pytestmark = pytest.mark.agents

SAFE = ROOT / "infra" / "examples" / "openenv" / "safe.py"


def solve(task: Any, observation: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the first book, and open the safe."""
    return [{"name": "read", "arguments": {"book": 1}}, {"name": "open", "arguments": {"code": task["code"]}}]


@pytest.fixture(scope="module")
def safe() -> Iterator[OpenEnvEnvironment]:
    with closing(
        openenv_server.make_environment(
            command=[python_of("openenv"), str(SAFE), "--port", "{port}"],
            splits=["train", "test"],
            solution=f"{as_custom('tests.examples.test_openenv')}:solve",
            request="result",
            reward="last",
            max_sessions=4,
        )
    ) as environment:
        yield environment


@pytest.fixture(scope="module")
def problems(safe: OpenEnvEnvironment) -> list[Problem]:
    return list(safe.generate(seed=1, num_problems=10, max_level=1))


def test_its_tasks_are_problems_which_their_solutions_solve_by_its_mcp_tools(
    safe: OpenEnvEnvironment, problems: list[Problem]
):
    """Three safes to train on and one to test; the second of train is opened by 34."""
    assert [problem.requests[0] for problem in problems] == [
        "Safe 0 of train.", "Safe 1 of train.", "Safe 2 of train.", "Safe 0 of test.",
    ]  # fmt: skip
    assert [tool.name for tool in safe.tools] == ["read", "open"]
    played = play(safe, [Script.reference(problem) for problem in problems])
    assert [one.verdict and one.verdict.success for one in played] == [True] * 4
    assert [reply.text for reply in played[1].replies] == ["3", "open\n[The episode has ended.]"]
    assert played[1].verdict == Verdict(True, {"reward": True}, {"reward": 1.0, "rewards": [1.0], "done": True})


def test_a_tool_that_refuses_is_read_by_the_model_and_a_wrong_code_is_a_failure(
    safe: OpenEnvEnvironment, problems: list[Problem]
):
    episode = safe.start(problems[0])
    refused = block_until(episode.call("read", {"book": 3}))
    assert refused.error == "conflict"
    assert "there is no book 3" in refused.text
    assert block_until(episode.call("open", {"code": "99"})).text == "shut"
    assert episode.verdict("").details == {"reward": 0.0, "rewards": [0.0], "done": False}
    episode.close()


def test_killed_in_mid_episode_it_is_a_fault_and_the_episode_is_played_again(
    safe: OpenEnvEnvironment, problems: list[Problem]
):
    episode = safe.start(problems[0])
    assert block_until(episode.call("read", {"book": 1})).text == "1"
    process = safe.servers.servers[-1].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="the server was ended by signal 9"):
        block_until(episode.call("open", {"code": "12"}))
    episode.close()
    (again,) = play(safe, [Script.reference(problems[0])])
    assert again.verdict is not None and again.verdict.success


def test_what_its_own_command_scaffolds_is_played_as_it_is(tmp_path: Path):
    """An echo with actions of its own: a tenth for each letter, at most 1. It allows one session at a time."""
    scaffold = [str(Path(python_of("openenv")).with_name("openenv")), "init", "parrot", "--output-dir", str(tmp_path)]
    subprocess.run(scaffold, check=True, capture_output=True, timeout=300)
    with closing(
        openenv_server.make_environment(
            command=[python_of("openenv"), "-m", "parrot.server.app", "--host", "127.0.0.1", "--port", "{port}"],
            environment={"PYTHONPATH": {"value": str(tmp_path)}},
            request="echoed_message",
            solution=None,
            reward="last",
            max_sessions=1,
        )
    ) as environment:
        (problem,) = environment.generate(seed=1, num_problems=1, max_level=1)
        assert problem.requests == ["Parrot environment ready!"]
        assert not environment.knows_solution(problem)
        for message, reward in (("hello", 0.5), ("hello hello", 1.0)):
            episode = environment.start(problem)
            reply = block_until(episode.call("step", {"message": message}))
            assert reply.text == f'{{"echoed_message": "{message}", "message_length": {len(message)}}}'
            assert episode.verdict("").details["reward"] == reward
            episode.close()
