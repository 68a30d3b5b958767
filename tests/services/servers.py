"""Real servers on loopback ports, for tests: Postgres, SeaweedFS (S3), MLflow, Prefect, and a process worker.

Each is started once per session (`fixtures.py`), keeps its port and its data when it is killed and started again, and
ends with the tests, also after kill -9 (`tasks/core/child_processes.py`). Passwords and keys are drawn at each start.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from tasks.core.child_processes import GRACE_SECONDS, ChildProcess

START_SECONDS = 600  # of a busy machine; in quiet Postgres takes 0.1 s, S3 3 s, MLflow and Prefect 6 to 10 s
DIRECT = build_opener(ProxyHandler({}))
POSTGRES_PROGRAMS = "/usr/lib/postgresql/*/bin"  # Debian has them there alone
# Postgres refuses to run as root, and its user could not enter a folder of root's, as pytest's and make's are.
ENTERED_BY_ALL = Path("/tmp")
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # of evaluations by judges, which start processes of their own
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
}
OF_OTHERS = ("PREFECT_", "MLFLOW_", "_MLFLOW_", "AWS_", "PG", "TURNWISE_", "PYTEST_", "COV_")


def program(name: str) -> str | None:
    """Where a program is: beside this Python, on the PATH, or where Debian puts Postgres."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), *map(str, postgres_folders())]
    return shutil.which(name, path=os.pathsep.join(places))


def postgres_folders() -> list[Path]:
    """The newest version first."""
    return sorted(Path("/").glob(POSTGRES_PROGRAMS.lstrip("/")), reverse=True)


def reserved_port() -> socket.socket:
    """A port that a server may listen on and nobody else is given, though the server be down for a while."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it: then both may be bound to it
    place.bind(("127.0.0.1", 0))
    return place


def clean_environment(**own: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return {**kept, **QUIET, "PATH": path, "PYTHONUNBUFFERED": "1", **own}


def wait_until(is_there: Callable[[], Any], what: str, seconds: float = START_SECONDS, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(pause)


def answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Program:
    """What a test starts and ends."""

    log: Path
    child: ChildProcess | None = None
    grace_seconds = GRACE_SECONDS

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return clean_environment()

    def launch(self) -> None:
        """Start it without waiting, so that others can start meanwhile."""
        self.child = ChildProcess(
            self.command(), env=self.environment(), log=self.log, grace_seconds=self.grace_seconds
        )

    def wait(self) -> None:
        """Until it can be used."""

    def start(self) -> None:
        self.launch()
        self.wait()

    def stop(self) -> None:
        """As a person or a reboot ends it."""
        if self.child is not None:
            self.child.stop()

    def kill(self) -> None:
        """Without a warning, with all that it started."""
        assert self.child is not None
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.stop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started for as long as the block lasts."""
        self.start()
        try:
            yield
        finally:
            self.stop()


class Server(Program):
    """A program that listens on `port` and keeps its data in `folder`. `start` returns when it can be used."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.place = reserved_port()
        self.port = int(self.place.getsockname()[1])
        self.log = folder / "server.log"

    def is_up(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        wait_until(self._is_up_or_dead, f"{type(self).__name__} up: {self.log}")

    def _is_up_or_dead(self) -> bool:
        assert self.child is not None and self.child.is_alive(), self.log.read_text(encoding="utf-8")[-3000:]
        return self.is_up()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Killed for as long as the block lasts, however that ends: the next test has it again."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        if self.child is not None:
            self.kill()  # at once: nobody needs its data any more
        self.place.close()


def _folder_of(process: Path) -> Path | None:
    """In which it works; None for one that has ended or is another user's."""
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None


