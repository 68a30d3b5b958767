"""Prefect's API as anybody on the machine may call it: with the password of the server, or without."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import psutil

BUSY_TRIES = 60
DIRECT = build_opener(ProxyHandler({}))
STRANGERS: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Basic " + base64.b64encode(b"turnwise:guess").decode()},
)  # what they send


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_of(command: int) -> psutil.Process:
    """The server that `flows run` or `flows serve` started, by the number of that process."""
    return next(child for child in psutil.Process(command).children() if "uvicorn" in str(child.cmdline()))


class Answer(NamedTuple):
    status: int
    body: Any


class PrefectApi:
    """The API of a server of ours; `page` is its address without /api."""

    def __init__(self, page: str, password: str):
        self.page, self.url, self.password = page, f"{page}/api", password
        self.token = base64.b64encode(password.encode()).decode()
        self.secrets = (password, self.token)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """With all that the server asks of its clients; the answer must be a good one.

        Prefect's own clients too ask again where its database is locked for a moment, which is 503.
        """
        client = str(uuid.uuid4())
        own = {"Authorization": f"Basic {self.token}"}
        if method != "GET":
            token = self.send("GET", f"/csrf-token?client={client}", headers=own).body["token"]
            own |= {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": client}
        for _ in range(BUSY_TRIES):
            answer = self.send(method, path, body, {**own, **(headers or {})})
            if answer.status != 503:
                break
            time.sleep(1)
        assert answer.status < 300, answer
        return answer.body

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """As a stranger would, unless `headers` say otherwise."""
        data = None if body is None else json.dumps(body).encode()
        named = {"Content-Type": "application/json", **(headers or {})}
        try:
            with DIRECT.open(Request(f"{self.url}{path}", data, named, method=method), timeout=300) as answer:
                return Answer(answer.status, json.loads(answer.read() or b"null"))
        except HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode(errors="replace"))

    def routes(self) -> list[tuple[str, str]]:
        """(method, path) of all the server has, any name in a path made up."""
        with DIRECT.open(f"{self.page}/openapi.json", timeout=300) as answer:
            paths = json.loads(answer.read())["paths"]
        made_up = str(uuid.uuid4())
        return [
            (method.upper(), "/".join(made_up if part.startswith("{") else part for part in path.split("/")))
            for path, methods in paths.items()
            for method in methods
        ]

    def open_paths(self) -> set[str]:
        """Those that a stranger is not refused. 403 is the missing CSRF token, which nobody gets without the password
        either.
        """
        routes = self.routes()
        assert len(routes) > 150
        return {
            path
            for headers in STRANGERS
            for method, path in routes
            if self.send(method, path, None if method == "GET" else {}, headers).status not in (401, 403)
        }

    def leaks(self, folder: Path) -> list[Path]:
        """The files below `folder`, and the command lines on this machine, that have the password in them."""
        lines = [file for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != "password"]
        return [file for file in [*lines, *files] if any(secret.encode() in _bytes(file) for secret in self.secrets)]

    def start_run(self) -> str:
        """A run of the deployment, due now; its id."""
        deployment = self.call("GET", "/deployments/name/retrain/travel-desk-agent")
        return str(self.call("POST", f"/deployments/{deployment['id']}/create_flow_run", {})["id"])

    def state(self, run: str) -> str:
        return str(self.call("GET", f"/flow_runs/{run}")["state_type"])

    def log(self, run: str) -> list[str]:
        """What the run logged, the oldest line first."""
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return [f"{row['timestamp']} {row['message']}" for row in self.call("POST", "/logs/filter", wanted)]

    def num_runs(self) -> int:
        return int(self.call("POST", "/flow_runs/count", {}))


def api_of(server: psutil.Process) -> PrefectApi:
    """With the password that its environment has, which only its owner can read."""
    environment = server.environ()
    return PrefectApi(environment["PREFECT_UI_API_URL"].removesuffix("/api"), environment["PREFECT_API_AUTH_STRING"])


def _bytes(file: Path) -> bytes:
    """None of a process that has ended meanwhile."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
