"""The command `score`: plays recorded calls in an environment and judges them; no model is involved.

Input and output are JSON lines in the same order, in the form that tasks/environments/README.md describes. The
environment finds problems by id (`find_problem`) where it can; else they are looked up among those that `curate` would
read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any

from pydantic import Field, ValidationError

from tasks.core import json_text
from tasks.core.records import Problem, Record, ToolCall
from tasks.core.settings import load, read_params
from tasks.core.terminal import tell
from tasks.core.text import counted, first_few
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import check_environment_name
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.sources import read_problems
from tasks.storage.inputs import copy_argument
from tasks.tools.base import Environment, EnvironmentFault, Verdict
from tasks.tools.replay import Script, play

FORMAT = "tasks/environments/README.md, Recorded calls"
NO_ANSWER = "no answer was given, and the reference has one: add `answers`, a closing message per request"
Find = Callable[[str], Problem | None]


class Line(Record):
    problem_id: str
    turns: list[list[ToolCall]] = Field(min_length=1)
    answers: list[str] = Field(default_factory=list)


def score(environment_name: str, calls: str) -> bool:
    """Score a file, or standard input for `-`; False where a line could not be scored, ValueError where none of a file
    could.
    """
    settings = _for_environment(load(CurateSections, read_params()), environment_name)
    all_scored = True
    with _opened(calls) as lines, closing(load_bare_environment(settings.environment)) as environment:
        results = score_lines(environment, lines, _finder(environment, settings))
        for result in results if calls == "-" else refuse_unscored(results, calls):
            tell(json.dumps(result))  # whoever writes line by line reads each score before the next
            all_scored &= "error" not in result
    return all_scored


def score_lines(environment: Environment, lines: Iterable[bytes], find: Find) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(lines, start=1):
        if text.strip():
            try:
                line = _read(text)
                yield _play(environment, _problem(line, find), line)
            except (ValueError, EnvironmentFault) as error:
                yield {"error": f"line {number}: {error}"}


def refuse_unscored(results: Iterator[dict[str, Any]], calls: str) -> Iterator[dict[str, Any]]:
    """The results; ValueError where every line is an error, since the file is then another than was meant."""
    first: list[dict[str, Any]] = []
    for result in results:
        first.append(result)
        if "error" not in result:
            return chain(first, results)
    if first:
        told = first_few([result["error"] for result in first], by="; ")
        raise ValueError(f"--calls {calls}: no line can be scored ({told}). The format is in {FORMAT}.")
    return iter(())


def _play(environment: Environment, problem: Problem, line: Line) -> dict[str, Any]:
    messages = [*line.answers, *[None] * len(line.turns)]
    (played,) = play(environment, [Script(problem, list(zip(line.turns, messages, strict=False)))])
    if played.verdict is None:
        assert played.error is not None
        raise played.error
    replies = iter(played.replies)
    return {
        "problem_id": problem.id,
        "valid": played.verdict.success,
        "error_type": _error_type(played.verdict),
        "responses": [[reply.text for reply in islice(replies, len(turn))] for turn in line.turns],
        **({"note": NO_ANSWER} if not played.verdict.success and _lacks_answers(problem, line) else {}),
    }


def _lacks_answers(problem: Problem, line: Line) -> bool:
    is_answered = any(turn.answer for turn in problem.reference[: len(line.turns)])
    return is_answered and "answers" not in line.model_fields_set


def _error_type(verdict: Verdict) -> str | None:
    if verdict.success:
        return None
    failed = [name for name, passed in verdict.checks.items() if not passed]
    return verdict.details.get("error_type") or (failed[0] if failed else "failure")


def _read(text: bytes) -> Line:
    try:
        return Line.model_validate(json_text.parse(text, max_depth=json_text.MAX_ROW_DEPTH))
    except ValidationError as error:
        found = [f"{'.'.join(map(str, item['loc'])) or 'the line'}: {item['msg']}" for item in error.errors()]
        raise ValueError("; ".join(found[:3])) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except ValueError:
        raise ValueError("not JSON in UTF-8, or nested too deep, or a number that is too long") from None


def _problem(line: Line, find: Find) -> Problem:
    problem = find(line.problem_id)
    if problem is None:
        raise ValueError(f"there is no problem {line.problem_id!r}")
    if len(line.turns) > len(problem.requests):
        turns, requests = counted(len(line.turns), "turn"), counted(len(problem.requests), "request")
        raise ValueError(f"{turns} for a problem of {requests}")
    return problem


def _for_environment(settings: CurateSections, name: str) -> CurateSections:
    """The settings with another environment than params.yaml's, and with that environment's own problems."""
    if name == settings.environment.name:
        return settings
    check_environment_name(name)
    environment = settings.environment.model_copy(update={"name": name, "settings": None, "judge": None})
    curate = settings.curate.model_copy(update={"source": f"tasks/environments/{name}"})
    return settings.model_copy(update={"environment": environment, "curate": curate})


def _finder(environment: Environment, settings: CurateSections) -> Find:
    @cache
    def problems() -> dict[str, Problem]:
        return {problem.id: problem for _, problem in read_problems(settings, environment)}

    return lambda problem_id: environment.find_problem(problem_id) or problems().get(problem_id)


@contextmanager
def _opened(calls: str) -> Iterator[Iterable[bytes]]:
    if calls == "-":
        yield sys.stdin.buffer
        return
    file = copy_argument(calls)
    if not file.is_file():
        raise ValueError(
            f"--calls {calls}: is no file, so there is nothing to score. Give a JSONL file or -, standard input."
        )
    with file.open("rb") as lines:
        yield lines
