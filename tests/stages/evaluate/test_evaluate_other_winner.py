"""evaluate goes on after a kill and plays a lost episode again, by which the race ends otherwise than before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import write_jsonl
from tasks.core.records import Problem
from tasks.rollouts.collect import Collector
from tasks.stages.evaluate import inputs as evaluate_inputs
from tasks.stages.evaluate import stage as evaluate
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.tools.base import EnvironmentFault
from tests import tiny
from tests.stages.evaluate.stage_folder import PROBLEMS, evaluated, files_of, stage_folder
from tests.stages.evaluate.test_evaluate_resume import same_but_for_last_digits
from tests.stages.evaluate.test_sharded import OPTIONS as SHARDED
from tests.stages.evaluate.test_transfer import also, shop

__all__ = ["shop"]
RACE = {"error_rate": 0.1, "num_rounds": 2, "min_problems": 1, "max_finalists": 2}


@pytest.mark.slow
def test_no_episode_of_a_model_is_taken_for_one_of_another_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is kept of the three models is kept once more after each has changed: of select, test, greedy, another
    environment, and parts with a replay. Reflexion plays base or warm start, which change the folder.
    """
    paths, kept = stage_folder(tmp_path), tmp_path / "kept"
    write_jsonl(paths.split("test"), (problem.model_dump() for problem in PROBLEMS[:2]))
    models = [paths.stage("train") / "snapshots" / "iteration-0001", paths.base_model,
              paths.start_model]  # fmt: skip

    def play_all() -> dict[Path, bytes]:
        with pytest.raises(KeyboardInterrupt):
            evaluated(paths, also=[also(num_problems=1)], sharded={**SHARDED, "num_replays": 2})
        return {file: file.read_bytes() for file in kept.rglob("*.jsonl")}

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate_inputs, "resume_folder", lambda *_: kept)
    monkeypatch.setattr(evaluate, "refuse_altered", die)
    before = play_all()
    for seed, model in enumerate(models, start=11):
        shutil.rmtree(model)
        tiny.model_folder(model, seed=seed)
    after = play_all()
    assert (len(before), len(after)) == (1 + 4 * 3 + 1, 2 * len(before))
    assert after.items() >= before.items()


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_winner_measures_what_a_run_without_a_kill_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round has 6 of 12 problems, of which the second and third snapshot fail one. The tools lose two of the
    first one's, so it goes out and the second wins. Played again, it solves them and wins, and the third goes out in
    the first round, though it has played the last.
    """
    paths = stage_folder(tmp_path)
    for number in (2, 3):
        tiny.model_folder(paths.stage("train") / "snapshots" / f"iteration-000{number}", seed=number + 5)
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in PROBLEMS))
    write_jsonl(paths.split("test"), (problem.model_dump() for problem in PROBLEMS[:3]))
    play, keep, under_way, first_round = EpisodeRunner.play, Collector._keep, ("", ""), list[str]()
    are_tools_well, num_ended = True, 0

    def play_and_note(
        self: EpisodeRunner, model: Path, problems: list[Problem], split: str, name: str, **more: Any
    ) -> Any:
        nonlocal under_way
        under_way = split, name
        first_round[:] = first_round or [problem.id for problem in problems]
        return play(self, model, problems, split, name, **more)

    def keep_by_rule(self: Collector, number: int, run: Any) -> None:
        nonlocal num_ended
        split, name = under_way
        if split == "select":
            place = first_round.index(run.key.problem.id) if run.key.problem.id in first_round else None
            run.outcome = "failure" if name != "iteration-0001" and place == 0 else "success"
            if name == "iteration-0001" and place in (0, 1) and not are_tools_well:
                run.fault, run.outcome = EnvironmentFault("it is down", tool="book"), "environment_error"
        keep(self, number, run)
        num_ended += under_way == ("test", "best")
        if num_ended == 2 and not are_tools_well:
            raise KeyboardInterrupt

    monkeypatch.setattr(EpisodeRunner, "play", play_and_note)
    monkeypatch.setattr(Collector, "_keep", keep_by_rule)
    whole, without_kill = evaluated(paths, racing=RACE, greedy=False), files_of(paths)
    assert whole["best_snapshot"] == "iteration-0001"
    assert whole["racing"]["dropped"]["iteration-0003"]["num_problems"] == 6
    are_tools_well, num_ended = False, 0
    with pytest.raises(KeyboardInterrupt):
        evaluated(paths, racing=RACE, greedy=False)
    are_tools_well = True
    again = evaluated(paths, racing=RACE, greedy=False)
    # The bytes of episodes hold log-probs, which the company they were played in moves by up to 1e-5.
    assert again.pop("contents").keys() == whole.pop("contents").keys()
    assert again == whole
    same_but_for_last_digits(paths, without_kill)
