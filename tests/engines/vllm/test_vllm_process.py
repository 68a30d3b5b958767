"""A server's command, its share of the GPUs, and its sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tasks.engines.vllm import shared as vllm_shared
from tasks.engines.vllm.server_process import serve_command, server_environment
from tasks.engines.vllm.settings import VLLMSettings
from tasks.rollouts.settings import SERVERS_ON_RAY

pytestmark = pytest.mark.slow

SETTINGS = VLLMSettings(
    mode="server",
    urls=[],
    num_servers=2,
    dtype="float32",
    enforce_eager=True,
    kv_cache_gib=1,
    gpu_memory_utilization=0.5,
    tensor_parallel_size=2,
    transfer="disk",
    folder="artifacts/vllm",
    start_timeout_seconds=60.0,
    request_timeout_seconds=60.0,
    max_restarts=3,
)


def test_servers_get_the_gpus_from_the_last_one_down_and_training_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = [server_environment(SETTINGS, number=n, num_gpus=5)["CUDA_VISIBLE_DEVICES"] for n in (1, 2)]
    assert devices == ["3,4", "1,2"]
    with pytest.raises(ValueError, match="asks for 2 servers of 2 GPUs and this machine has 3, so server 2"):
        server_environment(SETTINGS, number=2, num_gpus=3)


def test_a_server_listens_on_a_socket_alone_since_it_takes_weights_from_whoever_asks() -> None:
    socket = Path("/tmp/turnwise-x/server")
    for on_gpu in (False, True):
        command = serve_command(
            Path("model"), SETTINGS, socket=socket, max_model_len=201, max_num_seqs=13, on_gpu=on_gpu
        )
        assert command[command.index("--uds") + 1] == str(socket)
        assert not {"--host", "--port"} & set(command)
        assert command[command.index("--max-num-seqs") + 1] == "13"
        assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert ("--gpu-memory-utilization" in command, "--block-size" in command) == (on_gpu, not on_gpu)


def test_without_a_gpu_a_model_in_one_part_runs_in_the_engine_core_and_one_in_two_in_processes_of_their_own() -> None:
    command = vllm_shared.cpu_executor(1), vllm_shared.cpu_executor(2)
    assert command == (vllm_shared.CPU_EXECUTOR, "mp")


def test_sockets_have_a_folder_for_this_user_alone_whose_name_nobody_can_foresee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = vllm_shared.private_folder(), vllm_shared.private_folder()
    assert one != other and one.stat().st_mode & 0o777 == 0o700
    one.rmdir()
    other.rmdir()
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ValueError, match=r"is too long a path for the socket of a vLLM server.*Set TMPDIR"):
        vllm_shared.private_folder()
    assert list(deep.iterdir()) == []


def test_trainers_and_servers_of_one_machine_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of 2 GPUs beside one trainer are 5 GPUs; a machine without any computes on its processors."""
    assert SETTINGS.crowd_fault(num_trainers=1, num_gpus=5) is None
    assert SETTINGS.crowd_fault(num_trainers=1, num_gpus=0) is None
    told = SETTINGS.crowd_fault(num_trainers=1, num_gpus=4)
    assert told is not None and told.startswith("1 trainer and 2 servers of the engine ask for 5 GPUs of this machine")
    for changed in ({"urls": ["http://127.0.0.1:8000"]}, {"mode": "in_process"}):
        assert (
            VLLMSettings.model_validate(SETTINGS.model_dump() | changed).crowd_fault(num_trainers=1, num_gpus=1) is None
        )
    monkeypatch.setenv(SERVERS_ON_RAY, "auto")
    assert SETTINGS.crowd_fault(num_trainers=1, num_gpus=1) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "in_process", "urls": ["http://127.0.0.1:8000"]}, "urls names servers and mode is in_process"),
        ({"kv_cache_gib": 0.5}, "kv_cache_gib"),
        ({"transfer": "other"}, "'disk', 'ipc' or 'nccl'"),
        ({"mode": "in_process", "transfer": "ipc"}, "transfer is ipc and tensor_parallel_size 2.*Set transfer: disk"),
    ],
)
def test_settings_that_contradict_each_other_or_mean_nothing_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMSettings.model_validate(SETTINGS.model_dump() | changed)
