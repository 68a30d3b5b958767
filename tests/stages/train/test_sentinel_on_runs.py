"""The sentinel on whole runs: scripted blow-ups, real ones, and healthy ones it must leave alone, all with the settings
of params.yaml.

The recordings hold what the sentinel reads of each row. `healthy_runs.jsonl`: three runs of the demo (params.yaml with
seeds 21 to 23, 80 iterations). `collapsing_runs.jsonl`: five of the test profile with a constant learning rate of 6e-3
(seeds 2, 3, 6, 12 and 19, 40 iterations). Nothing is scripted in these: with overlong filtering nothing holds
completions back, so they grow from 14 tokens to 80, most of them noise at up to 4 nats, and success rises to 59 to 74%
before it falls under 20%. `stale_runs.jsonl`: three healthy ones of the test profile at 3e-3 whose batches may be 0, 1
and 3 versions old (in the place of the seed, which is 3 for each; 16 iterations).
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from tasks.chat.format import load_chat
from tasks.core.records import Demonstration, Group, Outcome, Problem, Score, TokenSequence, Trajectory
from tasks.core.settings import load, read_params
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.learning.grpo.metrics import rollout_metrics
from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.models.embedded import build_embedded_model
from tasks.models.folders import load_model, save_snapshot
from tasks.models.settings import PLAIN_TEMPLATE, on_cpu
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.sentinel import Sentinel
from tasks.stages.train.settings import SentinelSettings, TrainSections
from tasks.stages.train.stage import train_policy
from tasks.stages.warm_start.rows import demonstration_row
from tasks.stages.warm_start.settings import WarmStartSections
from tests import tiny
from tests.conftest import ROOT
from tests.learning.options import grpo
from tests.profiles import profile_params

Row = dict[str, Any]
pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
SENTINEL: Row = read_params(ROOT / "params.yaml")["sentinel"]


def first_alarm(rows: Sequence[Row], **changed: Any) -> Alarm | None:
    """What the sentinel of params.yaml says first."""
    sentinel = Sentinel(SentinelSettings.model_validate({**SENTINEL, **changed}))
    return next((alarm for row in rows if (alarm := sentinel.observe(row)) is not None), None)


def recorded(name: str) -> dict[int, list[Row]]:
    """The rows of each run, by seed."""
    runs: dict[int, list[Row]] = defaultdict(list)
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        runs[row.pop("seed")].append(row)
    return runs


def fall_of_success(rows: Sequence[Row]) -> int:
    """The iteration from which success, as the median of five, lies 10 points under the best it had."""
    success = [row["success_rate"] for row in rows]
    levels = [median(success[end - 5 : end]) for end in range(5, len(success) + 1)]
    return next(5 + i for i in range(len(levels)) if levels[i] < max(levels[: i + 1]) - 0.1)


# A scripted blow-up, through the metrics of the trainer

CLEAN, CHARACTERS, PHRASE = range(600), range(1000, 1095), range(700, 705)  # token ids
BUDGET, READ = 420, 120  # tokens of an episode, as in params.yaml; those of them that are prompt and tool replies
ONSET = 30


def blow_up(filler: str, points: int) -> list[Row]:
    """Rows of a run whose completions hold `points` of 100 more filler each iteration from ONSET on: random characters,
    or one phrase over and over.

    Without it a completion has 50 to 90 tokens at 0.1 nats. 7 trajectories in 10 succeed, filler or not, as long as
    the episode stays within its budget: at 90 tokens that is up to 70% filler, at 50 tokens 83%.
    """
    rng = random.Random(f"{filler}/{points}")
    rows: list[Row] = []
    for iteration in range(1, ONSET + 95 // points + 10):
        share = min(0.95, max(0, iteration - ONSET) * points / 100)
        episodes = [an_episode(rng, number, share, filler) for number in range(128)]
        groups = [a_group(episodes[first : first + 8]) for first in range(0, 128, 8)]
        rows.append({"iteration": iteration, **rollout_metrics(groups, grpo(), None)})
    return rows


def an_episode(rng: random.Random, number: int, share: float, filler: str) -> Trajectory:
    num_clean = rng.randint(50, 90)
    num_filler = round(num_clean * share / (1 - share))
    tokens = [(rng.choice(CLEAN), -rng.expovariate(10)) for _ in range(num_clean)]
    if filler == "characters":
        tokens += [(rng.choice(CHARACTERS), -math.log(len(CHARACTERS))) for _ in range(num_filler)]
    else:
        tokens += [(PHRASE[i % len(PHRASE)], -0.01) for i in range(num_filler)]
    is_cut = len(tokens) > BUDGET - READ
    tokens = tokens[: BUDGET - READ]
    outcome: Outcome = "overlong" if is_cut else "success" if number % 10 < 7 else "failure"
    sequence = TokenSequence()
    sequence.append_given([1] * READ)
    sequence.append_sampled([token for token, _ in tokens], [logp for _, logp in tokens], [0] * len(tokens))
    return Trajectory(
        problem_id=f"p{number // 8}", category="book/none", request="", draw=0, sample_index=number % 8,
        policy_version=0, environment_fingerprint="", sequences=[sequence],
        turns=[], outcome=outcome, limit="max_tokens_per_episode" if is_cut else None, checks={}, num_calls=0,
        num_invalid_calls=0,
    )  # fmt: skip


def a_group(trajectories: list[Trajectory]) -> Group:
    scores = [Score(float(item.is_success), {"outcome": float(item.is_success)}) for item in trajectories]
    return Group(trajectories[0].problem_id, "book/none", trajectories, scores)


@pytest.mark.parametrize("points", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("filler", ["characters", "phrase"])
def test_filler_that_grows_step_by_step_is_noticed_before_success_falls(filler: str, points: int):
    """At 3 points an iteration the alarm on random characters comes 8 iterations after they do, with completions a
    third longer and success whole; success falls 18 iterations later.
    """
    rows = blow_up(filler, points)
    alarm = first_alarm(rows)
    assert alarm is not None and ONSET < alarm.iteration < fall_of_success(rows)
    assert alarm.signal == {"characters": "entropy_explosion", "phrase": "repetition"}[filler]


@pytest.mark.parametrize("points", [2, 3, 5, 8])
def test_the_slope_of_completion_length_alone_is_enough(points: int):
    """From 2 points an iteration on; at 1 point it takes 20 iterations to get a third longer."""
    rows = blow_up("characters", points)
    others = {name for name in SENTINEL if name.startswith(("max_", "min_"))} - {"max_length_growth", "max_rollbacks"}
    alarm = first_alarm(rows, **dict.fromkeys(others))
    assert alarm is not None and alarm.signal == "completion_length"
    assert ONSET < alarm.iteration < fall_of_success(rows)


def test_completions_that_triple_and_stay_there_are_noticed_until_a_window_has_passed():
    """So that raising a threshold, or accepting the longer text, does not take a new run."""
    lengths = [60.0] * 20 + [60 * 3 ** (i / 10) for i in range(11)] + [180.0] * 40
    steady = {
        "success_rate": 0.5,
        "informative_group_share": 0.6,
        "entropy": 0.3,
        "repetition": 0.1,
        "overlong_share": 0.0,
    }
    rows = [{"iteration": i + 1, "mean_sampled_tokens": length, **steady} for i, length in enumerate(lengths)]
    sentinel = Sentinel(SentinelSettings.model_validate(SENTINEL))
    noticed = [row["iteration"] for row in rows if sentinel.observe(row)]
    assert noticed and min(noticed) > 20 and max(noticed) < 50


# Real runs


@pytest.mark.parametrize("unwatched", [(), ("max_kl", "max_clip_share")])
@pytest.mark.parametrize("seed", [2, 3, 6, 12, 19])
def test_a_run_that_really_collapsed_is_stopped_before_its_success_fell(seed: int, unwatched: tuple[str, ...]):
    """In three of them by KL, at iterations 5, 5 and 18; without KL and clipping, what the text is like is enough."""
    rows = recorded("collapsing_runs.jsonl")[seed]
    success = [row["success_rate"] for row in rows]
    assert mean(success[-5:]) < 0.2 and max(success) > 0.55
    alarm = first_alarm(rows, **dict.fromkeys(unwatched))
    assert alarm is not None and alarm.iteration < fall_of_success(rows)


def test_no_whole_run_of_the_demo_alarms():
    """Completions go from 57 to 87 tokens and back, one iteration has a KL of 409, and entropy falls to 0.04 nats."""
    runs = recorded("healthy_runs.jsonl")
    assert [len(rows) for rows in runs.values()] == [80, 80, 80]
    for rows in runs.values():
        assert mean(row["success_rate"] for row in rows[-5:]) > 0.9
        assert first_alarm(rows) is None


def test_batches_of_older_weights_are_no_mean_mismatch_and_another_models_logits_are():
    """3 versions old they are up to 0.4 nats a token from the trainer; a head without its scale is 3 and more."""
    watched = {"max_mean_mismatch", "max_rollbacks"}
    others = {name for name in SENTINEL if name.startswith(("max_", "min_"))} - watched
    runs = recorded("stale_runs.jsonl")
    for rows in runs.values():
        assert mean(row["success_rate"] for row in rows[-3:]) > rows[0]["success_rate"] + 0.1
        assert first_alarm(rows, **dict.fromkeys(others)) is None
    assert [max(row["mismatch_mean"] for row in rows) > 0.2 for rows in runs.values()] == [False, True, True]
    unscaled = [{**row, "mismatch_mean": 3.0} for row in runs[0]]
    alarm = first_alarm(unscaled, **dict.fromkeys(others))
    assert alarm is not None and (alarm.signal, alarm.iteration) == ("mean_mismatch", 5)


# Twenty runs, made here


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    """Cancelled bookings: one call, and an answer that names the refund."""
    return tiny.problems(600, seed=7, max_level=1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, problems: list[Problem]) -> Path:
    """The test profile's model after its warm start."""
    params = profile_params("test")
    options, world, folder = load(WarmStartSections, params).warm_start, TravelDesk(), tmp_path_factory.mktemp("start")
    shown = [world.demonstrate(problem, random.Random(number)) for number, problem in enumerate(problems)]
    demonstrations = [item for item in shown if item is not None]
    build_embedded_model(
        folder / "base",
        texts=[text for item in demonstrations for text in texts_of(item)],
        vocabulary=world.vocabulary(),
        settings=tiny.EMBEDDED.model_validate(params["model"]["embedded"]),
        template=PLAIN_TEMPLATE,
        seed=7,
        compute=on_cpu(1),
    )
    chat, tools = load_chat(folder / "base"), [tool.schema() for tool in world.tools]
    rows = [demonstration_row(item, chat, tools) for item in demonstrations]
    trainer = SupervisedTrainer(load_model(folder / "base", compute=on_cpu(1)), rows, options, seed=7)
    for _ in range(options.num_steps):
        trainer.step()
    save_snapshot(folder / "model", trainer.model, chat.tokenizer)
    return folder / "model"


