"""The control: is it RL, or would more imitation have done as well?

From the demo's warm start, supervised fine-tuning goes on for as long as GRPO took, on fresh demonstrations of the same
train problems, and meets the same test problems with the same random numbers. Writes artifacts/bench/control.json.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tasks.chat.format import load_chat
from tasks.core.files import read_json, read_jsonl, write_json
from tasks.core.records import Trajectory
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import SupervisedSettings
from tasks.measurement.statistics import paired_difference, summarise
from tasks.models.folders import load_model, save_snapshot
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import sample_episodes
from tasks.stages.curate.demonstrations import expert_episodes
from tasks.stages.curate.references import Replays
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.warm_start.rows import demonstration_row
from tests.benchmarks.demo import demo_artifacts, demo_params

pytestmark = pytest.mark.bench
CALIBRATION_STEPS = 30


def settings(num_steps: int, rate_share: float) -> SupervisedSettings:
    """The warm start's own settings at a share of its rate: what a continued run would use."""
    options = demo_params()["warm_start"]
    return SupervisedSettings(
        **{**options, "num_steps": num_steps, "learning_rate": options["learning_rate"] * rate_share}
    )


def fresh_rows(paths: Paths, warm_start: Path) -> list[Row]:
    params, chat = demo_params(), load_chat(warm_start)
    world = load_environment(EnvironmentSettings(**params["environment"]))
    tools = [tool.schema() for tool in world.tools]
    problems = read_split(paths, "train")
    episodes = expert_episodes(
        Replays(world), problems, num=2 * params["curate"]["num_demonstrations"], seed=params["seed"] + 1
    )
    return [demonstration_row(demonstration, chat, tools) for _, demonstration in episodes]


def steps_in(seconds: float, warm_start: Path, rows: list[Row]) -> int:
    model = load_model(warm_start, compute=on_cpu(demo_params()["compute"]["num_threads"]))
    trainer = SupervisedTrainer(model, rows, settings(CALIBRATION_STEPS, 0.0), seed=0)
    start = time.perf_counter()
    for _ in range(CALIBRATION_STEPS):
        trainer.step()
    return int(seconds / ((time.perf_counter() - start) / CALIBRATION_STEPS))


def on_test(model_folder: Path, paths: Paths) -> list[Trajectory]:
    params = demo_params()
    return sample_episodes(
        model_folder,
        load_environment(EnvironmentSettings(**params["environment"])),
        read_split(paths, "test"),
        load(EvaluateSections, params).plays["test"],
        stage="test",
        label="test: control",
    )


def continue_imitating(warm_start: Path, rows: list[Row], num_steps: int) -> PreTrainedModel:
    model = load_model(warm_start, compute=on_cpu(demo_params()["compute"]["num_threads"]))
    trainer = SupervisedTrainer(model, random.Random(0).sample(rows, len(rows)), settings(num_steps, 0.4), seed=1)
    for _ in range(num_steps):
        trainer.step()
    return model


def test_more_imitation_does_not_teach_what_rl_does(tmp_path: Path) -> None:
    paths = demo_artifacts()
    warm_start, evaluation = paths.start_model, read_json(paths.stage("evaluate") / "evaluation.json")
    rl_seconds = read_json(paths.artifacts / "run.json")["seconds"]["train"]
    if rl_seconds < 20:  # the stage came from the cache: count an iteration at a second, a generous guess
        rl_seconds = float(demo_params()["train"]["num_iterations"])
    rows = fresh_rows(paths, warm_start)
    num_steps = steps_in(rl_seconds, warm_start, rows)
    save_snapshot(
        tmp_path / "control", continue_imitating(warm_start, rows, num_steps), load_chat(warm_start).tokenizer
    )
    played = on_test(tmp_path / "control", paths)
    control = summarise(played, confidence=0.95)
    best = [
        Trajectory.from_row(row) for _, row in read_jsonl(paths.stage("evaluate") / "trajectories" / "test_best.jsonl")
    ]
    gain = paired_difference(best, played, confidence=0.95)
    write_json(paths.artifacts / "bench" / "control.json", {"control": control, "num_steps": num_steps,
               "rl_seconds": rl_seconds, "gain_of_rl": gain})  # fmt: skip
    print_table(
        {"warm start": evaluation["test"]["warm_start"], "more SFT": control, "GRPO": evaluation["test"]["best"]}
    )
    assert gain["ci_low"] > 0


def print_table(results: dict[str, Any]) -> None:
    categories = sorted(results["GRPO"]["by_category"])
    print("\n" + " " * 46 + "".join(f"{name:>12}" for name in results))
    for category in categories:
        rates = "".join(f"{result['by_category'][category]['success_rate']:12.1%}" for result in results.values())
        print(f"{category:<46}{rates}")
    print(f"{'all':<46}" + "".join(f"{result['success_rate']:12.1%}" for result in results.values()))
