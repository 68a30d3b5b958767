"""A whole GRPO run of the real parts at tiny size: resume after a kill, roll-back, LoRA snapshots, bad rewards."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.core.files import content_hash, number_of, write_json, write_jsonl
from tasks.core.records import Group, Score, Trajectory
from tasks.core.settings import Paths, load
from tasks.engines.transformers import decode_step, traces
from tasks.learning.grpo import prefixes
from tasks.learning.grpo.metrics import rollout_metrics
from tasks.learning.shared import checkpoints as checkpointing
from tasks.measurement.learnt import read_untrained
from tasks.models.folders import is_adapter, load_model, merged_snapshot, weights_hash
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EpisodeKey, EpisodeRun
from tasks.rollouts.references import reference_messages
from tasks.stages.train import groups as grouping
from tasks.stages.train import run as training
from tasks.stages.train import stage
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.outlook import Baseline
from tasks.stages.train.sentinel import Sentinel
from tasks.stages.train.serving import add_hit_rate
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import (
    CURVE,
    CollapseAlarm,
    _progress,
    iteration_seconds,
    note_learning,
    train_policy,
    write_metrics,
)
from tasks.tools.base import EnvironmentFault
from tests import tiny
from tests.learning.options import NO_EXPLORATION
from tests.measurement.synthetic import BASELINE
from tests.pipeline.training_worker import unwatched
from tests.profiles import profile_params

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("earnable")]
PROBLEMS = tiny.problems(40)
LORA = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}


def settings(**changed: Any) -> TrainSections:
    """The test profile at a size of seconds: six iterations of 4 problems × 4."""
    params = profile_params("test")
    small = {
        "num_iterations": 6, "snapshot_interval": 2, "checkpoint_interval": 1, "problems_per_iteration": 4,
        "group_size": 4, "problem_sampler": "uniform", "filter_overlong": False, "kl_weight": 0.01,
        "reference_interval": 2, "zero_variance_groups": "keep",
    }  # fmt: skip
    params["train"] |= small | {key: value for key, value in changed.items() if key in params["train"]}
    params["sentinel"] |= unwatched(params["sentinel"])
    for section in ("sentinel", "sampling"):
        params[section] |= {key: value for key, value in changed.items() if key in params[section]}
    return load(TrainSections, params)


def test_a_distribution_whose_tail_is_cut_is_refused_in_training_and_has_its_place_in_evaluation() -> None:
    with pytest.raises(ValueError, match=r"^params.yaml: sampling.top_p is 0.9, .*set evaluate.sampling, such as to"):
        settings(top_p=0.9)


def run(options: TrainSections, start: Path, place: Path, baseline: Baseline | None = None) -> list[dict[str, Any]]:
    place.mkdir(exist_ok=True)
    shutil.rmtree(place / "output", ignore_errors=True)
    return train_policy(
        options, start=start, problems=PROBLEMS, output=place / "output", resume=place / "resume",
        alarms=place / "alarms", baseline=baseline,
    )  # fmt: skip


def test_bfloat16_passes_the_comparison_and_the_sentinel_as_they_are_in_the_demo(start: Path, tmp_path: Path) -> None:
    demo = profile_params("demo")
    options = load(
        TrainSections,
        settings().model_dump(mode="json")
        | {"compute": demo["compute"] | {"num_threads": 1, "weights": "bfloat16", "frozen": "bfloat16"}}
        | {"engine": demo["engine"], "sentinel": demo["sentinel"]},
    )
    assert options.engine.probe_tolerance == "auto"
    training_run = training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path)
    with closing(training_run):
        assert {parameter.dtype for parameter in training_run.serving.model.parameters()} == {torch.bfloat16}
        for _ in range(3):
            row, alarm = training_run.iterate()
            assert alarm is None
            assert training_run.serving.is_compared
            assert row["grad_norm"] > 0
            assert 0 < row["mismatch_mean"] < options.engine.tolerance("bfloat16").mean


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def run_killed_after(count: int, options: TrainSections, start: Path, place: Path, patch: pytest.MonkeyPatch) -> None:
    """Stop dead when iteration `count` is done, before anything of it is written."""
    with patch.context() as patched:
        save = training.TrainingRun._save_if_due

        def dies(self: Any, **options: Any) -> None:
            if self.iteration == count:
                raise Killed
            save(self, **options)

        patched.setattr(training.TrainingRun, "_save_if_due", dies)
        with pytest.raises(Killed):
            run(options, start, place)


EXPLORING = {
    **NO_EXPLORATION,
    "temperature": [{"iteration": 1, "value": 1.5}, {"iteration": 5, "value": 0.7}],
    "samples_per_problem": [{"iteration": 1, "value": 4}, {"iteration": 4, "value": 3}],
    "keep": 2,
}


def test_each_iteration_is_drawn_and_trained_at_its_temperature_top_p_and_samples(start: Path, tmp_path: Path) -> None:
    """The engine's log-probs are the trainer's at every point of the schedule; at another temperature they are not."""
    top_p = [{"iteration": 1, "value": 0.6}, {"iteration": 5, "value": 1.0}]
    rows = run(settings(exploration={**EXPLORING, "top_p": top_p}, updates_per_batch=1), start, tmp_path)
    assert [row["top_p"] for row in rows] == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert [row["temperature"] for row in rows] == pytest.approx([1.5, 1.3, 1.1, 0.9, 0.7, 0.7])
    assert [row["samples_per_problem"] for row in rows] == [4, 4, 4, 3, 3, 3]
    assert [row["num_episodes"] for row in rows] == [16, 16, 16, 12, 12, 12]
    assert max(row["mismatch_max"] for row in rows) < 1e-3


def test_a_schedule_of_temperature_needs_an_engine_that_can_change_it() -> None:
    params = profile_params("test")
    params["engine"]["name"] = "vllm"
    params["engine"]["settings"] = {**profile_params("qwen2.5_7b_lora_80gb")["engine"]["settings"]}
    params["train"]["exploration"] = {**EXPLORING, "samples_per_problem": None}
    with pytest.raises(ValueError, match=r"keeps the temperature it started with. Set train.exploration.temperature"):
        load(TrainSections, params)


def prefixed(source: str) -> dict[str, Any]:
    schedules = {"share": [{"iteration": 1, "value": 0.75}], "depth": [{"iteration": 1, "value": 0.8}]}
    return {**NO_EXPLORATION, "prefixes": {"source": source, **schedules}}


def test_all_episodes_of_a_group_begin_with_the_same_replayed_turns_and_learn_from_the_rest(
    start: Path, tmp_path: Path
) -> None:
    """3 of 4 groups; what was given is the reference, masked and without a log-prob, and the engine's log-probs of the
    rest are the trainer's.
    """
    options = settings(exploration=prefixed("reference"), max_tokens_per_episode=200)
    by_id, chat = {problem.id: problem for problem in PROBLEMS}, load_chat(start)
    training_run = training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path)
    with closing(training_run):
        row, alarm = training_run.iterate()
        groups = training_run.trainer.last_groups
    assert alarm is None and row["num_prefixed_groups"] == 3 and row["mismatch_max"] < 1e-3
    assert sum(group.is_prefixed for group in groups) == 3
    for group in groups:
        (num_replayed,) = {item.num_replayed_turns for item in group.trajectories}
        starts = {
            tuple(item.sequences[0].token_ids[: item.sequences[0].sampled_mask.index(True)])
            for item in group.trajectories
        }
        assert len(starts) == 1 and (num_replayed > 0) is group.is_prefixed
        for item in group.trajectories:
            first = item.sequences[0].sampled_mask.index(True)
            given = ",".join(map(str, item.sequences[0].token_ids[:first]))
            messages = reference_messages(chat, by_id[item.problem_id])[:num_replayed]
            assert all(",".join(map(str, message)) in given for message in messages)
            assert [logp < 0.0 for logp in item.sequences[0].sampler_logp] == item.sequences[0].sampled_mask


@pytest.mark.parametrize(
    ("name", "first", "last"), [("top_p", 0.6, 1.0), ("top_p", 1.0, 0.6), ("temperature", 0.5, 1.5)]
)
def test_a_schedule_of_what_is_drawn_is_no_change_of_the_policys_entropy(
    tmp_path: Path, name: str, first: float, last: float
) -> None:
    """With a rate of 0 the policy is what it was. The log-probs of its tokens change by more than a nat."""
    wide = tiny.model_folder(tmp_path / "m", embedded=tiny.EMBEDDED.model_copy(update={"initializer_range": 0.3}))
    schedule = [{"iteration": number, "value": value} for number, value in ((1, first), (2, first), (3, last))]
    options = settings(
        exploration=NO_EXPLORATION | {name: schedule}, updates_per_batch=1, learning_rate=0.0, window=8,
        max_entropy_rise=0.75, num_iterations=4,
    )  # fmt: skip
    training_run = training.TrainingRun(options, start=wide, problems=PROBLEMS, resume=tmp_path / "r")
    drawn = []
    with closing(training_run):
        for _ in range(4):
            row, alarm = training_run.iterate()
            assert alarm is None
            groups = training_run.trainer.last_groups
            drawn.append((rollout_metrics(groups, options.train, None)["entropy"], row["entropy"]))
    sampled, policy = zip(*drawn, strict=True)
    assert max(sampled) - min(sampled) > 1
    assert max(policy) - min(policy) < 0.25


def test_a_replayed_start_never_takes_the_last_turn_of_the_limit(start: Path, tmp_path: Path) -> None:
    """With two turns, at most one is given: every episode has a turn of its own, and none looks stale."""
    deep = {"source": "reference", "share": [{"iteration": 1, "value": 0.75}], "depth": [{"iteration": 1, "value": 1}]}
    options = settings(
        exploration={**NO_EXPLORATION, "prefixes": deep}, max_turns=2, max_tokens_per_episode=200, max_staleness=1,
        importance_correction="token_truncate",
    )  # fmt: skip
    training_run = training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path)
    with closing(training_run):
        rows = [training_run.iterate()[0] for _ in range(3)]
        groups = training_run.trainer.last_groups
    assert all(row["num_prefixed_groups"] == 3 and row["staleness_max"] <= 1 for row in rows)
    assert all(item.own_turns and item.num_sampled_tokens for group in groups for item in group.trajectories)


def test_an_episode_that_its_replayed_start_ended_is_no_episode_of_the_policy(start: Path, tmp_path: Path) -> None:
    """Its user was done, or a reply was too long. It would be a failure that no weights wrote, as old as the run."""
    options = settings(exploration=prefixed("reference"), max_tokens_per_episode=200)
    training_run = training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path)
    with closing(training_run):
        training_run.iterate()
        group = next(group for group in training_run.trainer.last_groups if group.is_prefixed)
    first, *others = group.trajectories
    ended = dataclasses.replace(first, turns=first.turns[: first.num_replayed_turns])
    problem = next(problem for problem in PROBLEMS if problem.id == group.problem_id)
    assert grouping.score_group(problem, [ended, *others], options.reward, 0).trajectories == others


def test_a_shared_start_is_packed_once_and_gives_the_same_gradient(start: Path, tmp_path: Path) -> None:
    """4 episodes per group have one start of prompt and given turns: its positions are computed once, not 4 times."""
    rows, positions = {}, {}
    for packing in ("tree", "none"):
        options = settings(exploration=prefixed("reference"), max_tokens_per_episode=200, packing=packing)
        training_run = training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path / packing)
        with closing(training_run):
            rows[packing], _ = training_run.iterate()
            trainer = training_run.trainer
            (whole_step,) = trainer._mini_batches(trainer.last_groups)
            positions[packing] = sum(batch.tensors.ids_BT.numel() for batch in trainer._micro_batches(whole_step))
    played = [item for group in trainer.last_groups for item in group.trajectories]
    num_read = sum(
        len(item.sequences[0].token_ids) - 1 - item.sequences[0].sampled_mask[::-1].index(True) for item in played
    )
    num_shared = sum(group.trajectories[0].sequences[0].sampled_mask.index(True) for group in trainer.last_groups)
    assert positions["tree"] <= num_read - 3 * num_shared < num_read <= positions["none"]
    for name in ("loss", "grad_norm", "mismatch_mean"):
        assert rows["tree"][name] == pytest.approx(rows["none"][name], rel=1e-3, abs=1e-6)


def test_a_killed_run_that_replays_its_own_episodes_ends_bitwise_the_same(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four problems come back in every iteration; of each group one is taken for a success that began well."""
    few, chat = {problem.id: problem for problem in PROBLEMS[:4]}, load_chat(start)
    monkeypatch.setattr(sys.modules[__name__], "PROBLEMS", list(few.values()))
    monkeypatch.setattr(Trajectory, "is_success", property(lambda item: item.sample_index == 0))

    def began_well(item: Trajectory) -> dict[str, Any]:
        return {"messages": reference_messages(chat, few[item.problem_id])[:1], "num_turns": 2}

    monkeypatch.setattr(prefixes, "_row", began_well)
    options = settings(exploration=prefixed("own"), max_tokens_per_episode=200)
    expected = run(options, start, tmp_path / "whole")
    assert [row.get("num_prefixed_groups", 0) for row in expected] == [0, 3, 3, 3, 3, 3]
    run_killed_after(3, options, start, tmp_path / "killed", monkeypatch)
    assert run(options, start, tmp_path / "killed") == expected
    for part in ("output", "resume/iteration-000006"):
        assert content_hash(tmp_path / "killed" / part) == content_hash(tmp_path / "whole" / part)