def texts_of(demonstration: Demonstration) -> list[str]:
    replies = [reply for turn in demonstration.replies for reply in turn]
    return [demonstration.request, *demonstration.assistant_texts, *replies]


@pytest.mark.bench
def test_twenty_healthy_runs_learn_and_none_alarms(start: Path, problems: list[Problem], tmp_path: Path):
    """The test profile with overlong filtering off, so that a completion past its limit costs what it is worth; with it
    on, about one seed in ten of this profile drifts to its limits, and the sentinel says so. An alarm would raise.
    """
    params = profile_params("test")
    params["train"] |= {
        "num_iterations": 16, "problems_per_iteration": 12, "learning_rate": 3e-3, "filter_overlong": False,
        "checkpoint_interval": 16, "snapshot_interval": 16,
    }  # fmt: skip
    params["sentinel"] = {**SENTINEL, "action": "stop"}
    gains = []
    for seed in range(1, 21):
        folder = tmp_path / str(seed)
        rows = train_policy(
            load(TrainSections, {**params, "seed": seed}),
            start=start,
            problems=problems,
            output=folder / "output",
            resume=folder / "resume",
            alarms=folder / "alarms",
        )
        success = [row["success_rate"] for row in rows]
        assert len(rows) == 16
        gains.append(mean(success[-5:]) - mean(success[:5]))
    assert min(gains) > 0.05 and mean(gains) > 0.15, gains
