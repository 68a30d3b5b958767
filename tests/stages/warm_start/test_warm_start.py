"""The stage warm_start on a tiny model: attempts, held-out loss, and a kill at any point of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import content_hash, read_json, read_jsonl, write_json, write_jsonl
from tasks.core.settings import Paths, load
from tasks.learning.sft.trainer import NotFinite, SupervisedTrainer
from tasks.models.folders import weights_hash
from tasks.models.trained_on import digests_of, read_trained_on
from tasks.stages.warm_start import run as warm_start_run
from tasks.stages.warm_start import stage
from tests import tiny
from tests.profiles import profile_params
from tests.stages.curated import PROBLEMS, curated_project
from tests.stages.warm_start.test_attempts import STOP

pytestmark = pytest.mark.slow
SELECT = tiny.problems(26, max_level=1)[20:]
SHORT = {"num_steps": 4, "batch_size": 2, "checkpoint_interval": 3}
UNREACHABLE = {**STOP, "num_problems": 2, "minimum_success": 1.0, "max_attempts": 3}


class Killed(BaseException):
    pass


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """What curate and assess leave for a model that needs a warm start."""
    made = curated_project(tmp_path, monkeypatch)
    write_json(made.stage("curate") / "environment.json", {})
    tiny.model_folder(made.stage("assess") / "base_model")
    rate = {"num_problems": 2, "samples_per_problem": 1, "success_rate": 0.0, "ci_low": 0.0, "ci_high": 0.1}
    write_json(made.stage("assess") / "baseline.json", {**rate, "gate": "warm_start"})
    return made


def run(paths: Paths, **changed: Any) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """The weights, the metrics and the attempts."""
    params = profile_params("test")
    params["warm_start"] |= {**SHORT, **changed}
    stage.run(load(stage.SETTINGS, params), paths)
    folder = paths.stage("warm_start")
    metrics = [row for _, row in read_jsonl(folder / "metrics.jsonl")]
    return weights_hash(folder / "model"), metrics, read_json(folder / "attempts.json")


def test_a_check_that_is_passed_changes_no_weight(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    unseen, _, _ = run(paths, stop=None)
    monkeypatch.setattr(warm_start_run, "measure_success", lambda *args, **kwargs: 1.0)
    seen, metrics, (attempt,) = run(paths, stop=UNREACHABLE)
    assert seen == unseen
    assert (len(metrics), attempt["success"], attempt["end"]) == (4, 1.0, "num_steps")


def test_a_start_that_solves_too_little_goes_on_then_begins_anew_and_says_so(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    _, metrics, attempts = run(paths, stop=UNREACHABLE)
    assert [row["start"] for row in attempts] == [None, 0, None]
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert metrics[4]["loss"] < metrics[0]["loss"]  # goes on
    told = capsys.readouterr()
    assert "go on from it" in told.out + told.err
    assert "begins anew" in told.out + told.err
    assert "RL may find little" in told.out + told.err


def test_of_the_attempts_the_best_is_kept(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = iter([0.2, 0.1, 0.0])
    monkeypatch.setattr(warm_start_run, "measure_success", lambda *args, **kwargs: next(reached))
    best, _, attempts = run(paths, stop=UNREACHABLE)
    assert [row["is_kept"] for row in attempts] == [True, False, False]
    first, _, _ = run(paths, stop=None)
    assert best == first


def test_a_run_killed_in_any_attempt_ends_with_the_same_bits(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first attempt, at the start of the second, and at the end of the third."""
    stop = {**UNREACHABLE, "held_out_share": 0.3, "check_interval": 2}
    whole = run(paths, stop=stop)
    step = SupervisedTrainer.step
    for num_calls in (2, 5, 12):
        calls = count(1)

        def step_or_die(self: SupervisedTrainer, calls: Iterator[int] = calls, last: int = num_calls) -> dict[str, Any]:
            if next(calls) == last:
                raise Killed
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(SupervisedTrainer, "step", step_or_die)
            with pytest.raises(Killed):
                run(paths, stop=stop)
        assert run(paths, stop=stop) == whole, num_calls


