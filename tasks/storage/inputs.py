"""What a run or a command reads from `s3://`: copied here before anything reads it. What params.yaml names of S3 is
checked before anything runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.settings import load, read_params
from tasks.core.urls import is_url, parse_url
from tasks.storage.client import StorageError, connect
from tasks.storage.copies import find_objects, local_copy
from tasks.storage.settings import StorageSections, StorageSettings

ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"  # read by boto3, and so by DVC and MLflow
MLFLOW_VARIABLE = "MLFLOW_S3_ENDPOINT_URL"  # MLflow's own name for it, which it prefers
PROBE = ".turnwise-write-check"  # an empty object in each folder that is written to


def copy_argument(text: str) -> Path:
    """The path that a command's argument names: a local one, or the copy of an `s3://` URL."""
    return local_copy(text, load(StorageSections, read_params()).storage) if is_url(text) else Path(text)


def copy_inputs(params: dict[str, Any]) -> None:
    """Copy what params.yaml names by `s3://` URLs, unless the copies here are of the same objects."""
    for _, url in _urls(params):
        local_copy(url, load(StorageSections, params).storage)


def share_endpoint(params: Mapping[str, Any]) -> None:
    """For the children of this process: DVC and MLflow reach the same server, unless they were told another. The params
    of an older version, which `lineage --verify` builds again, have no such section.
    """
    endpoint = params.get("storage", {}).get("endpoint_url")
    if endpoint is not None:
        os.environ.setdefault(ENDPOINT_VARIABLE, endpoint)


def check_storage(params: dict[str, Any]) -> None:
    """ValueError, in one line that names the key, where S3 cannot be reached, an object is not there, or a folder
    cannot be written to. Nothing is asked where params.yaml names nothing on S3.
    """
    settings = load(StorageSections, params).storage
    for key, url in _urls(params):
        with _naming(key):
            find_objects(connect(settings), parse_url(url))
    for key, url, endpoint in _folders(params):
        with _naming(key):
            check_writable(url, settings, endpoint)


def urls_of(params: dict[str, Any]) -> list[str]:
    """The keys of params.yaml that name something on S3."""
    return [*(key for key, _ in _urls(params)), *(key for key, _, _ in _folders(params))]


def check_writable(url: str, settings: StorageSettings, endpoint: str | None = None) -> None:
    """StorageError where nothing can be written under `url`; `endpoint` is of the server, if not the settings'."""
    store, place = connect(at_endpoint(settings, endpoint)), parse_url(url) / PROBE
    with store.clear_errors(place):
        store.client.put_object(Bucket=place.bucket, Key=place.key, Body=b"")


def at_endpoint(settings: StorageSettings, endpoint: str | None) -> StorageSettings:
    return settings.model_copy(update={"endpoint_url": endpoint}) if endpoint else settings


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the key of params.yaml before the message."""
    try:
        yield
    except StorageError as error:
        raise ValueError(f"{key}: {error}") from None


def _urls(params: dict[str, Any]) -> Iterator[tuple[str, str]]:
    named = {
        "curate.source": params["curate"]["source"],
        "model.path": params["model"]["path"],
        "environment.cache.frozen": params["environment"]["cache"]["frozen"],
    }
    return ((key, value) for key, value in named.items() if value is not None and is_url(value))


def _folders(params: dict[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """(key, URL, endpoint) of what this machine writes to: MLflow's files too, unless its server passes them on."""
    named = (
        ("paths.remote", params["paths"]["remote"], None),
        ("tracking.artifact_location", params["tracking"]["artifact_location"], os.environ.get(MLFLOW_VARIABLE)),
    )
    return ((key, url, endpoint) for key, url, endpoint in named if url is not None and is_url(url))
