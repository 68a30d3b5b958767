"""Where a model came from, as text pairs for the tags of a registry version. Nothing here uses MLflow.
`tasks/commands/lineage.py` shows a version's lineage and makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import json_hash, read_yaml
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import PARAMS_FILE, read_params
from tasks.tracking.metrics import flatten

if TYPE_CHECKING:
    from tasks.core.provenance import Origin

# Promotion has side effects, so it is no DVC stage; these are the sections it reads.
SECTIONS_OUTSIDE_DVC = {"promote": ("promote", "tracking", "seed")}
MAX_TAG_LENGTH = 4900  # of what may grow; MLflow and its databases take 5,000 characters


def lineage_tags(
    origin: Origin,
    *,
    card: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    weights: str,
    description: Mapping[str, Any],
    drift: Sequence[str],
    reason: str,
) -> dict[str, str]:
    """`origin` is what it was trained and measured with, `card` and `evaluation` the stages' JSON, `description` the
    environment's, `drift` its accepted changes since curation, `reason` why the run was needed.
    """
    trained, evaluated = origin.records["train"], origin.records["evaluate"]
    best = evaluation["test"]["best"]
    return {
        "reason": reason,
        **reward_tags(origin.params.get("reward") or {}),
        "weights_hash": weights,
        "snapshot": evaluation["best_snapshot"],
        "git_commit": trained["git_commit"],
        "git_dirty": trained["git_dirty"],
        "mlflow.source.git.commit": trained["git_commit"],
        "evaluation.git_commit": evaluated["git_commit"],
        "evaluation.git_dirty": evaluated["git_dirty"],
        "dvc_lock_hash": origin.lock_hash,
        "params_hash": json_hash(origin.params),
        "seed": str(origin.params["seed"]),
        **{name: str(trained[name]) for name in ("python", "platform", "cpu", "num_threads", "device")},
        "trainers": f"{trained.get('num_trainers', 1)}, {trained.get('launcher', 'local')}",
        "packages_hash": json_hash(trained["packages"]),
        "environment": str(card["environment"]),
        "environment_fingerprint": str(card["fingerprint"]),
        "environment_fingerprint_at_evaluation": str(evaluation["environment"]["fingerprint"]),
        "environment_fields": json.dumps(environment_fields(description)),
        "environment_drift": _cut("; ".join(drift)) or "none",
        "judge": json.dumps(judge_of(description)),
        **{f"data_hash.{file}": digest for file, digest in sorted(card["hashes"].items())},
        **{f"test.{name}": str(best[name]) for name in ("success_rate", "ci_low", "ci_high", "num_problems")},
        "test.samples_per_problem": str(best["samples_per_problem"]),
        "select.success_rate": str(evaluation["select"][evaluation["best_snapshot"]]["success_rate"]),
    }


def reward_tags(reward: Mapping[str, Any]) -> dict[str, str]:
    """The parts beside success, and whether somebody insisted on parts that may outweigh it; empty without parts."""
    parts = [f"{part['weight']:g} {part['name']}" for part in reward.get("parts") or []]
    if not parts:
        return {}
    insisted = "; allow_undominated: a failure could outscore a success" if reward.get("allow_undominated") else ""
    return {"reward": _cut(f"outcome + {' + '.join(parts)}{insisted}")}


def environment_fields(description: Mapping[str, Any]) -> dict[str, str]:
    """A short hash per field and tool, to compare versions; one for all tools where they are too many for a tag."""
    tools = description.get("tools", {})
    fields = {name: json_hash(value)[:8] for name, value in description.items() if name != "tools"}
    fields |= {f"tools.{name}": json_hash(tool)[:8] for name, tool in tools.items()}
    return fields if len(json.dumps(fields)) <= MAX_TAG_LENGTH else _with_tools_as_one(fields)


def judge_of(description: Mapping[str, Any]) -> dict[str, Any] | None:
    """The environment's judge (model, endpoint, hash of the rubric) and its agreement with people; None without one.
    The members of a mixture share one.
    """
    judge = next(
        (part["judge"] for part in [description, *description.get("members", {}).values()] if "judge" in part), None
    )
    if judge is None:
        return None
    measured = judge["agreement"]
    names = ("model", "url", "weights", "rubric", "decides", "num_votes", "temperature")
    numbers = ("agreement", "ci_low", "ci_high", "confidence", "kappa", "num_labels", "labels")
    return {
        **{name: judge[name] for name in names if name in judge},  # weights: of a model in process
        "agreement": measured if isinstance(measured, str) else {name: measured[name] for name in numbers},
    }


def differing_fields(tags: Mapping[str, str], description: Mapping[str, Any]) -> list[str]:
    """The fields in which a version's environment differs from `description`; none where its tags lack them."""
    if "environment_fields" not in tags:
        return []
    try:
        before, now = dict(json.loads(tags["environment_fields"])), environment_fields(description)
    except (TypeError, ValueError):  # edited by hand in MLflow
        return []
    if "tools" in before or "tools" in now:
        before, now = _with_tools_as_one(before), _with_tools_as_one(now)
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _with_tools_as_one(fields: Mapping[str, str]) -> dict[str, str]:
    each = {name: digest for name, digest in fields.items() if name.startswith("tools.")}
    others = {name: digest for name, digest in fields.items() if name not in each}
    return {**others, "tools": json_hash(each)[:8]} if each else others


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TAG_LENGTH else f"{text[:MAX_TAG_LENGTH]}…"


def stage_lock_hash(stage: str, lock_file: Path = LOCK_FILE) -> str:
    """Hash of the stage's entry in dvc.lock (command, params, inputs, outputs); "" where it has none."""
    entry = lock_entry(stage, lock_file)
    return json_hash(entry) if entry else ""


def stage_params(stage: str, lock_file: Path = LOCK_FILE) -> dict[str, Any]:
    """The params a stage ran with, dotted names to values, as dvc.lock recorded them."""
    if stage in SECTIONS_OUTSIDE_DVC:
        params = read_params()
        return dict(flatten({name: params[name] for name in SECTIONS_OUTSIDE_DVC[stage] if name in params}))
    return dict(flatten(lock_entry(stage, lock_file).get("params", {}).get(str(PARAMS_FILE), {})))


def lock_entry(stage: str, lock_file: Path = LOCK_FILE) -> dict[str, Any]:
    if not lock_file.exists():
        return {}
    return dict(read_yaml(lock_file).get("stages", {}).get(stage, {}))
