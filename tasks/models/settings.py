"""Settings of the base model, and of what computes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tasks.core.settings import Settings

Dtype = Literal["float32", "bfloat16"]


class ComputeSettings(Settings):
    """Where and in which precision a model computes.

    `device: auto` is CUDA where torch finds it. `weights` is the dtype of what is trained or played; with bfloat16 the
    optimizer keeps float32 master weights. `frozen` is that of weights which never change in training: the reference,
    and a base under LoRA. A measurement loads what would be published, the base with the adapter merged, in `weights`.
    `offload: optimizer` keeps the optimizer's state in pinned host memory between updates. `tf32` lets CUDA round the
    factors of float32 products to 10 bits, which is faster; a CPU never does.
    """

    device: Literal["auto", "cpu", "cuda"]
    num_threads: int = Field(ge=1)
    weights: Dtype
    frozen: Dtype
    offload: Literal["none", "optimizer"]
    tf32: bool


class RaySettings(Settings):
    """Where Ray's cluster is; read where `launch.launcher` is ray.

    `address` null: one of this machine's, for as long as the command runs, whose processors ranks and servers share.
    `auto`: the one that this machine is part of; or HOST:PORT of its head. A placement that takes longer than
    `place_seconds` is refused. `variables` are those of the command's environment that ranks on other nodes get, as
    names with `*`; a server has its node's.
    """

    address: str | None = Field(pattern=r"^(auto|[^/:]+:\d+)$")
    place_seconds: float = Field(gt=0)
    variables: list[str]


class LaunchSettings(Settings):
    """How many processes train one policy, and who starts them (infra/decisions/0067). No stage depends on it: a result
    is the same to the last digits of float32, and a run may go on with another number.

    `local`: this process alone. `torchrun`: `python -m tasks train` starts `num_trainers` of them on this machine, and
    again from the last checkpoint after one has died, at most `max_restarts` times. `ray`: the same on Ray's cluster,
    with the engine's vLLM servers. `external`: they exist already, as torchrun or Slurm starts them, each with the same
    command. `meet_seconds` is how long they wait for each other at the start, `step_seconds` inside a step of training;
    a rank that waits longer counts as lost.
    """

    launcher: Literal["local", "torchrun", "external", "ray"]
    num_trainers: int = Field(ge=1)
    max_restarts: int = Field(ge=0)
    meet_seconds: float = Field(gt=0)
    step_seconds: float = Field(gt=0)
    ray: RaySettings

    @property
    def starts_ranks(self) -> bool:
        """Whether this command starts them, and starts them again."""
        return self.launcher in ("torchrun", "ray")

    @model_validator(mode="after")
    def _refuse_useless_restarts(self) -> LaunchSettings:
        if not self.starts_ranks and self.max_restarts > 0:
            raise ValueError(
                f"max_restarts is {self.max_restarts} with launcher: {self.launcher}, which starts nothing again, so a "
                f"death would end the run. Set launch.max_restarts to 0 (torchrun has --max-restarts of its own), or "
                f"launch.launcher to torchrun or ray"
            )
        return self

    @model_validator(mode="after")
    def _check_num_trainers(self) -> LaunchSettings:
        if self.launcher == "local" and self.num_trainers > 1:
            raise ValueError(
                f"num_trainers is {self.num_trainers} with launcher: local, which is one process, so the others would "
                f"not exist. Set launch.launcher to torchrun, or launch.num_trainers to 1"
            )
        return self


def on_cpu(num_threads: int) -> ComputeSettings:
    return ComputeSettings(
        device="cpu", num_threads=num_threads, weights="float32", frozen="float32", offload="none", tf32=False
    )


# What turnwise itself gives a chat template.
NOT_FOR_KWARGS = ("conversation", "messages", "tools", "tokenize", "add_generation_prompt", "strftime_now")


class TemplateSettings(Settings):
    """What a chat template is called with, beyond messages and tools; it travels in the model's folder.

    `enable_thinking` (null: the template's own choice) and `kwargs` are variables of the template; those that its
    folder states already remain unless stated here. A thought stays in the episode's ids, where no token ever changes.
    `keep_thinking: true` also takes templates that leave earlier thoughts out when they render a whole history, as
    Qwen3's do. `false` refuses them: a server that renders the history anew for each turn shows the model less than it
    had in training, and what was measured here may differ there.
    """

    keep_thinking: bool
    enable_thinking: bool | None
    kwargs: dict[str, JsonValue]

    @field_validator("kwargs")
    @classmethod
    def _refuse_own_variables(cls, kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
        taken = sorted({*NOT_FOR_KWARGS, "enable_thinking"} & kwargs.keys())
        if taken:
            raise ValueError(
                f"kwargs contains {', '.join(taken)}, which turnwise gives the template itself; leave it out "
                f"(enable_thinking has a key of its own, beside kwargs)"
            )
        return kwargs

    @property
    def variables(self) -> dict[str, Any]:
        """What `apply_chat_template` gets."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.kwargs, **thinking}

    def over(self, stated: TemplateSettings) -> TemplateSettings:
        """These, with what a folder states where these state nothing; either may refuse a template."""
        return TemplateSettings(
            keep_thinking=self.keep_thinking and stated.keep_thinking,
            enable_thinking=stated.enable_thinking if self.enable_thinking is None else self.enable_thinking,
            kwargs={**stated.kwargs, **self.kwargs},
        )


PLAIN_TEMPLATE = TemplateSettings(keep_thinking=True, enable_thinking=None, kwargs={})


class EmbeddedModelSettings(Settings):
    """It learns its tools from demonstrations; `tools_in_prompt` describes them too, so prompts are of realistic
    length. With `thinks` its template is a thinking model's, and its demonstrations contain the environment's thoughts.
    """

    hidden_size: int = Field(ge=8)
    intermediate_size: int = Field(ge=8)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    initializer_range: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=32)
    tools_in_prompt: bool
    thinks: bool


class LoRASettings(Settings):
    """Low-rank adapters through PEFT; `target_modules` is `all-linear` or a list of module names."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    target_modules: Literal["all-linear"] | list[str]


class ModelSettings(Settings):
    path: str = Field(min_length=1)
    template: TemplateSettings
    embedded: EmbeddedModelSettings
