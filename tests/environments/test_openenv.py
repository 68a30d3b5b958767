"""An OpenEnv server as an environment: its tasks, its tools, its reward, and whatever it can do wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tasks.chat.format import ChatFormat
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.doctor import examine
from tasks.core.records import Problem, ToolCall
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.environments.openenv.environment import OpenEnvEnvironment
from tasks.environments.openenv.messages import Observed, rpc_reply, tool_reply
from tasks.environments.openenv.problems import group_of, grouped
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.stage import run as curate
from tasks.tools.base import EnvironmentFault, SourceCount, ToolReply, Verdict, block_until
from tests import tiny
from tests.environments import openenv_server as keypad
from tests.environments.test_mcp import WORLDLESS
from tests.profiles import profile_params
from tests.rollouts.agents.conftest import Imitator, collect, reference_texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world() -> Iterator[OpenEnvEnvironment]:
    """The keypad with the task API, in one process."""
    with closing(keypad.make_environment("--tasks")) as environment:
        yield environment


@pytest.fixture(scope="module")
def problem(world: OpenEnvEnvironment) -> Problem:
    return problems_of(world)[0]


def problems_of(environment: OpenEnvEnvironment, count: int = 20) -> list[Problem]:
    return list(environment.generate(seed=1, num_problems=count, max_level=1) or ())


def play(environment: OpenEnvEnvironment, problem: Problem, *keys: int, tool: str = "step") -> tuple[Any, Verdict]:
    """The last reply, and the verdict."""
    episode, reply = environment.start(problem), ToolReply("")
    try:
        for key in keys:
            reply = block_until(episode.call(tool, {"key": key}))
        return reply, episode.verdict("done")
    finally:
        episode.close()


def fault_of(environment: OpenEnvEnvironment, problem: Problem, *keys: int) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        play(environment, problem, *keys)
    return str(caught.value)


def test_the_tasks_of_its_splits_are_problems_and_its_halves_are_the_published_ones(world: OpenEnvEnvironment):
    """Six tasks of train, three of test; task i of train is opened by key i, then 1."""
    problems = problems_of(world)
    assert [problem.id for problem in problems] == [
        *(f"train-{index:06d}" for index in range(6)),
        *(f"test-{index:06d}" for index in range(3)),
    ]
    assert problems[4].requests == ["Press 4, then 1."]
    assert [call.arguments for call in problems[4].reference[0].calls] == [{"key": 4}, {"key": 1}]
    assert world.published_halves() == (
        frozenset(problem.id for problem in problems[:6]),
        frozenset(problem.id for problem in problems[6:]),
    )
    assert len(problems_of(world, 4)) == 4
    assert world.count_source(seed=1, num_problems=4, max_level=1) == SourceCount(4, {})


def test_the_same_task_by_another_id_is_of_the_same_split_group(world: OpenEnvEnvironment):
    def group(task: Any, prompt: str = "Add.", *keys: int) -> str:
        seen = Observed(observation={"prompt": prompt, "episode_id": str(task), "metadata": {"step": id(task)}})
        return group_of(task, seen, [ToolCall(name="step", arguments={"key": key}) for key in keys])

    first = group({"id": "a", "index": 1, "question": "1 + 1"})
    assert group({"id": "b", "index": 2, "question": "1 + 1"}) == first
    for named in ({"uuid": "c"}, {"taskId": "c"}, {"taskUUID": "c"}, {"episode_id": "c"}):
        assert group({**named, "question": "1 + 1"}) == first
    nested = [group({"data": [{"id": id, "question": "1 + 1"}]}) for id in ("a", "b")]
    assert nested[0] == nested[1] != group({"data": [{"id": "a", "question": "1 + 2"}]})
    assert group({"valid": 1}) != group({"valid": 2})
    apart = [{"id": "a", "index": 1, "question": "1 + 2"}, {"id": "a"}, {"id": "b"}, None]
    assert len({first, *map(group, apart), group(None, "Subtract."), group(None, "Add.", 3)}) == 7
    problems = problems_of(world)
    assert len({problem.split_group for problem in problems}) == len(problems)
    alike = [problem.model_copy(update={"split_group": "one"}) for problem in problems]
    assert [problem.split_group for problem in grouped(alike)] == [problem.id for problem in problems]


def test_the_verdict_is_the_sum_of_its_rewards_or_the_last_one(world: OpenEnvEnvironment, problem: Problem):
    """Each right key gives a half: both make 1.0, which is enough; one makes 0.5, which is not."""
    for keys, success, details in (
        ((0, 1), True, {"reward": 1.0, "rewards": [0.5, 0.5], "done": True}),
        ((0,), False, {"reward": 0.5, "rewards": [0.5], "done": False}),
        ((), False, {"reward": None, "rewards": [], "done": False}),
    ):
        assert play(world, problem, *keys)[1] == Verdict(success, {"reward": success}, details)
    with closing(keypad.make_environment("--tasks", reward="last", success_reward=0.5)) as other:
        assert play(other, problem, 7, 1)[1].details["reward"] == 0.5
        assert play(other, problem, 0, 7)[1].success is False


def test_what_the_model_reads_has_no_reward_and_no_metadata_and_says_the_end(
    world: OpenEnvEnvironment, problem: Problem
):
    assert play(world, problem, 0)[0].text == '{"pressed": [0]}'
    assert play(world, problem, 0, 1)[0].text == '{"pressed": [0, 1]}\n[The episode has ended.]'
    assert play(world, problem, 0, 1, 1)[0].error == "conflict"
    assert world.tools[0].parameters["properties"] == {"key": keypad.KEY}


def test_mcp_tools_are_the_tools_and_their_errors_are_the_models():
    with closing(keypad.make_environment("--tools")) as environment:
        assert [tool.name for tool in environment.tools] == ["press", "look"]
        (problem,) = problems_of(environment, 1)
        order = [call.arguments["key"] for call in problem.reference[0].calls]
        assert problem.world["reset"]["seed"] % 8100 == order[0] + 90 * order[1]
        assert play(environment, problem, *order, tool="press")[1].success
        assert play(environment, problem, keypad.NOT_FITTING, tool="press")[0] == ToolReply(
            '{"error": {"type": "conflict", "message": "there is no such key"}}', valid=False, error="conflict"
        )


def test_a_file_in_the_reply_of_an_mcp_tool_is_read_as_its_text():
    file = {"type": "resource", "resource": {"uri": "repo://a.txt", "text": "the code is 7"}}
    picture = {"type": "resource", "resource": {"uri": "repo://a.png", "blob": "iVBORw=="}}
    blocks = [{"type": "text", "text": "downloaded"}, {"type": "image", "data": "iVBORw=="}, file, picture]
    text = "downloaded\n[image, 4 bytes]\n[resource repo://a.txt]\nthe code is 7\n[resource repo://a.png, 4 bytes]"
    assert tool_reply({"result": {"content": blocks}}, "get") == text
    assert rpc_reply({"result": {"content": blocks}}, "get") == text


def test_an_action_that_the_server_refuses_is_the_models_mistake(world: OpenEnvEnvironment, problem: Problem):
    reply, verdict = play(world, problem, keypad.NOT_FITTING, 0)
    assert reply.text == '{"pressed": [0]}'  # the session goes on
    assert verdict.details["rewards"] == [0.5]
    assert play(world, problem, keypad.NOT_FITTING)[0].error == "invalid_arguments"


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (keypad.DIE, "the server ended with status 3; it last said: the keypad is on fire"),
        (keypad.FLOOD, "the server sent a message of more than 8 MB"),
        (keypad.GARBAGE, "the server sent what is no message of OpenEnv"),
        (keypad.CRASH, "the server answered EXECUTION_ERROR: division by zero"),
        (keypad.NO_OBSERVATION, "the server sent an observation that OpenEnv does not know (observation"),
        (keypad.BAD_REWARD, "the server sent an observation that OpenEnv does not know (reward"),
        (keypad.NESTED, "the server sent what is no message of OpenEnv: nested deeper than 64 levels"),
        (keypad.CHATTER, "the server answered step with state"),
    ],
)
def test_what_a_server_does_wrong_in_mid_episode_is_one_line_and_the_next_episode_goes_on(
    world: OpenEnvEnvironment, problem: Problem, key: int, fault: str
):
    told = fault_of(world, problem, 0, key)
    assert told.startswith(f"step: unavailable: {fault}")
    assert "\n" not in told
    assert play(world, problem, 0, 1)[1].success


def test_a_server_killed_in_mid_episode_is_a_fault_of_its_episodes_and_a_fresh_one_plays_on(
    world: OpenEnvEnvironment, problem: Problem
):
    first, second = world.start(problem), world.start(problem)
    for episode in (first, second):
        block_until(episode.call("step", {"key": 0}))
    os.kill(child(world), signal.SIGKILL)
    for episode in (first, second):
        with pytest.raises(EnvironmentFault, match="the server was ended by signal 9"):
            block_until(episode.call("step", {"key": 1}))
        episode.close()
    assert play(world, problem, 0, 1)[1].success


def test_a_server_that_dies_again_and_again_costs_a_batch_no_episode():
    """Ten episodes of two steps, two at a time, on a server that dies at its seventh step: none of the 20 is lost."""
    chat = ChatFormat(tiny.tokenizer(), source="test")
    environment = keypad.make_environment("--dies-at-step", "7", max_sessions=2)
    environment.limits = environment.limits.model_copy(update={"max_attempts": 20})  # one may meet each death
    problems = problems_of(environment, 10)
    engine = Imitator(chat, {problem.requests[0]: reference_texts(problem) for problem in problems})
    played = collect(environment, engine, chat, problems, at_once=2)
    assert [trajectory.outcome for trajectory in played] == ["success"] * 10
    assert environment.servers.num_restarts >= 3  # 20 steps, six in each life


def test_a_server_that_hangs_is_replaced_and_one_that_ends_too_often_is_not(problem: Problem):
    """One restart: after the hang. The death that follows is one too many."""
    with closing(keypad.make_environment("--tasks", max_restarts=1, timeout_seconds=1.0)) as environment:
        assert fault_of(environment, problem, keypad.HANG) == "step: timeout: the server did not answer in 1 s"
        environment.limits = environment.limits.model_copy(update={"timeout_seconds": 60.0})
        assert play(environment, problem, 0, 1)[1].success
        fault_of(environment, problem, keypad.DIE)
        assert "was replaced 1 time (max_restarts), and no more; the last one ended with status 3" in fault_of(
            environment, problem, 0
        )


def test_no_process_is_left_behind_and_every_place_is_given_back(problem: Problem):
    """Two processes of one episode each: six episodes at once wait for each other."""
    environment = keypad.make_environment("--tasks", "--sessions", "1", max_servers=2, max_sessions=1)
    episodes = [environment.start(problem) for _ in range(6)]
    waiting = [cast("Future[ToolReply]", episode.call("step", {"key": 0})) for episode in episodes]
    replies = []
    while waiting:  # whoever has answered makes room
        done = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
        replies.append(done.result().text)
        episodes.pop(waiting.index(done)).close()
        waiting.remove(done)
    processes = [psutil.Process(server.process.pid) for server in environment.servers.servers if server.process]
    assert replies == ['{"pressed": [0]}'] * 6
    assert len(processes) == 2
    environment.close()
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_a_server_that_forgets_its_seed_is_a_fault_since_the_model_read_another_beginning():
    with closing(keypad.make_environment("--forgets-seed", request=None)) as environment:
        (problem,) = problems_of(environment, 1)
        told = [str(error) for error in (began_otherwise(environment, problem) for _ in range(4)) if error]
        assert told  # one in 8,100 beginnings is the same
        assert all("begins this problem otherwise than when it was written" in line for line in told)


def began_otherwise(environment: OpenEnvEnvironment, problem: Problem) -> EnvironmentFault | None:
    try:
        play(environment, problem, 0)
    except EnvironmentFault as fault:
        return fault
    return None


@pytest.mark.flow
@pytest.mark.parametrize("is_solved", [True, False])
def test_what_is_curated_from_a_server_passes_the_doctor_who_warns_where_nobody_knows_a_solution(
    is_solved: bool, tmp_path: Path
):
    params, paths = profile_params("test"), Paths(tmp_path / "artifacts")
    params["environment"] = keypad.environment_settings(max_dropped_share=0.05).model_dump(mode="json")
    params["environment"]["settings"] |= {} if is_solved else {"solution": None}
    params["curate"] |= {"source": "tasks/environments/openenv", "num_generated": 300}
    params["curate"]["num_demonstrations"] = 50 if is_solved else 0
    params["promote"]["min_unseen_problems"] = 1
    curate(load(CurateSections, params), paths)
    groups = [{item.split_group for item in read_split(paths, name)} for name in ("train", "select", "test")]
    assert all(groups) and len(set.union(*groups)) == sum(map(len, groups))  # no task is on two sides
    examined = {item.check: item for item in examine(DoctorContext(load(DoctorSections, params), paths))}
    of_the_machine = {"threads", "memory", "disk", "duration"}
    failing = {name for name, item in examined.items() if item.result != "pass"} - of_the_machine
    assert failing == (set() if is_solved else {"references score 1"}), examined


def child(environment: OpenEnvEnvironment) -> int:
    server = environment.servers.servers[-1]
    assert server.process is not None
    return server.process.pid


class Elsewhere(BaseHTTPRequestHandler):
    """A web site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_what_cannot_be_used_is_one_line_that_names_the_setting(elsewhere: str):
    def refusal(*flags: str, **changed: Any) -> str:
        with pytest.raises(ValueError) as caught, closing(keypad.make_environment(*flags, **changed)) as environment:
            list(environment.generate(seed=1, num_problems=1, max_level=1) or ())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    by_url = {"command": None, "url": elsewhere}
    dies = [sys.executable, "-c", "raise SystemExit('no module named wordle')", "{port}"]
    assert "the server answered /health with no JSON" in refusal(**by_url)
    assert "ended with status 1; it last said: no module named wordle" in refusal(command=dies)
    assert "could not be started: No such file" in refusal(command=["/nowhere/python", "{port}"])
    assert "Set splits to []" in refusal(splits=["train"])
    assert "It has: train, test" in refusal("--tasks", splits=["dev"])
    assert "the server answered with no task for test-00000" in refusal("--tasks", "--odd-tasks", splits=["test"])
    assert "environment.settings.request is 'question'" in refusal(request="question")
    with pytest.raises(ValueError, match=r"command does not contain \{port\}"):
        keypad.environment_settings(command=["python"])


def test_a_problem_of_ones_own_says_with_what_the_server_is_reset(world: OpenEnvEnvironment, problem: Problem):
    own = problem.model_copy(update={"world": {"reset": {"seed": 273}}})
    assert play(world, own, 3, 3)[1].success  # 273 is 3 + 3 · 90
    with pytest.raises(ValueError, match="'reset'"):
        world.start(WORLDLESS)
