"""What `engine.settings` of vLLM refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.engines.vllm.settings import address_of
from tests.engine_benches import vllm_settings


def test_in_process_vllm_leaves_the_trainer_its_part_of_the_gpu(tmp_path: Path) -> None:
    """0.6 of the memory at most; servers have GPUs of their own."""
    assert vllm_settings(tmp_path, gpu_memory_utilization=0.6).gpu_memory_utilization == 0.6
    assert vllm_settings(tmp_path, mode="server", gpu_memory_utilization=0.9).gpu_memory_utilization == 0.9
    with pytest.raises(ValueError, match=r"shares the GPU with the trainer.*gpu_memory_utilization to at most 0\.6"):
        vllm_settings(tmp_path, gpu_memory_utilization=0.61)


def test_a_folder_or_a_socket_below_home_is_written_out_since_no_shell_reads_it() -> None:
    with pytest.raises(ValueError, match=r"begins with `~`, which is not expanded here.* Write /"):
        vllm_settings(Path("~/weights"))
    with pytest.raises(ValueError, match=r"begins with `~`.* Write /"):
        address_of("unix:~/server")


@pytest.mark.parametrize("url", ["node1:8000", "node1", "ftp://node1"])
def test_an_address_that_no_server_can_have_is_refused_before_anything_waits_for_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"urls has '.*node1.*Write http://HOST:PORT, or unix:"):
        address_of(url)
    for known in ("http://node1:8000", "https://node1", "unix:/run/vllm"):
        assert address_of(known) == known
