"""Reads problems: from the environment's own generator, or from the user's file, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from tasks.core import json_text
from tasks.core.files import read_jsonl
from tasks.core.records import Problem
from tasks.core.splits import content_key
from tasks.core.text import counted, one_line
from tasks.core.tool_calls import parse_calls
from tasks.core.urls import local_path
from tasks.core.user_code import is_raised_by_us, users_line
from tasks.tools.base import Environment, Halves, SourceCount

if TYPE_CHECKING:
    from tasks.stages.curate.settings import CurateSections


class Found(NamedTuple):
    where: str
    problem: Problem


def is_generated(settings: CurateSections) -> bool:
    """Whether the environment generates the problems: `curate.source` then names its folder."""
    return Path(settings.curate.source) == Path(f"tasks/environments/{settings.environment.name}")


def read_problems(settings: CurateSections, environment: Environment) -> list[Found]:
    """Every row as later stages read it; ValueError names the lines that are no valid problem."""
    source, found = settings.curate.source, []
    if not is_generated(settings):
        refuse_other_environment(source, settings.environment.name)
        return read_file(local_path(source))
    for number, problem in enumerate(_generate(settings, environment), start=1):
        try:
            found.append(Found(f"row {number}", _problem(_as_stored(problem.model_dump()))))
        except ValueError as error:
            raise ValueError(
                f"{source}, row {number} ({one_line(problem.id)}): {error}. Correct generate() of the environment."
            ) from None
    return found


def _generate(settings: CurateSections, environment: Environment) -> Iterator[Problem]:
    """ValueError names the line at which the user's own code crashed, and after how many rows."""
    options, number = settings.curate, 0
    try:
        problems = environment.generate(
            seed=settings.seed, num_problems=options.num_generated, max_level=options.max_level
        )
        if problems is None:
            raise ValueError(
                f"curate.source = {options.source!r}, but the environment {environment.name!r} generates no problems. "
                f"Set curate.source to the path of a JSONL file of problems."
            )
        for problem in problems:
            yield problem
            number += 1
    except Exception as error:
        line = users_line(error)
        if not line or (isinstance(error, ValueError) and is_raised_by_us(error)):
            raise
        raise ValueError(
            f"{options.source}: generate() crashed at {line} after {counted(number, 'row')} ({type(error).__name__}: "
            f"{one_line(error)}), so no problem was curated. Correct it."
        ) from error


def _as_stored(value: Any, place: str = "") -> Any:
    """What a file gives back, if it equals the value. Else ValueError names the smallest part for which it does not."""
    how = "which no file can contain"
    with suppress(ValueError, TypeError, RecursionError):
        stored = json_text.parse(json_text.json_row(value), max_depth=json_text.MAX_ROW_DEPTH)
        if stored == value:
            return stored
        how = f"which a file gives back as {one_line(repr(stored))}"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if place.count(".") < json_text.MAX_ROW_DEPTH:  # a list may contain itself
        for name, part in parts:
            _as_stored(part, f"{place}.{name}" if place else str(name))
    raise ValueError(
        f"{one_line(place) or 'the row'} is {one_line(repr(value))}, {how}, so later stages would play another "
        f"problem. Use text as keys, a list for a tuple or set, text for a date or Enum, finite numbers, and at most "
        f"{json_text.MAX_ROW_DEPTH} levels of lists and dicts"
    )


def count_source(settings: CurateSections, environment: Environment) -> SourceCount | None:
    options = settings.curate
    if not is_generated(settings):
        return None
    return environment.count_source(seed=settings.seed, num_problems=options.num_generated, max_level=options.max_level)


def published_halves(settings: CurateSections, environment: Environment) -> Halves | None:
    """The ids of the published halves where `curate.split` asks for them; ValueError where there are none."""
    if settings.curate.split != "published":
        return None
    halves = environment.published_halves() if is_generated(settings) else None
    if halves is None:
        raise ValueError(
            f"curate.split is published, but the problems of {settings.curate.source} have no published halves. Set "
            f"curate.split to groups; bfcl's own problems have published halves."
        )
    return halves


def refuse_other_environment(source: str, environment: str) -> None:
    if Path(source).parent == Path("tasks/environments"):
        raise ValueError(
            f"curate.source = {source!r} is no file of problems, and environment.name is {environment}. Set "
            f"curate.source to tasks/environments/{environment} for its own problems, or to a JSONL file."
        )


def read_file(path: Path) -> list[Found]:
    if not path.is_file():
        raise ValueError(
            f"curate.source = {str(path)!r} is no file, so there are no problems to curate. "
            f"Give the path of a JSONL file, or tasks/environments/<name> for that environment's own problems."
        )
    _refuse_array(path)
    problems, faults = [], []
    for number, raw in read_jsonl(path, by_hand=True):
        try:
            problems.append(Found(f"line {number}", _stored_problem(raw)))
        except ValueError as error:
            faults.append((number, str(error)))
    if faults:
        number, fault = faults[0]
        others = f" (so are {len(faults) - 1} more, from line {faults[1][0]} on)" if faults[1:] else ""
        raise ValueError(
            f"{path}, line {number}: not a valid problem{others}: {fault}. Guessing its meaning could train "
            f"something unintended. Correct or remove it; tasks/environments/README.md shows a complete row."
        )
    if not problems:
        raise ValueError(f"{path}: contains no problem, so there is nothing to learn. Write one JSON object per line.")
    return problems


def _refuse_array(path: Path) -> None:
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        first = next((line.lstrip() for line in stream if line.strip()), "")
    if first.startswith("["):
        raise ValueError(
            f"{path}: a JSON array, of which no line is a problem. Write one object per line, not an array: "
            f"`jq -c '.[]'` makes lines of one."
        )


def _stored_problem(raw: dict[str, Any]) -> Problem:
    problem = _problem(raw)
    try:
        content_key(problem)
    except (ValueError, RecursionError):
        raise ValueError(
            "it contains NaN, Infinity, half a surrogate pair or endless nesting, which cannot be stored"
        ) from None
    return problem


def _problem(raw: dict[str, Any]) -> Problem:
    try:
        problem = Problem.model_validate(raw)
    except ValidationError as error:
        found = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ValueError(one_line("; ".join(found))) from None
    if fault := call_as_answer(problem):
        raise ValueError(fault)
    return problem


def call_as_answer(problem: Problem) -> str:
    """The fault of a reference that closes a turn with a call, which no replay plays: a warm start would teach it."""
    places = [f"reference.{number}.answer" for number, turn in enumerate(problem.reference) if parse_calls(turn.answer)]
    return (
        f"{places[0]} contains a tool call, which is not played and would be taught as an answer; put it into `calls`"
        if places
        else ""
    )
