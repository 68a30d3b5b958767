"""What is refused before any weights are read: the model folder here has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.environments.travel_desk import TravelDesk
from tasks.rollouts.load import load_checked_chat
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny.model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    return folder


def refused(folder: Path, **sampling: int) -> str:
    with pytest.raises(ValueError) as error:
        load_checked_chat(folder, TravelDesk(), tiny.problems(5), tiny.SAMPLING.model_copy(update=sampling))
    return str(error.value)


def rewrite_template(folder: Path, old: str, new: str) -> None:
    file = folder / "chat_template.jinja"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_folder_that_can_converse_passes(folder: Path) -> None:
    load_checked_chat(folder, TravelDesk(), tiny.problems(5), tiny.SAMPLING)


def test_a_prompt_that_leaves_no_room_names_the_problem_and_the_setting(folder: Path) -> None:
    message = refused(folder, max_tokens_per_episode=8)
    assert "problem 'td-3-000000': its prompt has" in message
    assert "sampling.max_tokens_per_episode is 8, so no turn fits. Raise the limit" in message


def test_a_budget_beyond_the_models_context_is_refused(folder: Path) -> None:
    assert "the model's context is 256 tokens" in refused(folder, max_tokens_per_episode=300)


def test_a_template_that_closes_a_message_with_ordinary_text_is_refused(folder: Path) -> None:
    rewrite_template(folder, "{{ message.content }}<|im_end|>", "{{ message.content }} done")
    message = refused(folder)
    assert "an ordinary token" in message
    assert "special end-of-turn token" in message


def test_a_template_that_never_closes_a_message_is_refused(folder: Path) -> None:
    rewrite_template(folder, "{{ message.content }}<|im_end|>", "{{ message.content }}")
    assert "a turn would never end" in refused(folder)


def test_a_template_whose_history_changes_is_refused(folder: Path) -> None:
    """Once a tool has replied, this template drops the first message."""
    template = (folder / "chat_template.jinja").read_text()
    start = "{% for message in messages %}"
    shorter = "{% for message in (messages[1:] if messages[-1].role == 'tool' else messages) %}"
    assert start in template
    (folder / "chat_template.jinja").write_text(template.replace(start, shorter))
    message = refused(folder)
    assert "changes earlier text when a tool reply follows" in message
    assert "history is a prefix of its continuation" in message


def test_the_context_is_found_in_a_nested_text_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    assert "the model's context is 256 tokens" in refused(folder, max_tokens_per_episode=300)
