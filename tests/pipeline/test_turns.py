"""Several runs that want one folder: each ends as it says itself, and only one whose process is gone is closed.

The runs are three real flows of one Prefect server, which stands for the folder's own as well as for a shared one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType

from flows.prefect_runs import PROCESS_LABEL, crash_dead_runs
from flows.turn import HERE, _find_holder
from tasks.core.processes import this_process
from tasks.pipeline.run_lock import SERVE, only_run
from tests.conftest import ROOT
from tests.profiles import profile_params

pytestmark = pytest.mark.flow

WORKSPACE = "workspace: shop"
# Each line it reads is one run, on whose server and with which `on_busy`; its turn ends with the next line.
RUNNER = """
import json, os, sys
from pathlib import Path
import yaml
from prefect import flow
from flows import turn
from flows.one_run import begin_flow, run_alone
from flows.verdict import end
turn.LOOK_SECONDS = 0.2

def work(stages):
    print("at work", flush=True)
    sys.stdin.readline()
    return end("Held", "done")

@flow
def one_run(params):
    with begin_flow():
        return run_alone(params, work, is_shown=False)

for line in sys.stdin:
    server, on_busy = line.split()
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["pipeline"]["on_busy"] = on_busy
    os.environ["TURNWISE_OWN_SERVER"] = str(os.getppid()) if server == "own" else ""
    print(one_run(params, return_state=True).name, flush=True)
"""


class Runner:
    """A process that runs flows in the folder."""

    def __init__(self, folder: Path, server: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **server, "PYTHONPATH": str(ROOT), "PREFECT_LOGGING_LEVEL": "CRITICAL"},
        )  # fmt: skip

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory, prefect: dict[str, str]) -> Iterator[list[Runner]]:
    folder = tmp_path_factory.mktemp("turns")
    (folder / "params.yaml").write_text(json.dumps(profile_params("test")), encoding="utf-8")
    runners = [Runner(folder, prefect) for _ in range(3)]
    with only_run(folder / "artifacts", SERVE):  # without a `serve` no run on a server of the folder's own waits
        yield runners
    for runner in runners:
        runner.process.kill()
        runner.process.communicate()


@pytest.mark.parametrize("server", ["own", "shared"])
def test_runs_that_wait_each_get_their_turn(runners: list[Runner], prefect_client: SyncPrefectClient, server: str):
    first, *others = runners
    first.tell(f"{server} wait")
    assert first.hear() == "at work"
    for runner in others:
        runner.tell(f"{server} wait")
    while [run.state_name for run in prefect_client.read_flow_runs()].count("Waiting for its turn") < 2:
        assert all(runner.process.poll() is None for runner in runners)
    for runner in runners:
        runner.tell("that was it")
    assert first.hear() == "Held"
    assert [[runner.hear(), runner.hear()] for runner in others] == [["at work", "Held"]] * 2


@pytest.mark.parametrize("server", ["own", "shared"])
def test_runs_that_are_skipped_leave_the_one_at_work_alone(runners: list[Runner], server: str):
    first, *others = runners
    first.tell(f"{server} skip")
    assert first.hear() == "at work"
    for runner in others:
        runner.tell(f"{server} skip")
    assert [runner.hear() for runner in others] == ["Skipped"] * 2
    first.tell("that was it")
    assert first.hear() == "Held"


HERE_AND_ALIVE = this_process()
GONE = {**HERE_AND_ALIVE, "started": HERE_AND_ALIVE["started"] - 60}  # another process had its id
ELSEWHERE = {**GONE, "host": "another"}
# (name, the process it noted, state, dead for a run beside a `serve`, dead for one alone or a `serve` that starts)
RUNS: tuple[tuple[str, dict[str, Any] | None, StateType, bool, bool], ...] = (
    ("waits", HERE_AND_ALIVE, StateType.RUNNING, False, True),
    ("was killed", GONE, StateType.RUNNING, True, True),
    ("was killed while it was cancelled", GONE, StateType.CANCELLING, True, True),
    ("was in another container", ELSEWHERE, StateType.RUNNING, False, True),
    ("has only begun", None, StateType.RUNNING, False, True),
    ("is started again", GONE, StateType.PENDING, False, True),
    ("is about to start", None, StateType.PENDING, False, True),
    ("waits for a person", GONE, StateType.PAUSED, False, False),
    ("is to come", None, StateType.SCHEDULED, False, False),
    ("ended", GONE, StateType.FAILED, False, False),
)


@pytest.mark.parametrize("is_only", [False, True])
def test_only_a_run_whose_process_is_gone_is_closed(prefect_client: SyncPrefectClient, tmp_path: Path, is_only: bool):
    runs = {row[0]: make_run(prefect_client, str(tmp_path), *row[:3]) for row in RUNS}
    runs["is this one"] = make_run(prefect_client, str(tmp_path), "is this one", None, StateType.RUNNING)
    crash_dead_runs(prefect_client, str(tmp_path), is_only=is_only, own=runs["is this one"])
    crashed = {name for name, run in runs.items() if state_of(prefect_client, run) == StateType.CRASHED}
    assert crashed == {name for name, *_, beside, alone in RUNS if (alone if is_only else beside)}


def test_a_run_of_this_machine_that_waits_holds_no_slot_and_one_of_another_machine_may(
    prefect_client: SyncPrefectClient,
):
    waiting = make_run(prefect_client, WORKSPACE, "waits", HERE_AND_ALIVE, StateType.RUNNING, HERE)
    assert _find_holder(prefect_client, "shop") is None
    make_run(prefect_client, WORKSPACE, "far away", ELSEWHERE, StateType.RUNNING)
    assert _find_holder(prefect_client, "shop") == "far away"
    assert state_of(prefect_client, waiting) == StateType.RUNNING


def make_run(
    client: SyncPrefectClient, workspace: str, name: str, process: dict[str, Any] | None, state: StateType, *tags: str
) -> UUID:
    run = client.create_flow_run(flow(some_flow), name=name, tags=[workspace, *tags])
    client.set_flow_run_state(run.id, State(type=state), force=True)
    if process is not None:
        client.update_flow_run_labels(run.id, {PROCESS_LABEL: json.dumps(process)})
    return run.id


def some_flow() -> None:
    pass


def state_of(client: SyncPrefectClient, run: UUID) -> StateType:
    state = client.read_flow_run(run).state
    assert state is not None
    return state.type
