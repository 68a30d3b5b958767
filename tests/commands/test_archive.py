"""The embedded registry's backup: consistent while others write, compared by hashes, and never restored over more."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tasks.commands import archive, archive_copies
from tasks.commands.archive import backup, restore
from tasks.commands.archive_copies import copy_of_one_moment
from tasks.commands.profile import read_profiles
from tasks.core.settings import Paths
from tasks.tracking.connection import refuse_lost_registry
from tasks.tracking.journal import FILES as JOURNALS
from tasks.tracking.journal import OWNER, POINTER, Pointer
from tests.conftest import ROOT
from tests.tracking.project import DATABASE, SETTINGS

FILES = Path(SETTINGS.artifact_location)
PREFECT = Path("artifacts/.prefect/prefect.db")
ARCHIVE = Path("kept.tar")
SCHEMA = """
CREATE TABLE alembic_version (version_num);
CREATE TABLE experiments (experiment_id, name, artifact_location);
CREATE TABLE registered_models (name);
CREATE TABLE registered_model_aliases (name, alias, version);
CREATE TABLE registered_model_tags (name, key, value);
CREATE TABLE runs (run_uuid, experiment_id, status, artifact_uri, start_time);
CREATE TABLE tags (run_uuid, key, value);
CREATE TABLE logged_models (artifact_location);
CREATE TABLE model_versions (name, version, source, storage_location);
CREATE TABLE trace_tags (value);
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A workspace with one run in MLflow, one file of it, and a database of Prefect."""
    make_project(tmp_path, monkeypatch, "first")
    PREFECT.parent.mkdir()
    with closing(sqlite3.connect(PREFECT)) as connection:
        connection.execute("CREATE TABLE flow_run (name)")
    return Paths("artifacts")


def make_project(folder: Path, monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    """Make it the working directory; of MLflow's tables only what a backup looks at."""
    monkeypatch.chdir(folder)
    Path("params.yaml").write_text(read_profiles(["test"], ROOT / "infra" / "profiles"), encoding="utf-8")
    DATABASE.parent.mkdir(parents=True)
    with closing(sqlite3.connect(DATABASE)) as connection:
        connection.executescript(SCHEMA)
    add_experiment("travel-desk", FILES.absolute())
    record_run(run)


def add_experiment(name: str, location: Path) -> None:
    with closing(sqlite3.connect(DATABASE)) as connection, connection:
        connection.execute("INSERT INTO experiments VALUES (?, ?, ?)", (name, name, str(location)))


def record_run(name: str, experiment: str = "travel-desk", folder: Path = FILES) -> str:
    """A finished run with one file that has its name; its id."""
    place = folder.absolute() / name
    place.mkdir(parents=True)
    (place / "said.txt").write_text(name, encoding="utf-8")
    with closing(sqlite3.connect(DATABASE)) as connection, connection:
        connection.execute("INSERT INTO runs VALUES (?, ?, 'FINISHED', ?, 0)", (name, experiment, str(place)))
    return name


def write_journal(*ids: str, moves: int = 1) -> None:
    """The journal of "desk" with these entries, as `journal.py` leaves it: each write is to the other of two files."""
    folder = FILES.absolute() / "journal"
    if not folder.exists():
        record_run("journal")
    for count in range(len(ids) - moves + 1, len(ids) + 1):
        lines = "".join(json.dumps({"id": id}) + "\n" for id in ids[:count])
        (folder / JOURNALS[count % 2]).write_text(lines, encoding="utf-8")
    pointer = Pointer("journal", JOURNALS[len(ids) % 2], hashlib.sha256(lines.encode()).hexdigest(), len(ids))
    text = json.dumps(pointer._asdict())
    with closing(sqlite3.connect(DATABASE)) as connection, connection:
        connection.execute("DELETE FROM tags")
        connection.execute("DELETE FROM registered_model_tags")
        connection.executemany("INSERT INTO tags VALUES ('journal', ?, ?)", [(OWNER, "desk"), (POINTER, text)])
        connection.execute("INSERT INTO registered_model_tags VALUES ('desk', ?, ?)", (POINTER, text))


