"""assess: how good is the base model without training, and is that enough for RL to start from?

Takes the curated problems and `model.path`; leaves the base model (built on the spot, or a pointer to the user's
folder), its trajectories and `baseline.json` with success, interval and the gate: below `assess.warm_start_below`,
exploration finds too little to learn from, and the next stage warms the model up on demonstrations.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from pydantic import Field

from tasks.environments.base import Environment
from tasks.environments.catalog import load_environment
from tasks.environments.options import EnvironmentSettings
from tasks.learning.options import EmbeddedModelSettings, ModelSettings
from tasks.pinning import check_pin
from tasks.problems import read_split
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import atomic_folder, read_jsonl, write_json, write_jsonl


class AssessOptions(Settings):
    """How much evidence the gate needs, and where it lies."""

    samples_per_problem: int = Field(ge=1)
    num_problems: int = Field(ge=1)
    warm_start_below: float = Field(ge=0, le=1)
    confidence: float = Field(gt=0.5, lt=1)


class AssessSettings(Settings):
    seed: int
    num_threads: int = Field(ge=1)
    model: ModelSettings
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    assess: AssessOptions


SETTINGS = AssessSettings


def run(settings: AssessSettings, paths: Paths) -> None:
    from tasks.measurement.statistics import summarise
    from tasks.rollouts.collect import sample_episodes

    options = settings.assess
    check_pin(settings.environment, paths, stage="assess")
    problems = read_split(paths, "select")[: options.num_problems]
    with atomic_folder(paths.stage("assess")) as folder, closing(load_environment(settings.environment)) as world:
        prepare_base_model(folder / "base_model", settings, paths, world)
        trajectories = sample_episodes(
            folder / "base_model",
            world,
            problems,
            engine=settings.engine,
            sampling=settings.sampling,
            seed=settings.seed,
            stage="assess",
            samples_per_problem=options.samples_per_problem,
            num_threads=settings.num_threads,
            label="assess the base model",
        )
        result = summarise(trajectories, confidence=options.confidence)
        gate = "warm_start" if result["success_rate"] < options.warm_start_below else "rl"
        write_json(folder / "baseline.json", {**result, "gate": gate})
        write_jsonl(folder / "trajectories.jsonl", (trajectory.to_row() for trajectory in trajectories))


def prepare_base_model(folder: Path, settings: AssessSettings, paths: Paths, environment: Environment) -> None:
    """Build the embedded model from the curated data, or point to the user's model, once it is known to be usable."""
    from tasks.learning.embedded_model import build_embedded_model, is_embedded
    from tasks.models import write_pointer
    from tasks.rollouts.chat import load_chat

    path = Path(settings.model.path)
    if not is_embedded(settings.model.path):
        if not (path / "config.json").exists():
            raise ValueError(
                f"model.path = {settings.model.path!r} is not a folder with a config.json, so nothing can be trained. "
                f"Point it to a Hugging Face model folder, or to tasks/learning/embedded_model.py for the tiny one."
            )
        load_chat(path)
        write_pointer(folder, settings.model.path)
        return
    build_embedded_model(
        folder,
        texts=embedded_texts(settings.model.embedded, paths, environment),
        vocabulary=environment.vocabulary() if hasattr(environment, "vocabulary") else [],
        settings=settings.model.embedded,
        seed=settings.seed,
        num_threads=settings.num_threads,
    )


def embedded_texts(settings: EmbeddedModelSettings, paths: Paths, environment: Environment) -> list[str]:
    """What the embedded tokenizer takes its pieces from: everything the demonstrations and the training requests say,
    and how the tools describe themselves, where prompts hold that.
    """
    texts = [request for problem in read_split(paths, "train") for request in problem.requests]
    for _, row in read_jsonl(paths.stage("curate") / "demonstrations.jsonl"):
        texts += [*row["assistant_texts"], *(reply for replies in row["replies"] for reply in replies)]
    if settings.tools_in_prompt:
        texts += [json.dumps(tool.schema(), ensure_ascii=False) for tool in environment.tools]
    return list(dict.fromkeys(texts))
