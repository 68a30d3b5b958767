"""What can be wrong with MLflow's database or server: each fault in one line with its remedy."""

from __future__ import annotations

import re
from typing import NamedTuple

from tasks.core.passing_faults import causes
from tasks.core.text import one_line

LOCKED = "database is locked"
RESTORE = "Restore it from a backup (python -m tasks restore FILE)"


class Fault(NamedTuple):
    pattern: str
    what: str
    remedy: str
    may_pass: bool = False  # by itself, in a minute


FAULTS = (
    Fault("No space left|database or disk is full|Disk quota exceeded", "the disk is full", "Free some space"),
    Fault(
        LOCKED, "another process keeps MLflow's database locked", "Wait for it or end it (`fuser FILE` names it)", True
    ),
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
    Fault("malformed|file is not a database|disk I/O error", "MLflow's database is damaged", RESTORE),
    Fault(
        r"password authentication failed|no password supplied|Access denied for user|"
        r'role "[^"]*" does not exist|no pg_hba.conf entry',
        "the database refuses the user or the password",
        "Export PGPASSWORD, or correct the user in tracking.uri",
    ),
    Fault(
        r'database "[^"]*" does not exist|Unknown database',
        "there is no database of that name",
        "Create it, or correct tracking.uri",
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
        True,
    ),
    Fault(
        "NameResolutionError|could not translate host name|nodename nor servname",
        "there is no host of that name",
        "Correct the host in tracking.uri",
    ),
    Fault(
        "Max retries exceeded|Connection refused|timed out|ConnectionError|RemoteDisconnected|could not connect|"
        "system is (starting up|shutting down)|in recovery mode|terminating connection|server closed the connection",
        "no server answers at that address",
        "Start the server or correct tracking.uri",
        True,
    ),
    Fault(
        "RESOURCE_DOES_NOT_EXIST|not found|must be in the 'active' state",
        "something that was in MLflow has been deleted",
        "Restore it on MLflow's page, or MLflow's database from a backup (python -m tasks restore FILE)",
    ),
)
OTHER = Fault("", "a request to MLflow failed", "Look at the reason, and at the MLflow server's log if there is one")


def find_fault(error: BaseException | str) -> Fault:
    links = list(causes(error)) if isinstance(error, BaseException) else [error]
    said = " ".join(f"{type(link).__name__} {getattr(link, 'error_code', '')} {link}" for link in links)
    return next((fault for fault in FAULTS if re.search(fault.pattern, said)), OTHER)


def explain(error: BaseException | str, uri: str) -> str:
    """One line: what was found, the original words (`error`), and the remedy."""
    fault = find_fault(error)
    if isinstance(error, ModuleNotFoundError):
        fault = Fault("", f"the driver {error.name} is not installed", f"Run `.venv/bin/pip install {error.name}`")
    reason = one_line(error)
    return (
        f"tracking.uri = {uri!r}: {fault.what} ({reason}), so neither runs nor a champion can be recorded. "
        f"{fault.remedy}, then run again; finished stages are not repeated."
    )
