"""infra/compose.yaml as tests read it: variables filled in with their defaults, each service with what it inherits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.conftest import ROOT

COMPOSE = ROOT / "infra" / "compose.yaml"
VARIABLE = re.compile(r"\$\{([A-Z_0-9]+):-([^}]*)\}")
IMAGE_ROOT = "/opt/turnwise"


def compose_text() -> str:
    return COMPOSE.read_text(encoding="utf-8")


def parse(text: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """As `docker compose config` has it: every variable of compose.yaml has a default."""
    chosen = variables or {}
    filled = VARIABLE.sub(lambda match: chosen.get(match[1], match[2]), text)
    assert "${" not in filled, "a variable without a default"
    return yaml.safe_load(filled)


def words(service: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in service.get("command", [])]


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def texts(value: Any) -> Iterator[str]:
    """Every text in it, keys too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts(key), *texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    else:
        yield str(value)
