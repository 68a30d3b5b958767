"""A model in this process that is asked: its answer ends where its family ends one, and nobody hears its thoughts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.models.embedded import build_model
from tasks.models.folders import save_snapshot
from tasks.tools import frozen
from tasks.tools.base import EnvironmentFault, block_until
from tasks.tools.frozen import FrozenModel
from tasks.tools.user.environment import UserEnvironment
from tests import tiny
from tests.chat import templates, thinking_templates
from tests.rollouts.test_requests import Notebook
from tests.tools.user.test_model import user
from tests.tools.user.test_script import WHOLE
from tests.worlds import QUICK

ASKED = [{"role": "system", "content": "You need a note."}, {"role": "user", "content": "Hello."}]
SETTING = "environment.user.model"


def model_with(template: str, folder: Path, *, positions: int = 4000, further: tuple[str, ...] = ()) -> Path:
    """Random weights below a family's chat template."""
    words = templates.tokenizer(template)
    words.add_special_tokens({"additional_special_tokens": list(further)})
    embedded = tiny.EMBEDDED.model_copy(update={"max_position_embeddings": positions})
    save_snapshot(folder, build_model(len(words), embedded, seed=0, end_of_turn=words.eos_token_id), words)
    return folder


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """The next answer of a model, token by token, whatever it has read."""

    def write_next(model: FrozenModel, text: str) -> None:
        left = iter(model.chat.encode(text))
        size = len(model.chat.tokenizer)
        monkeypatch.setattr(
            frozen.Draft, "_logits", lambda draft: torch.nn.functional.one_hot(torch.tensor(next(left)), size).float()
        )

    return write_next


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "goes_on"),
    [
        (templates.PHI, "<|end|>\n<|assistant|>\nI can help.<|end|></s>"),
        (templates.GEMMA, "<end_of_turn>\n<start_of_turn>model\nI can help.</s>"),
        (templates.QWEN, "<|im_end|>\n<|im_start|>assistant\nI can help.</s>"),
        (templates.QWEN, "<|im_start|>assistant\nI can help.</s>"),
    ],
)
def test_a_message_ends_where_the_family_ends_one_and_the_user_never_plays_the_agent(
    template: str, goes_on: str, tmp_path: Path, write: Callable[[Any, str], None]
) -> None:
    """The tokenizer's end of text is another token, which these models write later or never."""
    model = FrozenModel(model_with(template, tmp_path / "m"), temperature=0.0, setting=SETTING)
    draft = model.begin(ASKED, seed=1)
    write(model, f"A note, please.{goes_on}")
    draft.write(max_tokens=100)
    assert draft.text == "A note, please."


def test_rules_begin_the_users_message_where_the_template_knows_no_system_message(tmp_path: Path) -> None:
    model = FrozenModel(model_with(templates.GEMMA, tmp_path / "m"), temperature=0.0, setting=SETTING)
    answered = [*ASKED, {"role": "assistant", "content": "A note, please."}, {"role": "user", "content": "For whom?"}]
    assert model.chat.decode(model.prompt_ids(answered)) == (
        "<s><start_of_turn>user\nYou need a note.\n\nHello.<end_of_turn>\n"
        "<start_of_turn>model\nA note, please.<end_of_turn>\n"
        "<start_of_turn>user\nFor whom?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("template", "opened"), [(thinking_templates.QWEN3, "<think>\n"), (thinking_templates.QWEN3_5, "<think>\n")]
)
def test_a_model_that_thinks_is_asked_after_an_empty_thought(template: str, opened: str, tmp_path: Path) -> None:
    """Whether its template opens the thought or leaves that to the model."""
    model = FrozenModel(model_with(template, tmp_path / "m"), temperature=0.0, setting=SETTING)
    prompt = model.chat.decode(model.prompt_ids(ASKED))
    assert prompt.partition("<|im_start|>assistant\n")[2] == f"{opened}\n</think>\n\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "heard"),
    [
        ("<think>\nIt is for Ada.\n</think>\n\nA note, please.<|im_end|>", "A note, please."),
        ("It is for Ada.</think>A note, please.<|im_end|>", "A note, please."),
        ("A note, please. <think>It is for Ada.<|im_end|>", "A note, please."),
        ("A note. <think>It is for Ada.</think> Please.<|im_end|>", "Please."),
    ],
)
def test_the_agent_never_hears_what_a_user_in_process_thinks(
    written: str, heard: str, tmp_path: Path, write: Callable[[Any, str], None]
) -> None:
    folder = model_with(thinking_templates.QWEN3, tmp_path / "m")
    settings = user(None, model=str(folder), max_output_tokens=200)
    with closing(UserEnvironment(Notebook(QUICK), settings)) as world:
        speaker: Any = world.speaker
        write(speaker.model, written)
        assert block_until(world.start_user(WHOLE).open()) == heard


@pytest.mark.slow
@pytest.mark.parametrize("written", ["It is for Ada, so I first ask for", "A note, please. ###STOP"])
@pytest.mark.parametrize("is_room", [False, True])
def test_what_a_user_in_process_could_not_write_to_its_end_is_a_fault(
    written: str, is_room: bool, tmp_path: Path, write: Callable[[Any, str], None]
) -> None:
    """A thought may go on after the empty one, without a mark of its own, and half a farewell ends nothing."""
    folder = model_with(thinking_templates.QWEN3, tmp_path / "m")
    world = UserEnvironment(Notebook(QUICK), user(None, model=str(folder), max_output_tokens=9999 if is_room else 20))
    with closing(world):
        speaker: Any = world.speaker
        write(speaker.model, written * 999)
        with pytest.raises(EnvironmentFault, match=r"^user: .* its message was cut at \d+ tokens.*max_output_tokens"):
            block_until(world.start_user(WHOLE).open())


def test_a_model_that_answers_in_channels_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    """Of gpt-oss, whose answer is one of several messages in a turn."""
    folder = model_with(thinking_templates.HARMONY, tmp_path / "m", further=thinking_templates.SPECIAL)
    with pytest.raises(ValueError, match=r"environment\.user\.model: .* in channels.* set url"):
        FrozenModel(folder, temperature=0.0, setting=SETTING)


def test_a_model_whose_template_carries_no_conversation_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves out what an assistant message says"):
        FrozenModel(model_with("{{ messages[0].content }}", tmp_path / "m"), temperature=0.0, setting=SETTING)
