"""An MLflow client that works offline and keeps every file inside the project, and MLflow's errors in one line.

`tracking.uri` is a sqlite file (the default) or a server. Relative paths are made absolute, because MLflow stores them
and would resolve them against the working folder of a later process.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasks.core.databases import fault_of_database, holds_rows, why_unusable
from tasks.core.surroundings import causes
from tasks.core.text import one_line
from tasks.tracking.metrics import quiet_mlflow
from tasks.tracking.settings import DATABASES, SQLITE, TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient


# Some of MLflow's tables; wherever MLflow has kept a file, one of the last three has a row.
TABLES = ("alembic_version", "experiments", "registered_models", "runs", "logged_models", "model_versions")
LEADING_TO_FILES = TABLES[-3:]
LOCKED = "database is locked"


class Fault(NamedTuple):
    pattern: str
    what: str
    remedy: str


FAULTS = (
    Fault("No space left|database or disk is full|Disk quota exceeded", "the disk is full", "Free some space"),
    Fault(LOCKED, "another process keeps MLflow's database locked", "Wait for it or end it (`fuser FILE` names it)"),
    Fault(
        r"out-of-date database schema|Can't locate revision",
        "MLflow's database was written by another version of MLflow",
        "Use the version it was written by (the project's is in infra/locks/demo.txt); or copy the database, then "
        "`mlflow db upgrade URI`",
    ),
    Fault(
        "readonly database|unable to open database",
        "MLflow's database cannot be opened or written",
        "Look at the file's owner and its folder's (`ls -la`), or correct tracking.uri",
    ),
    Fault(
        "malformed|file is not a database|disk I/O error", "MLflow's database is damaged", "Restore it from a backup"
    ),
    Fault(
        "Invalid Host header",
        "the MLflow server does not accept this host name",
        "Start it with `--allowed-hosts HOST`, or use in tracking.uri the host that it was started with",
    ),
    Fault(
        r"UNAUTHENTICATED|error code 401|not authenticated",
        "the MLflow server requires a login",
        "Export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN)",
    ),
    Fault(
        "PERMISSION_DENIED|error code 403",
        "the MLflow server forbids it to this user",
        "Have its administrator let this user edit the experiment and the registered model, or export the "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD of one who may",
    ),
    Fault(
        r"ENDPOINT_NOT_FOUND|error code (404|405|3\d\d)|valid JSON format|redirects|Invalid url",
        "the server at that address is no MLflow server of a supported version",
        "Correct tracking.uri (the address alone, as in http://HOST:5000), or start an `mlflow server` there",
    ),
    Fault(
        "SSL|CERTIFICATE",
        "no secure connection to the MLflow server can be made",
        "Write http:// in tracking.uri where it speaks no TLS; else name its certificate in "
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
    ),
    Fault(
        r"too many (429|5\d\d) error|error code 5\d\d",
        "the MLflow server fails with an internal error",
        "Look at its log, its database and its disk",
    ),
    Fault(
        "NameResolutionError|could not translate host name|nodename nor servname",
        "there is no host of that name",
        "Correct the host in tracking.uri",
    ),
    Fault(
        "Max retries exceeded|Connection refused|timed out|ConnectionError|RemoteDisconnected|could not connect",
        "no server answers at that address",
        "Start the server or correct tracking.uri",
    ),
    Fault(
        "RESOURCE_DOES_NOT_EXIST|not found|must be in the 'active' state",
        "something that was in MLflow has been deleted",
        "Restore it in MLflow, or start over",
    ),
)
OTHER = Fault("", "a request to MLflow failed", "Look at the reason, and at the MLflow server's log if there is one")


def absolute_uri(uri: str) -> str:
    """A sqlite URI with an absolute path, its folder made; a server's URL unchanged."""
    if not uri.startswith(SQLITE):
        return uri
    path = Path(uri.removeprefix(SQLITE)).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{path}"


def absolute_location(location: str) -> str:
    return location if ":/" in location else str(Path(location).absolute())


def connect(settings: TrackingSettings) -> MlflowClient:
    """A client on `tracking.uri`. Also sets MLflow's process-wide URI: its registry uses it to find logged models."""
    quiet_mlflow()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # MLflow draws one per file
    import mlflow

    for name in ("mlflow.store.db.utils", "mlflow.tracking", "alembic"):  # one INFO line per schema step, on stderr
        logging.getLogger(name).setLevel(logging.WARNING)
    refuse_lost_registry(settings)
    uri = absolute_uri(settings.uri)
    if uri.startswith(SQLITE):
        _make_database(Path(uri.removeprefix(SQLITE)))
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return mlflow.MlflowClient(uri, uri)


def refuse_lost_registry(settings: TrackingSettings) -> None:
    """ValueError where MLflow's database is damaged, or has no record of the files that MLflow kept: MLflow takes an
    emptied one for a new one, and the next challenger would meet no champion. A server is not checked.
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
        f"{database}: MLflow's database is damaged ({fault}). It contains the model registry: the versions, "
        f"who is champion and every run; without it all of that is lost, though the models' files stay. Restore the "
        f"file from a backup. If there is none, start an empty registry with `{command}`."
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
        # An old SQLite journal would corrupt the next database.
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
    """The experiment's id; made on first use. ValueError where its files are in a folder outside this project."""
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
    """Turns exceptions of MLflow and its database into one line; a bug of ours keeps its traceback. ValueError too
    where the SQLite file was deleted meanwhile: a new connection silently makes an empty registry.
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
    if not settings.uri.startswith(SQLITE):
        return None
    try:
        found = Path(settings.uri.removeprefix(SQLITE)).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def explain(error: BaseException | str, uri: str) -> str:
    """One line: what was found, the original words (`error`), and the remedy."""
    links = list(causes(error)) if isinstance(error, BaseException) else [error]
    said = " ".join(f"{type(link).__name__} {getattr(link, 'error_code', '')} {link}" for link in links)
    fault = next((fault for fault in FAULTS if re.search(fault.pattern, said)), OTHER)
    if isinstance(error, ModuleNotFoundError):
        fault = Fault("", f"the driver {error.name} is not installed", f"Run `.venv/bin/pip install {error.name}`")
    reason = one_line(error)
    return (
        f"tracking.uri = {uri!r}: {fault.what} ({reason}), so neither runs nor a champion can be recorded. "
        f"{fault.remedy}, then run again; finished stages are not repeated."
    )
