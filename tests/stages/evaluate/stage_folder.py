"""What the stages before `evaluate` leave, in small: twelve test problems, and three untrained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, write_jsonl
from tasks.core.settings import Paths, load, read_params
from tasks.drift.pin import make_pin, play_probes, write_pin
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.collect import Collector
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate import stage as evaluate
from tasks.stages.evaluate.settings import EvaluateSections
from tests import tiny
from tests.conftest import ROOT
from tests.worlds import environment_settings

PROBLEMS = list({problem.requests[0]: problem for problem in tiny.problems(16, max_level=3)}.values())[:12]
ENVIRONMENT = environment_settings()


def stage_folder(folder: Path) -> Paths:
    made = Paths(folder / "artifacts")
    for split, count in (("select", 2), ("test", 12)):
        write_jsonl(made.split(split), (problem.model_dump() for problem in PROBLEMS[:count]))
    write_pin(made.stage("curate"), make_pin(TravelDesk(), PROBLEMS[:2], [play_probes(ENVIRONMENT, PROBLEMS[:2])]))
    tiny.model_folder(made.stage("train") / "snapshots" / "iteration-0001")
    tiny.model_folder(made.stage("assess") / "base_model", seed=2)
    tiny.model_folder(made.stage("warm_start") / "model", seed=3)
    return made


def evaluated(paths: Paths, frontier: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """evaluation.json; `changed` are keys of the section `evaluate`."""
    evaluate.run(load(EvaluateSections, small_params(frontier=frontier, **changed)), paths)
    return dict(read_json(paths.stage("evaluate") / "evaluation.json"))


def small_params(**changed: Any) -> dict[str, Any]:
    params = read_params(ROOT / "params.yaml")
    params["environment"] = ENVIRONMENT.model_dump(mode="json")
    params["compute"]["num_threads"] = 1
    params["sampling"] = {**tiny.SAMPLING.model_dump(), "max_turns": 12, "max_tokens_per_episode": 80}
    small = {"test_samples_per_problem": 1, "frontier": None, "sharded": None}
    params["evaluate"] = {**params["evaluate"], **small, **changed}
    return params


def files_of(paths: Paths) -> dict[str, bytes]:
    """What evaluate left, by its path in the folder of the stage."""
    folder = paths.stage("evaluate")
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def play_settings() -> PlaySettings:
    """How `evaluated` plays, one episode per problem."""
    params = read_params(ROOT / "params.yaml")
    params["compute"]["num_threads"] = 1
    params["sampling"] = tiny.SAMPLING.model_dump()
    return load(EvaluateSections, params).plays["greedy"].model_copy(update={"sampling": tiny.SAMPLING})


class Kill:
    """Ends the process, as it were, when episode number `at` has ended; `num_ended` counts all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        keep, self.num_ended, self.at = Collector._keep, 0, 0

        def count(collector: Collector, *ended: Any) -> None:
            keep(collector, *ended)
            self.num_ended += 1
            if self.num_ended == self.at:
                raise KeyboardInterrupt

        monkeypatch.setattr(Collector, "_keep", count)
