"""An MLflow client that works offline and keeps every file inside the project, and MLflow's errors in one line.

`tracking.uri` is a sqlite file (the default) or a server. Relative paths are made absolute, because MLflow stores them
and would resolve them against the working folder of a later process.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.core.aside import name_aside
from tasks.core.databases import copy_empty, fault_of_database, holds_rows, why_unusable
from tasks.core.passing_faults import PassingFault
from tasks.core.secrets import hide_known_secrets
from tasks.storage.client import explain as explain_s3
from tasks.tracking.faults import RESTORE, explain, find_fault
from tasks.tracking.half_restored import refuse_half_restored
from tasks.tracking.metrics import quiet_mlflow
from tasks.tracking.relocate import way_to_moved_files
from tasks.tracking.settings import DATABASES, SQLITE, TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient


# Some of MLflow's tables; wherever MLflow has kept a file, one of the last three has a row.
TABLES = ("alembic_version", "experiments", "registered_models", "runs", "logged_models", "model_versions")
LEADING_TO_FILES = TABLES[-3:]
DATABASE_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds; Postgres restarts in one or two


def absolute_uri(settings: TrackingSettings) -> str:
    """A sqlite URI with an absolute path, its folder made; a server's URL unchanged."""
    if settings.database is None:
        return settings.uri
    path = settings.database.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{path}"


def absolute_location(settings: TrackingSettings) -> str:
    return settings.artifact_location if settings.files is None else str(settings.files.absolute())


def local_folder(location: str) -> Path | None:
    """The folder behind one of MLflow's locations, where that is a folder of this machine."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    return Path(local_file_uri_to_path(location)) if urlsplit(location).scheme in ("", "file") else None


def connect(settings: TrackingSettings) -> MlflowClient:
    """A client on `tracking.uri`. Also sets MLflow's process-wide URI: its registry uses it to find logged models."""
    quiet_mlflow()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # MLflow draws one per file
    import mlflow

    for name in ("mlflow.tracking", "alembic"):  # one INFO line per schema step, on stderr
        logging.getLogger(name).setLevel(logging.WARNING)
    # Each attempt to connect is a warning, and what fails a traceback of 60 lines: `mlflow_errors` explains that.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    refuse_lost_registry(settings)
    if re.match(f"{DATABASES}://", settings.uri):
        _await_database(settings)
    uri = absolute_uri(settings)
    if settings.database is not None:
        _make_database(settings.database.absolute())
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return mlflow.MlflowClient(uri, uri)


def _await_database(settings: TrackingSettings) -> None:
    """Connect once, with the patience that a restart needs; ValueError where that is refused. MLflow itself repeats any
    refusal, a wrong password too, for 100 seconds.
    """
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from sqlalchemy.exc import SQLAlchemyError

    with mlflow_errors(settings):
        engine = create_sqlalchemy_engine(settings.uri)
        for pause in DATABASE_PAUSES:
            try:
                engine.connect().close()
                break
            except SQLAlchemyError as error:
                if not find_fault(error).may_pass:
                    raise
                time.sleep(pause)
        else:
            engine.connect().close()
        engine.dispose()


