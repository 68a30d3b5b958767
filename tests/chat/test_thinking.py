"""Models that think: what their templates write after a turn, and what of a turn is thought, message and call."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tasks.chat.format import ChatFormat, load_chat
from tasks.chat.thinking import HARMONY, MARKS, ThoughtMarks, after_thought
from tasks.models.settings import PLAIN_TEMPLATE, TemplateSettings
from tasks.models.template import state_template
from tests import tiny
from tests.chat import templates, thinking_templates
from tests.chat.thinking_templates import thinking_tokenizer

pytestmark = pytest.mark.slow
THINK = MARKS[1]
CHATML_REPLY = "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CHATML_ASKED = "\n<|im_start|>user\nAnd back?<|im_end|>\n<|im_start|>assistant\n"
OFF = "<think>\n\n</think>\n\n"
# Template, enable_thinking, what follows the end of a turn (a reply, a request), whether that opens a thought.
WRITTEN: dict[str, tuple[str, bool | None, str, str, bool]] = {
    "qwen3": ("QWEN3", None, CHATML_REPLY, CHATML_ASKED, False),
    "qwen3 off": ("QWEN3", False, CHATML_REPLY + OFF, CHATML_ASKED + OFF, False),
    "qwen3.5": ("QWEN3_5", None, CHATML_REPLY + "<think>\n", CHATML_ASKED + "<think>\n", True),
    "qwen3.5 off": ("QWEN3_5", False, CHATML_REPLY + OFF, CHATML_ASKED + OFF, False),
    "qwq": ("QWQ", None, CHATML_REPLY + "<think>\n", CHATML_ASKED + "<think>\n", True),
    "r1 distill": (
        "R1_DISTILL", None, "<|User|>Tool reply:\nsunny<|Assistant|><think>\n",
        "<|User|>And back?<|Assistant|><think>\n", True,
    ),
    "glm": (
        "GLM", None, "\n<tool_response>\nsunny\n</tool_response><|assistant|>", "\nAnd back?<|assistant|>", False,
    ),
    "glm off": (
        "GLM", False, "\n<tool_response>\nsunny\n</tool_response><|assistant|>\n<think></think>",
        "\nAnd back?/nothink<|assistant|>\n<think></think>", False,
    ),
    "harmony": (
        "HARMONY", None, "<|start|>user<|message|>Tool reply:\nsunny<|end|><|start|>assistant",
        "<|start|>user<|message|>And back?<|end|><|start|>assistant", False,
    ),
}  # fmt: skip
# Of the published templates: whether a prompt opens a thought, and the ends of an answer and of calls.
PUBLISHED = {
    "qwen3": (False, "<|im_end|>", "<|im_end|>"), "qwen3_5_think": (True, "<|im_end|>", "<|im_end|>"),
    "qwen3_5_nothink": (False, "<|im_end|>", "<|im_end|>"), "qwen3_6": (True, "<|im_end|>", "<|im_end|>"),
    "deepseek_r1_distill": (True, "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "glm4moe": (False, "<|user|>", "<|observation|>"), "gptoss": (False, "<|return|>", "<|call|>"),
    "nemotron_3_nano": (True, "<|im_end|>", "<|im_end|>"),
}  # fmt: skip


def chat_of(template: str, **settings: bool | None) -> ChatFormat:
    words, ends = thinking_tokenizer(template)
    state_template(words, PLAIN_TEMPLATE.model_copy(update=settings))
    return ChatFormat(words, source="test", further_end_ids=ends)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_appended_is_what_the_template_writes_after_a_turn(name: str) -> None:
    """Whatever the thought was, and whether the template keeps it or not."""
    template, enable, reply, asked, opens = WRITTEN[name]
    chat = chat_of(getattr(thinking_templates, template), enable_thinking=enable)
    assert chat.decode(chat.reply_ids(("sunny",))) == reply
    assert chat.decode(chat.request_ids("And back?")) == asked
    assert chat.opens_thought == opens
    assert chat.decode(chat.prompt_ids("To Rome.", [])).endswith("<think>\n") == opens


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_of_models_that_think_are_continued(name: str) -> None:
    chat = chat_of(templates.published(name))
    ends = chat.decode([chat.end_of_turn]), chat.decode([chat.end_of_calls])
    assert (chat.opens_thought, *ends) == PUBLISHED[name]
    assert "sunny" in chat.decode(chat.reply_ids(("sunny",)))
    assert chat.decode(chat.request_ids("And back?")).count("And back?") == 1


# Template; a turn's text; its thought, its message, and what the tokens of the thought say.
TURNS = {
    "written by the model": ("QWEN3", "<think>\nRome?\n</think>\n\nYes.", "Rome?", "Yes.", "<think>\nRome?\n</think>"),
    "opened by the prompt": ("QWQ", "Rome?\n</think>\n\nYes.", "Rome?", "Yes.", "Rome?\n</think>"),
    "not closed": ("QWEN3", "<think>\nRome", "Rome", "", "<think>\nRome"),
    "opened, not closed": ("QWQ", "Rome", "Rome", "", "Rome"),
    "none": ("QWEN3", "Yes.", None, "Yes.", ""),
    "closed twice": ("QWQ", "a</think>b</think>c", "a", "b</think>c", "a</think>"),
    "in Harmony": (
        "HARMONY",
        "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Rome?", "<|channel|>final<|message|>Yes.", "<|channel|>analysis<|message|>Rome?<|end|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_a_thought_and_a_message(name: str) -> None:
    template, text, thought, message, counted = TURNS[name]
    chat = chat_of(getattr(thinking_templates, template))
    found = chat.read_turn(chat.encode(text))
    assert found == (thought, message, len(chat.encode(counted)))


def test_a_call_within_a_thought_is_none() -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    chat = chat_of(thinking_templates.QWEN3)
    planned = chat.read_turn(chat.encode(f"<think>\nFirst {call}\n</think>\n\nDone."))
    made = chat.read_turn(chat.encode(f"<think>\nDone.\n</think>\n\n{call}"))
    assert (chat.calls(planned.message), len(chat.calls(made.message))) == ([], 1)
    assert chat.calls(chat.read_turn(chat.encode(f"<think>\n{call}")).message) == []


def test_several_thoughts_of_harmony_are_one() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>c"
    assert HARMONY.split(text, is_open=False) == (["a", "b"], "c")
    assert THINK.split("<think>a</think>\n\n<think>b</think>c", is_open=False) == (["a", "b"], "c")


def by_copies(marks: ThoughtMarks, text: str, *, is_open: bool) -> tuple[list[str], str]:
    """`split` as one would write it, with a copy of the rest for each thought."""
    thoughts, message = list[str](), text
    while is_open or message.lstrip().startswith(marks.opening) or _ends_the_first(marks, message, thoughts):
        thought, _, message = message.partition(marks.closing)
        thoughts.append(thought.strip().removeprefix(marks.opening).strip())
        message, is_open = message.removeprefix(marks.after).lstrip("\n"), False
    return thoughts, message


def _ends_the_first(marks: ThoughtMarks, message: str, thoughts: list[str]) -> bool:
    return not thoughts and marks.ends_thoughts_only and marks.closing in message


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.closing)
def test_thoughts_are_found_by_place_as_by_copies_and_in_time_that_grows_with_their_number(marks: ThoughtMarks) -> None:
    draw = random.Random(7)
    pieces = [marks.opening, marks.closing, marks.after, "\n", " ", "\x1c", "a", "<tool_call>"]
    for _ in range(5000):
        text = "".join(draw.choices(pieces, k=draw.randrange(9)))
        for is_open in (False, True):
            assert marks.split(text, is_open=is_open) == by_copies(marks, text, is_open=is_open), text
    begun = time.process_time()
    thoughts, _ = marks.split(f"{marks.opening}{marks.closing}{marks.after}" * 100_000, is_open=False)
    assert len(thoughts) == 100_000
    assert time.process_time() - begun < 5  # by copies: a minute


# What is given and what is the model's own of a demonstrated message "Hi." without a thought, and with "T".
DEMONSTRATED = {
    "QWEN3": (OFF, "Hi.", "<think>\nT\n</think>\n\nHi."), "QWQ": ("\n</think>\n\n", "Hi.", "T\n</think>\n\nHi."),
    "GLM": ("\n<think></think>\n", "Hi.", "\n<think>T</think>\nHi."),
}  # fmt: skip


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_a_demonstration_without_a_thought_teaches_nothing_about_thinking(name: str) -> None:
    chat = chat_of(getattr(thinking_templates, name))
    without, thinking = chat.written_ids("Hi."), chat.written_ids("Hi.", "T")
    assert (chat.decode(without[0]), chat.decode(without[1])) == DEMONSTRATED[name][:2]
    assert (thinking[0], chat.decode(thinking[1])) == ([], DEMONSTRATED[name][2])
    off = chat_of(thinking_templates.QWEN3, enable_thinking=False)
    assert off.written_ids("Hi.") == ([], off.encode("Hi."))


def test_a_template_that_forgets_thoughts_is_refused_where_they_must_be_kept() -> None:
    for name in ("QWEN3", "QWQ", "R1_DISTILL", "GLM", "HARMONY"):
        with pytest.raises(ValueError, match=r"keep_thinking is false.*enable_thinking") as error:
            chat_of(getattr(thinking_templates, name), keep_thinking=False).request_ids("And back?")
        assert "\n" not in str(error.value)
    assert chat_of(thinking_templates.QWEN3, keep_thinking=False).reply_ids(("sunny",))  # kept within a request
    assert chat_of(templates.QWEN, keep_thinking=False).request_ids("And back?")


def test_a_suffix_that_depends_on_the_thought_is_refused_at_the_place_where_it_differs() -> None:
    """It counts the thoughts before each reply."""
    counts = thinking_templates.QWEN3.replace(
        "<tool_response>\n{{", "<tool_response>\n{{ 'after a thought: ' if messages[1].reasoning_content }}{{"
    )
    with pytest.raises(ValueError, match="writes other text after a thought when a tool reply follows") as error:
        chat_of(counts)
    found = str(error.value)
    assert "'sunny there" in found and "'after a thought: sunny" in found and "\n" not in found


def test_a_prompt_must_open_thoughts_always_or_never() -> None:
    at_first = "{{ '<think>\\n' if messages | length == 1 }}{% endif %}"
    with pytest.raises(ValueError, match="opens a thought before one turn and not before another"):
        chat_of(thinking_templates.QWQ.replace("<think>\n{% endif %}", at_first))


def test_variables_of_the_template_reach_it() -> None:
    words, ends = thinking_tokenizer(thinking_templates.HARMONY)
    low = TemplateSettings(keep_thinking=True, enable_thinking=None, kwargs={"reasoning_effort": "low"})
    state_template(words, low)
    chat = ChatFormat(words, source="test", further_end_ids=ends)
    assert "Effort: low" in chat.decode(chat.prompt_ids("?", []))
    assert "Effort: medium" in chat.decode(chat_of(thinking_templates.HARMONY).prompt_ids("?", []))


def test_every_special_end_of_the_generation_config_ends_a_turn(tmp_path: Path) -> None:
    """The template's own comes first; an ordinary token that is named there ends nothing."""
    folder = tiny.model_folder(tmp_path / "model")
    own, other, word = (load_chat(folder).encode(text)[0] for text in ("<|im_end|>", "<|im_start|>tool\n", "the "))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, word, own]}))
    assert load_chat(folder).end_ids == (own, other)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    assert load_chat(folder).end_ids == (own,)
    (folder / "generation_config.json").unlink()
    assert load_chat(folder).end_ids == (own,)


