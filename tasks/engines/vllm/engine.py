"""The vLLM engine of the profile: in this process, or behind servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.chat.format import ChatFormat
from tasks.engines.vllm.shared import Start
from tasks.models.policy_weights import AdapterShape
from tasks.models.settings import ComputeSettings
from tasks.rollouts.engine import Engine
from tasks.rollouts.settings import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_engine(
    folder: Path,
    chat: ChatFormat,
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    compute: ComputeSettings,
    model: PreTrainedModel | None,
    lora: AdapterShape | None,
) -> Engine:
    start = Start(folder, chat, sampling, engine, lora)
    if start.options.mode == "server":
        from tasks.engines.vllm.server_engine import ServerEngine

        return ServerEngine(start)
    from tasks.engines.vllm.in_process import VLLMEngine

    return VLLMEngine(start)