def refuse_lost_registry(settings: TrackingSettings) -> None:
    """ValueError where MLflow's database is damaged, or has no record of the files that MLflow kept: MLflow takes an
    emptied one for a new one, and the next challenger would meet no champion. A server is not checked.
    """
    database, location = settings.database, settings.files
    if database is None:
        return
    refuse_half_restored(database)
    files = sorted(item for item in location.iterdir() if item.is_dir()) if location and location.is_dir() else []
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
    lost = _quoted(name_aside(database.parent, "lost"))
    moved = [f"{_quoted(database)}*"] if database.exists() else []  # with its journal
    command = f"mkdir {lost} && mv {' '.join([*moved, *([_quoted(location)] if location and files else []), lost])}"
    raise ValueError(
        f"{database}: MLflow's database is damaged ({fault}). It contains the model registry: the versions, "
        f"who is champion and every run; without it all of that is lost, though the models' files stay. "
        f"{RESTORE}. If there is none, start an empty registry with `{command}`."
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _make_database(path: Path) -> None:
    """Made beside its place and moved when complete: MLflow needs two seconds and opens no database whose maker was
    killed, so after `kill -9` no flow would run in the folder again.
    """
    if path.exists():
        return
    from filelock import FileLock
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    temporary = path.with_name(f".{path.name}.partial")
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():  # another process was quicker
            return
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink(missing_ok=True)
        if copy_empty("mlflow", path):
            return
        engine = create_sqlalchemy_engine(f"{SQLITE}{temporary}")
        try:
            _initialize_tables(engine)
        finally:
            engine.dispose()
        os.replace(temporary, path)


def experiment_id(client: MlflowClient, settings: TrackingSettings) -> str:
    """The experiment's id; made on first use. ValueError where its files are in a folder outside this project."""
    location = absolute_location(settings)
    experiment = client.get_experiment_by_name(settings.experiment)
    if experiment is None:
        return str(client.create_experiment(settings.experiment, artifact_location=location))
    if experiment.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment = {settings.experiment!r} was deleted in MLflow, which then takes no runs in it. "
            f"Restore it: MLFLOW_TRACKING_URI={shlex.quote(settings.uri)} mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}; or choose another tracking.experiment."
        )
    stored = experiment.artifact_location.removeprefix("file://")
    if location.startswith("/") and stored != location:
        raise ValueError(
            f"tracking.artifact_location is {location}, but MLflow's experiment {settings.experiment!r} keeps its "
            f"files under {experiment.artifact_location}; runs would be written outside this folder. If the project "
            f"was moved or copied with them, {way_to_moved_files(settings, stored)}; else choose another "
            f"tracking.experiment."
        )
    if not settings.is_local and stored.startswith("/"):
        raise ValueError(
            f"MLflow's experiment {settings.experiment!r} at {settings.uri} keeps its files in a folder ({stored}), "
            f"which no other machine reaches, so no champion could be fetched there. Choose another "
            f"tracking.experiment, whose files go to tracking.artifact_location ({location})."
        )
    return str(experiment.experiment_id)


def refuse_moved_files(client: MlflowClient, settings: TrackingSettings) -> None:
    """ValueError where the folder that MLflow names for the experiment's files does not exist on this machine: they are
    elsewhere, and not lost.
    """
    experiment = client.get_experiment_by_name(settings.experiment)
    folder = local_folder(experiment.artifact_location) if experiment else None
    if folder is not None and not folder.exists():
        raise ValueError(
            f"MLflow keeps the files of its experiment {settings.experiment!r} under {folder}, which does not exist "
            f"here, so no version can be read. If they were moved, {way_to_moved_files(settings, str(folder))}; if "
            f"they are lost, restore a backup to that folder, or make it (mkdir -p), and the command says how to go on."
        )


@contextmanager
def mlflow_errors(settings: TrackingSettings) -> Iterator[None]:
    """Turns exceptions of MLflow, its database and its files' store into one line; a bug of ours keeps its traceback.
    ValueError too where the SQLite file was deleted meanwhile: a new connection silently makes an empty registry.
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
    except Exception as error:  # of boto3, which MLflow passes on
        place = f"tracking.artifact_location ({settings.artifact_location})"
        told = explain_s3(error, place, server="S3", hide=hide_known_secrets)
        if told is None:
            raise
        raise told from error
    if before is not None and _identity(settings) != before:
        raise ValueError(
            f"tracking.uri = {settings.uri!r}: MLflow's database was deleted or replaced while it was in use, so what "
            f"was recorded in it is lost. {RESTORE}, then run again; finished stages are not repeated."
        ) from cause
    if cause is not None:
        kind = PassingFault if find_fault(cause).may_pass else ValueError
        raise kind(explain(cause, settings.uri)) from cause


def _identity(settings: TrackingSettings) -> tuple[int, int] | None:
    if settings.database is None:
        return None
    try:
        found = settings.database.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def unless_there(call: Callable[[], Any]) -> None:
    """Run `call`, which makes something that another process may have made a moment ago."""
    from mlflow.exceptions import MlflowException

    try:
        call()
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def paged(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """What all pages of one of MLflow's searches contain; `search` gives the page that a token leads to."""
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def or_none(call: Callable[[], Any]) -> Any:
    """The result of `call`, or None where MLflow says there is no such thing. Any other fault is raised."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
