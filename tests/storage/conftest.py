"""The S3 server as boto3 finds it, and an empty folder on it for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.servers import ObjectStore
from tests.storage.fault_proxy import FaultProxy
from tests.storage.places import Place


@pytest.fixture
def place(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in object_store.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it may have the keys of another test's server
    (tmp_path / "workspace").mkdir()
    monkeypatch.chdir(tmp_path / "workspace")
    return Place(object_store.client(), object_store.bucket, uuid.uuid4().hex[:12])


@pytest.fixture
def faults(place: Place, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, which boto3 finds in its place."""
    proxy = FaultProxy(object_store.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    yield proxy
    proxy.close()
