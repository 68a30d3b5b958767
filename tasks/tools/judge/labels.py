"""The labelled set: episodes that people judged, one JSON object per line, with `label` true for a success. Either

    {"problem": {…}, "trajectory": {…}, "label": true}                      as turnwise stores the two
    {"requests": ["…"], "events": [], "final_message": "…", "label": true}  of any agent

An event is {"tool", "arguments", "reply"} or, where the user then said more, {"message", "user"}. A stored episode must
not have ended on a limit, where no judge is asked. The second form may have `reference` (for `show_reference`), `id`
and `group`; rows of one group depend on the same facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tasks.core.files import read_jsonl
from tasks.core.records import Problem, Record, Trajectory
from tasks.tools.judge.prompt import Judged

FEWEST = 2  # one episode of each label


class _Stored(Record):
    problem: Problem
    trajectory: dict[str, Any]
    label: bool


class _Told(Record):
    requests: list[str] = Field(min_length=1)
    events: list[dict[str, Any]]
    final_message: str
    label: bool
    reference: list[dict[str, Any]] | None = None
    id: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Labelled:
    """`name` is what a person finds the row by."""

    name: str
    group: str
    judged: Judged
    label: bool


def read_labels(file: Path, *, show_reference: bool) -> list[Labelled]:
    """ValueError names an invalid line; one for a set in which every label is the same, which shows no agreement."""
    if not file.is_file():
        raise ValueError(
            f"environment.judge.agreement.labels: {file} does not exist, so the judge cannot be compared with people. "
            f"Write episodes that you judged yourself; tasks/tools/README.md has the format."
        )
    found = [
        _read(row, f"{file}, line {number}", number, show_reference) for number, row in read_jsonl(file, by_hand=True)
    ]
    if len({item.label for item in found}) < FEWEST:
        raise ValueError(
            f"{file}: every label is the same, so a judge that always says so would agree with all of them. Add "
            f"episodes of the other kind."
        )
    return found


def _read(row: dict[str, Any], where: str, number: int, show_reference: bool) -> Labelled:
    try:
        return _stored(row, show_reference) if "trajectory" in row else _told(row, number, show_reference)
    except ValidationError as error:
        fault = error.errors()[0]
        why = f"{'.'.join(map(str, fault['loc'])) or 'the row'}: {fault['msg']}"
    except (TypeError, KeyError, ValueError) as error:
        why = str(error)
    raise ValueError(
        f"{where}: is no labelled episode ({why}), so agreement on it cannot be measured. Correct the line; "
        f"tasks/tools/README.md has the format."
    )


def _stored(row: dict[str, Any], show_reference: bool) -> Labelled:
    read = _Stored.model_validate(row)
    trajectory = Trajectory.from_row(read.trajectory)
    if trajectory.limit is not None:
        raise ValueError(f"it ended on the limit {trajectory.limit}, where no judge is asked")
    judged = Judged.of_stored(read.problem, trajectory, show_reference=show_reference)
    name = f"{read.problem.id}, draw {trajectory.draw}, sample {trajectory.sample_index}"
    return Labelled(name, read.problem.split_group, judged, read.label)


def _told(row: dict[str, Any], number: int, show_reference: bool) -> Labelled:
    read = _Told.model_validate(row)
    if show_reference and read.reference is None:
        raise ValueError("it has no reference, and show_reference is true")
    reference = read.reference if show_reference else None
    name = read.id or f"line {number}"
    return Labelled(
        name, read.group or name, Judged(read.requests, read.events, read.final_message, reference), read.label
    )
