"""Which evaluations were made on which test problems; `promote` counts them as looks.

artifacts/evaluations.jsonl is no DVC out, since DVC would delete it before the next evaluation. An evaluation is noted
once and without a time, so a repeat changes nothing. `promote` copies it into the model's journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from tasks.core.files import read_records, write_jsonl
from tasks.core.settings import Paths

FILE = "evaluations.jsonl"  # in artifacts


class NotedEvaluation(BaseModel):
    """The hash of a test set, its problems, and the SHA-256 of the chosen snapshot's episodes on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    test: str
    episodes: str
    problem_ids: list[str]


def note_evaluation(paths: Paths, *, test: str, episodes: str, problem_ids: Sequence[str]) -> None:
    noted, new = (
        list(read_evaluations(paths)),
        NotedEvaluation(test=test, episodes=episodes, problem_ids=[*problem_ids]),
    )
    if new not in noted:
        write_jsonl(paths.artifacts / FILE, (evaluation.model_dump() for evaluation in (*noted, new)))


def read_evaluations(paths: Paths) -> Iterator[NotedEvaluation]:
    file = paths.artifacts / FILE
    return read_records(file, NotedEvaluation) if file.exists() else iter(())
