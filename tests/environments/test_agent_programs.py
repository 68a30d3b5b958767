"""Programs and functions that are agents: each has an end, leaves nothing behind, and changes the fingerprint."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.environments.agent.environment import AgentEnvironment
from tasks.environments.agent.programs import Function, Program
from tasks.environments.agent.settings import VerdictSettings
from tasks.environments.agent.verdicts import VerdictGiver
from tasks.tools.base import EnvironmentFault
from tasks.tools.driven import AgentTask, Endpoint
from tests import tiny
from tests.rollouts.agents.conftest import AGENTS, VERDICT, agent_world
from tests.worlds import as_custom

ENDPOINT = Endpoint("http://o", "http://a", "http://m", key="sk-episode", model="policy")
TASK = AgentTask(id="p", category="c", requests=["Hello"], rules="", world={})
SECONDS = 60  # of a busy machine


@pytest.mark.parametrize("details", [{"at": object()}, {"share": float("nan")}])
def test_details_that_no_file_can_contain_are_a_fault(details: dict[str, Any]):
    async def tells(task: AgentTask, endpoint: Endpoint) -> dict[str, Any]:
        return {"success": True, "details": details}

    assert "its result is not JSON" in str(Function(tells, TASK, ENDPOINT).ended.exception(SECONDS))


HALF = b'{"success": true, "answer": "cut \\ud83d", "details": {"reply \\ud83d": ["cut \\ud83d", "\\ud83d\\ude00"]}}'


class Saying(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(HALF)))
        self.end_headers()
        self.wfile.write(HALF)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def test_half_a_surrogate_pair_of_any_agent_or_judge_can_be_stored():
    async def tells(task: AgentTask, endpoint: Endpoint) -> dict[str, Any]:
        return json.loads(HALF)

    async def says(task: AgentTask, endpoint: Endpoint) -> str:
        return "cut \ud83d"

    code = f"import os; open(os.environ['TURNWISE_RESULT'], 'wb').write({HALF!r})"
    whole = {"success": True, "answer": "cut �", "details": {"reply �": ["cut �", "😀"]}}
    assert Function(tells, TASK, ENDPOINT).ended.result(SECONDS) == whole
    assert Function(says, TASK, ENDPOINT).ended.result(SECONDS) == {"answer": "cut �"}
    assert Program([sys.executable, "-c", code], {}, TASK, ENDPOINT).ended.result(SECONDS) == whole
    with ThreadingHTTPServer(("127.0.0.1", 0), Saying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        giver = VerdictGiver(VerdictSettings(by="http", checker=None, url=url, timeout_seconds=SECONDS))
        verdict = asyncio.run(giver.judge(tiny.problems(1)[0], {}, "Done."))
        server.shutdown()
    assert verdict.details == whole["details"]


def test_a_function_that_is_stopped_before_its_loop_runs_ends_at_its_first_wait(monkeypatch: pytest.MonkeyPatch):
    went_on = list[str]()

    async def notes(task: AgentTask, endpoint: Endpoint) -> None:
        await asyncio.sleep(0.1)
        went_on.append(task.id)

    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    agent = Function(notes, TASK, ENDPOINT)
    agent.stop()
    agent._run()
    assert isinstance(agent.ended.exception(SECONDS), EnvironmentFault)
    assert went_on == []


def test_a_program_that_cannot_be_started_or_read_is_a_fault_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def cannot(_: Program) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Program, "_read_result", cannot)
    with pytest.raises(EnvironmentFault, match="could not be started"):
        Program([str(tmp_path / "none")], {}, TASK, ENDPOINT)
    assert list(tmp_path.iterdir()) == []
    ended = Program([sys.executable, "-c", ""], {}, TASK, ENDPOINT).ended
    assert "the disk is gone" in str(ended.exception(SECONDS))
    assert list(tmp_path.iterdir()) == []


def test_an_edited_program_or_checker_is_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The program itself where it lies in the project, and each file that it is given; python is none of them."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "run.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    worlds = [agent_world(object=None, command=command) for command in ([str(program)], [sys.executable, str(program)])]
    before = [world.fingerprint() for world in worlds]
    assert [[*world.describe()["agent"]["sources"]] for world in worlds] == [[str(program)]] * 2
    program.write_text("#!/bin/sh\nexit 1\n")
    assert all(world.fingerprint() != old for world, old in zip(worlds, before, strict=True))
    checked = agent_world(world=None, verdict={**VERDICT, "by": "checker", "checker": f"{AGENTS}:check"})
    assert [*checked.describe()["agent"]["sources"]] == [f"{AGENTS}:play", f"{AGENTS}:check"]


FLEET = """
import json, sys
for line in sys.stdin:
    episode = json.loads(line)
    print("loading a model …\\n[1]\\n{}", flush=True)
    if episode["request"] == "die":
        sys.exit()
    if episode["request"] != "wait":
        print(json.dumps({"number": episode["number"], "answer": "done"}), flush=True)
"""


def test_a_fleet_skips_what_is_printed_ends_all_its_episodes_and_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fleet = sys.modules[as_custom("infra.examples.agents.fleet")].fleet
    (tmp_path / "program.py").write_text(FLEET)
    monkeypatch.setenv("FLEET", f"{sys.executable} {tmp_path / 'program.py'}")

    def begin(request: str) -> Any:
        return fleet().begin(TASK.model_copy(update={"requests": [request]}), ENDPOINT)

    first = fleet()
    assert begin("play").result(SECONDS) == "done"
    assert begin("wait").cancel()
    assert "ended" in str(begin("die").exception(SECONDS))
    assert begin("play").result(SECONDS) == "done"
    assert fleet() is not first
    fleet().program.stdin.close()


def test_an_agent_is_told_the_rules_and_neither_the_solution_nor_the_state_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
):
    """An agent without a world brings its tools, and may need the state that they begin with."""
    (problem,) = tiny.problems(1)
    world = agent_world()
    assert isinstance(world, AgentEnvironment)
    monkeypatch.setattr(world.inner, "rules_for", lambda problem: "Never refund twice.")
    told = world.task_of(problem)
    assert (told.id, told.requests, told.rules, told.world) == (problem.id, problem.requests, "Never refund twice.", {})
    assert "reference" not in told.model_dump()
    errand = agent_world(world=None, verdict=VERDICT)
    assert isinstance(errand, AgentEnvironment)
    assert errand.task_of(problem).world == problem.world
