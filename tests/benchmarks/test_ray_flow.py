"""The whole flow with two trainers and two vLLM servers on Ray's cluster; a server and a trainer are killed."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tasks.core.files import read_json, read_jsonl
from tests import tiny
from tests.engine_benches import vllm_settings
from tests.pipeline.project import Project, make_project
from tests.pipeline.test_nodes import rank_process

pytestmark = pytest.mark.bench
LONGEST_SECONDS = 3000
SERVER = "vllm.entrypoints.openai.api_server"


def server_process(project: Project) -> psutil.Process | None:
    return next((found for found in project.processes() if SERVER in found.cmdline()), None)


@pytest.mark.timeout(LONGEST_SECONDS)
def test_a_flow_on_ray_outlives_a_killed_server_and_a_killed_trainer(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    engine = vllm_settings(tmp_path / "weights", mode="server", num_servers=2, max_restarts=4)
    project.set_params(
        {
            **{f"model.embedded.{name}": value for name, value in tiny.HEADS_FOR_VLLM.items()},
            "engine.name": "vllm",
            "engine.settings": engine.model_dump(mode="json"),
            "sampling.temperature": 1.2,
            "compute.num_threads": 1,
            "train.num_iterations": 4,
            "train.snapshot_interval": 2,
            "train.checkpoint_interval": 1,
            "launch.launcher": "ray",
            "launch.num_trainers": 2,
            "launch.max_restarts": 1,
        }
    )
    begin = time.monotonic()
    flow = project.start("flows", "run", variables={"NO_COLOR": "1"})
    killed: list[str] = []
    while flow.poll() is None and len(killed) < 2:
        made = sorted((project.artifacts / ".resume" / "train").glob("*/iteration-*/manifest.json"))
        rank = rank_process(project, 1)
        if made and not killed and rank is not None and (server := server_process(project)) is not None:
            server.kill()
            killed.append("server")
        elif len(made) > 1 and killed and rank is not None:
            rank.kill()
            killed.append("rank 1")
        time.sleep(0.05)
    output, errors = flow.communicate(timeout=LONGEST_SECONDS)
    told = output + errors
    print(told[-6000:])
    assert flow.returncode == 0, told
    assert killed == ["server", "rank 1"]
    assert "rank 1 of 2 was ended by signal 9, so all were ended; starting again" in told
    record = read_json(project.artifacts / "provenance" / "train.json")
    assert (record["launcher"], record["num_trainers"]) == ("ray", 2)
    rows = [row for _, row in read_jsonl(project.artifacts / "train" / "metrics.jsonl")]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["mismatch_max"] < 1e-3 for row in rows)  # every token has the log-prob that the trainer finds
    assert project.decision()["decision"]
    assert not project.processes()
    seconds, restarts = time.monotonic() - begin, [row["engine_restarts"] for row in rows]
    print(f"{seconds:.0f} s, decision {project.decision()['decision']}, engine restarts {restarts}")
