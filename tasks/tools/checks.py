"""What a checker of the user's may say, as a verdict."""

from __future__ import annotations

from typing import Any

from tasks.tools.base import EnvironmentFault, Verdict


def read_verdict(said: Any) -> Verdict:
    """Of True, False, or named checks that must all be True; EnvironmentFault for anything else."""
    checks = {"success": said} if isinstance(said, bool) else said
    if not isinstance(checks, dict) or not checks or not all(isinstance(value, bool) for value in checks.values()):
        raise EnvironmentFault(
            f"it returned {said!r:.100}, and must return True, False, or a dict of at least one named check",
            tool="checker",
        )
    return Verdict(all(checks.values()), {str(name): value for name, value in checks.items()})
