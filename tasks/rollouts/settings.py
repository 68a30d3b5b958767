"""Settings of generation: which engine, how it samples, and the budgets of an episode. Free of heavy imports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.environments.settings import EnvironmentSettings


class VLLMSettings(Settings):
    """vLLM, in this process or behind OpenAI-compatible servers.

    `urls` are servers somebody else runs; where it is empty, `num_servers` are started on sockets that nobody else can
    reach. `transfer` is how refreshed weights come in: by disk, which is `folder` (the engine's own; memory that is
    mounted as a folder, such as one in /dev/shm, is quickest), by IPC where trainer and an engine in process share a
    GPU, or by NCCL to servers on other GPUs (those of `urls` are started with --weight-transfer-config '{"backend":
    "nccl"}'). `kv_cache_gib` (of each engine) is for CPU only, `gpu_memory_utilization` for GPU only.

    A reply, or the loading of new weights, that takes longer than `request_timeout_seconds` counts as lost, and its
    engine as dead; after `max_restarts` of all engines together the run stops.
    """

    mode: Literal["in_process", "server"]
    urls: list[str]
    num_servers: int = Field(ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    enforce_eager: bool
    kv_cache_gib: int = Field(ge=1)
    gpu_memory_utilization: float = Field(gt=0, le=1)
    tensor_parallel_size: int = Field(ge=1)
    transfer: Literal["disk", "ipc", "nccl"]
    folder: str = Field(min_length=1)
    start_timeout_seconds: float = Field(gt=0)
    request_timeout_seconds: float = Field(gt=0)
    max_restarts: int = Field(ge=0)

    @model_validator(mode="after")
    def _urls_are_of_servers(self) -> VLLMSettings:
        if self.urls and self.mode == "in_process":
            raise ValueError(
                "urls names servers and mode is in_process, so none of them would be asked. Set mode: server, or leave "
                "urls empty"
            )
        return self


class EngineSettings(Settings):
    """The engine that generates, how many episodes it holds at once, and how far its log-probs may be from the
    trainer's (nats: any token of the probe after a refresh, the mean over the first episodes of a training process).
    """

    name: Literal["transformers", "vllm"]
    max_concurrent_episodes: int = Field(ge=1)
    probe_tolerance: float = Field(gt=0)
    vllm: VLLMSettings | None

    @model_validator(mode="after")
    def _vllm_is_described(self) -> EngineSettings:
        if self.name == "vllm" and self.vllm is None:
            raise ValueError("engine.name is vllm and engine.vllm is null, so it is not said how to run it; fill it in")
        return self


class DistributionSettings(Settings):
    """What a token is drawn from: logits over the temperature, cut to the likeliest tokens that make up `top_p`."""

    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)


class SamplingSettings(DistributionSettings):
    """The sampling distribution and the budgets that end an episode.

    `max_tokens_per_episode` counts the prompt and tool replies too; `max_completion_tokens` everything after the
    prompt, where prompts are long and differ (null: no such limit). `max_turns` is of the whole episode. A turn also
    ends with any of the `stop_strings`, which stay in it.
    """

    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_tokens_per_episode: int = Field(ge=2)
    max_completion_tokens: int | None = Field(ge=1)
    stop_strings: list[Annotated[str, Field(min_length=1)]]

    def drawn_from(self, distribution: DistributionSettings | None) -> SamplingSettings:
        """The same budgets with tokens drawn from another distribution; None leaves it as it is."""
        return self if distribution is None else self.model_copy(update=distribution.model_dump())

    def token_limit(self, num_prompt_tokens: int) -> int:
        """The tokens an episode may have, its prompt included."""
        if self.max_completion_tokens is None:
            return self.max_tokens_per_episode
        return min(self.max_tokens_per_episode, num_prompt_tokens + self.max_completion_tokens)


class PlaySettings(Settings):
    """How a model is played on a set of problems: `samples_per_problem` episodes of each. Episodes under equal settings
    meet the same random numbers.
    """

    engine: EngineSettings
    sampling: SamplingSettings
    seed: int
    samples_per_problem: int = Field(ge=1)
    num_threads: int = Field(ge=1)


class PlaySections(Settings):
    """The sections of params.yaml that every stage reads that plays a model."""

    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings

    def play(self, samples_per_problem: int, *, drawn_from: DistributionSettings | None = None) -> PlaySettings:
        """`drawn_from` is the distribution of a measurement; None draws tokens as training does."""
        return PlaySettings(
            engine=self.engine,
            sampling=self.sampling.drawn_from(drawn_from),
            seed=self.seed,
            samples_per_problem=samples_per_problem,
            num_threads=self.num_threads,
        )
