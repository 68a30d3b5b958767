"""The way to MLflow: its settings, and a client that works offline and keeps every file inside the project.

`tracking.uri` may name a sqlite file (the embedded default) or a server; relative paths are made absolute here, because
MLflow stores them and would otherwise resolve them against whatever folder a later process happens to start in.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from tasks.core.databases import fault_of_database, holds_rows, why_unusable
from tasks.core.settings import Settings
from tasks.tracking.faults import explain
from tasks.tracking.metrics import quiet_mlflow
from tasks.tracking.names import ExperimentName

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
DATABASES = r"(?:postgresql|mysql|mssql)(?:\+\w+)?"  # which MLflow can speak to without a server of its own
# A few of MLflow's tables; of the last three, one has a row wherever MLflow has kept a file.
TABLES = ("alembic_version", "experiments", "registered_models", "runs", "logged_models", "model_versions")
LEADING_TO_FILES = TABLES[-3:]


def check_uri(uri: str) -> str:
    """The URI as it is; ValueError where MLflow would keep no model registry behind it."""
    if re.match(rf"{SQLITE}.|(https?|{DATABASES})://[^/]", uri):
        return uri
    raise ValueError(
        f"{uri!r} names neither a server nor a database that MLflow could keep a model registry in. Write "
        f"sqlite:///artifacts/mlflow/mlflow.db, or the URL of an MLflow server such as http://HOST:5000"
    )


class TrackingSettings(Settings):
    """Where MLflow keeps runs (`uri`), files (`artifact_location`) and under which experiment name; how many of
    evaluation's episodes a flow writes there as traces (0: none).
    """

    uri: Annotated[str, AfterValidator(check_uri)]
    artifact_location: str = Field(min_length=1)
    experiment: ExperimentName
    num_traces: int = Field(ge=0)


class TrackingSections(Settings):
    """The section of params.yaml alone, for whoever needs no other."""

    tracking: TrackingSettings


def absolute_uri(uri: str) -> str:
    """A sqlite URI with an absolute path, its folder made; a server's URL as it is."""
    if not uri.startswith(SQLITE):
        return uri
    path = Path(uri.removeprefix(SQLITE)).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{path}"


def absolute_location(location: str) -> str:
    """Where artifacts go: an absolute folder, or a remote store's URI as it is."""
    return location if ":/" in location else str(Path(location).absolute())


def connect(settings: TrackingSettings) -> MlflowClient:
    """A client on `tracking.uri`. Sets MLflow's process-wide URI too: its registry looks logged models up through
    it.
    """
    quiet_mlflow()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it draws one for each file
    import mlflow

    for name in ("mlflow.store.db.utils", "mlflow.tracking", "alembic"):  # one INFO line a schema step, on stderr
        logging.getLogger(name).setLevel(logging.WARNING)
    refuse_lost_registry(settings)
    uri = absolute_uri(settings.uri)
    if uri.startswith(SQLITE):
        _make_database(Path(uri.removeprefix(SQLITE)))
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return mlflow.MlflowClient(uri, uri)


