"""Challengers of a few bytes, promoted for real: `promote`, MLflow and every process are the true ones.

Drills run a promotion in a process of its own, which may be killed before any of its writes to the registry. Processes
are forked from one that has MLflow loaded already, since loading it takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import content_hash, write_json, write_jsonl
from tasks.core.settings import Paths, read_params
from tasks.drift.pin import PIN_FILE
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.files import files_hash
from tasks.stages.promote.challenger import Challenger
from tasks.stages.promote.origin import read_origin
from tasks.stages.promote.publish import publish
from tasks.tracking.aliases import current_champion, open_registry
from tasks.tracking.connection import absolute_location, absolute_uri
from tasks.tracking.registry import Registry
from tasks.tracking.runs import FlowRuns
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.versions import Version
from tests.conftest import ROOT
from tests.records_of_stages import write_records
from tests.tracking.project import SETTINGS

MODEL = "travel-desk-agent"
RESULT = {"success_rate": 0.95, "ci_low": 0.93, "ci_high": 0.97, "num_problems": 500, "samples_per_problem": 2}
CARD = {"environment": "travel_desk", "fingerprint": "f00d", "hashes": {"test.jsonl": "aa"}, "split": "groups"}
DECISION: dict[str, Any] = {
    "decision": "promote",
    "reasons": ["It is better."],
    "comparison": {"difference": 0.1},
}
TIMES = {"decided_at": "2026-01-01T00:00:00.000Z", "expires": "2999-01-01T00:00:00.000Z"}
WAITING = {**DECISION, **TIMES, "decision": "hold", "approval": "waiting"}
BUDGET = {"per_year": 0.5, "decisions_per_year": 20}  # 2.5% a decision
# Before which call of MLflow's client a promotion over a champion is killed: a method, and which of its calls.
WRITE = {
    "the upload": ("log_model_artifacts", 1),
    "the transition": ("set_registered_model_tag", 2),  # after the lock
    "the journal": ("log_text", 1),
    "the entry": ("set_tag", 1),
    "its copy": ("set_registered_model_tag", 3),
    "the note": ("set_model_version_tag", 1),
    "the alias previous": ("set_registered_model_alias", 1),
    "the alias champion": ("set_registered_model_alias", 2),
    "the end": ("delete_registered_model_tag", 1),
}


def write_project(tracking: TrackingSettings = SETTINGS) -> None:
    """params.yaml and what curate leaves, in the working directory."""
    shares = {"max_invalid_call_share": 0.1, "max_overlong_share": 0.1}
    categories = {"max_loss": 0.05, "false_alarm": 0.2, "never_fall": []}
    bounds = {"max_cost_increase": None, "categories": categories, "max_extra_lost_share": 0.01}
    asked: dict[str, Any] = {"minimum_success": 0.6, "confidence": 0.95, "or_cheaper": None, **bounds, **shares}
    policy: dict[str, Any] = {"model_name": MODEL, **asked, "approval": False, "approval_expires_days": 7, "power": 0.8}
    policy |= {
        "error_budget": BUDGET,
        "max_looks_per_problem": 10,
        "on_holdout_reuse": "warn",
        "min_unseen_problems": 1,
    }
    params = {"seed": 7, "curate": {"split_seed": 1}, "promote": policy, "tracking": tracking.model_dump()}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    curated = Paths("artifacts").stage("curate")
    write_json(curated / "card.json", CARD)
    write_json(curated / PIN_FILE, {"fingerprint": "f00d", "description": {}, "probes": []})


def candidate(name: str, folder: Path | None = None) -> Challenger:
    """A measured snapshot whose weights are its name; `folder` for one with true weights."""
    paths = Paths("artifacts")
    if folder is None:
        folder = paths.stage("train") / "snapshots" / f"iteration-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        (folder / "model.safetensors").write_bytes(name.encode())
    result = {"select": {f"iteration-{name}": RESULT}, "test": {"best": RESULT}, "environment": {"fingerprint": "beef"}}
    evaluation = {"best_snapshot": f"iteration-{name}", **result}
    write_json(paths.stage("evaluate") / "evaluation.json", evaluation)
    episodes = paths.test_episodes("best")
    write_jsonl(episodes, [{"played_by": name}])
    weights = content_hash(*sorted(folder.glob("*.safetensors")))
    return Challenger(f"iteration-{name}", folder, weights, files_hash(folder), evaluation, [], episodes, {}, [])


def promote(
    name: str,
    *,
    tracking: TrackingSettings = SETTINGS,
    decided: Callable[[], Any] = lambda: None,
    folder: Path | None = None,
    model: str = MODEL,
    reasons: Sequence[str] = DECISION["reasons"],
) -> Version:
    """Promote a candidate over whoever is champion now; `decided` is called between deciding and acting."""
    registry = open_registry(tracking, model)
    champion = current_champion(registry)
    challenger = candidate(name, folder)
    decided()
    paths = Paths("artifacts")
    write_records(paths, read_params())
    origin = read_origin(paths)
    decision = {**DECISION, "decided_at": datetime.now(UTC).isoformat(timespec="milliseconds"), "reasons": reasons}
    return publish(paths, challenger, registry, TravelDesk(), origin, decision=decision, instead_of=champion)


def wait(name: str, registry: Registry) -> Version:
    """Register a candidate that waits for approval."""
    paths, challenger = Paths("artifacts"), candidate(name)
    write_records(paths, read_params())
    origin, champion = read_origin(paths), registry.champion()
    decision = {**WAITING, "challenger": {"snapshot": challenger.snapshot}}
    return publish(paths, challenger, registry, TravelDesk(), origin, decision=decision, instead_of=champion)


def fork_server() -> ForkServerContext:
    """Where drills come from; started on first use, with what takes long to load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow", "psutil", "tests.tracking.candidates"])
    with pytest.MonkeyPatch.context() as patch:  # what it is started with is what every drill has
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        forkserver.ensure_running()
    return context


