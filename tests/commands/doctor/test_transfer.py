"""Environments of `evaluate.also` that could not be played are found before training, not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands.doctor.project import found, look
from tests.contracts.test_environments import load_page_module
from tests.readme import page_block
from tests.stages.evaluate.test_transfer import also
from tests.worlds import NO_BUDGETS

CHECK = "other environments"


@pytest.fixture(autouse=True)
def shop() -> Any:
    return load_page_module("tasks.custom.page_shop", page_block("tasks/custom/README.md", "python", "class Shop"))


def test_what_is_played_after_training_is_looked_at_before_it(artifacts: Path) -> None:
    found(look(CHECK, artifacts), "pass", "names none", "")
    found(look(CHECK, artifacts, evaluate__also=[also()]), "pass", "custom-Shop: 6 problems", "")


def test_missing_data_a_context_too_small_and_bad_settings_fail(artifacts: Path) -> None:
    missing = look(CHECK, artifacts, evaluate__also=[also(source="tasks/custom/none.jsonl")])
    found(missing, "fail", "evaluate.also, custom-Shop: tasks/custom/none.jsonl", "")
    small = look(CHECK, artifacts, evaluate__also=[also(budgets={**NO_BUDGETS, "max_tokens_per_episode": 5000})])
    found(small, "fail", "budgets.max_tokens_per_episode is 5000 and the model's context is 300", "at most 300")
    strict = {"mode": "strict", "folder": str(artifacts / "none"), "frozen": None}
    off = look(CHECK, artifacts, evaluate__also=[also()], environment__cache=strict)
    found(off, "fail", "evaluate.also plays", "environment.cache.mode to replay")


def test_notes_of_reflexion_without_room_in_the_context_fail(artifacts: Path) -> None:
    """The context is 300 tokens, all of them the budget of an episode."""
    again = {"policy": "base", "max_attempts": None, "question": "Why?", "max_note_tokens": 9, "max_memory_tokens": 9}
    found(look("notes", artifacts), "pass", "reflexion is null", "")
    short = look("notes", artifacts, evaluate__reflexion=again)
    found(short, "fail", "the model's context is 300", "Lower evaluate.reflexion.max_memory_tokens")
    fits = look("notes", artifacts, evaluate__reflexion=again, sampling__max_tokens_per_episode=200)
    found(fits, "pass", "an attempt with notes takes up to", "")


def test_problems_that_no_reference_solves_are_counted(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, shop: Any
) -> None:
    generate = shop.Shop.generate

    def with_a_wrong_one(self: Any, **given: Any) -> Any:
        first, *rest = generate(self, **given)
        wrong = first.reference[0].model_copy(update={"calls": []})
        return [first.model_copy(update={"reference": [wrong]}), *rest]

    monkeypatch.setattr(shop.Shop, "generate", with_a_wrong_one)
    examined = look(CHECK, artifacts, evaluate__also=[also()])
    found(examined, "warn", "custom-Shop: 5 problems; 1 more are left out", "Correct them")