class Postgres(Server):
    """A database server with a password (scram-sha-256), on the loopback alone. It writes without fsync."""

    def __init__(self) -> None:
        self.is_root = os.geteuid() == 0
        home = Path(tempfile.mkdtemp(prefix="turnwise-postgres-", dir=ENTERED_BY_ALL if self.is_root else None))
        super().__init__(home)
        self.user, self.password = "turnwise", secrets.token_urlsafe(16)
        self._make_data()

    def _make_data(self) -> None:
        word = self.folder / "password"
        word.write_text(self.password, encoding="utf-8")
        if self.is_root:
            shutil.chown(self.folder, "postgres")
            shutil.chown(word, "postgres")
        options = ["--auth=scram-sha-256", f"--pwfile={word}", "--no-sync", "--encoding=UTF8", "--locale=C"]
        made = self._run("initdb", "--pgdata", str(self.folder / "data"), "--username", self.user, *options)
        assert made.returncode == 0, made.stderr
        word.unlink()

    def _program(self, name: str) -> list[str]:
        path = program(name)
        assert path is not None, f"{name} is missing; infra/locks/services.sh installs it"
        return [*(AS_POSTGRES if self.is_root else []), path]

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._program(name), *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False)

    def command(self) -> list[str]:
        # A killed one leaves nothing in the system's shared memory.
        settings = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}", "fsync=off",
                    "dynamic_shared_memory_type=mmap")  # fmt: skip
        given = [part for setting in settings for part in ("-c", setting)]
        return [*self._program("postgres"), "-D", str(self.folder / "data"), "-p", str(self.port), *given]

    def kill(self) -> None:
        """Each connection has a process that is in no group of the first one's and outlives it for a moment; until
        then the data cannot be opened again.
        """
        super().kill()
        wait_until(lambda: not self._is_used(), "the end of Postgres's processes", 30)

    def _is_used(self) -> bool:
        return any(_folder_of(process) == self.folder / "data" for process in Path("/proc").glob("[0-9]*"))

    def is_up(self) -> bool:
        return self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port)).returncode == 0

    def launch(self) -> None:
        super().launch()
        assert self.child is not None
        self.child.guardian.remove(self.folder)  # it is in no folder of pytest's

    def query(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """The rows of a statement, which commits by itself."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def make_database(self, name: str) -> None:
        self.query(f'CREATE DATABASE "{name}"')

    def url(self, database: str, driver: str = "") -> str:
        """`driver` as SQLAlchemy names it: psycopg or asyncpg."""
        scheme = f"postgresql+{driver}" if driver else "postgresql"
        return f"{scheme}://{self.user}:{self.password}@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ObjectStore(Server):
    """SeaweedFS behind S3's own protocol: it checks signatures, so a wrong key is refused as at any provider."""

    bucket = "turnwise"
    strangers_bucket = "not-ours"  # there, and closed to our key

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.key, self.secret = f"key{secrets.token_hex(6)}", secrets.token_hex(20)
        self.stranger = (f"key{secrets.token_hex(6)}", secrets.token_hex(20))
        self.others = {name: reserved_port() for name in ("master", "volume", "filer", "grpc")}
        self.hidden = [reserved_port() for _ in range(4)]
        (folder / "data").mkdir(exist_ok=True)
        self._write_identities()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _write_identities(self) -> None:
        def identity(name: str, key: tuple[str, str], bucket: str) -> dict[str, Any]:
            actions = [f"{action}:{bucket}" for action in ("Admin", "Read", "Write", "List", "Tagging")]
            return {
                "name": name,
                "credentials": [{"accessKey": key[0], "secretKey": key[1]}],
                "actions": actions,
            }

        ours = identity("turnwise", (self.key, self.secret), self.bucket)
        strangers = identity("stranger", self.stranger, self.strangers_bucket)
        text = json.dumps({"identities": [ours, strangers]})
        (self.folder / "identities.json").write_text(text, encoding="utf-8")

    def command(self) -> list[str]:
        weed = program("weed")
        assert weed is not None, "weed is missing: it comes with infra/locks/test.txt"
        ports = [f"-{name}.port={_port(self.others[name])}" for name in ("master", "volume", "filer")]
        grpc = zip(("master", "volume", "filer", "s3"), map(_port, self.hidden), strict=True)
        return [
            weed, "server", "-s3", f"-s3.port={self.port}", f"-s3.config={self.folder / 'identities.json'}",
            *ports, *(f"-{name}.port.grpc={port}" for name, port in grpc), "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64", "-volume.max=100", "-master.electionTimeout=1s",
            "-master.heartbeatInterval=200ms",
        ]  # fmt: skip

    def is_up(self) -> bool:
        """Both buckets are there and an object comes back: the volumes on disk are found again after a kill."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._make_bucket((self.key, self.secret), self.bucket)
            self._make_bucket(self.stranger, self.strangers_bucket)
            self._read_back()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _read_back(self) -> None:
        """Read the object that an earlier start wrote; the first one writes it."""
        client = self.client(self.stranger)
        try:
            client.get_object(Bucket=self.strangers_bucket, Key="up")["Body"].read()
        except client.exceptions.NoSuchKey:
            client.put_object(Bucket=self.strangers_bucket, Key="up", Body=b"up")
            client.get_object(Bucket=self.strangers_bucket, Key="up")["Body"].read()

    def _make_bucket(self, key: tuple[str, str], bucket: str) -> None:
        from botocore.exceptions import ClientError

        client = self.client(key)
        try:
            client.head_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            client.create_bucket(Bucket=bucket)

    def client(self, key: tuple[str, str] | None = None) -> Any:
        """boto3's own client, with our key unless another is given."""
        import boto3
        from botocore.config import Config

        name, secret = key or (self.key, self.secret)
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=30, proxies={})
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=name, aws_secret_access_key=secret,
            region_name="us-east-1", config=config,
        )  # fmt: skip

    def variables(self) -> dict[str, str]:
        """What a program needs to reach it where boto3 looks for it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint,
        }

    def close(self) -> None:
        super().close()
        for place in [*self.others.values(), *self.hidden]:
            place.close()


def _port(place: socket.socket) -> int:
    return int(place.getsockname()[1])


class MLflowServer(Server):
    """`mlflow server` on Postgres; it passes artifacts on to S3, so that only the server has the keys."""

    def __init__(self, folder: Path, postgres: Postgres, store: ObjectStore):
        super().__init__(folder)
        self.postgres, self.store = postgres, store
        postgres.make_database("mlflow")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        stores = ["--backend-store-uri", self.postgres.url("mlflow", "psycopg")]
        files = ["--artifacts-destination", f"s3://{self.store.bucket}/mlflow"]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        return [sys.executable, "-m", "mlflow", "server", *stores, *files, *place]

    def environment(self) -> dict[str, str]:
        return clean_environment(**self.store.variables(), MLFLOW_S3_ENDPOINT_URL=self.store.endpoint)

    def is_up(self) -> bool:
        return answers(f"{self.url}/health")

    def client(self) -> Any:
        """MLflow's own client."""
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.url, registry_uri=self.url)


