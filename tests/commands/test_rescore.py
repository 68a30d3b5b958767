"""`python -m tasks rescore`: the same trajectories under another reward, in a new file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.rescore import rescore
from tasks.core.files import write_jsonl
from tasks.core.records import Score, Trajectory, Turn
from tasks.core.settings import Paths, read_params
from tasks.tracking.lineage import reward_tags
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.tracking.test_traces import problem_row


def episode(is_success: bool, num_turns: int, sample: int, **others: Any) -> Trajectory:
    turns = [Turn("hm") for _ in range(num_turns)]
    return trajectory("p0", is_success, turns=turns, sample_index=sample, **others)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_params([{"name": "step_penalty", "weight": 0.05}])
    write_jsonl(Paths("artifacts").split("test"), [problem_row("p0")])
    # One group: a success in 4 turns, failures in 2 and in 6.
    played = [episode(True, 4, 0), episode(False, 2, 1), episode(False, 6, 2)]
    write_jsonl(Path("old.jsonl"), [item.to_row() for item in played])
    return tmp_path


def write_params(parts: list[dict[str, Any]]) -> None:
    params = read_params(ROOT / "params.yaml")
    params["reward"] = {"parts": parts, "allow_undominated": False}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")


def test_each_trajectory_gets_its_parts_weights_and_total_in_a_new_file(project: Path):
    before = Path("old.jsonl").read_bytes()
    rescore(Path("old.jsonl"), None)
    rows = [json.loads(line) for line in Path("artifacts/rescore/old.jsonl").read_text().splitlines()]
    assert Path("old.jsonl").read_bytes() == before
    assert [row["score"]["reward"] for row in rows] == pytest.approx([0.8, -0.1, -0.3])
    assert rows[0]["score"]["parts"] == pytest.approx({"outcome": 1.0, "step_penalty": -0.2})
    assert rows[0]["score"]["weights"] == {"outcome": 1.0, "step_penalty": 0.05}
    assert Trajectory.from_row(rows[1]).score is not None


def test_the_table_has_totals_parts_ranks_and_signs(project: Path):
    lines = [" ".join(line.split()) for line in rescore(Path("old.jsonl"), None)]
    assert "total 0.3333 0.1333" in lines  # (0.8 − 0.1 − 0.3)/3
    assert "outcome 0.3333 0.3333" in lines and "step_penalty – -0.2000" in lines
    assert "3 trajectories were stored without a reward: before is success alone" in lines
    assert "0 of 3 pairs of a group changed their order, and 1 that were equal differ" in lines
    assert "0 of 3 advantages changed their sign" in lines
    assert "1 of 1 group had a signal, 1 have one now" in lines
    assert "a failure earns as much as a success in 0 groups" in lines


def test_a_rescored_file_is_compared_with_the_scores_it_has(project: Path):
    rescore(Path("old.jsonl"), None)
    write_params([])
    lines = [" ".join(line.split()) for line in rescore(Path("artifacts/rescore/old.jsonl"), Path("again.jsonl"))]
    assert "total 0.1333 0.3333" in lines and "step_penalty -0.2000 –" in lines
    assert not any("without a reward" in line for line in lines)


def test_a_mean_is_of_those_that_were_measured(project: Path):
    """A penalty of 0.2 in one stored row and of none in another: their mean is not 0.1."""
    scored = episode(True, 4, 0)
    scored.score = Score(0.8, {"outcome": 1.0, "step_penalty": -0.2})
    write_jsonl(Path("mixed.jsonl"), [scored.to_row(), episode(False, 2, 1).to_row()])
    lines = [" ".join(line.split()) for line in rescore(Path("mixed.jsonl"), None)]
    assert "step_penalty -0.2000 -0.1500" in lines  # 4 and 2 turns now
    assert "1 trajectory was stored without a reward: before is success alone" in lines


def test_nothing_is_written_over(project: Path):
    rescore(Path("old.jsonl"), None)
    with pytest.raises(ValueError, match=r"never written over\. Name another file with --out"):
        rescore(Path("old.jsonl"), None)
    with pytest.raises(ValueError, match="never written over"):
        rescore(Path("old.jsonl"), Path("old.jsonl"))


def test_a_part_that_cannot_be_computed_is_one_line_and_leaves_no_file(project: Path):
    write_params([{"name": "ndcg", "weight": 0.2, "k": 3}])
    with pytest.raises(ValueError, match="there is no retrieval with ranked") as refusal:
        rescore(Path("old.jsonl"), None)
    assert "\n" not in str(refusal.value) and not Path("artifacts/rescore/old.jsonl").exists()


def test_trajectories_of_another_project_are_refused_and_lost_ones_stay_as_they_were(project: Path):
    lost = episode(False, 1, 3, outcome="environment_error")
    write_jsonl(Path("lost.jsonl"), [lost.to_row()])
    with pytest.raises(ValueError, match="no trajectory is an episode of the problems"):
        rescore(Path("lost.jsonl"), None)
    write_jsonl(Path("some.jsonl"), [lost.to_row(), episode(True, 1, 0).to_row()])
    assert "1 trajectory cannot be scored: unchanged" in rescore(Path("some.jsonl"), None)
    assert "score" not in json.loads(Path("artifacts/rescore/some.jsonl").read_text().splitlines()[0])


def test_the_lineage_says_the_parts_and_whether_somebody_insisted():
    parts = [{"name": "format", "weight": 2.0}]
    assert reward_tags({"parts": [], "allow_undominated": False}) == {}
    assert reward_tags({"parts": parts, "allow_undominated": False}) == {"reward": "outcome + 2 format"}
    assert reward_tags({"parts": parts, "allow_undominated": True}) == {
        "reward": "outcome + 2 format; allow_undominated: a failure could outscore a success"
    }
