"""The servers the other tests of this folder stand on: real ones, with passwords that count, that outlive a kill."""

from __future__ import annotations

import gzip
from pathlib import Path

import psycopg
import pytest
from botocore.exceptions import ClientError

from tasks.tracking.versions import TRAJECTORIES_FILE
from tests.services.fixtures import Services
from tests.services.servers import ObjectStore, Postgres

pytestmark = [pytest.mark.flow, pytest.mark.services]


def test_postgres_takes_its_password_alone_and_keeps_what_was_committed_through_a_kill(postgres: Postgres) -> None:
    postgres.make_database("kept")
    postgres.query("CREATE TABLE numbers (number int)", "kept")
    postgres.query("INSERT INTO numbers VALUES (1), (2)", "kept")
    postgres.kill()
    shared = sorted(Path("/dev/shm").glob("PostgreSQL.*"))
    postgres.start()
    assert sorted(Path("/dev/shm").glob("PostgreSQL.*")) == shared
    assert postgres.query("SELECT sum(number) FROM numbers", "kept") == [(3,)]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(postgres.url("kept").replace(postgres.password, "guess"))


def test_the_object_store_checks_signatures_and_whose_a_bucket_is(object_store: ObjectStore) -> None:
    client = object_store.client()
    client.put_object(Bucket=object_store.bucket, Key="kept", Body=b"three")
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        object_store.client((object_store.key, "guess")).list_objects_v2(Bucket=object_store.bucket)
    with pytest.raises(ClientError, match="AccessDenied"):
        client.list_objects_v2(Bucket=object_store.strangers_bucket)
    object_store.kill()
    object_store.start()
    assert client.get_object(Bucket=object_store.bucket, Key="kept")["Body"].read() == b"three"


def test_what_promotion_packs_comes_back_from_mlflow_on_s3_byte_for_byte(services: Services, tmp_path: Path) -> None:
    client, packed = services.mlflow.client(), gzip.compress(b"an episode\n" * 100)
    (tmp_path / TRAJECTORIES_FILE).write_bytes(packed)
    experiment = client.create_experiment("packed", artifact_location="mlflow-artifacts:/packed")
    run = client.create_run(experiment).info.run_id
    client.log_artifact(run, str(tmp_path / TRAJECTORIES_FILE))
    (tmp_path / "back").mkdir()
    fetched = client.download_artifacts(run, TRAJECTORIES_FILE, str(tmp_path / "back"))
    assert Path(fetched).read_bytes() == packed
