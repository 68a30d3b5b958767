"""What a baseline says of a run to come: by hand from its arithmetic, in plan, and at the stage."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.plan.output import print_plan
from tasks.commands.plan.plan import Plan, as_json, make_plan
from tasks.core.console import SafeConsole
from tasks.core.files import read_jsonl, write_json, write_jsonl
from tasks.core.records import TokenSequence, Trajectory
from tasks.core.settings import Paths, load
from tasks.learning.grpo.signal import share_without_signal
from tasks.learning.grpo.solve_rates import Beta
from tasks.stages.train.outlook import Baseline, baseline_of, expect, read_baseline, warning_of
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import tell_outlook
from tests import tiny
from tests.learning.options import NO_EXPLORATION, grpo
from tests.measurement.synthetic import BASELINE
from tests.profiles import profile_params

SELECT = tiny.problems(22, seed=8)
TRAIN = tiny.problems(33)


def an_episode(problem: Any, outcome: str, num_sampled: int = 50) -> Trajectory:
    return Trajectory(
        problem_id=problem.id, category=problem.category, request="", draw=0, sample_index=0, policy_version=0,
        environment_fingerprint="",
        sequences=[TokenSequence([1] * num_sampled, [True] * num_sampled, [0.0] * num_sampled)],
        turns=[], outcome=outcome,  # type: ignore[arg-type]
        limit=None, checks={}, num_calls=0, num_invalid_calls=0,
    )  # fmt: skip


def assessed(folder: Path, *, solved: int, gate: str = "rl") -> Paths:
    """A project after assess, whose model solved the first `solved` of 22 problems."""
    paths = Paths(folder)
    for name, problems in (("train", TRAIN), ("select", SELECT), ("test", SELECT)):
        write_jsonl(paths.split(name), (problem.model_dump() for problem in problems))
    outcomes = ["success"] * solved + ["failure"] * (len(SELECT) - solved)
    episodes = [an_episode(problem, outcome) for problem, outcome in zip(SELECT, outcomes, strict=True)]
    write_jsonl(paths.stage("assess") / "trajectories.jsonl", (item.to_row() for item in episodes))
    write_json(paths.stage("assess") / "baseline.json", {**BASELINE, "gate": gate})
    return paths


def test_a_baseline_that_solved_nothing_expects_hardly_any_signal_of_small_groups() -> None:
    """No success in 22: all (0 + 4·½)/26 = 1/13, a level of n problems 4/13/(n + 4), and so on down."""
    baseline = baseline_of([an_episode(problem, "failure", 50) for problem in SELECT], SELECT)
    assert baseline is not None
    outlook = expect(grpo(num_iterations=10, problems_per_iteration=16, group_size=8), TRAIN, baseline)
    assert [row.group_size for row in outlook.rows] == [4, 8, 16, 32]
    shares = [row.without_signal for row in outlook.rows]
    assert shares == sorted(shares, reverse=True)
    assert min(shares) > 0.8
    assert outlook.planned.episodes == 10 * 16 * 8
    assert outlook.planned.sampled_tokens == 10 * 16 * 8 * 50
    assert outlook.recommended == 32


SCHEDULED = {
    **NO_EXPLORATION,
    "samples_per_problem": [{"iteration": 1, "value": 16}, {"iteration": 4, "value": 4}],
}  # fmt: skip


def test_scheduled_samples_are_what_is_planned_and_not_the_group_size() -> None:
    """Every problem is Beta(2, 2). 3 iterations of 16 and 7 of 4, of 10 problems: 480 and 280 episodes."""
    settings = grpo(
        problem_sampler="uniform", num_iterations=10, problems_per_iteration=10, group_size=16, exploration=SCHEDULED
    )
    planned = expect(settings, TRAIN, Baseline([], 50.0)).planned
    assert planned.num_iterations == {16: 3, 4: 7}
    assert (planned.episodes, planned.sampled_tokens) == (760, 38_000)
    few, many = share_without_signal(Beta(2, 2), 4), share_without_signal(Beta(2, 2), 16)
    assert planned.without_signal == pytest.approx(0.7 * few + 0.3 * many)


def test_without_an_episode_of_a_category_its_rate_is_the_prior() -> None:
    """k = 4: every problem is Beta(2, 2)."""
    outlook = expect(grpo(problem_sampler="uniform"), TRAIN, Baseline([], 0.0))
    assert outlook.planned.without_signal == pytest.approx(share_without_signal(Beta(2, 2), 4))


def test_the_band_expects_more_signal_than_uniform_from_the_same_baseline() -> None:
    baseline = baseline_of([an_episode(item, "success" if item.level == 2 else "failure") for item in SELECT], SELECT)
    assert baseline is not None
    uniform, band = (
        expect(grpo(problem_sampler=name, group_size=8), TRAIN, baseline).planned for name in ("uniform", "band")
    )
    assert band.without_signal < uniform.without_signal - 0.03


def test_where_no_group_can_have_signal_the_plan_shows_no_number_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hardly known prior and 22 failures: a group of 4 has signal with a chance below 2⁻⁵³, and 1 less that is 1."""
    paths = assessed(tmp_path / "artifacts", solved=0)
    params = planned_here(paths, monkeypatch)
    params["train"]["band"]["prior_strength"] = 1e-5
    tell_outlook(load(TrainSections, params), SELECT, read_baseline(paths))
    assert "100% of G = 4" in capsys.readouterr().out
    plan = make_plan(gpu="cpu")
    row = json.loads(as_json(plan))["signal"]["rows"][0]
    assert (row["group_size"], row["without_signal"], row["episodes_per_useful_group"]) == (4, 1.0, None)
    assert "–" in next(line for line in printed(plan).splitlines() if "G = 4" in line)