def test_a_run_killed_in_its_check_ends_with_the_same_bits(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(paths, stop=UNREACHABLE)
    episodes = content_hash(paths.stage("warm_start") / "trajectories.jsonl")

    def die(*args: Any, **kwargs: Any) -> float:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(warm_start_run, "measure_success", die)
        with pytest.raises(Killed):
            run(paths, stop=UNREACHABLE)
    assert run(paths, stop=UNREACHABLE) == whole
    assert content_hash(paths.stage("warm_start") / "trajectories.jsonl") == episodes


def test_the_episodes_that_judged_the_kept_model_are_its_baseline(paths: Paths) -> None:
    _, _, attempts = run(paths, stop=UNREACHABLE)
    rows = [row for _, row in read_jsonl(paths.stage("warm_start") / "trajectories.jsonl")]
    assert [row["problem_id"] for row in rows] == [problem.id for problem in PROBLEMS][: UNREACHABLE["num_problems"]]
    solved = sum(row["outcome"] == "success" for row in rows) / len(rows)
    assert solved == max(attempt["success"] for attempt in attempts)


def test_what_it_was_trained_on_and_what_chose_among_its_attempts_is_in_its_folder(paths: Paths) -> None:
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in SELECT))
    run(paths, stop=UNREACHABLE)
    known = read_trained_on(paths.start_model)
    assert known.trained == digests_of(PROBLEMS)
    assert known.chosen == digests_of(SELECT[: UNREACHABLE["num_problems"]])
    run(paths, stop=None)
    assert read_trained_on(paths.start_model).chosen == digests_of([])


def test_a_held_out_loss_that_rises_ends_an_attempt_with_the_weights_of_the_lowest(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = {**UNREACHABLE, "held_out_share": 0.3, "check_interval": 1, "patience": 2, "max_attempts": 1}
    losses = iter([3.0, 2.0, 2.5, 2.6])
    monkeypatch.setattr(SupervisedTrainer, "held_out_loss", lambda self: next(losses))
    stopped, metrics, (attempt,) = run(paths, stop=stop, num_steps=8, schedule="constant")
    assert (len(metrics), attempt["end"], attempt["held_out_loss"]) == (4, "held_out_loss", 2.0)
    losses = iter([3.0, 2.0])
    assert run(paths, stop=stop, num_steps=2, schedule="constant")[0] == stopped
    assert metrics[1]["held_out_loss"] == 2.0


def test_what_is_held_out_is_not_trained_on(paths: Paths) -> None:
    params = profile_params("test")
    params["warm_start"] |= {**SHORT, "stop": {**STOP, "held_out_share": 0.3}}
    settings = load(stage.SETTINGS, params)
    done = warm_start_run.WarmStartRun(settings, paths, base=paths.base_model, resume=Path("r"))
    assert len(done.rows) + len(done.held_out) == 20
    assert 2 <= len(done.held_out) <= 12
    trained, held_out = ({tuple(row.token_ids) for row in rows} for rows in (done.rows, done.held_out))
    assert not trained & held_out


@pytest.mark.parametrize(("share", "what"), [(0.999, "every demonstration"), (1e-9, "none of the demonstrated")])
def test_a_share_that_leaves_nothing_is_refused(paths: Paths, share: float, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        run(paths, stop={**STOP, "held_out_share": share})


def test_a_gradient_that_is_not_finite_is_followed_by_an_attempt_at_a_lower_rate(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = SupervisedTrainer.step, [0]

    def explode_once(self: SupervisedTrainer) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 2:
            raise NotFinite("the gradient is not finite. Set warm_start.learning_rate lower.")
        return step(self)

    monkeypatch.setattr(SupervisedTrainer, "step", explode_once)
    monkeypatch.setattr(warm_start_run, "measure_success", lambda *args, **kwargs: 1.0)
    _, metrics, attempts = run(paths, stop=STOP)
    assert [row["end"] for row in attempts] == ["not_finite", "num_steps"]
    assert attempts[1]["learning_rate"] == attempts[0]["learning_rate"] / 2
    assert len(metrics) == 5  # one of the first, four of the second
    calls[0] = 0
    with pytest.raises(NotFinite):
        run(paths, stop=None)
