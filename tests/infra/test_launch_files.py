"""infra/launch: what each file starts, with stand-ins for Slurm's programs; shellcheck reads them in `test_images.py`.

That ranks which they start train to the same end is in `tests/pipeline/test_nodes.py`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import psutil
import pytest

from tasks.engines.vllm.server_process import serve_command
from tasks.engines.vllm.settings import address_of
from tests.conftest import ROOT
from tests.engine_benches import vllm_settings
from tests.infra.slurm import SAYS, SRUN, allocation, stand_ins

LAUNCH = ROOT / "infra" / "launch"


def words_of(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.slow
def test_slurm_gives_the_last_node_to_vllm_and_each_gpu_of_the_others_a_rank(tmp_path: Path) -> None:
    variables = allocation(tmp_path, nodes=["a1", "a2", "a7"], per_node=8)
    told = 'echo "flow $*"; echo "$MASTER_ADDR $VLLM_HOST"; echo "$TURNWISE_LAUNCH"'
    flow = f"until [[ -e asked ]]; do sleep 0.05; done; {told}"  # its end is that of the servers
    stand_ins(tmp_path, srun=f"{SAYS}; touch asked", python=flow)
    done = subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=tmp_path, env={**variables, "MODEL": "models/m"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    lines = words_of(done.stdout)
    servers = next(line for line in lines if "infra/launch/vllm_server.sh" in line)
    assert {"--nodelist=a7", "--ntasks=8", "--gpus-per-task=1"} <= set(servers)
    assert servers[-3:] == ["infra/launch/again.sh", "infra/launch/vllm_server.sh", "models/m"]
    assert ["flow", "-m", "flows", "run"] in lines and ["a1", "a7"] in lines
    ranks = next(line for line in lines if line[0] == "srun" and line is not servers)
    assert {"--nodes=2", "--nodelist=a1,a2", "--ntasks=16", "--gpus-per-task=1", "--kill-on-bad-exit=0"} < set(ranks)


def test_a_server_that_dies_is_started_again_takes_no_other_with_it_and_ends_with_the_flow(tmp_path: Path) -> None:
    """Two servers, of which the second dies once; the flow ends when it has been started again."""
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    starts = tmp_path / "starts"
    python = f"""
    if [[ $* == "-m flows run" ]]; then
      until [[ -e {starts} ]] && (( $(wc -l < {starts}) > 2 )); do /bin/sleep 0.1; done
      exit
    fi
    [[ $* =~ --port\\ ([0-9]+) ]] && port=${{BASH_REMATCH[1]}}
    echo "$port $$" >> {starts}
    [[ $port != 8001 || $(grep -c ^8001 {starts}) -gt 1 ]] || exit 1
    exec /bin/sleep 600"""
    variables = allocation(tmp_path, nodes=["a1", "a2"], per_node=2)
    stand_ins(tmp_path, srun=SRUN, python=python, sleep='exec /bin/sleep "0.$1"')
    done = subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=tmp_path, env={**variables, "MODEL": "models/m"}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ended with status 1 and is started again" in done.stderr
    started = [line.split() for line in starts.read_text().splitlines()]
    assert sorted(port for port, _ in started) == ["8000", "8001", "8001"]
    assert not [pid for _, pid in started if psutil.pid_exists(int(pid))]  # `run` waited for all who had its output


def test_a_job_without_the_servers_model_does_not_start(tmp_path: Path) -> None:
    variables = allocation(tmp_path, nodes=["a1", "a2"], per_node=1)
    stand_ins(tmp_path, srun=SAYS, python=SAYS)
    done = subprocess.run(
        [LAUNCH / "slurm.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "MODEL" in done.stderr


# A cluster with one Job, whose state is a file: it is `running` once it is applied, and then what `next` says.
KUBECTL = """
echo "$*" >> calls
state=$(cat state 2>/dev/null || echo none)
case "$1 $2" in
  "wait --for=condition=$state") exit 0 ;;
  wait*) exit 1 ;;
  delete*) rm state ;;
  apply*) [[ $state != none ]] || echo running > state ;;
  get*) [[ $state != none ]] && cp next state ;;
esac
"""


@pytest.mark.parametrize("before", [None, "running", "complete", "failed"])
@pytest.mark.parametrize(("end", "status"), [("complete", 0), ("failed", 1)])
def test_a_job_of_kubernetes_is_waited_for_until_either_end_and_one_that_has_ended_is_no_other(
    tmp_path: Path, before: str | None, end: str, status: int
) -> None:
    stand_ins(tmp_path, kubectl=KUBECTL, sleep="exit 0")
    (tmp_path / "next").write_text(end)
    if before:
        (tmp_path / "state").write_text(before)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [LAUNCH / "kubernetes.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    calls = (tmp_path / "calls").read_text()
    assert done.returncode == status
    assert ("job/training failed" in done.stderr) == (status == 1)
    assert ("delete" in calls) == (before in ("complete", "failed"))
    assert "get" in calls  # it did not take an older end for its own


def test_torchrun_waits_for_the_other_nodes_as_long_as_it_says(tmp_path: Path) -> None:
    stand_ins(tmp_path, python=SAYS)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOIN_SECONDS": "40"}
    command = [str(LAUNCH / "torchrun.sh"), "2", "8", "a1"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    (started,) = words_of(done.stdout)
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=a1:29400", "--rdzv-conf=join_timeout=40"} < set(
        started
    )
    assert started[-3:] == ["-m", "tasks", "train"]


def test_a_server_for_urls_is_started_as_turnwise_starts_its_own(tmp_path: Path) -> None:
    """But on a port: turnwise's own has a socket that nobody else can reach."""
    stand_ins(tmp_path, python=SAYS)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_LOCALID": "3", "MAX_TOKENS": "900"}
    done = subprocess.run([LAUNCH / "vllm_server.sh", "m"], env=variables, capture_output=True, text=True, check=True)
    (started,) = words_of(done.stdout)
    own = serve_command(
        Path("m"), vllm_settings(tmp_path, mode="server", enforce_eager=False, dtype="bfloat16"), socket=tmp_path,
        max_model_len=900, max_num_seqs=96, on_gpu=True,
    )  # fmt: skip
    assert [word for word in own if word.startswith("--") and word not in started] == ["--uds"]
    assert started[started.index("--port") + 1] == "8003"
    for option in ("--logprobs-mode", "--generation-config", "--load-format", "--max-model-len", "--served-model-name"):
        assert started[started.index(option) + 1] == own[own.index(option) + 1]


def test_an_address_has_the_node_that_the_job_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST", "a7")
    assert address_of("http://$VLLM_HOST:8000") == "http://a7:8000"
    monkeypatch.delenv("VLLM_HOST")
    with pytest.raises(ValueError, match=r"urls has 'http://\$VLLM_HOST:8000'.*no such variable.*Export it"):
        address_of("http://$VLLM_HOST:8000")
