"""python prepare.py NAME…: makes what servers need before they start, and changes nothing that is there.

`prefect` and `mlflow` are databases in the Postgres of PGHOST, PGUSER and PGPASSWORD, each owned by a role of its own
name whose password is in NAME_DATABASE_PASSWORD; another one is set, so a changed secret needs no hand. `worker` is the
user that runs log in to MLflow as, with the password in MLFLOW_WORKER_PASSWORD: no administrator, it manages what it
made. `bucket` is S3_BUCKET in the store that boto3 finds. So one definition serves compose, Kubernetes and a managed
Postgres or S3.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg import Connection

DATABASES = ("prefect", "mlflow")
WORKER, BUCKET = "worker", "bucket"


def main(names: list[str]) -> None:
    if not names or not set(names) <= {*DATABASES, WORKER, BUCKET}:
        raise SystemExit(f"usage: prepare.py {' | '.join([*DATABASES, WORKER, BUCKET])} …")
    for name in names:
        if name == BUCKET:
            make_bucket(os.environ["S3_BUCKET"])
        elif name == WORKER:
            make_worker(os.environ["MLFLOW_DATABASE_PASSWORD"], os.environ["MLFLOW_WORKER_PASSWORD"])
        else:
            make_database(name, os.environ[f"{name.upper()}_DATABASE_PASSWORD"])


def make_database(name: str, password: str) -> None:
    """A database and its owner, who alone may connect; the superuser of PGUSER is only used here."""
    import psycopg
    from psycopg.sql import SQL, Identifier

    try:
        with psycopg.connect(dbname="postgres", autocommit=True) as connection:
            if not _is_there(connection, "SELECT 1 FROM pg_roles WHERE rolname = %s", name):
                connection.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(name)))
            _set_password(connection, name, password)
            if not _is_there(connection, "SELECT 1 FROM pg_database WHERE datname = %s", name):
                connection.execute(
                    SQL("GRANT {} TO CURRENT_USER").format(Identifier(name))
                )  # a managed one asks for it
                connection.execute(SQL("CREATE DATABASE {0} OWNER {0}").format(Identifier(name)))
            connection.execute(SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(Identifier(name)))
    except psycopg.Error as error:
        raise SystemExit(
            f"error: the database {name} could not be made in the Postgres at {os.environ.get('PGHOST', 'PGHOST')} "
            f"({type(error).__name__}: {' '.join(str(error).split())}), so its server cannot start. Correct PGHOST, "
            f"PGUSER or the password's file."
        ) from None


def _is_there(connection: Connection, query: str, name: str) -> bool:
    return connection.execute(query.encode(), [name]).fetchone() is not None


def _set_password(connection: Connection, role: str, password: str) -> None:
    """As a verifier made here: Postgres may log a statement, and never sees the password in one."""
    from psycopg.sql import SQL, Identifier, Literal

    verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    connection.execute(SQL("ALTER ROLE {} PASSWORD {}").format(Identifier(role), Literal(verifier)))


def make_worker(database_password: str, password: str) -> None:
    """In MLflow's own table of users, which its server finds when it starts; only hashes of passwords are in it."""
    from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import URL

    users, place = SqlAlchemyStore(), URL.create("postgresql+psycopg", "mlflow", database_password, database="mlflow")
    users.init_db(place.render_as_string(hide_password=False))
    if users.has_user(WORKER):
        users.update_user(WORKER, password, is_admin=False)
    else:
        users.create_user(WORKER, password)


def make_bucket(bucket: str) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.client("s3")
        if bucket not in {known["Name"] for known in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        raise SystemExit(
            f"error: the bucket {bucket} could not be made ({type(error).__name__}: {error}), so results and models "
            f"could not be kept. Correct S3_BUCKET, AWS_ENDPOINT_URL_S3 or the file of credentials."
        ) from None


if __name__ == "__main__":
    main(sys.argv[1:])
