"""The servers of `servers.py`, each once per session: for every test that names one of them.

`services` starts all four, MLflow and Prefect side by side, in about 20 s on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.services.servers import MLflowServer, ObjectStore, Postgres, PrefectServer


@dataclass(frozen=True)
class Services:
    postgres: Postgres
    store: ObjectStore
    mlflow: MLflowServer
    prefect: PrefectServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """With a bucket of ours and one of a stranger's."""
    server = ObjectStore(tmp_path_factory.mktemp("object_store"))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def services(
    postgres: Postgres, object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    mlflow = MLflowServer(tmp_path_factory.mktemp("mlflow_server"), postgres, object_store)
    prefect = PrefectServer(tmp_path_factory.mktemp("prefect_server"), postgres)
    for server in (mlflow, prefect):
        server.launch()
    for server in (mlflow, prefect):
        server.wait()
    yield Services(postgres, object_store, mlflow, prefect)
    for server in (mlflow, prefect):
        server.close()