def refuse_lost_registry(settings: TrackingSettings) -> None:
    """ValueError where MLflow's database is damaged, or knows nothing of the files that it has kept.

    MLflow takes an emptied or missing database for a new one: it would start another registry, without a champion, and
    the next challenger would win against nobody. Costs milliseconds; a server keeps its own.
    """
    if not settings.uri.startswith(SQLITE):
        return
    database, location = Path(settings.uri.removeprefix(SQLITE)), Path(settings.artifact_location)
    is_local = "://" not in settings.artifact_location
    files = sorted(item for item in location.iterdir() if item.is_dir()) if is_local and location.is_dir() else []
    if database.exists():
        if unusable := why_unusable(database):
            raise ValueError(explain(unusable, settings.uri))
        fault = fault_of_database(database, TABLES)
        if fault is None and files and not holds_rows(database, LEADING_TO_FILES):
            fault = f"it is empty, and MLflow has kept files under {location}"
    else:
        fault = f"it is gone, and MLflow has kept files under {location}" if files else None
    if fault is None:
        return
    num_before = len(list(database.parent.glob("lost*")))
    lost = _quoted(database.with_name(f"lost-{num_before + 1}" if num_before else "lost"))
    moved = [f"{_quoted(database)}*"] if database.exists() else []  # with its journal
    command = f"mkdir {lost} && mv {' '.join([*moved, *([_quoted(location)] if files else []), lost])}"
    raise ValueError(
        f"{database}: MLflow's database is damaged ({fault}). It holds the model registry: which versions there are, "
        f"who is champion and every run; without it all of that is lost, though the models' files stay. Restore the "
        f"file from a backup. If there is none, start an empty registry with `{command}`."
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _make_database(path: Path) -> None:
    """Make MLflow's database beside its place and move it there when it is whole.

    MLflow takes two seconds and fifty steps to make one, each for itself, and opens none whose maker was killed on the
    way: after `kill -9` in its first seconds no flow would run in the folder again.
    """
    if path.exists():
        return
    from filelock import FileLock
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    temporary = path.with_name(f".{path.name}.partial")
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():  # another process was quicker
            return
        # A journal, of a killed maker or of a database somebody removed, would corrupt the next.
        journals = (path.with_name(f"{path.name}{suffix}") for suffix in ("-journal", "-wal", "-shm"))
        for leftover in (*path.parent.glob(f"{temporary.name}*"), *journals):
            leftover.unlink(missing_ok=True)
        engine = create_sqlalchemy_engine(f"{SQLITE}{temporary}")
        try:
            _initialize_tables(engine)
        finally:
            engine.dispose()
        os.replace(temporary, path)


def experiment_id(client: MlflowClient, settings: TrackingSettings) -> str:
    """The experiment's id; made on first use. ValueError where its files lie in a folder that is not this project's."""
    location = absolute_location(settings.artifact_location)
    experiment = client.get_experiment_by_name(settings.experiment)
    if experiment is None:
        return str(client.create_experiment(settings.experiment, artifact_location=location))
    if experiment.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment = {settings.experiment!r} was deleted in MLflow, which then takes no runs in it. "
            f"Restore it: MLFLOW_TRACKING_URI={shlex.quote(settings.uri)} mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}; or choose another tracking.experiment."
        )
    if location.startswith("/") and experiment.artifact_location.removeprefix("file://") != location:
        raise ValueError(
            f"tracking.artifact_location is {location}, but MLflow's experiment {settings.experiment!r} keeps its "
            f"files under {experiment.artifact_location}; runs would be written outside this folder. If the project "
            f"was moved or copied, delete its MLflow database ({settings.uri}) with the files under {location}, or "
            f"choose another tracking.experiment."
        )
    return str(experiment.experiment_id)


@contextmanager
def mlflow_errors(settings: TrackingSettings) -> Iterator[None]:
    """The exceptions of MLflow and of its database as one readable line; a bug of ours keeps its traceback.

    ValueError too where the SQLite file was deleted meanwhile: a new connection makes an empty registry without a word.
    """
    quiet_mlflow()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    before = _identity(settings)
    cause: Exception | None = None
    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        cause = error
    except ModuleNotFoundError as error:
        if not re.match(f"({DATABASES})://", settings.uri):
            raise
        raise ValueError(explain(error, settings.uri)) from error
    if before is not None and _identity(settings) != before:
        raise ValueError(
            f"tracking.uri = {settings.uri!r}: MLflow's database was deleted or replaced while it was in use, so what "
            f"was recorded in it is lost. Restore the file from a backup, then run again; finished stages are not "
            f"repeated."
        ) from cause
    if cause is not None:
        raise ValueError(explain(cause, settings.uri)) from cause


def _identity(settings: TrackingSettings) -> tuple[int, int] | None:
    """Which file the sqlite database is; None where there is none, or a server."""
    if not settings.uri.startswith(SQLITE):
        return None
    try:
        found = Path(settings.uri.removeprefix(SQLITE)).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