def test_a_template_that_writes_no_end_needs_one_in_the_generation_config() -> None:
    words, _ = thinking_tokenizer(thinking_templates.GLM)
    with pytest.raises(ValueError, match=r"writes nothing after.*generation_config\.json.*eos_token_id"):
        ChatFormat(words, source="test")


def test_the_embedded_model_can_think() -> None:
    chat = ChatFormat(tiny.tokenizer(tiny.THINKING), source="test")
    assert chat.thoughts_are_learnt and chat.end_of_thought is not None and not chat.opens_thought
    assert len(chat.encode("<think></think>")) == 2
    plain = ChatFormat(tiny.tokenizer(), source="test")
    assert plain.thinking is None and not plain.thoughts_are_learnt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>\nWhich one?\n</think>\n\nB12.", "B12."),
        ("Which one?\n</think>\n\nB12.", "B12."),
        ("\n[THINK]Which one?[/THINK]B12.", "B12."),
        ("Which one?[/THINK]B12.", "B12."),
        ("<|channel|>analysis<|message|>Which one?<|end|><|start|>assistant<|channel|>final<|message|>B12.",
         "<|channel|>final<|message|>B12."),
        ("<think>Which", ""),
        ("B12.<|end|>", "B12.<|end|>"),
        ("B12.\n</think>\n", "B12.\n</think>\n"),
        ("B12. <think>Was that all?</think>", "B12. <think>Was that all?</think>"),
        ("It writes <think> and </think> itself.", "It writes <think> and </think> itself."),
        ("<tool_call>strip </think> first</tool_call>", "<tool_call>strip </think> first</tool_call>"),
    ],
)  # fmt: skip
def test_only_the_thought_that_a_text_begins_with_is_no_message(text: str, message: str) -> None:
    assert after_thought(text) == message