def drill(
    folder: str,
    name: str,
    tracking: TrackingSettings,
    kill_before: str | None,
    victim: int | None,
    meeting: Any,
    told: Any,
) -> None:
    """The body of a process: a promotion in `folder`, which tells what came of it.

    Before the write named by `kill_before`, the process group of `victim` is killed, None being this process alone.
    """
    os.chdir(folder)
    if kill_before:
        _kill_before(*WRITE[kill_before], victim)
    try:
        version = promote(name, tracking=tracking, decided=meeting.wait if meeting else lambda: None)
        told.put(("promoted", version.version))
    except ValueError as error:
        told.put(("refused", str(error)))


def work(folder: str, tracking: TrackingSettings, host: str | None, told: Any) -> None:
    """The body of a process: a flow in `folder` that tells its run's id and works on until it is killed."""
    os.chdir(folder)
    if host:
        socket.gethostname = lambda: host
    told.put(FlowRuns(tracking, {}, Paths("artifacts")).begin())
    signal.pause()


def _kill_before(method: str, count: int, victim: int | None) -> None:
    from mlflow import MlflowClient

    original, calls = getattr(MlflowClient, method), iter(range(1, 1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL) if victim is None else os.killpg(victim, signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(MlflowClient, method, call)


def two_at_once(tracking: TrackingSettings, folder: Path) -> list[tuple[str, Any]]:
    """Two projects on one MLflow, each with a challenger decided against the same champion."""
    context = fork_server()
    places = {"uri": absolute_uri(tracking), "artifact_location": absolute_location(tracking)}
    tracking = tracking.model_copy(update=places)
    meeting, told, processes = context.Barrier(2), context.SimpleQueue(), []
    for name in ("x", "y"):
        project = folder / f"project-{name}"
        project.mkdir()
        shutil.copy("params.yaml", project)
        shutil.copytree("artifacts/curate", project / "artifacts" / "curate")
        processes.append(context.Process(target=drill, args=(str(project), name, tracking, None, None, meeting, told)))
        processes[-1].start()
    results = [told.get() for _ in processes]
    for process in processes:
        process.join(600)
    return results


def state(registry: Registry) -> tuple[int | None, int | None]:
    """(champion, previous) as plain MLflow shows them, nothing repaired."""
    champion, previous = registry.at("champion"), registry.at("previous")
    return (champion.version if champion else None, previous.version if previous else None)
