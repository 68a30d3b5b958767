"""`python -m tasks export`: files of safe names, whole or not at all, and nothing replaced that is not an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import atif
import pytest

from tasks.commands.export.export import MARK, export, file_name, safe_name
from tasks.core.files import read_json, read_jsonl, write_json, write_jsonl
from tasks.core.settings import Paths
from tests.conftest import ROOT
from tests.measurement.hostile import HANDLER, NO_UTF_8_SHOWN, PROBLEM, write_hostile_episodes
from tests.measurement.synthetic import REQUEST, trajectory, write_artifacts

NUM_EPISODES = 22  # 11 types, 2 samples of one problem each


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A project with a finished run of 22 episodes a policy, as the working directory."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return write_artifacts(Path("artifacts"), problems_per_type=1, num_snapshots=1)


def atif_of(reference: str | None = None, out: str | None = None, *, with_tokens: bool = True) -> list[str]:
    return export(reference, Path(out) if out else None, file_format="atif", with_tokens=with_tokens)


def test_a_run_becomes_a_folder_a_policy_and_a_valid_document_a_trajectory(paths: Paths):
    (line,) = atif_of()
    assert line == "artifacts/export/atif: 66 trajectories as ATIF-v1.8 (base, iteration-0010, warm start)"
    files = sorted(Path("artifacts/export/atif").rglob("*.json"))
    assert len(files) == 3 * NUM_EPISODES
    assert {file.parent.name for file in files} == {"base", "warm_start", "best"}
    ids = {atif.Trajectory.model_validate_json(file.read_text("utf-8")).trajectory_id for file in files}
    assert len(ids) == 3 * NUM_EPISODES
    assert "best/td-0000-d0-s0" in ids
    document = read_json(Path("artifacts/export/atif/best/td-0000-d0-s0.json"))
    assert document["agent"]["model_name"] == "iteration-0010"
    assert document["agent"]["extra"] == {"snapshot": "iteration-0010", "weights_hash": "c2"}


def test_the_reward_is_computed_where_the_problem_is_one_of_this_project(paths: Paths):
    problem = {"category": "c", "level": 1, "requests": [REQUEST], "world": {}, "split_group": "g"}
    problem |= {"id": "p0", "reference": [{"calls": [], "answer": "x"}]}
    write_jsonl(paths.split("test"), [problem])
    write_jsonl(Path("own.jsonl"), [trajectory("p0").to_row(), trajectory("p1").to_row()])
    atif_of("own.jsonl", "own")
    ours, theirs = (read_json(Path(f"own/own/p{number}-d0-s0.json"))["extra"] for number in (0, 1))
    assert ours["reward"] == {"total": 1.0, "parts": {"outcome": 1.0}}
    assert "reward" not in theirs


def test_one_file_can_hold_a_document_a_line_or_the_only_one(paths: Paths):
    atif_of("artifacts/evaluate/trajectories/test_base.jsonl", "all.jsonl")
    assert len([atif.Trajectory.model_validate(row) for _, row in read_jsonl(Path("all.jsonl"))]) == NUM_EPISODES
    with pytest.raises(ValueError, match="contains one trajectory, and there is more than one"):
        atif_of(out="one.json")
    assert not Path("one.json").exists()
    write_jsonl(Path("single.jsonl"), [trajectory().to_row()])
    atif_of("single.jsonl", "one.json", with_tokens=False)
    assert atif.Trajectory.model_validate(read_json(Path("one.json"))).trajectory_id == "single/p0-d0-s0"


@pytest.mark.parametrize(
    "text", ["../../etc/passwd", "/", "..", "", ".hidden", "a b", "x" * 500, "\ud83d", "é", "con\x00nul", HANDLER]
)
def test_a_problem_id_never_becomes_a_path(text: str):
    name = safe_name(text)
    assert name.isascii() and 0 < len(name) <= 100
    assert Path("out", name).resolve().parent == Path("out").resolve()
    assert not name.startswith(".")
    assert name != safe_name(f"{text} ")


def test_ids_that_would_share_a_name_get_one_each(paths: Paths):
    rows = [trajectory(name).to_row() for name in ("Ab", "ab", "a/b", "a b")]
    write_jsonl(Path("ids.jsonl"), [*rows, rows[0]])
    atif_of("ids.jsonl", "ids")
    names = [file.stem for file in Path("ids/ids").iterdir()]
    assert len({name.lower() for name in names}) == 5
    assert {"Ab-d0-s0", "ab-d0-s0-2", "Ab-d0-s0-3"} <= set(names)
    assert file_name(trajectory("td-1", sample_index=3)) == "td-1-d0-s3"


def test_whatever_a_model_or_tool_wrote_is_a_valid_document(paths: Paths):
    write_hostile_episodes(paths)
    atif_of("artifacts/evaluate", "out")
    text = Path(f"out/best/{PROBLEM}-d0-s0.json").read_text("utf-8")
    steps = atif.Trajectory.model_validate_json(text).steps
    assert steps[1].tool_calls and steps[1].tool_calls[0].function_name == HANDLER
    assert "<script>" in str(steps[1].message)
    assert f"no text: {NO_UTF_8_SHOWN}" in text


def test_an_older_export_is_replaced_and_any_other_folder_left_alone(paths: Paths):
    atif_of(out="out")
    (Path("out") / "base" / "old.json").touch()
    atif_of("artifacts/evaluate/trajectories/test_best.jsonl", "out")
    assert [item.name for item in sorted(Path("out").iterdir())] == [MARK, "best"]
    Path("mine").mkdir()
    Path("mine/thesis.txt").touch()
    with pytest.raises(ValueError, match="mine: exists and is not an export"):
        atif_of(out="mine")
    assert [item.name for item in Path("mine").iterdir()] == ["thesis.txt"]
    Path("notes").touch()
    with pytest.raises(ValueError, match="notes: exists and is not an export"):
        atif_of(out="notes")
    assert Path("notes").is_file() and not list(Path.cwd().glob(".notes*"))


@pytest.mark.parametrize("out", ["rows.jsonl", "rows.json", "notes.jsonl", "notes.json", "atif_of_others.jsonl"])
def test_a_file_that_is_no_export_is_left_alone_first_of_all_the_one_that_is_read(paths: Paths, out: str):
    write_jsonl(Path("rows.jsonl"), [trajectory().to_row()])
    shutil.copy("rows.jsonl", "rows.json")
    Path("notes.jsonl").write_text("dear diary\n")
    Path("notes.json").write_text('{"schema_version": 1}')
    Path("atif_of_others.jsonl").write_text('{"schema_version": "ATIF-v1.8", "agent": {"name": "other"}}\n')
    before = Path(out).read_bytes()
    with pytest.raises(ValueError, match=r"Name a new file with --out"):
        atif_of("rows.json" if out == "rows.json" else "rows.jsonl", out)
    assert Path(out).read_bytes() == before


def test_an_older_export_in_a_file_is_replaced(paths: Paths):
    write_jsonl(Path("one.jsonl"), [trajectory("p1").to_row()])
    write_jsonl(Path("two.jsonl"), [trajectory("p2").to_row()])
    for out in ("out.jsonl", "out.json"):
        atif_of("one.jsonl", out)
        atif_of("two.jsonl", out)
        assert read_json(Path(out))["trajectory_id"] == "two/p2-d0-s0"


def test_trajectories_inside_an_older_export_are_not_removed_by_the_next(paths: Paths):
    atif_of(out="out")
    write_jsonl(Path("out/rows.jsonl"), [trajectory().to_row()])
    with pytest.raises(ValueError, match=r"would remove out/rows\.jsonl"):
        atif_of("out/rows.jsonl", "out")
    assert Path("out/rows.jsonl").exists()


def test_a_row_that_is_no_trajectory_ends_it_with_its_line_and_leaves_nothing(paths: Paths):
    Path("rows.jsonl").write_text(json.dumps(trajectory().to_row()) + '\n{"id": 3}\n', encoding="utf-8")
    for out in ("out", "out.jsonl"):
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: is not a trajectory"):
            atif_of("rows.jsonl", out)
    assert not [item.name for item in Path().iterdir() if "out" in item.name]


def test_what_cannot_be_found_or_written_is_one_line(paths: Paths):
    with pytest.raises(ValueError, match="there are no trajectories"):
        atif_of("elsewhere")
    with pytest.raises(ValueError, match="does not name a model version"):
        atif_of("models:/../../x")
    with pytest.raises(ValueError, match=r"b7\.csv: .*, or a \.jsonl or \.json file"):
        atif_of(out="b7.csv")
    with pytest.raises(ValueError, match="--format csv is not known"):
        export(None, None, file_format="csv", with_tokens=True)


def test_another_runs_folder_is_named_with_its_policies(paths: Paths):
    other = write_artifacts(Path("last_week"), problems_per_type=1, num_snapshots=1)
    evaluation = other.stage("evaluate") / "evaluation.json"
    write_json(evaluation, {**read_json(evaluation), "frontier": {"model": "lab/big-model-1"}})
    write_jsonl(other.stage("evaluate") / "trajectories" / "test_frontier.jsonl", [trajectory().to_row()])
    (line,) = atif_of("last_week", "out")
    assert "67 trajectories" in line
    assert "lab/big-model-1 of last_week/evaluate" in line
