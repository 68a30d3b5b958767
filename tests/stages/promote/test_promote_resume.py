"""promote goes on after a kill in the middle of a measurement: episodes that ended are not played again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Trajectory
from tasks.core.resume import resume_root
from tasks.environments.catalog import load_environment
from tasks.stages.promote.episodes import Conditions, Episodes, find_episodes
from tests.stages.evaluate.stage_folder import ENVIRONMENT, PROBLEMS, Kill, play_settings, stage_folder

pytestmark = pytest.mark.slow
NOBODY: Any = None  # neither registry nor journal is asked


def test_of_twelve_episodes_a_kill_after_seven_leaves_five_to_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths, one_by_one = stage_folder(tmp_path), {"max_concurrent_episodes": 1}
    settings = play_settings()
    play = settings.model_copy(update={"engine": settings.engine.model_copy(update=one_by_one)})
    conditions = Conditions(paths, load_environment(ENVIRONMENT), NOBODY, None, NOBODY, play, {"torch": "2.0"})
    model = paths.stage("train") / "snapshots" / "iteration-0001"

    def measure(identity: str) -> Episodes:
        return find_episodes("the champion", identity, conditions, None, lambda: nullcontext(model))

    kill = Kill(monkeypatch)
    kill.at = 7
    with pytest.raises(KeyboardInterrupt):
        measure("a")
    found = measure("a").trajectories
    assert kill.num_ended == 7 + 5
    assert [item.problem_id for item in found] == [problem.id for problem in PROBLEMS]
    assert not resume_root("promote", paths).exists()

    kill.at = kill.num_ended + 7
    with pytest.raises(KeyboardInterrupt):
        measure("b")
    whole = measure("c").trajectories  # another model takes up none of them
    assert kill.num_ended == 12 + 7 + 12
    assert list(map(Trajectory.to_row, found)) == list(map(Trajectory.to_row, whole))
