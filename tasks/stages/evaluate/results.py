"""What `evaluate` leaves, and how it is read: only where it still has the hashes that were recorded with it.

So no edit since passes for measured. `artifacts/evaluations.jsonl` notes which evaluation was made on which test
problems, for `promote` to count as looks. That file is no out of DVC, which would delete it before the next evaluation.
It contains no time, and the same evaluation is noted once, so that a repeat leaves it as it was. What is deleted before
a promotion copied it into the journal of the registered model is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.core.files import file_hash, read_json, read_records, write_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.rewards.stored import read_trajectories

AGAIN = "Run `dvc repro evaluate`, then promote again."
NOTED_FILE = "evaluations.jsonl"  # in artifacts


def read_evaluation(paths: Paths) -> dict[str, Any]:
    """evaluation.json. ValueError where it does not say what it was measured under."""
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
    """The episodes of a policy on `test`. ValueError where a byte of the file is another since."""
    file = episodes_file(paths, policy)
    found, recorded = file_hash(file), evaluation["contents"].get(file.name)
    if found != recorded:
        raise ValueError(
            f"{file}: is not the file that evaluate left (its SHA-256 is {found[:12]}, evaluation.json has "
            f"{str(recorded)[:12]}), so what it says was not measured. {AGAIN}"
        )
    return read_episodes(file)


def episodes_file(paths: Paths, policy: str) -> Path:
    """The file of a policy's episodes on `test`."""
    return paths.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"


def read_episodes(file: Path) -> list[Trajectory]:
    return [trajectory for _, trajectory in read_trajectories(file)]


def hash_episodes(trajectories: Path) -> dict[str, str]:
    """SHA-256 of each file of episodes in a folder, by name."""
    return {file.name: file_hash(file) for file in sorted(trajectories.glob("*.jsonl"))}


class NotedEvaluation(BaseModel):
    """The hash of a test set, its problems, and the SHA-256 of the episodes that the chosen snapshot played on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    test: str
    episodes: str
    problem_ids: list[str]


def note_evaluation(paths: Paths, *, test: str, episodes: str, problem_ids: Sequence[str]) -> None:
    """Add an evaluation to the noted ones, all or nothing."""
    noted, new = (
        list(read_evaluations(paths)),
        NotedEvaluation(test=test, episodes=episodes, problem_ids=[*problem_ids]),
    )
    if new not in noted:
        write_jsonl(paths.artifacts / NOTED_FILE, (evaluation.model_dump() for evaluation in (*noted, new)))


def read_evaluations(paths: Paths) -> Iterator[NotedEvaluation]:
    """The noted evaluations, the oldest first."""
    file = paths.artifacts / NOTED_FILE
    return read_records(file, NotedEvaluation) if file.exists() else iter(())
