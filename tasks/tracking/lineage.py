"""Where a model came from: data hashes, environment fingerprint, git commit, dvc.lock, params, seed, and its results.

Plain text pairs, because they become the tags of a registry version. The dirty flag ignores dvc.lock, which every run
rewrites, and stores its hash instead. Nothing here talks to MLflow. Left out: the command that reproduces a version.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.settings import PARAMS_FILE, read_params
from tasks.storage import content_hash, json_hash
from tasks.tracking.metrics import flatten

LOCK_FILE = Path("dvc.lock")
# Promotion is not a DVC stage, since it has a side effect; these are the sections it reads.
SECTIONS_OUTSIDE_DVC = {"promote": ("promote", "tracking", "seed")}


def lineage_tags(
    *, params: Mapping[str, Any], card: Mapping[str, Any], evaluation: Mapping[str, Any], weights: str
) -> dict[str, str]:
    """Every tag of a registry version. `card` is curate's card.json, `evaluation` evaluate's evaluation.json."""
    commit, is_dirty = git_state(Path.cwd())
    best = evaluation["test"]["best"]
    return {
        "weights_hash": weights,
        "snapshot": evaluation["best_snapshot"],
        "git_commit": commit,
        "git_dirty": is_dirty,
        "dvc_lock_hash": content_hash(LOCK_FILE) if LOCK_FILE.exists() else "none",
        "params_hash": json_hash(params),
        "seed": str(params["seed"]),
        "environment": str(card["environment"]),
        "environment_fingerprint": str(card["fingerprint"]),
        **{f"data_hash.{file}": digest for file, digest in sorted(card["hashes"].items())},
        **{f"test.{name}": str(best[name]) for name in ("success_rate", "ci_low", "ci_high", "num_problems")},
        "test.samples_per_problem": str(best["samples_per_problem"]),
        "select.success_rate": str(evaluation["select"][evaluation["best_snapshot"]]["success_rate"]),
    }


def git_state(root: Path) -> tuple[str, str]:
    """(commit, "true"/"false" whether anything but dvc.lock differs from it); ("none", "unknown") outside git."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude,top,glob)**/dvc.lock")
    if changes is None:
        return "none", "unknown"
    return (commit or "none"), str(bool(changes)).lower()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def stage_lock_hash(stage: str, lock_file: Path = LOCK_FILE) -> str:
    """Hash of the stage's entry in dvc.lock: the same command, params, inputs and outputs; "" where it has none."""
    entry = _lock_entry(stage, lock_file)
    return json_hash(entry) if entry else ""


def stage_params(stage: str, lock_file: Path = LOCK_FILE) -> dict[str, Any]:
    """The params a stage ran with, dotted names to values, as dvc.lock recorded them."""
    if stage in SECTIONS_OUTSIDE_DVC:
        params = read_params()
        return dict(flatten({name: params[name] for name in SECTIONS_OUTSIDE_DVC[stage] if name in params}))
    return dict(flatten(_lock_entry(stage, lock_file).get("params", {}).get(str(PARAMS_FILE), {})))


def _lock_entry(stage: str, lock_file: Path) -> dict[str, Any]:
    if not lock_file.exists():
        return {}
    lock = yaml.safe_load(lock_file.read_text(encoding="utf-8")) or {}
    return dict(lock.get("stages", {}).get(stage) or {})
