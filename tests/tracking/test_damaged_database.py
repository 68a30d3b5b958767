"""A registry is never lost without a word, and no database that is damaged is taken for a new one."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flows.server import refuse_damaged_history
from tasks.core.databases import fault_of_database
from tasks.core.settings import Paths
from tasks.tracking.connection import connect, experiment_id, refuse_lost_registry
from tests.damage import DAMAGES, damage
from tests.tracking.project import DATABASE, SETTINGS

KEPT_FILES = Path("artifacts/mlflow/artifacts")


@pytest.fixture
def used(project: Paths) -> Path:
    """MLflow's database after a run that left a file, which is there."""
    client = connect(SETTINGS)
    run = client.create_run(experiment_id(client, SETTINGS))
    client.log_dict(run.info.run_id, {"a": 1}, "a.json")
    assert any(KEPT_FILES.iterdir())
    return DATABASE


def empty_every_table(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in set(tables) - {"alembic_version"}:
            connection.execute(f'DELETE FROM "{table}"')
        connection.commit()


def drop_a_table(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DROP TABLE registered_models")


LOSSES: dict[str, Callable[[Path], object]] = {
    **{kind: lambda file, kind=kind: damage(file, kind) for kind in DAMAGES},  # type: ignore[misc]
    "every row gone": empty_every_table,
    "a table gone": drop_a_table,
    "the file gone": Path.unlink,
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_registry_is_never_lost_without_a_word_and_the_command_starts_another(used: Path, loss: str) -> None:
    LOSSES[loss](used)
    with pytest.raises(ValueError) as error:
        connect(SETTINGS)
    told = str(error.value)
    assert "\n" not in told
    assert told.startswith(f"{DATABASE}: ") and "who is champion" in told and "backup" in told
    subprocess.run(["bash", "-c", told.split("`")[1]], check=True)
    assert any(Path("artifacts/mlflow/lost-1/artifacts").iterdir())
    assert (DATABASE.parent / "lost-1" / DATABASE.name).exists() == (loss != "the file gone")
    refuse_lost_registry(SETTINGS)


def test_a_database_that_knows_its_files_is_opened_and_so_is_a_new_one(used: Path, tmp_path: Path) -> None:
    refuse_lost_registry(SETTINGS)
    refuse_lost_registry(SETTINGS.model_copy(update={"uri": f"sqlite:///{tmp_path}/new.db", "artifact_location": "no"}))
    refuse_lost_registry(SETTINGS.model_copy(update={"uri": "http://127.0.0.1:1"}))


def test_a_database_somebody_writes_to_is_waited_for_and_not_called_damaged(used: Path) -> None:
    with closing(sqlite3.connect(used)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert fault_of_database(used) is None


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "empty"])
def test_a_damaged_prefect_database_stops_before_its_server_starts(
    tmp_path: Path, kind: str, empty_database: Path
) -> None:
    """Any SQLite database: what Prefect keeps in it is not looked at, since it makes an empty one anew by itself."""
    database = tmp_path / "prefect.db"
    database.write_bytes(empty_database.read_bytes())
    refuse_damaged_history(tmp_path)
    damage(database, kind)
    (tmp_path / "prefect.db-wal").write_bytes(b"")
    with pytest.raises(ValueError, match=r"prefect\.db: .*past runs.*`mkdir ") as error:
        refuse_damaged_history(tmp_path)
    assert "\n" not in str(error.value)
    subprocess.run(["bash", "-c", str(error.value).split("`")[1]], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-1"]  # moved, not removed
    refuse_damaged_history(tmp_path)
