"""What the user's code may say of an episode: an episode's own verdict, or a checker's answer as one."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from tasks.tools.base import EnvironmentFault, Episode, Verdict, await_in_steps


def judge_in_steps(episode: Episode, final_message: str | None) -> Generator[Future[Any], None, Verdict]:
    """The episode's verdict, by `yield from`. TypeError where its author returned something else."""
    try:
        verdict = yield from await_in_steps(episode.verdict(final_message))
    except SystemExit as end:
        raise RuntimeError(f"{_author(episode)}.verdict would end the program (SystemExit: {end})") from end
    if not isinstance(verdict, Verdict):
        raise TypeError(f"{_author(episode)}.verdict returned {type(verdict).__name__}, not a Verdict(success, checks)")
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


def _author(episode: Episode) -> str:
    """The class whose verdict it is, under what wraps it."""
    while (inner := getattr(episode, "inner", None)) is not None:
        episode = inner
    return type(episode).__name__
