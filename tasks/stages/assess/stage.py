"""assess: how good is the base model without training, and what does that call for?

Reads the curated problems and `model.path`. Writes the base model (or a pointer to it), its trajectories, and
`baseline.json` with success, interval and the gate's decision (`gate.py`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core import machine
from tasks.core.files import atomic_folder, write_json, write_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell
from tasks.drift.pin import check_pin
from tasks.environments.catalog import load_environment
from tasks.rollouts.settings import PlaySettings
from tasks.stages.assess.base_model import check_budgets, prepare_base_model
from tasks.stages.assess.gate import decide, look_confidence, plan_looks, read_look
from tasks.stages.assess.settings import AssessSections
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result
    from tasks.rollouts.load import Engines

SETTINGS = AssessSections


def run(settings: AssessSections, paths: Paths) -> None:
    """Play looks until the gate's answer is clear; each look continues with the episodes of the one before."""
    from tasks.models.embedded import is_embedded
    from tasks.models.missing import check_model_path

    if not is_embedded(settings.model.path):
        check_model_path(settings.model.path)
    check_pin(settings.environment, paths, stage="assess")
    select = read_split(paths, "select")
    resume = resume_folder("assess", settings, paths)
    with atomic_folder(paths.stage("assess")) as folder, closing(load_environment(settings.environment)) as environment:
        model = folder / "base_model"
        prepare_base_model(model, settings, paths, environment)
        check_budgets(model, settings, paths, environment)
        played, result, decision = assess_model(model, environment, select, settings, resume / "episodes.jsonl")
        headline = {name: decision[name] for name in ("gate", "confidence")}
        write_json(folder / "baseline.json", {**result, **headline, "decision": decision})
        write_jsonl(folder / "trajectories.jsonl", (trajectory.to_row() for trajectory in played))
    clear_resume("assess", paths)
    tell(f"gate: {decision['gate']}. {decision['reason']}")


def assess_model(
    model: Path, environment: Environment, select: list[Problem], settings: AssessSections, finished: Path
) -> tuple[list[Trajectory], Result, dict[str, Any]]:
    """The episodes of the last look, their success, and the gate's decision. All looks share the model's weights, which
    are read once where memory allows.
    """
    from tasks.rollouts.kept_models import KeptModels
    from tasks.rollouts.load import Engines

    plan = plan_looks(settings.assess, len(select))
    confidence = look_confidence(settings.assess, len(plan))
    kept = KeptModels(machine.available_memory)
    kept.expect([model] if len(plan) > 1 else [])
    looks: list[dict[str, Any]] = []
    with closing(Engines(settings.play(settings.assess.samples_per_problem), kept)) as engines:
        for num_problems, num_samples in plan:
            problems = select[:num_problems]
            played = play_look(model, environment, problems, settings.play(num_samples), finished, engines)
            result, look = read_look(played, settings.assess, confidence=confidence)
            looks.append(look)
            if look["answer"] != "need_more_evidence":
                break
    return played, result, decide(looks, settings.assess, confidence=confidence)


def play_look(
    model: Path,
    environment: Environment,
    problems: list[Problem],
    play: PlaySettings,
    finished: Path,
    engines: Engines,
) -> list[Trajectory]:
    """The episodes of one look; those in the file `finished` (earlier looks, a killed run) are not played again."""
    from tasks.rollouts.collect import sample_episodes
    from tasks.rollouts.finished import FinishedEpisodes

    return sample_episodes(
        model,
        environment,
        problems,
        play,
        stage="assess",
        label="assess the base model",
        engines=engines,
        finished=FinishedEpisodes(finished),
    )
