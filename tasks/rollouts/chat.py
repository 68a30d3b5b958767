"""Chat as tokens: the prompt is rendered once by the model's own template, and from then on ids are only appended.

Rendering a growing history again each turn is the fault that bites every multi-turn trainer: past tokens change under
their log-probs. So the text a tool reply adds is found once, by comparing the template's output with and without it,
and a template whose history is not a prefix of its continuation is refused before anything is trained.

What a tool or a user wrote is data: a control token spelt out in it ("<|im_end|>") is broken up with a space, or a tool
could close its own message and forge the next one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_USER, PROBE_ASSISTANT = "Which city?", "Paris."


class ChatFormat:
    """Renders prompts and tool replies to ids and ids back to text, for one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str):
        if not tokenizer.chat_template:
            raise ValueError(
                f"{source}: the tokenizer has no chat template, so conversations cannot be rendered as the model "
                f"expects. Use an instruction-tuned model, or save the tokenizer with a `chat_template`."
            )
        self.tokenizer = tokenizer
        self.source = source
        self._control = _any_of(_control_tokens(tokenizer))
        history = [{"role": "user", "content": PROBE_USER}, {"role": "assistant", "content": PROBE_ASSISTANT}]
        self._history = history
        self._closed = self._render(history)
        self._after_assistant = self._closed.rpartition(PROBE_ASSISTANT)[2]
        end_ids = self.encode(self._after_assistant)
        if not end_ids:
            raise ValueError(
                f"{source}: the chat template writes nothing after an assistant message, so a turn would never end. "
                f"Save the tokenizer with a template that closes each message with an end-of-turn token."
            )
        self.end_of_turn = end_ids[0]
        if self.end_of_turn not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
            raise ValueError(
                f"{source}: the chat template closes an assistant message with {self.decode(end_ids[:1])!r}, an "
                f"ordinary token that a message may hold itself, so there is no telling where a turn ends. Save the "
                f"tokenizer with a special end-of-turn token and a template that closes each message with it."
            )
        self._end_text = self.decode([self.end_of_turn])
        self.reply_ids = lru_cache(maxsize=1 << 16)(self._reply_ids)
        self.reply_ids(("probe",))

    def prompt_ids(self, request: str, tools: list[dict[str, Any]]) -> list[int]:
        """Ids of the opening: tools, if the template renders them, the user's request, the assistant's header."""
        return self.encode(
            self._render([{"role": "user", "content": self.as_data(request)}], tools=tools, continues=True)
        )

    def request_ids(self, request: str) -> list[int]:
        """Ids that follow the assistant's end-of-turn token: a further request, then the next assistant header."""
        return self._appended([{"role": "user", "content": self.as_data(request)}], what="a further request")

    def _reply_ids(self, replies: tuple[str, ...]) -> list[int]:
        """Ids that follow the assistant's end-of-turn token: the tool replies, then the next assistant header."""
        messages = [{"role": "tool", "content": self.as_data(reply)} for reply in replies]
        return self._appended(messages, what="a tool reply")

    def _appended(self, messages: list[dict[str, Any]], *, what: str) -> list[int]:
        rendered = self._render([*self._history, *messages], continues=True)
        if not rendered.startswith(self._closed):
            raise ValueError(
                f"{self.source}: the chat template changes earlier text when {what} follows, so past tokens "
                f"would no longer match their log-probs. Use a template whose history is a prefix of its continuation."
            )
        return self.encode(self._after_assistant.removeprefix(self._end_text) + rendered[len(self._closed) :])

    def _render(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, continues: bool = False
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=continues
        )
        return str(text)

    def as_data(self, text: str) -> str:
        """The text with a space after the first character of every control token in it."""
        return self._control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Every token that structures a conversation and that no text may stand for."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token}


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing where there are none."""
    ordered = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def load_chat(folder: Path) -> ChatFormat:
    """The chat format of a model folder; ValueError where its tokenizer or template cannot carry a conversation."""
    return ChatFormat(load_tokenizer(folder), source=str(folder))
