"""Whole training runs over a real vLLM: servers that are killed or stop answering, LoRA, rollouts ahead, kill -9.

Every run is held against one over the same engine that nothing happened to. What vLLM computes of a token depends in
the last bits on what shares its step, so runs are the same in every token and to 1e-4 in every weight, not bitwise.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tasks.engines.vllm.server import Server
from tasks.engines.vllm.server_engine import ServerEngine
from tasks.engines.vllm.server_process import ServerProcess
from tasks.models.architecture import model_logp
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tasks.stages.train import groups as grouping
from tasks.stages.train.collect_ahead import measure_staleness
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tests import tiny
from tests.conftest import ROOT
from tests.engine_benches import engine_settings, is_running, vllm_settings
from tests.stages.train.test_training import LORA, run, settings

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("earnable"),
]  # vLLM is started a dozen times: about five minutes
PROBLEMS = tiny.problems(40)
NUM_ITERATIONS = 6  # of tests/stages/train/test_training.py, 16 episodes each
SERVERS = {"mode": "server", "num_servers": 2, "max_restarts": 10}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    embedded = tiny.EMBEDDED.model_copy(update=tiny.HEADS_FOR_VLLM)
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m", embedded=embedded)


def over_vllm(folder: Path, vllm: dict[str, Any], **changed: Any) -> TrainSections:
    """The small run of test_training.py with vLLM; the weights move by much more than vLLM's tolerance."""
    engine = engine_settings("vllm", vllm_settings(folder / "weights", **vllm))
    return settings(**changed).model_copy(update={"engine": engine})


class Trouble:
    """What happens to servers while a run trains: a fault by iteration, once a server writes two turns or more."""

    def __init__(self, faults: dict[int, Callable[[Server], None]]):
        self.faults, self.victims = dict(faults), list[Server]()

    @contextmanager
    def comes_to(self, training_run: TrainingRun) -> Iterator[None]:
        engine = training_run.engine
        assert isinstance(engine, ServerEngine)
        submit = engine.submit

        def submit_and_maybe_break(request: Any) -> None:
            submit(request)
            fault = self.faults.get(training_run.iteration)
            busy = [server for server in engine.servers.all if server.num_in_flight > 1] if engine.servers else []
            fresh = [server for server in busy if server.state == "ready" and server not in self.victims]
            if fault is not None and fresh:
                del self.faults[training_run.iteration]
                self.victims.append(fresh[0])
                fault(fresh[0])

        engine.submit = submit_and_maybe_break  # type: ignore[method-assign]
        yield
        assert not self.faults, "no server was in the middle of anything"


def api_process(server: Server) -> psutil.Process:
    assert isinstance(server.process, ServerProcess)
    return psutil.Process(server.process.pid)


def kill(server: Server) -> None:
    api_process(server).kill()


def stop_answering(server: Server) -> None:
    api_process(server).suspend()


def train(options: TrainSections, start: Path, resume: Path, trouble: Trouble | None = None) -> TrainingRun:
    """A run to its end, closed."""
    training_run = TrainingRun(options, start=start, problems=PROBLEMS, resume=resume)
    try:
        with (trouble or Trouble({})).comes_to(training_run):
            while not training_run.is_done:
                training_run.iterate()
    finally:
        training_run.close()
    return training_run


def weights(training_run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in training_run.trainer.model.state_dict().items()}


def assert_same_run(found: TrainingRun, expected: TrainingRun) -> None:
    """Every iteration has the same rewards over as many tokens, and the weights end where they would have."""
    for name in ("success_rate", "mean_sampled_tokens", "num_episodes", "policy_version"):
        rows = [[row.get(name) for row in item.metrics] for item in (found, expected)]
        assert rows[0] == rows[1], name
    distance = furthest(weights(found), weights(expected))
    moved = furthest(weights(expected), weights_of(expected.start))
    print(f"weights {distance:.1e} apart after moving by {moved:.1e}")
    assert distance < 1e-4 < 0.01 < moved


def furthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in others)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, compute=on_cpu(1)).state_dict())


def total(training_run: TrainingRun, name: str) -> float:
    return sum(row[name] for row in training_run.metrics)


@pytest.fixture(scope="module")
def undisturbed(start: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "reward", tiny.reward_of_any_text)
        return train(over_vllm(folder, SERVERS), start, folder / "resume")


def failures(folder: Path, event: str) -> list[dict[str, Any]]:
    (log,) = (folder / "weights").glob("*/logs/failures.jsonl")
    return [row for row in map(json.loads, log.read_text().splitlines()) if row["event"] == event]


def test_a_run_whose_servers_die_and_fall_silent_ends_as_if_they_had_not(
    start: Path, tmp_path: Path, undisturbed: TrainingRun
) -> None:
    """kill -9 of one in the second batch, and the other stopped in the fourth: both started again, their turns asked
    for again, and each of it in the metrics of its iteration and in failures.jsonl.
    """
    options = over_vllm(tmp_path, {**SERVERS, "request_timeout_seconds": 30})
    found = train(options, start, tmp_path / "resume", Trouble({2: kill, 4: stop_answering}))
    assert_same_run(found, undisturbed)
    assert total(undisturbed, "engine_restarts") == total(undisturbed, "engine_retried_turns") == 0
    retried = {row["iteration"]: row["engine_retried_turns"] for row in found.metrics}
    assert retried[2] > 0 and retried[4] > 0
    assert 2 <= total(found, "engine_restarts") <= 2 + sum(retried.values()), "two faults; a slow machine may add some"
    assert len(failures(tmp_path, "turn_retried")) == total(found, "engine_retried_turns")
    assert len(failures(tmp_path, "server_failed")) == total(found, "engine_restarts")
    reasons = [row["reason"] for row in failures(tmp_path, "server_failed")]
    assert any("within 30 s" in reason for reason in reasons)


