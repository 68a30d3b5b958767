"""Whether a model's family can be trained and played with these settings, from its config.json alone.

What neither a config nor an architecture without numbers shows is found when trainer and engine start, by comparing
log-probs with the model's own forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tasks.core.files import names_in
from tasks.core.settings import load
from tasks.core.urls import local_path
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.embedded import is_embedded
from tasks.models.settings import ModelSettings
from tasks.models.tokenizer_files import check_tokenizer
from tasks.planning.setup import PlanSections
from tasks.planning.shapes import count_parameters
from tasks.rollouts.settings import EngineSettings, SamplingSettings


class PlayedAndTrained(Protocol):
    @property
    def engine(self) -> EngineSettings: ...
    @property
    def sampling(self) -> SamplingSettings: ...
    @property
    def train(self) -> GRPOSettings: ...


class FamilySections(PlanSections):
    model: ModelSettings


def check_family(params: dict[str, Any]) -> None:
    """ValueError where the trainer, or the engine in this process, would compute another distribution than the model's;
    nothing where the model is built on the spot or not there.
    """
    settings = load(FamilySections, params)
    folder = local_path(settings.model.path)
    if is_embedded(settings.model.path) or not (folder / "config.json").exists():
        return
    check_config(folder, settings)


def check_config(folder: Path, settings: PlayedAndTrained) -> str:
    """The model type of the config in `folder`, if it passes."""
    from tasks.models.empty_model import check_attention, check_tensors
    from tasks.models.folders import load_config
    from tasks.models.limits import check_playable, check_trainable

    check_attention(folder)  # first: no setting makes up for it
    if names_in(folder, ".safetensors"):
        check_tokenizer(folder)
        count_parameters(folder)  # refuses a dtype that is not computed in
        check_tensors(folder)
    config, longest = load_config(folder), settings.sampling.max_tokens_per_episode
    check_trainable(config, packing=settings.train.packing, max_tokens=longest, key="train.packing")
    if settings.engine.name == "transformers":
        check_playable(config, max_tokens=longest)
    return str(config.model_type)
