"""What the user's code may say of an episode: its own verdict, or a checker's answer as one, and which of its errors
are faults.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tasks.core.passing_faults import may_pass, members
from tasks.core.text import one_line
from tasks.core.user_code import users_line
from tasks.tools.base import EnvironmentFault, Episode, Verdict, await_in_steps


@contextmanager
def without_exit(author: object, step: str) -> Iterator[None]:
    """RuntimeError where the user's code would end the program: a stage would seem done, or other episodes be lost."""
    try:
        yield
    except SystemExit as end:
        raise RuntimeError(f"{_class_name(author)}.{step} would end the program (SystemExit: {end})") from end


def judge_in_steps(episode: Episode, final_message: str | None) -> Generator[Future[Any], None, Verdict]:
    """The episode's verdict, by `yield from`. TypeError where its author returned something else."""
    with without_exit(episode, "verdict"):
        verdict = yield from await_in_steps(episode.verdict(final_message))
    if not isinstance(verdict, Verdict):
        name, found = _class_name(episode), type(verdict).__name__
        raise TypeError(f"{name}.verdict returned {found}, not a Verdict(success, checks)")
    return verdict


def read_verdict(said: Any) -> Verdict:
    """Of True, False, or named checks that must all be True; EnvironmentFault for anything else."""
    checks = {"success": said} if isinstance(said, bool) else said
    if not isinstance(checks, dict) or not checks or not all(isinstance(value, bool) for value in checks.values()):
        raise EnvironmentFault(
            f"it returned {said!r:.100}, and must return True, False, or a dict of at least one named check",
            tool="checker",
        )
    return Verdict(all(checks.values()), {str(name): value for name, value in checks.items()})


def fault_of(error: Exception) -> EnvironmentFault | None:
    """The fault that an error of an environment or a user is: they cannot reach what they need. None: it is a bug, or a
    file or a disk that will be no other when the episode starts again.
    """
    if isinstance(error, EnvironmentFault):
        return error
    if not any(map(may_pass, members(error))):
        return None
    line = users_line(error)
    fault = EnvironmentFault(f"it failed{f' at {line}' if line else ''} with {type(error).__name__}: {one_line(error)}")
    fault.__cause__ = error
    return fault


def close_episode(episode: Episode) -> None:
    """Where its connection is lost, nothing is left to release."""
    try:
        with without_exit(episode, "close"):
            episode.close()
    except Exception as error:
        if fault_of(error) is None:
            raise


def _class_name(author: object) -> str:
    """Under what wraps it."""
    while (inner := getattr(author, "inner", None)) is not None:
        author = inner
    return type(author).__name__