def test_beyond_max_restarts_a_run_stops_with_one_line_and_a_later_start_goes_on(
    start: Path, tmp_path: Path, undisturbed: TrainingRun
) -> None:
    options = over_vllm(tmp_path, {**SERVERS, "max_restarts": 0})
    with pytest.raises(ValueError, match=r"max_restarts \(0\) are used up.*run again to continue") as error:
        train(options, start, tmp_path / "resume", Trouble({4: kill}))
    assert "\n" not in str(error.value)

    later = TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path / "resume")
    later.close()
    checkpoints = [int(item.name.removeprefix("iteration-")) for item in (tmp_path / "resume").glob("iteration-*")]
    assert later.iteration == max(checkpoints, default=0) <= 3, "without a restart, a busy machine may stop it sooner"
    assert_same_run(train(options, start, tmp_path / "resume"), undisturbed)


@pytest.mark.parametrize("vllm", [{"mode": "in_process"}, {"mode": "server"}], ids=["in_process", "server"])
def test_with_lora_and_rollouts_ahead_the_merged_weights_arrive_and_each_turn_says_whose_it_is(
    start: Path, tmp_path: Path, vllm: dict[str, Any]
) -> None:
    """max_staleness 1: batches by versions 0, 0, 1, 2, 3, 4. Each refresh is probed against the merged weights, to
    1e-3; the weights that correct for the age are bounded by the cap of 2.
    """
    options = over_vllm(
        tmp_path, vllm, lora=LORA, max_staleness=1, importance_correction="token_truncate", learning_rate=3e-3
    )
    training_run = TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path / "resume")
    versions: list[set[int]] = []
    try:
        while not training_run.is_done:
            training_run.iterate()
            assert training_run.pipeline is not None and training_run.pipeline.batch is not None
            groups = training_run.pipeline.batch.groups
            turns = [turn for group in groups for item in group.trajectories for turn in item.turns]
            versions.append({turn.policy_version for turn in turns})
            assert measure_staleness(groups, training_run.iteration, None)["staleness_max"] <= 1
        merged = load_model(training_run.checkpoints.snapshots / "iteration-0006", compute=on_cpu(1))
        training_run.engine.refresh(PolicyWeights.of(merged), 99)
        ids = [list(range(20, 60))]
        assert training_run.engine.token_logp(ids)[0] == pytest.approx(model_logp(merged, ids)[0], abs=1e-4)
        assert model_logp(merged, ids)[0] != pytest.approx(
            model_logp(load_model(start, compute=on_cpu(1)), ids)[0], abs=1e-2
        )
    finally:
        training_run.close()
    assert versions == [{0}, {0}, {1}, {2}, {3}, {4}]
    rows = training_run.metrics
    assert [row["staleness_max"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert rows[0]["mismatch_weight_max"] == pytest.approx(1, abs=1e-3)  # the same weights, to float32
    assert max(row["mismatch_weight_max"] for row in rows[1:]) > 1.001  # one iteration's change apart
    assert all(row["refresh_seconds"] > 0 and row["probe_seconds"] > 0 for row in rows if row["iteration"] in (3, 4))


def test_a_training_killed_with_kill_9_over_vllm_goes_on_and_leaves_no_process(start: Path, tmp_path: Path) -> None:
    """Killed after its third checkpoint, in the fourth iteration."""
    ends = {}
    for name in ("whole", "killed"):
        place = tmp_path / name
        if name == "killed":
            worker = start_worker(start, place)
            while not (place / "resume" / "iteration-000003").exists():
                assert worker.poll() is None
                time.sleep(0.05)
            family = psutil.Process(worker.pid).children(recursive=True)
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            deadline = time.monotonic() + 60
            while [process for process in family if is_running(process)]:
                assert time.monotonic() < deadline, "vLLM outlived the training"
                time.sleep(0.1)
            shutil.rmtree(place / "output", ignore_errors=True)
        assert start_worker(start, place).wait(timeout=1200) == 0
        (ends[name],) = (load_file(file) for file in (place / "output/snapshots/iteration-0006").glob("*.safetensors"))
    distance = furthest(ends["killed"], ends["whole"])
    print(f"weights {distance:.1e} apart; bitwise the same: {distance == 0}")
    assert distance < 1e-4
    assert furthest(weights_of(start), ends["whole"]) > 0.01  # a snapshot leaves the tied head out


def start_worker(start: Path, place: Path) -> subprocess.Popen[bytes]:
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.stages.train.test_training_over_vllm", str(start), str(place)]
    with (place / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


if __name__ == "__main__":
    grouping.reward = tiny.reward_of_any_text
    run(over_vllm(Path(sys.argv[2]), {"mode": "in_process"}), Path(sys.argv[1]), Path(sys.argv[2]))