NUCLEUS = {**NO_EXPLORATION, "top_p": [{"iteration": 1, "value": 0.6}, {"iteration": 5, "value": 1.0}]}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lora": LORA},
        {"checkpoint_interval": 2, "problem_sampler": "band"},
        {"exploration": EXPLORING},
        {"exploration": NUCLEUS, "updates_per_batch": 1},
        {"exploration": prefixed("reference"), "max_replacement_rounds": 1, "zero_variance_groups": "drop"},
        {"exploration": prefixed("reference"), "max_staleness": 1, "importance_correction": "token_truncate"},
    ],
)
def test_a_killed_run_goes_on_and_ends_bitwise_the_same(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    options = settings(**changed)
    expected = run(options, start, tmp_path / "whole")
    for count in (2, 5):
        run_killed_after(count, options, start, tmp_path / "killed", monkeypatch)
    assert run(options, start, tmp_path / "killed") == expected
    newest = "resume/iteration-000006"
    for part in ("output", newest):
        assert content_hash(tmp_path / "killed" / part) == content_hash(tmp_path / "whole" / part)


def test_no_iteration_waits_for_a_checkpoint_to_be_written_and_a_kill_meanwhile_leaves_the_one_before(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of iteration 2 cannot be written before iteration 4 plays: iteration 3 is complete by then, and a
    kill would start over, for nothing is in place. The result is that of a run whose writer is quick.
    """
    options = settings(checkpoint_interval=2)
    expected = run(options, start, tmp_path / "quick")
    folder = tmp_path / "slow" / "resume"
    is_played = threading.Event()
    seen: list[str] = []
    write, collect = checkpointing.write_tensors, Collector.collect

    def write_late(*arguments: Any) -> None:
        assert is_played.wait(60)
        write(*arguments)

    def watched(self: Any, keys: list[EpisodeKey], *rest: Any) -> Any:
        if keys[0].draw == 4:
            seen.extend(item.name for item in folder.glob("*") if item.name != "snapshots")
            is_played.set()
        return collect(self, keys, *rest)

    monkeypatch.setattr(checkpointing, "write_tensors", write_late)
    monkeypatch.setattr(Collector, "collect", watched)
    assert run(options, start, tmp_path / "slow") == expected
    assert len(seen) == 1
    assert seen[0].startswith(".iteration-000002.")
    assert seen[0].endswith(".partial")
    assert content_hash(tmp_path / "slow" / "output") == content_hash(tmp_path / "quick" / "output")


def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = settings()
    expected = run(options, start, tmp_path / "whole")
    run_killed_after(5, options, start, tmp_path / "killed", monkeypatch)
    file = tmp_path / "killed" / "resume" / "iteration-000004" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    assert run(options, start, tmp_path / "killed") == expected
    message = capsys.readouterr().err
    assert "iteration-000004: optimizer.safetensors is torn or was altered" in message
    assert content_hash(tmp_path / "killed" / "output") == content_hash(tmp_path / "whole" / "output")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_engine_that_samples_from_another_distribution_is_refused_before_the_first_step(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """In process: at temperature 1.2, and it says so nowhere. The engine's own check, of its architecture, passed
    before.
    """
    monkeypatch.setattr("tasks.engines.transformers.engine.check_architecture", lambda model, max_tokens: False)
    sample = decode_step.sample_tokens
    monkeypatch.setattr(traces, "_KNOWN", {})  # of the tests before
    monkeypatch.setattr(decode_step, "sample_tokens", lambda *args, **how: sample(*args, **{**how, "temperature": 1.2}))
    options = settings(max_staleness=max_staleness, importance_correction="token_truncate")
    with pytest.raises(ValueError, match=r"engine\.probe_tolerance"):
        run(options, start, tmp_path)
    assert not list((tmp_path / "resume").glob("iteration-*"))


def test_a_tokenizer_that_no_snapshot_could_contain_is_refused_before_the_first_step(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, folder: str, **how: Any) -> None:
        raise TypeError("no such vocabulary")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    with pytest.raises(ValueError, match=r"cannot write them again .*no such vocabulary"):
        run(settings(), start, tmp_path)
    assert not list((tmp_path / "resume").glob("iteration-*"))


def test_the_snapshots_and_a_line_of_metrics_an_iteration_are_handed_over(start: Path, tmp_path: Path) -> None:
    run(settings(), start, tmp_path)
    output = tmp_path / "output"
    assert sorted(item.name for item in (output / "snapshots").iterdir()) == [
        "iteration-0002",
        "iteration-0004",
        "iteration-0006",
    ]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    head, *lines = (output / "curve.csv").read_text().splitlines()
    assert head == ",".join(CURVE) and [line.split(",")[0] for line in lines] == ["1", "2", "3", "4", "5", "6"]
    assert [float(line.split(",")[2]) for line in lines] == [row["success_rate"] for row in rows]


def test_progress_says_kl_where_it_was_measured_alone() -> None:
    """Not where there is no reference or no step, nor where it is not finite."""
    row = {"num_episodes": 8, "success_rate": 0.5, "mean_sampled_tokens": 70.0, "informative_group_share": 0.25}
    assert _progress(row) == _progress({**row, "kl": None}) == "success 0.50  tokens 70  signal 0.25"
    assert _progress({**row, "kl": 0.0}) == "success 0.50  tokens 70  kl 0.000  signal 0.25"


def test_seconds_are_handed_over_beside_the_results_and_not_in_them(tmp_path: Path) -> None:
    """What an engine with a memory of its own tells of an iteration; one that shares the trainer's tells no times."""
    rows = [{"iteration": 1, "kl": 0.5, "refresh_seconds": 0.02, "probe_seconds": 0.01}, {"iteration": 2, "kl": 0.6}]
    write_metrics(tmp_path, rows)
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [{"iteration": 1, "kl": 0.5}, {"iteration": 2, "kl": 0.6}]
    assert iteration_seconds(rows) == [{"iteration": 1, "refresh_seconds": 0.02, "probe_seconds": 0.01}]


def alarm_at(iterations: set[int], monkeypatch: pytest.MonkeyPatch, *, since: int | None = None) -> None:
    """Make the sentinel raise an alarm at these iterations; the trouble began at `since`, or the iteration before."""

    def observe(self: Any, row: dict[str, Any]) -> Alarm | None:
        number = row["iteration"]
        began = number - 1 if since is None else since
        return Alarm(number, "length", "Completions doubled.", {"growth": 2.0}, began) if number in iterations else None

    monkeypatch.setattr("tasks.stages.train.sentinel.Sentinel.observe", observe)


@pytest.mark.parametrize(("exploration", "known"), [(None, {"overlong_share": 0.25}), (EXPLORING, {})])
def test_the_sentinel_knows_how_many_episodes_of_the_model_it_starts_from_were_cut(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exploration: Any, known: dict[str, float]
) -> None:
    seen = []
    monkeypatch.setattr(Sentinel, "observe", lambda self, row: seen.append(self.start))
    run(settings(exploration=exploration, updates_per_batch=1), start, tmp_path, Baseline([], 0.0, 0.25))
    assert seen == [known] * 6


def test_an_alarm_stops_the_run_and_keeps_the_trajectories_and_the_snapshots_so_far(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm_at({5}, monkeypatch)
    with pytest.raises(CollapseAlarm, match=r"Completions doubled.*iteration-0005"):
        run(settings(action="stop"), start, tmp_path)
    place = tmp_path / "alarms" / "iteration-0005"
    assert len((place / "trajectories.jsonl").read_text().splitlines()) == 16
    assert json.loads((place / "alarm.json").read_text())["signal"] == "length"
    assert sorted(item.name for item in (tmp_path / "output" / "snapshots").iterdir()) == [
        "iteration-0002",
        "iteration-0004",
    ]


def test_an_alarm_rolls_back_to_the_last_snapshot_from_before_the_trouble(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alarm at 5 about 4 and 5: snapshot 2 is good, 4 is not and goes; the rate halves; the run ends at 6."""
    alarm_at({5}, monkeypatch)
    constant = {"schedule": "constant", "warmup_steps": 0}
    rows = run(settings(action="roll_back", step_factor=0.5, max_rollbacks=1, **constant), start, tmp_path)
    assert rows[4]["rolled_back_to"] == 2
    assert rows[5]["learning_rate"] == pytest.approx(rows[4]["learning_rate"] / 2)
    assert sorted(item.name for item in (tmp_path / "output" / "snapshots").iterdir()) == [
        "iteration-0002",
        "iteration-0006",
    ]
    assert "Rolled back to iteration 2" in capsys.readouterr().err


def test_a_stopped_run_goes_on_under_the_limit_that_its_alarm_advised_and_says_so(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped at 5 by a limit of 2; with 3 it plays 5 and 6, and ends as a run that had 3 from the start. From 5 on the
    metrics have what was changed, once.
    """
    low, high = settings(max_length_growth=2.0), settings(max_length_growth=3.0)
    expected = run(high, start, tmp_path / "high")
    observe = Sentinel.observe

    def alarms_under_two(self: Sentinel, row: dict[str, Any]) -> Alarm | None:
        observe(self, row)
        is_due = row["iteration"] == 5 and self.settings.max_length_growth == 2.0
        return Alarm(5, "completion_length", "Completions doubled.", {}, 1) if is_due else None

    monkeypatch.setattr(Sentinel, "observe", alarms_under_two)
    with pytest.raises(CollapseAlarm):
        run(low, start, tmp_path / "low")
    capsys.readouterr()
    rows = run(high, start, tmp_path / "low")
    assert "after iteration 4" in (said := capsys.readouterr().err)
    assert "with sentinel.max_length_growth 3.0 (before 2.0)" in said
    assert rows[4].pop("changed_limits") == {"max_length_growth": [2.0, 3.0]}
    assert rows == expected
    snapshots = [content_hash(tmp_path / name / "output" / "snapshots") for name in ("low", "high")]
    assert snapshots[0] == snapshots[1]


def test_a_stage_that_the_sentinel_stopped_names_what_it_leaves_and_leaves_no_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, output: Path, **__: Any) -> Any:
        (output / "snapshots").mkdir()
        raise CollapseAlarm("Completions doubled.", Alarm(5, "length", "Completions doubled.", {}, 1), [])

    paths, resume = Paths(tmp_path), tmp_path / ".resume" / "train" / "0123"
    write_json(paths.stage("assess") / "baseline.json", {**BASELINE, "gate": "rl"})
    write_jsonl(paths.split("train"), (problem.model_dump() for problem in PROBLEMS))
    for name, found in (("check_pin", None), ("read_baseline", None), ("resume_folder", resume)):
        monkeypatch.setattr(stage, name, lambda *_, found=found, **__: found)
    monkeypatch.setattr(stage, "train_policy", stopped)
    with pytest.raises(CollapseAlarm, match=r"doubled\. There is no snapshot yet; if a checkpoint is in .*0123"):
        stage.run(settings(), paths)
    for number in (0, 4):
        (resume / "snapshots" / f"iteration-{number:04d}").mkdir(parents=True)
    with pytest.raises(CollapseAlarm, match=rf"doubled\. .*{resume / 'snapshots'}.*`python -m tasks train` goes on"):
        stage.run(settings(), paths)
    assert not paths.stage("train").exists()


@pytest.mark.parametrize(("alarm", "snapshots"), [(2, {4, 6}), (4, {2, 6}), (6, {2, 4})])
def test_an_iteration_that_was_rolled_back_leaves_no_snapshot(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarm: int, snapshots: set[int]
) -> None:
    """A snapshot is due every two iterations and at the end. At 2 the weights are those of the start again."""
    alarm_at({alarm}, monkeypatch, since=alarm)
    options = settings(action="roll_back", max_rollbacks=1)
    rows = run(options, start, tmp_path)
    assert rows[alarm - 1]["rolled_back_to"] == alarm - 2
    found = list((tmp_path / "output" / "snapshots").iterdir())
    assert {number_of(item.name) for item in found} == snapshots
    assert len({weights_hash(start), *map(weights_hash, found)}) == 3
    note_learning(options, tmp_path / "output", rows, has_warm_start=False)
    assert not any(read_untrained(tmp_path / "output", item.name) for item in found)


def test_a_run_that_ends_with_a_roll_back_to_the_start_has_the_start_as_its_untrained_snapshot(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alarm_at({6}, monkeypatch, since=1)
    options = settings(action="roll_back", max_rollbacks=1)
    note_learning(options, tmp_path / "output", run(options, start, tmp_path), has_warm_start=False)
    (only,) = (tmp_path / "output" / "snapshots").iterdir()
    assert only.name == "iteration-0000" and weights_hash(only) == weights_hash(start)
    assert "iteration-0000 is untrained: the last alarm rolled all back" in capsys.readouterr().err


def lose_episodes(monkeypatch: pytest.MonkeyPatch, samples: Collection[int], *, of_iteration: int) -> None:
    """The tools are down while this iteration plays these samples of each group."""
    take_turn = EpisodeRun._take_turn

    def faulty(self: EpisodeRun, reply: Any) -> Any:
        if self.key.draw == of_iteration and self.key.sample_index in samples:
            raise EnvironmentFault("HTTP 503", tool="search")
        yield from take_turn(self, reply)

    monkeypatch.setattr(EpisodeRun, "_take_turn", faulty)


def tolerant(max_dropped_share: float, **changed: Any) -> TrainSections:
    params = settings(**changed).model_dump(mode="json")
    params["environment"]["tools"]["max_dropped_share"] = max_dropped_share
    return load(TrainSections, params)


def test_an_iteration_whose_episodes_were_all_lost_is_recorded_as_no_measurement(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth of six; no step is taken, its line of the curve has no success, and the mean is of the other five."""
    lose_episodes(monkeypatch, range(4), of_iteration=4)
    options = tolerant(0.3)
    rows = run(options, start, tmp_path)
    lost = {"success_rate", "mean_reward", "entropy", "mean_sampled_tokens", "informative_group_share", "loss"}
    assert [not lost & row.keys() for row in rows] == [False, False, False, True, False, False]
    assert (rows[3]["num_episodes"], rows[3]["episodes_dropped"]) == (0, 16)
    assert rows[3]["optimizer_steps"] == rows[2]["optimizer_steps"]
    assert (tmp_path / "output" / "curve.csv").read_text().splitlines()[4] == f"4,{rows[2]['optimizer_steps']},,,,,,,,,"
    note_learning(options, tmp_path / "output", rows, has_warm_start=False)
    mean = sum(row["success_rate"] for row in rows if row is not rows[3]) / 5
    learnt = json.loads((tmp_path / "output" / "learnt.json").read_text())
    assert learnt["success_rate"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("killed_after", "changed"),
    [(5, {}), (4, {"max_staleness": 1, "importance_correction": "token_truncate"})],
    ids=str,
)
def test_a_resumed_run_is_judged_by_all_its_episodes_as_one_never_stopped(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int, changed: dict[str, Any]
) -> None:
    """4 of the first 80 episodes are lost, of which a tenth may be; of the 16 that the resumed run plays first they
    are a quarter.
    """
    lose_episodes(monkeypatch, {0}, of_iteration=5)
    options = tolerant(0.1, **changed)
    expected = run(options, start, tmp_path / "whole")
    assert [row["episodes_dropped"] for row in expected] == [0, 0, 0, 0, 4, 0]
    run_killed_after(killed_after, options, start, tmp_path / "killed", monkeypatch)
    assert run(options, start, tmp_path / "killed") == expected


def photographed(place: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy `place` to photos/0, 1, … before each renaming and removal in a roll back and the checkpoint it writes,
    within removals, and after it: what a kill at that moment would leave on disk, each state once.
    """
    is_rolling_back, seen = False, set[str]()

    def shoot() -> None:
        nonlocal is_rolling_back
        if is_rolling_back and (state := content_hash(place)) not in seen:
            is_rolling_back = False  # copying is no part of it
            shutil.copytree(place, photos / str(len(seen)))
            seen.add(state)
            is_rolling_back = True

    def watch(change: Any) -> Any:
        def changing(*arguments: Any, **options: Any) -> Any:
            shoot()
            return change(*arguments, **options)

        return changing

    for module, name in ((os, "replace"), (os, "rename"), (shutil, "rmtree"), (os, "rmdir")):
        monkeypatch.setattr(module, name, watch(getattr(module, name)))
    roll_back = training.TrainingRun.roll_back

    def watched(self: Any, alarm: Alarm) -> str:
        nonlocal is_rolling_back
        is_rolling_back = True
        said = roll_back(self, alarm)
        self.checkpoints.current_snapshots()  # waits for the thread that writes
        shoot()
        is_rolling_back = False
        return said

    monkeypatch.setattr(training.TrainingRun, "roll_back", watched)


@pytest.mark.parametrize("changed", [{"checkpoint_interval": 2}, {"max_staleness": 1}], ids=str)
def test_a_run_killed_anywhere_in_a_roll_back_goes_on_and_ends_bitwise_the_same(
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
) -> None:
    """Alarm at 5 about the whole run: it goes back to the start and gives up what each checkpoint so far goes with."""
    alarm_at({5}, monkeypatch, since=1)
    changed |= {"importance_correction": "token_truncate"} if changed.get("max_staleness") else {}
    options = settings(action="roll_back", max_rollbacks=1, **changed)
    (tmp_path / "photos").mkdir()
    with monkeypatch.context() as patched:
        photographed(tmp_path / "whole", tmp_path / "photos", patched)
        expected = run(options, start, tmp_path / "whole")
    assert expected[4]["rolled_back_to"] == 0
    photos = sorted((tmp_path / "photos").iterdir())
    assert len(photos) >= 5
    for place in photos:
        capsys.readouterr()
        assert run(options, start, place) == expected, place
        assert re.search(r"continuing after iteration [45],", capsys.readouterr().err), place
        assert not (place / "resume" / "refused").exists()
        assert content_hash(place / "output") == content_hash(tmp_path / "whole" / "output")
        assert sorted(item.name for item in (place / "resume" / "snapshots").iterdir()) == [
            "iteration-0000",
            "iteration-0006",
        ]


def test_a_run_none_of_whose_checkpoints_is_whole_starts_over_and_keeps_what_it_had(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = settings()
    expected = run(options, start, tmp_path / "whole")
    run_killed_after(5, options, start, tmp_path / "killed", monkeypatch)
    resume = tmp_path / "killed" / "resume"
    for folder in resume.glob("iteration-*"):
        (folder / "state.json").write_text("{")
    weights = content_hash(resume / "snapshots" / "iteration-0004")
    assert run(options, start, tmp_path / "killed") == expected
    assert sorted(item.name for item in (resume / "refused").iterdir()) == [
        "iteration-000003",
        "iteration-000004",
        "snapshots",
    ]
    assert content_hash(resume / "refused" / "snapshots" / "iteration-0004") == weights
    said = capsys.readouterr().err
    for name in ("iteration-000003", "iteration-000004", "snapshots"):
        assert f"moved to {resume / 'refused' / name}" in said
    assert content_hash(tmp_path / "killed" / "output") == content_hash(tmp_path / "whole" / "output")


def test_without_an_earlier_snapshot_a_roll_back_goes_to_the_start(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm_at({1}, monkeypatch)
    for lora in (None, LORA):
        rows = run(settings(action="roll_back", max_rollbacks=1, lora=lora), start, tmp_path / str(bool(lora)))
        assert rows[0]["rolled_back_to"] == 0


def test_more_alarms_than_roll_backs_stop_the_run(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarm_at({2, 4}, monkeypatch)
    with pytest.raises(CollapseAlarm):
        run(settings(action="roll_back", max_rollbacks=1), start, tmp_path)


def test_a_lora_snapshot_is_the_adapter_alone_and_loads_and_merges_as_a_model(start: Path, tmp_path: Path) -> None:
    run(settings(lora=LORA), start, tmp_path)
    snapshot = tmp_path / "output" / "snapshots" / "iteration-0006"
    assert is_adapter(snapshot)
    assert not (snapshot / "model.safetensors").exists()
    whole = merged_snapshot(snapshot, tmp_path / "merged", compute=on_cpu(1))
    assert not is_adapter(whole)
    assert weights_hash(whole) != weights_hash(start)
    one, other = (
        load_model(snapshot, compute=on_cpu(1)),
        load_model(whole, compute=on_cpu(1)),
    )
    for (name, weight), (_, same) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert weight.equal(same), name


def test_a_reward_that_is_not_a_number_names_reward_problem_and_trajectory(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "reward", lambda problem, trajectory, settings: Score(float("nan"), {}))
    with pytest.raises(ValueError, match=r"the reward of problem 'td-3-\d+' \(draw 1, sample 0"):
        run(settings(), start, tmp_path)


def watched_run(
    start: Path, place: Path, monkeypatch: pytest.MonkeyPatch, *, faulty: Sequence[str] = (), **changed: Any
) -> tuple[Callable[[], training.TrainingRun], list[str]]:
    """How to make a run, and the list of what was closed in it, in order; closing what is `faulty` fails."""
    closed: list[str] = []

    def watch(made: Any, name: str) -> Any:
        close = made.close

        def closing() -> None:
            closed.append(name)
            close()
            if name in faulty:
                raise RuntimeError(f"{name} would not close")

        made.close = closing
        return made

    for function, name in (("load_environment", "environment"), ("load_engine", "engine"), ("Pipeline", "pipeline")):
        make = getattr(training, function)
        monkeypatch.setattr(
            training, function, lambda *a, make=make, name=name, **options: watch(make(*a, **options), name)
        )
    options = settings(**changed)
    return lambda: training.TrainingRun(options, start=start, problems=PROBLEMS, resume=place), closed


PIPELINED: dict[str, Any] = {"max_staleness": 1, "importance_correction": "token_truncate"}


def test_a_run_closes_all_it_made_the_last_first_whatever_fails(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, closed = watched_run(start, tmp_path, monkeypatch, faulty=["pipeline", "engine"], **PIPELINED)
    with pytest.raises(RuntimeError, match="engine would not close"):
        make().close()
    assert closed == ["pipeline", "engine", "environment"]


def test_a_finished_run_whose_engine_will_not_close_has_its_results(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched_run(start, tmp_path, monkeypatch, faulty=["engine"])
    rows = run(settings(num_iterations=2), start, tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2]
    assert (tmp_path / "output" / "snapshots" / "iteration-0002" / "model.safetensors").exists()
    assert "could be closed (RuntimeError: engine would not close)" in capsys.readouterr().err


def test_snapshots_are_copied_where_the_file_system_has_no_hard_links(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refuses)
        run(settings(num_iterations=2), start, tmp_path / "without")
    run(settings(num_iterations=2), start, tmp_path / "with")
    assert content_hash(tmp_path / "without" / "output") == content_hash(tmp_path / "with" / "output")
    links = {
        name: (tmp_path / name / "output/snapshots/iteration-0002/model.safetensors").stat().st_nlink
        for name in ("with", "without")
    }
    assert links == {"with": 2, "without": 1}


def test_an_environment_that_will_not_close_leaves_no_engine_behind(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, closed = watched_run(start, tmp_path, monkeypatch, faulty=["environment"])
    with pytest.raises(RuntimeError, match="environment would not close"):
        make().close()
    assert closed == ["engine", "environment"]


def test_a_run_that_cannot_be_taken_up_closes_what_it_made(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Any) -> Any:
        raise ValueError("the checkpoint is of another run")

    make, closed = watched_run(start, tmp_path, monkeypatch, **PIPELINED)
    monkeypatch.setattr("tasks.learning.shared.checkpoints.Checkpoints.load", refuses)
    with pytest.raises(ValueError, match="of another run"):
        make()
    assert closed == ["pipeline", "engine", "environment"]


def test_an_engine_that_does_not_start_leaves_no_environment_behind(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("vLLM did not start")

    monkeypatch.setattr(training, "load_engine", fails)
    make, closed = watched_run(start, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="did not start"):
        make()
    assert closed == ["environment"]


def test_a_learning_rate_of_zero_leaves_success_and_log_probs_as_they_were(start: Path, tmp_path: Path) -> None:
    rows = run(settings(learning_rate=0.0), start, tmp_path)
    assert all(row["kl"] == 0 and row["ratio_max"] == 1 for row in rows)
    keys = [EpisodeKey(problem, 0, 0) for problem in PROBLEMS]
    before, after = (
        tiny.collector(folder).collect(keys) for folder in (start, tmp_path / "output" / "snapshots" / "iteration-0006")
    )
    assert [item.outcome for item in before] == [item.outcome for item in after]
    assert [item.sequences[0].sampler_logp for item in before] == [item.sequences[0].sampler_logp for item in after]


def test_dynamic_sampling_takes_new_draw_numbers(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is equal, so each round is replaced, to the bound."""
    monkeypatch.setattr(grouping, "reward", lambda problem, trajectory, settings: Score(0.0, {}))
    seen: list[Group] = []
    collector = training.group_collector

    def spy(*arguments: Any, **options: Any) -> Any:
        collect = collector(*arguments, **options)

        def collect_and_note(*call: int) -> Sequence[Group]:
            groups = collect(*call)
            seen.extend(groups)
            return groups

        return collect_and_note

    monkeypatch.setattr(training, "group_collector", spy)
    rows = run(settings(num_iterations=1, max_replacement_rounds=2, zero_variance_groups="drop"), start, tmp_path)
    assert [group.trajectories[0].draw for group in seen] == [1] * 4 + [1_000_001] * 4 + [2_000_001] * 4
    assert len({group.problem_id for group in seen}) == 12
    assert (rows[0]["num_replaced_groups"], rows[0]["num_episodes"]) == (8, 16)


def test_a_run_without_signal_ends_with_that_and_the_remedy_and_its_snapshots_are_untrained(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grouping, "reward", lambda problem, trajectory, settings: Score(0.0, {}))
    options = settings(num_iterations=2, zero_variance_groups="drop")
    note_learning(options, tmp_path / "output", run(options, start, tmp_path), has_warm_start=False)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("warning: iteration-0002 is untrained: none of 2 iterations")
    assert "`python -m tasks doctor`" in said
    assert read_untrained(tmp_path / "output", "iteration-0002") is not None


def test_a_run_with_signal_says_nothing_of_it(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = settings(num_iterations=2)
    note_learning(options, tmp_path / "output", run(options, start, tmp_path), has_warm_start=False)
    assert "untrained" not in capsys.readouterr().err
    assert read_untrained(tmp_path / "output", "iteration-0002") is None


def test_an_iterations_share_of_cached_prompt_tokens_is_told_where_the_engine_counts_them() -> None:
    counts: dict[str, float] = {"prefix_cache_queries": 400, "prefix_cache_hits": 100}
    assert add_hit_rate(counts) == {**counts, "prefix_cache_hit_rate": 0.25}
    assert add_hit_rate({"tool_retries": 2}) == {"tool_retries": 2}
