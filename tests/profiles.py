"""The profiles of infra/profiles, each merged over demo.yaml, as `python -m tasks profile NAME` writes them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from tasks.commands.profile import read_profiles
from tasks.core.settings import parse_params

FOLDER = Path(__file__).resolve().parent.parent / "infra" / "profiles"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def profile_text(*names: str) -> str:
    return read_profiles(names, FOLDER)


def profile_params(*names: str) -> dict[str, Any]:
    return copy.deepcopy(_parsed(*names))


@cache
def _parsed(*names: str) -> dict[str, Any]:
    """A profile takes 60 ms to parse, and hundreds of tests ask for one."""
    return parse_params(profile_text(*names), FOLDER / f"{names[-1]}.yaml")
