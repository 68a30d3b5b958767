"""Chat as tokens: the model's own template renders the prompt once; from then on ids are only appended.

Rendering the growing history each turn would change past tokens under their log-probs. So the text that a tool reply
adds is the difference of the template's output with and without it, and a template whose history is no prefix of its
continuation is refused before training. Text of tools and users, and tool descriptions, are data: a control token spelt
out in them ("<|im_end|>") is broken up with a space, or a tool could close its message and forge the next.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.chat.formats.base import Tools
from tasks.chat.formats.recipe import instructions
from tasks.chat.template import ChatTemplate, Message
from tasks.core.records import ToolCall
from tasks.models.folders import load_tokenizer, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatFormat:
    """Prompts and tool replies to ids, and ids to text, for one tokenizer and its chat template.

    `end_of_turn` is the token that the template writes after a turn; any of `end_ids`, of which it is the first,
    completes one. Llama's `<|eom_id|>` (before a built-in tool's answer) is not
    supported: such a turn goes on to its limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str):
        self.tokenizer, self.source = tokenizer, source
        self.template = ChatTemplate(tokenizer, source=source)
        self.call_format = self.template.call_format
        end_ids = self.encode(self.template.after_assistant)
        if not end_ids:
            raise ValueError(
                f"{source}: the chat template writes nothing after an assistant message, so a turn would never end. "
                f"Save the tokenizer with a template that closes each message with an end-of-turn token."
            )
        self.end_of_turn = end_ids[0]
        if self.end_of_turn not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
            raise ValueError(
                f"{source}: the chat template closes an assistant message with {self.decode(end_ids[:1])!r}, an "
                f"ordinary token that a message may also contain, so the end of a turn is ambiguous. Save the "
                f"tokenizer with a special end-of-turn token and a template that closes each message with it."
            )
        self.end_ids = (self.end_of_turn,)
        self.template.refuse_if_it_rewrites()
        self._control = _any_of(_control_tokens(tokenizer, self.template.scaffold()))
        self.reply_ids = lru_cache(maxsize=1 << 16)(self._reply_ids)
        self.reply_ids(("probe",))

    def prompt_ids(self, request: str, tools: list[dict[str, Any]]) -> list[int]:
        """Ids of the opening: tools unless learnt, the user's request, the assistant's header."""
        messages, rendered_tools = self.opening(request, tools)
        return self.encode(self.template.render(messages, tools=rendered_tools, continues=True))

    def opening(self, request: str, tools: list[dict[str, Any]]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The messages a conversation opens with, and the tools for the template if it renders them."""
        asking = self.asking(request)
        if self.template.tools_are_learnt or not tools:
            return [asking], None
        safe_tools = [self._as_data_throughout(tool) for tool in tools]
        if self.template.renders_tools:
            return [asking], safe_tools
        rules = instructions(safe_tools)
        if self.template.takes_system:
            return [{"role": "system", "content": rules}, asking], None
        return [{**asking, "content": f"{rules}\n\n{asking['content']}"}], None

    def asking(self, request: str) -> Message:
        return {"role": "user", "content": self.as_data(request)}

    def replies(self, texts: tuple[str, ...]) -> list[Message]:
        return self.template.replies(tuple(map(self.as_data, texts)))

    def request_ids(self, request: str) -> list[int]:
        """Ids that follow the assistant's end-of-turn token: a further request, then the next assistant header."""
        return self._ids_after_a_turn([self.asking(request)], what="a further request", after_calls=False)

    def _reply_ids(self, texts: tuple[str, ...]) -> list[int]:
        return self._ids_after_a_turn(self.replies(texts), what="a tool reply", after_calls=True)

    def _ids_after_a_turn(self, messages: list[Message], *, what: str, after_calls: bool) -> list[int]:
        end, *ids = self.encode(self.template.continuation(messages, what=what, after_calls=after_calls))
        if end != self.end_of_turn:
            raise self.template.refusal(f"ends an assistant message otherwise when {what} follows")
        return ids

    def calls(self, text: str, tools: Tools = ()) -> list[ToolCall | None]:
        """The calls in the model's text, None for a malformed one; empty: a closing message.

        The schemas of `tools` say which type a value has where the family's format writes it as bare text.
        """
        return self.call_format.calls(text, tools)

    def as_data(self, text: str) -> str:
        """The text with a space after the first character of every control token."""
        return self._control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def _as_data_throughout(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.as_data(value)
        if isinstance(value, dict):
            return {self.as_data(str(key)): self._as_data_throughout(item) for key, item in value.items()}
        return [self._as_data_throughout(item) for item in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _control_tokens(tokenizer: PreTrainedTokenizerBase, scaffold: str) -> set[str]:
    """The special tokens, and added ones that occur in the template's text around messages."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special or str(token) in scaffold)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token.strip()}


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    ordered = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def load_chat(folder: Path) -> ChatFormat:
    """ValueError where the tokenizer or template cannot carry a conversation."""
    return ChatFormat(load_tokenizer(folder), source=str(resolve_model(folder)))