def told(*lines: object) -> str:
    return "\n".join(map(str, lines))


def said(run: str) -> str:
    """What the run's file says, by the path in the database."""
    with closing(sqlite3.connect(DATABASE)) as connection:
        ((place,),) = connection.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run,))
    assert Path(place).is_relative_to(Path.cwd())
    return (Path(place) / "said.txt").read_text(encoding="utf-8")


def count_runs() -> int:
    with closing(sqlite3.connect(DATABASE)) as connection:
        return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])


def make_writer(database: Path) -> sqlite3.Connection:
    """A connection in the midst of a transaction, as a run's."""
    writer = sqlite3.connect(database)
    writer.execute("BEGIN")
    writer.execute("INSERT INTO experiments VALUES ('9', 'half', '/nowhere')")
    return writer


def test_what_is_lost_after_a_backup_comes_back_with_it(project: Paths):
    run = record_run("second")
    told(*backup(ARCHIVE))
    shutil.rmtree(FILES)
    for file in (DATABASE, PREFECT):
        file.unlink()
    told(*restore(ARCHIVE, force=False))
    assert said(run) == "second"
    assert PREFECT.exists()


def test_what_a_killed_backup_or_restore_left_goes_and_that_of_one_at_work_stays(project: Paths):
    with subprocess.Popen(["sleep", "60"]) as at_work:
        folders = [DATABASE.parent / name for name in (".backup-999999999", ".restore-x1", f".backup-{at_work.pid}")]
        for folder in folders:
            folder.mkdir()
            (folder / "mlflow.db").touch()
        told(*backup(ARCHIVE))
        assert [folder.exists() for folder in folders] == [False, False, True]
        at_work.kill()


