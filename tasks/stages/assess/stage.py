"""assess: how good is the base model without training, and what does that call for?

Reads the curated problems and `model.path`. Writes the base model (or a pointer to it), its trajectories, and
`baseline.json` with success, interval and the gate's decision (`gate.py`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, write_json, write_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell
from tasks.drift.pin import check_pin
from tasks.environments.catalog import load_environment
from tasks.stages.assess.base_model import check_budgets, prepare_base_model
from tasks.stages.assess.gate import decide, look_confidence, plan_looks, read_look
from tasks.stages.assess.settings import AssessSections
from tasks.tools.base import Environment

SETTINGS = AssessSections


def run(settings: AssessSections, paths: Paths) -> None:
    """Play looks until the gate's answer is clear; each look continues with the episodes of the one before."""
    from tasks.models.embedded import is_embedded
    from tasks.models.missing import check_model_path

    if not is_embedded(settings.model.path):
        check_model_path(settings.model.path)
    check_pin(settings.environment, paths, stage="assess")
    select = read_split(paths, "select")
    plan = plan_looks(settings.assess, len(select))
    confidence = look_confidence(settings.assess, len(plan))
    resume = resume_folder("assess", settings, paths)
    with atomic_folder(paths.stage("assess")) as folder, closing(load_environment(settings.environment)) as environment:
        model = folder / "base_model"
        prepare_base_model(model, settings, paths, environment)
        check_budgets(model, settings, paths, environment)
        looks: list[dict[str, Any]] = []
        for num_problems, num_samples in plan:
            problems = select[:num_problems]
            played = play(model, environment, problems, num_samples, settings, resume / "episodes.jsonl")
            result, look = read_look(played, settings.assess, confidence=confidence)
            looks.append(look)
            if look["answer"] != "need_more_evidence":
                break
        decision = decide(looks, settings.assess, confidence=confidence)
        headline = {name: decision[name] for name in ("gate", "confidence")}
        write_json(folder / "baseline.json", {**result, **headline, "decision": decision})
        write_jsonl(folder / "trajectories.jsonl", (trajectory.to_row() for trajectory in played))
    clear_resume("assess", paths)
    tell(f"gate: {decision['gate']}. {decision['reason']}")


def play(
    model: Path,
    environment: Environment,
    problems: list[Problem],
    num_samples: int,
    settings: AssessSections,
    finished: Path,
) -> list[Trajectory]:
    """The episodes of one look; those in the file `finished` (earlier looks, a killed run) are not played again."""
    from tasks.rollouts.collect import sample_episodes
    from tasks.rollouts.finished import FinishedEpisodes

    return sample_episodes(
        model,
        environment,
        problems,
        settings.play(num_samples),
        stage="assess",
        label="assess the base model",
        finished=FinishedEpisodes(finished),
    )
