"""A project for the doctor to look at, and what its checks find there.

It is real and small: problems curated by the real `curate`, the embedded tokenizer, one matrix of zeros
for weights (`conftest.py`). Worlds are `travel_desk` with one thing broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.doctor import CHECKS, Examined, examine
from tasks.core.settings import Paths, load
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tests import tiny
from tests.profiles import profile_params
from tests.worlds import add_environment


def params(**changed: Any) -> dict[str, Any]:
    """The test profile with the settings named like `train__group_size` changed, and few problems of all levels."""
    values = profile_params("test")
    roomy = {"sampling__max_turns": 10, "sampling__max_tokens_per_episode": 300}
    small = {"curate__num_generated": 66, "curate__max_level": 3, "curate__num_demonstrations": 20}
    small |= {"curate__num_test_sets": 1, "promote__min_unseen_problems": 5}
    for name, value in {**small, **roomy, "model__embedded__max_position_embeddings": 300, **changed}.items():
        *path, key = name.split("__")
        section = values
        for part in path:
            section = section[part]
        assert key in section, name
        section[key] = value
    return values


def look(check: str, artifacts: Path, **changed: Any) -> Examined:
    """What one check finds."""
    context = DoctorContext(load(DoctorSections, params(**changed)), Paths(artifacts))
    (examined,) = examine(context, {check: CHECKS[check]})
    return examined


def look_at(checks: list[str], artifacts: Path, **changed: Any) -> list[Examined]:
    """What some checks find of one context."""
    context = DoctorContext(load(DoctorSections, params(**changed)), Paths(artifacts))
    return examine(context, {name: CHECKS[name] for name in checks})


def found(examined: Examined, result: str, text: str, remedy: str) -> None:
    assert (examined.result, text in examined.finding, remedy in examined.remedy) == (result, True, True), examined


def in_world(patch: pytest.MonkeyPatch, episode: type[TravelDeskEpisode], **methods: Any) -> str:
    """The name of a new environment: travel_desk with another episode, and other methods of its own."""
    environment = type("Broken", (TravelDesk,), {"name": "broken", "episode_class": episode, **methods})
    add_environment(patch, "broken", environment)
    return "broken"


def edit(artifacts: Path, name: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the rows of a curated file, as a text editor would."""
    file = artifacts / "curate" / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def retokenize(artifacts: Path, change: Callable[[Any], None]) -> None:
    """Save the base model's tokenizer with something changed."""
    words = tiny.tokenizer()
    change(words)
    words.save_pretrained(artifacts / "assess" / "base_model")
