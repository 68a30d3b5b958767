"""What MLflow's errors mean, in words, and the remedy that fits each: a locked database needs no server started.

MLflow passes on what its database, its server or the network said, mostly as text: so the words are looked for in the
whole chain of an error, the most particular first. Left out: a lost registry (`connection.refuse_lost_registry`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tasks.core.surroundings import causes

MAX_REASON = 300  # characters of MLflow's own words that are repeated
LOCKED = "database is locked"


class Fault(NamedTuple):
    """Words by which a fault is known, what it is, and what to do about it."""

    pattern: str
    what: str
    remedy: str


FAULTS = (
    Fault(
        "No space left|database or disk is full|Disk quota exceeded",
        "the disk is full",
        "Free some space",
    ),
    Fault(
        LOCKED,
        "another process keeps MLflow's database locked",
        "Wait for it or end it (`fuser FILE` names it)",
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
    Fault(
        "malformed|file is not a database|disk I/O error",
        "MLflow's database is damaged",
        "Restore it from a backup",
    ),
    Fault(
        "Invalid Host header",
        "the MLflow server does not know itself by this host's name",
        "Start it with `--allowed-hosts HOST`, or name in tracking.uri the host that it was started with",
    ),
    Fault(
        r"UNAUTHENTICATED|error code 401|not authenticated",
        "the MLflow server does not know who asks",
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
        "what answers there is no MLflow server of today's kind",
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
        "the MLflow server answers, and fails by itself",
        "Look at its log, its database and its disk",
    ),
    Fault(
        "NameResolutionError|could not translate host name|nodename nor servname",
        "no host of that name is known",
        "Correct the host in tracking.uri",
    ),
    Fault(
        "Max retries exceeded|Connection refused|timed out|ConnectionError|RemoteDisconnected|could not connect",
        "nobody answers there",
        "Start the server or correct tracking.uri",
    ),
    Fault(
        "RESOURCE_DOES_NOT_EXIST|not found|must be in the 'active' state",
        "something that was in MLflow has been deleted",
        "Restore it in MLflow, or begin the command anew",
    ),
)
OTHER = Fault(
    "", "MLflow does not do what it was asked", "Look at the reason, and at the MLflow server's log if there is one"
)


def explain(error: BaseException | str, uri: str) -> str:
    """One line: what was found, MLflow's own words (or a database's: `error`), and the remedy."""
    links = list(causes(error)) if isinstance(error, BaseException) else [error]
    said = " ".join(f"{type(link).__name__} {getattr(link, 'error_code', '')} {link}" for link in links)
    fault = next((fault for fault in FAULTS if re.search(fault.pattern, said)), OTHER)
    if isinstance(error, ModuleNotFoundError):
        fault = Fault("", f"the driver {error.name} is not installed", f"Run `.venv/bin/pip install {error.name}`")
    reason = " ".join(str(error).split())[:MAX_REASON]
    return (
        f"tracking.uri = {uri!r}: {fault.what} ({reason}), so neither runs nor a champion can be recorded. "
        f"{fault.remedy}, then run again; finished stages are not repeated."
    )