def test_an_episode_that_our_fault_ended_is_no_evidence() -> None:
    assert baseline_of([an_episode(SELECT[0], "environment_error")], SELECT) is None


def test_after_a_warm_start_the_episodes_that_judged_it_are_the_baseline(tmp_path: Path) -> None:
    paths = assessed(tmp_path, solved=0, gate="warm_start")
    judged = [an_episode(problem, "success") for problem in SELECT]
    write_jsonl(paths.stage("warm_start") / "trajectories.jsonl", (item.to_row() for item in judged))
    baseline = read_baseline(paths)
    assert baseline is not None
    assert sum(played.solved for played in baseline.played) == len(SELECT)


def test_before_assess_and_after_a_warm_start_that_nobody_looked_at_nothing_is_known(tmp_path: Path) -> None:
    assert read_baseline(assessed(tmp_path / "warm", solved=0, gate="warm_start")) is None
    assert read_baseline(Paths(tmp_path / "fresh")) is None


def planned_here(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The params of a project in which `plan` finds these results."""
    params = profile_params("test")
    params["paths"]["artifacts"] = str(paths.artifacts)
    monkeypatch.setattr("tasks.commands.plan.plan.read_params", lambda: params)
    return params


def printed(plan: Plan) -> str:
    output = io.StringIO()
    print_plan(plan, SafeConsole(file=output, width=120))
    return output.getvalue()


def test_the_stage_and_plan_tell_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = assessed(tmp_path / "artifacts", solved=11)
    params = planned_here(paths, monkeypatch)
    outlook = expect(load(TrainSections, params).train, TRAIN, read_baseline(paths) or Baseline([], 0.0))
    tell_outlook(load(TrainSections, params), TRAIN, read_baseline(paths))
    told = capsys.readouterr()
    assert outlook.sentence in told.out + told.err
    assert "would teach nothing" not in told.out + told.err
    plan = make_plan(gpu="cpu")
    assert json.loads(as_json(plan))["signal"] == json.loads(json.dumps(outlook.as_row()))
    output = printed(plan)
    size = params["train"]["group_size"]
    assert f"G = {size}" in output
    assert "as set" in output
    assert "as scheduled" not in output
    assert "recommended" in output
    assert "would teach nothing" not in output


def test_the_signal_is_of_episodes_as_long_as_the_lengths_that_plan_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_here(assessed(tmp_path / "artifacts", solved=11), monkeypatch)
    for tokens in ((30, 7, 3), (30, 70, 3)):
        signal = json.loads(as_json(make_plan(gpu="cpu", tokens=tokens)))["signal"]
        assert signal["planned"]["sampled_tokens"] == pytest.approx(tokens[1] * signal["planned"]["episodes"])
        assert all(row["sampled_tokens"] == pytest.approx(tokens[1] * row["episodes"]) for row in signal["rows"])


def test_both_warn_where_most_groups_would_teach_nothing_and_say_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = assessed(tmp_path / "artifacts", solved=0)
    params = planned_here(paths, monkeypatch)
    tell_outlook(load(TrainSections, params), TRAIN, read_baseline(paths))
    for told in (capsys.readouterr().err, printed(make_plan(gpu="cpu"))):
        assert "warning: " in told
        assert "of the groups would teach nothing" in told
        assert "train.problem_sampler to band" in told


@pytest.mark.parametrize(
    ("changed", "advised", "not_advised"),
    [
        ({}, ["problem_sampler to band", "group_size to 32"], ["exploration"]),
        ({"problem_sampler": "band"}, ["Set train.group_size to 32"], ["problem_sampler"]),
        ({"problem_sampler": "band", "group_size": 32}, ["Bring problems of another"], ["Set train"]),
        ({"group_size": 16, "exploration": SCHEDULED}, ["exploration.samples_per_problem up to 32"], ["group_size"]),
    ],
)
def test_nothing_is_advised_that_is_set_already(
    tmp_path: Path, changed: dict[str, Any], advised: list[str], not_advised: list[str]
) -> None:
    params = profile_params("test")
    params["train"] |= changed
    played = assessed(tmp_path, solved=0)
    file = played.stage("assess") / "trajectories.jsonl"
    write_jsonl(file, [row for _, row in read_jsonl(file)] * 20)  # surely never solved, so no size has much signal
    settings, baseline = load(TrainSections, params).train, read_baseline(played)
    assert baseline is not None
    sentence = warning_of(settings, expect(settings, TRAIN, baseline))
    assert sentence is not None
    for text in advised:
        assert text in sentence
    for text in not_advised:
        assert text not in sentence
