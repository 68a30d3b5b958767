"""What `engine.settings` of vLLM refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_benches import vllm_settings


def test_in_process_vllm_leaves_the_trainer_its_part_of_the_gpu(tmp_path: Path) -> None:
    """0.6 of the memory at most; servers have GPUs of their own."""
    assert vllm_settings(tmp_path, gpu_memory_utilization=0.6).gpu_memory_utilization == 0.6
    assert vllm_settings(tmp_path, mode="server", gpu_memory_utilization=0.9).gpu_memory_utilization == 0.9
    with pytest.raises(ValueError, match=r"shares the GPU with the trainer.*gpu_memory_utilization to at most 0\.6"):
        vllm_settings(tmp_path, gpu_memory_utilization=0.61)