def test_a_backup_has_nothing_of_a_transaction_that_did_not_end(project: Paths):
    with closing(make_writer(DATABASE)):
        told(*backup(ARCHIVE))
    told(*restore(ARCHIVE, force=True))
    with closing(sqlite3.connect(DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM experiments WHERE name = 'half'").fetchone() == (0,)


def test_what_was_moved_aside_before_stays_where_a_person_cleared_some(project: Paths):
    """Of 1, 2 and 3 the second is gone, so two folders are there; the next is the fourth."""
    told(*backup(ARCHIVE))
    for _ in range(3):
        told(*restore(ARCHIVE, force=False))
    shutil.rmtree("artifacts/mlflow/replaced-2")
    assert "replaced-4" in told(*restore(ARCHIVE, force=False))


def test_a_folder_as_the_file_is_one_line_and_nothing_is_written(project: Paths, tmp_path: Path):
    (tmp_path / "backups").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"backups is a folder.*b\.tar"):
        told(*backup(tmp_path / "backups"))
    with pytest.raises(ValueError, match=r"backups is a folder"):
        told(*restore(tmp_path / "backups", force=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_older_backup_is_replaced_and_any_other_file_left_alone(project: Paths):
    told(*backup(ARCHIVE))
    run = record_run("second")
    told(*backup(ARCHIVE))
    told(*restore(ARCHIVE, force=False))
    assert said(run) == "second"
    with tarfile.open("photos.tar", "w") as photos:
        photos.add("params.yaml")
    Path("train.jsonl").write_text('{"format": 1, "sha256": {}}\n')
    for name in ("photos.tar", "train.jsonl", str(DATABASE)):
        before = Path(name).read_bytes()
        with pytest.raises(ValueError, match="exists and is not a backup, so it is not replaced"):
            told(*backup(Path(name)))
        assert Path(name).read_bytes() == before


def test_files_of_other_agents_in_the_same_registry_are_named(project: Paths, tmp_path: Path):
    add_experiment("desk", tmp_path / "desk")
    record_run("theirs", "desk", tmp_path / "desk")
    first, *more = backup(ARCHIVE)
    assert "hash" in first and len(more) == 1 and "'desk'" in more[0] and str(tmp_path / "desk") in more[0]


def test_a_newer_registry_is_kept_unless_told_and_moved_aside_then(project: Paths):
    told(*backup(ARCHIVE))
    newer = record_run("newer")
    with pytest.raises(ValueError, match=r"newer state.*1 of the runs.*--force"):
        told(*restore(ARCHIVE, force=False))
    assert said(newer) == "newer"
    assert "replaced-1" in told(*restore(ARCHIVE, force=True))
    aside = Path("artifacts/mlflow/replaced-1")
    assert (aside / "mlflow.db").exists() and list(aside.rglob("said.txt"))
    assert count_runs() == 1


def test_another_registry_is_kept_unless_told(project: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told(*backup(ARCHIVE))
    (tmp_path / "other").mkdir()
    make_project(tmp_path / "other", monkeypatch, "theirs")
    with pytest.raises(ValueError, match=r"another registry.*--force"):
        told(*restore(tmp_path / ARCHIVE, force=False))


@pytest.mark.parametrize("fault", ["a byte", "its end"])
def test_a_damaged_backup_changes_nothing(project: Paths, fault: str):
    told(*backup(ARCHIVE))
    whole = ARCHIVE.read_bytes()
    with tarfile.open(ARCHIVE) as archive:
        place = archive.getmember("mlflow.db").offset_data + 5000
    damaged = whole[: len(whole) // 2] if fault == "its end" else whole[:place] + b"\xff\xfe" + whole[place + 2 :]
    ARCHIVE.write_bytes(damaged)
    before = DATABASE.read_bytes()
    with pytest.raises(ValueError, match="no sound backup"):
        told(*restore(ARCHIVE, force=True))
    assert DATABASE.read_bytes() == before and not list(DATABASE.parent.glob(".restore-*"))


def test_a_backup_restored_in_another_folder_names_that_folder(
    project: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = record_run("kept")
    told(*backup(ARCHIVE))
    (tmp_path / "artifacts").rename(tmp_path / "gone")
    (tmp_path / "second").mkdir()
    shutil.copy("params.yaml", "second")
    monkeypatch.chdir(tmp_path / "second")
    told(*restore(tmp_path / ARCHIVE, force=False))
    assert said(run) == "kept"


def journal_in(file: Path) -> list[str]:
    """The ids of the entries that the archive's database names, from the file with the hash on record."""
    with tarfile.open(file) as kept, TemporaryDirectory() as folder:
        kept.extractall(folder, filter="data")
        with closing(sqlite3.connect(f"{folder}/mlflow.db")) as connection:
            ((text,),) = connection.execute("SELECT value FROM registered_model_tags")
        content = (Path(folder) / "files" / "journal" / json.loads(text)["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == json.loads(text)["sha256"]
    return [json.loads(line)["id"] for line in content.decode().splitlines()]


def promote_while_files_are_written(patch: pytest.MonkeyPatch) -> None:
    """Gigabytes of weights take minutes. The second entry after the copy is written over the file that it names."""
    add_files = archive._add_files

    def promote_first(*args: Any) -> Any:
        write_journal("a", "b", "c", "d", moves=2)
        return add_files(*args)

    patch.setattr(archive, "_add_files", promote_first)


def test_promotions_while_the_files_are_written_leave_the_journal_that_the_database_names(
    project: Paths, monkeypatch: pytest.MonkeyPatch
):
    write_journal("a", "b")
    promote_while_files_are_written(monkeypatch)
    told(*backup(ARCHIVE))
    assert journal_in(ARCHIVE) == ["a", "b"]


def test_promotions_between_the_database_and_its_journal_are_a_reason_to_copy_both_again(
    project: Paths, monkeypatch: pytest.MonkeyPatch
):
    write_journal("a", "b")
    copy, promotions = archive_copies._copy_database, iter([["a", "b", "c", "d"]])

    def promote_after(source: Path, target: Path) -> Path:
        copied = copy(source, target)
        for ids in promotions:
            write_journal(*ids, moves=2)
        return copied

    monkeypatch.setattr(archive_copies, "_copy_database", promote_after)
    told(*backup(ARCHIVE))
    assert journal_in(ARCHIVE) == ["a", "b", "c", "d"]


def test_a_journal_that_is_not_the_one_on_record_is_not_backed_up(project: Paths):
    write_journal("a", "b")
    (FILES / "journal" / JOURNALS[0]).write_text("{}\n")
    with pytest.raises(ValueError, match=r"journal of desk is gone.*registry adopt"):
        told(*backup(ARCHIVE))
    assert not ARCHIVE.exists()


def test_a_backup_with_another_journal_than_its_database_names_is_restored_only_if_told(
    project: Paths, monkeypatch: pytest.MonkeyPatch
):
    """As one may be that was written before journals were copied with the database."""
    write_journal("a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(archive, "copy_of_one_moment", lambda *args: (copy_of_one_moment(*args)[0], {}))
        patch.setattr(archive, "journals_not_in", lambda *_: [])
        promote_while_files_are_written(patch)
        told(*backup(ARCHIVE))
    before = DATABASE.read_bytes()
    shutil.rmtree(FILES)
    with pytest.raises(ValueError, match=r"journal of desk.*registry adopt"):
        told(*restore(ARCHIVE, force=False))
    assert DATABASE.read_bytes() == before
    assert "registry adopt" in told(*restore(ARCHIVE, force=True))


def test_a_registry_with_a_newer_decision_alone_is_kept_unless_told(project: Paths):
    """A withdrawal takes an alias away, and a hold moves none: both are entries of the journal."""
    write_journal("promotion", "waiting")
    told(*backup(ARCHIVE))
    told(*restore(ARCHIVE, force=False))
    write_journal("promotion", "waiting", "withdrawal")
    with pytest.raises(ValueError, match=r"newer state.*1 of the runs.*entries.*--force"):
        told(*restore(ARCHIVE, force=False))


def test_a_journal_that_was_altered_here_is_no_reason_to_keep_the_registry(project: Paths):
    write_journal("promotion", "waiting")
    told(*backup(ARCHIVE))
    for file in (FILES / "journal").glob("*.jsonl"):
        file.write_text("{}\n")
    told(*restore(ARCHIVE, force=False))
    told(*backup(ARCHIVE))
    assert journal_in(ARCHIVE) == ["promotion", "waiting"]


@pytest.mark.parametrize("step", ["_move_aside", "_move_in"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_restore_that_was_killed_is_no_new_project_and_a_second_one_finishes_it(
    project: Paths, monkeypatch: pytest.MonkeyPatch, step: str, is_after: bool
):
    """Killed before or after what was there is aside, and before or after the archive's files are in their place."""
    told(*backup(ARCHIVE))
    move = getattr(archive, step)

    def be_killed(*args: Any) -> None:
        if is_after:
            move(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(archive, step, be_killed)
        with pytest.raises(KeyboardInterrupt):
            told(*restore(ARCHIVE, force=False))
    finish = f"python -m tasks restore {ARCHIVE.absolute()}"
    for verb in (lambda: refuse_lost_registry(SETTINGS), lambda: told(*backup(Path("another.tar")))):
        with pytest.raises(ValueError, match=rf"stopped half-way.*{finish}\.$"):
            verb()
    told(*restore(ARCHIVE, force=False))
    refuse_lost_registry(SETTINGS)
    assert said("first") == "first"
    assert PREFECT.exists()


def test_a_backup_among_the_files_that_it_would_contain_is_refused(project: Paths):
    with pytest.raises(ValueError, match="would contain itself"):
        told(*backup(FILES / "kept.tar"))
    assert not (FILES / "kept.tar").exists()


def test_weights_that_are_pruned_meanwhile_are_no_part_of_a_backup_that_says_it_is_sound(
    project: Paths, monkeypatch: pytest.MonkeyPatch
):
    weights = FILES / "first" / "model.safetensors"
    weights.touch()
    add_files = archive._add_files

    def prune_before(*args: Any) -> Any:
        weights.unlink()
        return add_files(*args)

    monkeypatch.setattr(archive, "_add_files", prune_before)
    with pytest.raises(ValueError, match=r"prune.*backup` again"):
        told(*backup(ARCHIVE))
    assert not ARCHIVE.exists()
