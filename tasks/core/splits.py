"""Reads curated problems, and says whether two have the same content, or ask the same in the same world."""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

from tasks.core.files import json_hash, read_records
from tasks.core.records import Problem
from tasks.core.settings import Paths


def read_split(paths: Paths, name: str) -> list[Problem]:
    path = paths.split(name)
    problems = list(read_records(path, Problem))
    if not problems:
        raise ValueError(
            f"{path}: contains no problem, so this stage has nothing to do. Run `python -m tasks curate` again."
        )
    return problems


def content_key(problem: Problem) -> str:
    """Equal for equal problems, whatever their ids."""
    return json_hash(problem.model_dump(include={"requests", "world", "reference"}))


def question_key(problem: Problem) -> str:
    """Equal for problems that ask the same in the same world, however spaced, in whichever form of Unicode and of whole
    numbers, and whatever their references answer.
    """
    return json_hash(_composed([[" ".join(request.split()) for request in problem.requests], problem.world]))


def _composed(value: Any) -> Any:
    """With each text in one form of Unicode, names too, before they are sorted, and 1.0 as 1."""
    if isinstance(value, dict):
        return {normalize("NFC", name): _composed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_composed(item) for item in value]
    if isinstance(value, float) and value.is_integer():  # 1.0, as pandas writes 1 in a column with a gap
        return int(value)
    return normalize("NFC", value) if isinstance(value, str) else value
