"""What is planned: a model's shape, the settings that memory and time depend on, and a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.core.settings import Settings, SettingsT, load, load_paths
from tasks.learning.shared.settings import GRPOSettings, SupervisedSettings
from tasks.models.settings import ComputeSettings, LaunchSettings, ModelSettings
from tasks.planning.hardware import Machine, this_machine
from tasks.planning.plays import CHECK, Play, curated_problems, plays_of
from tasks.planning.shapes import Shape, UnknownShape, shape_of
from tasks.rollouts.settings import EngineSettings, SamplingSettings


class PlanSections(Settings):
    compute: ComputeSettings
    launch: LaunchSettings
    engine: EngineSettings
    sampling: SamplingSettings
    warm_start: SupervisedSettings
    train: GRPOSettings

    @property
    def gpus_per_engine(self) -> int:
        """vLLM cuts a model over them."""
        return int(getattr(self.engine.own, "tensor_parallel_size", 1))

    def changed(self, key: str, value: Any) -> PlanSections:
        """With one value of another: `changed("compute.offload", "optimizer")`."""
        return _changed(self, key, value)


def _changed(settings: SettingsT, key: str, value: Any) -> SettingsT:
    name, _, rest = key.partition(".")
    return settings.model_copy(update={name: _changed(getattr(settings, name), rest, value) if rest else value})


class ModelSections(Settings):
    model: ModelSettings


@dataclass(frozen=True, slots=True)
class Setup:
    """`plays` are those beside training; none where they are not known."""

    shape: Shape
    settings: PlanSections
    machine: Machine
    plays: tuple[Play, ...] = ()

    @property
    def is_vllm(self) -> bool:
        return self.settings.engine.name == "vllm"

    @property
    def shares_the_device(self) -> bool:
        """Whether the engine is in this process, on the trainer's device."""
        return not self.is_vllm or getattr(self.settings.engine.settings, "mode", "") == "in_process"

    @property
    def is_ahead(self) -> bool:
        """Whether the next episodes are played while this batch is trained on."""
        return self.settings.train.max_staleness > 0

    @property
    def base_dtype(self) -> str:
        """Of the whole model as it is trained: under LoRA it is frozen."""
        return self.settings.compute.frozen if self.settings.train.lora else self.settings.compute.weights

    @property
    def base_bytes(self) -> int:
        return self.shape.num_parameters * num_bytes(self.base_dtype)

    @property
    def size_in_engine(self) -> int:
        """Bytes of one number; an engine without a dtype of its own generates with the trainer's model."""
        return num_bytes(getattr(self.settings.engine.own, "dtype", self.base_dtype))

    @property
    def episodes(self) -> int:
        """Of one iteration."""
        return self.settings.train.problems_per_iteration * self.settings.train.group_size

    def with_samples(self, group_size: int) -> Setup:
        """With groups of this size in every iteration, whatever is scheduled."""
        train = self.settings.train.model_copy(update={"group_size": group_size})
        if train.exploration is not None:
            fixed = train.exploration.model_copy(update={"samples_per_problem": None})
            train = train.model_copy(update={"exploration": fixed})
        return replace(self, settings=self.settings.model_copy(update={"train": train}))

    @property
    def at_once(self) -> int:
        """Episodes under way: of a batch, or of all groups that stream."""
        streaming = self.settings.train.streaming
        episodes = streaming.groups_under_way * self.settings.train.group_size if streaming else self.episodes
        return min(episodes, self.settings.engine.max_concurrent_episodes)


def warm_start_setup(setup: Setup) -> Setup:
    """The supervised warm start as if it were a training: all weights also under LoRA, without a reference, on batches
    of single episodes, by the settings of `warm_start`.
    """
    settings = setup.settings
    own = settings.warm_start.model_dump(exclude={"num_steps", "batch_size", "stop"})
    others = {"problems_per_iteration": settings.warm_start.batch_size, "group_size": 1, "lora": None, "kl_weight": 0.0}
    train = settings.train.model_copy(update={**own, **others, "max_staleness": 0})
    changed = settings.model_copy(update={"train": train}).changed("compute.offload", "none")
    return replace(setup, settings=changed)


def evaluation_setup(setup: Setup, play: Play) -> Setup:
    """A play beside training as if it were a batch: of one model alone, in one process. It is loaded in
    `compute.weights`, an adapter merged into it; beside an engine with its own memory, with which it is compared, in 16
    bits where that has no more (`rollouts/load.py`).
    """
    settings, own = setup.settings, getattr(setup.settings.engine.own, "dtype", None)
    is_short = own in ("auto", "bfloat16") and setup.shape.stored == "bfloat16"
    alone = {"lora": None, "kl_weight": 0.0, "max_staleness": 0, "streaming": None, "exploration": None}
    sizes = {"problems_per_iteration": max(1, play.problems), "group_size": play.samples}
    longest = play.max_tokens or settings.sampling.max_tokens_per_episode
    changed = {
        "train": settings.train.model_copy(update={**alone, **sizes}),
        "sampling": settings.sampling.model_copy(update={"max_tokens_per_episode": longest}),
        "launch": settings.launch.model_copy(update={"launcher": "local", "num_trainers": 1}),
        "compute": settings.compute.model_copy(update={"weights": "bfloat16"} if is_short else {}),
    }
    return replace(setup, settings=settings.model_copy(update=changed), plays=())


def evaluation_setups(setup: Setup) -> list[Setup]:
    return [evaluation_setup(setup, play) for play in setup.plays]


def warm_start_check(setup: Setup, num_problems: int) -> Play:
    """What judges an attempt: of as many problems as select has, or of `num_problems` where plays are not known."""
    return next((play for play in setup.plays if play.name == CHECK), Play(CHECK, num_problems))


def measured_at_once(setup: Setup) -> int:
    """The most episodes that are under way beside training; 0 where that is not known."""
    return max((one.at_once for one in evaluation_setups(setup)), default=0)


def setup_of(params: dict[str, Any]) -> Setup | None:
    """Of params.yaml, on this machine, with what is played of the problems that were curated; None where the model's
    shape is not known.
    """
    settings, problems = load(PlanSections, params), curated_problems(load_paths(params), params)
    try:
        shape = shape_of(load(ModelSections, params).model)
    except UnknownShape:
        return None
    return Setup(shape, settings, this_machine(settings.compute), plays_of(params, problems) if problems else ())


def num_bytes(dtype: str) -> int:
    """Of one number; what turnwise does not compute in counts as float32."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}.get(dtype, 4)