class PrefectServer(Server):
    """`prefect server start` on Postgres, with a password and protection against forged requests."""

    def __init__(self, folder: Path, postgres: Postgres, password: str | None = None):
        """With a `password` it is one more on the database of another, which has it."""
        super().__init__(folder)
        self.postgres = postgres
        self.password = password or f"turnwise:{secrets.token_urlsafe(16)}"
        if password is None:
            postgres.make_database("prefect")

    def beside(self, folder: Path) -> PrefectServer:
        """A second server on the same database, with a scheduler of its own."""
        return PrefectServer(folder, self.postgres, self.password)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "-m", "prefect", "server", "start", "--no-ui", *place]

    def environment(self) -> dict[str, str]:
        return clean_environment(
            PREFECT_HOME=str(self.folder),
            PREFECT_API_DATABASE_CONNECTION_URL=self.postgres.url("prefect", "asyncpg"),
            PREFECT_SERVER_API_AUTH_STRING=self.password,
            PREFECT_SERVER_CSRF_PROTECTION_ENABLED="true",
            PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="2",
            PREFECT_SERVER_LOGGING_LEVEL="WARNING",
        )

    def is_up(self) -> bool:
        return answers(f"{self.url}/health")

    def variables(self) -> dict[str, str]:
        """What its clients need."""
        return {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": self.password}


class Worker(Program):
    """`prefect worker start` for a process work pool, in the folder of a project."""

    grace_seconds = 30.0

    def __init__(self, folder: Path, variables: Mapping[str, str], pool: str, log: Path):
        self.folder, self.variables, self.pool, self.log = folder, variables, pool, log

    def command(self) -> list[str]:
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", self.pool]
        return ["env", "-C", str(self.folder), *worker, "--limit", "1"]

    def environment(self) -> dict[str, str]:
        return {**self.variables, "PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_LOGGING_LEVEL": "INFO"}
