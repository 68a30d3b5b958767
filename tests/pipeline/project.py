"""A whole project in a folder of its own, for tests that run the real stages: made fresh, or copied once finished.

A project holds what git would see here (tracked files, and new ones that are not ignored), the test profile as its
params.yaml, and its own git history, DVC cache and artifacts. Its home folder is beside it, so that a test can look for
what was written outside. Left out: made-up stages that take a blink (`toy_project.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from flows.fork_server import ForkServer
from tasks.commands.profile import read_profiles
from tasks.core.child_processes import own_guardian
from tasks.core.files import read_json
from tasks.core.fork_request import differs
from tasks.models.folders import weights_hash
from tasks.pipeline.cli_errors import TELEMETRY_OFF

ROOT = Path(__file__).resolve().parents[2]
DROPPED = ("PREFECT_", "MLFLOW_", "_MLFLOW_", "DVC_", "TURNWISE_", "PYTEST_", "COV_")
# Most company networks set one for every program, and it does not know our loopback; this one does not even answer.
PROXY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
SERVERS: list[tuple[dict[str, str], ForkServer]] = []  # of forks, with the environment that each began with
FLOW_SECONDS = 840  # a flow on the test profile takes under 40 s, the demo 4 to 6 min; 11 on a busy machine


def kept_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}


def shared_forks() -> dict[str, str]:
    """The variable that names a fork server for the flows of all tests of this process, which loads each library once.
    Where a test has left another environment behind, flows need another server.
    """
    env = {**TELEMETRY_OFF, **kept_environment()}
    for begun, server in SERVERS:
        if not differs(begun, env):
            return server.variables
    SERVERS.append((env, ForkServer(own_guardian(), Path(tempfile.mkdtemp()) / "forks.log", env=env)))
    return SERVERS[-1][1].variables


class Project:
    """One project folder, and what tests do in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.home = folder.parent / f"{folder.name}-home"
        self.server: dict[str, str] = {}  # the variables that name a Prefect server, where the flow starts none
        self.has_own_forks = False  # a flow starts a fork server of its own

    def environment(self) -> dict[str, str]:
        """A person's environment with a home of its own, without what this test session or its caller set."""
        self.home.mkdir(exist_ok=True)
        kept = kept_environment()
        if self.has_own_forks:
            kept.pop("HF_HUB_OFFLINE", None)  # no person has it, and it is read where a fork's libraries are loaded
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        notes = str(self.folder / ".dvc" / "site-cache")  # else DVC's are in a folder of the machine
        forks = {} if self.has_own_forks else shared_forks()
        own = {"PATH": path, "HOME": str(self.home), "PWD": str(self.folder), "DVC_SITE_CACHE_DIR": notes}
        return {**kept, **own, "COLUMNS": "120", **self.server, **forks}

    def start(
        self, *arguments: str, variables: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """`python -m …` in the project, in the background, in a process group of its own, and behind a proxy. DVC is a
        fork, as in a flow, where there is a server of forks.
        """
        return subprocess.Popen(
            [sys.executable, "-m", *(["tasks.core.forked"] if arguments[0] == "dvc" else []), *arguments],
            cwd=self.folder,
            env={**PROXY, **self.environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *arguments: str, timeout: float = FLOW_SECONDS) -> subprocess.CompletedProcess[str]:
        """`python -m …` in the project to its end, whatever the end. What a timeout leaves running is ended."""
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def lay(self, databases: Path) -> Project:
        """Give a fresh project databases that need not be made any more."""
        shutil.copytree(databases, self.artifacts, dirs_exist_ok=True)
        return self

    def flow(self, *options: str) -> str:
        """The flow, which must succeed; gives what it wrote."""
        return self._succeed("flows", "run", *options)

    def follow(self, page: Path) -> None:
        """Run what the first commands of a page say, but for its clone and set-up: those this interpreter has."""
        (block, *_) = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        commands = [line for line in block.splitlines() if not line.startswith(("git ", "make ", "source "))]
        assert commands[-1] == "python -m flows run"
        for command in commands:
            subprocess.run(command, shell=True, cwd=self.folder, env=self.environment(), check=True)

    def repro(self, *arguments: str) -> str:
        """`dvc repro`, which must succeed; gives what it wrote."""
        return self._succeed("dvc", "repro", *arguments)

    def changed(self) -> dict[str, Any]:
        """What `dvc status` says has changed, by stage."""
        return dict(yaml.safe_load(self._succeed("dvc", "status", "--json").strip().splitlines()[-1]))

    def _succeed(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.returncode == 0, f"{result.args}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr

    def params(self) -> dict[str, Any]:
        return dict(yaml.safe_load((self.folder / "params.yaml").read_text(encoding="utf-8")))

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Give the settings named like `train.group_size` other values."""
        params = self.params()
        for name, value in values.items():
            *path, key = name.split(".")
            section = params
            for part in path:
                section = section[part]
            assert key in section, f"{name} is no setting"
            section[key] = value
        (self.folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")

    def evaluation(self) -> dict[str, Any]:
        return dict(read_json(self.artifacts / "evaluate" / "evaluation.json"))

    def decision(self) -> dict[str, Any]:
        return dict(read_json(self.artifacts / "promote" / "decision.json"))

    def snapshot_hashes(self) -> dict[str, str]:
        """The weights hash of every snapshot."""
        return {folder.name: weights_hash(folder) for folder in sorted((self.artifacts / "train/snapshots").iterdir())}

    def versions(self) -> list[int]:
        """The versions in the project's model registry."""
        return [int(version.version) for version in self.mlflow().search_model_versions()]

    def mlflow(self) -> Any:
        """MLflow's own client on the project's database."""
        from mlflow import MlflowClient

        uri = f"sqlite:///{self.artifacts / 'mlflow' / 'mlflow.db'}"
        return MlflowClient(tracking_uri=uri, registry_uri=uri)

    def leftovers(self) -> list[Path]:
        """Half-written outs: what no finished run leaves."""
        return [path for path in self.artifacts.rglob("*") if path.suffix in (".partial", ".replaced")]

    def processes(self) -> list[psutil.Process]:
        """Every process that works in the project's folder."""
        return [process for process in psutil.process_iter() if self._works_here(process)]

    def _works_here(self, process: psutil.Process) -> bool:
        try:
            return Path(process.cwd()) == self.folder and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


def make_project(folder: Path, profile: str | None = "test") -> Project:
    """A fresh project, committed, as after a clone. Without a profile, params.yaml stays the repository's."""
    folder = folder.resolve()
    listed = _git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a tracked file may be deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)  # with its time, which what was compiled of it names
    for compiled in (ROOT / "tasks").rglob("*.pyc"):
        if (folder / compiled.relative_to(ROOT)).parent.parent.is_dir():
            (folder / compiled.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(compiled, folder / compiled.relative_to(ROOT))
    if profile is not None:
        text = read_profiles([profile], folder / "infra" / "profiles")
        (folder / "params.yaml").write_text(text, encoding="utf-8")
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    _git(folder, "-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "--quiet", "-m", "project")
    return Project(folder)


def copy_project(project: Project, folder: Path) -> Project:
    """A finished project once more, with its results and DVC cache but no registry and no champion.

    MLflow's database names the folders of the project it was made in, so a copy starts one of its own.
    """
    folder = folder.resolve()
    shutil.copytree(project.folder, folder, symlinks=True)
    for name in ("mlflow", "promote", ".prefect"):
        shutil.rmtree(folder / "artifacts" / name, ignore_errors=True)
    return Project(folder)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
