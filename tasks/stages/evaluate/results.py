"""Reads what `evaluate` left, and refuses files whose hashes differ from the recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.files import file_hash, read_json
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.rewards.stored import read_trajectories

AGAIN = "Run `dvc repro evaluate`, then promote again."


def read_evaluation(paths: Paths) -> dict[str, Any]:
    """evaluation.json. ValueError where it does not contain what it was measured under."""
    file = paths.stage("evaluate") / "evaluation.json"
    evaluation = dict(read_json(file))
    if not {"measurement", "folders", "contents"} <= evaluation.keys():
        raise ValueError(
            f"{file}: does not say what it was measured under, so nothing can be compared with it. {AGAIN}"
        )
    return evaluation


def refuse_other_files(folder: Path, evaluation: Mapping[str, Any], policy: str) -> None:
    """ValueError where a file of the model in `folder` is not the one `evaluate` measured as `policy`."""
    from tasks.models.folders import folder_hash, weights_hash

    for name, found, what in (
        ("weights", weights_hash(folder), "weights"),
        ("folders", folder_hash(folder), "files (configuration, chat template, tokenizer or another)"),
    ):
        measured = str(evaluation[name][policy])
        if found != measured:
            raise ValueError(
                f"{folder}: its {what} ({found[:12]}) are not the ones evaluate measured ({measured[:12]}), so the "
                f"success on record is not theirs. {AGAIN}"
            )


def evaluated_episodes(paths: Paths, evaluation: Mapping[str, Any], policy: str) -> list[Trajectory]:
    """The episodes of a policy on `test`. ValueError where the file changed since."""
    file = paths.test_episodes(policy)
    found, recorded = file_hash(file), evaluation["contents"].get(file.name)
    if found != recorded:
        raise ValueError(
            f"{file}: is not the file that evaluate left (its SHA-256 is {found[:12]}, evaluation.json has "
            f"{str(recorded)[:12]}), so what it says was not measured. {AGAIN}"
        )
    return read_episodes(file)


def read_episodes(file: Path) -> list[Trajectory]:
    return [trajectory for _, trajectory in read_trajectories(file)]
