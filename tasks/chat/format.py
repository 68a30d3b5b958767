"""Chat as tokens: the model's own template renders the prompt once; from then on ids are only appended.

Rendering the growing history each turn would change past tokens under their log-probs, and drop a model's earlier
thoughts. So the text that a tool reply adds is what the template writes after the end of an assistant message, and a
template in which that depends on more than the reply is refused before training. Text of tools and users, and tool
descriptions, are data: a control token spelt out in them ("<|im_end|>") is broken up with a space, or a tool could
close its message and forge the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.chat.formats.base import Tools
from tasks.chat.formats.recipe import instructions
from tasks.chat.template import PROBE_REPLY, USER, ChatTemplate, Message
from tasks.chat.thinking import CALL, HARMONY
from tasks.chat.tokens import any_of, control_tokens, find_special_ids, plain_decoder
from tasks.core.records import ToolCall
from tasks.models.folders import THOUGHTS_ARE_LEARNT, generation_end_ids, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHORT_REPLY = 512  # characters
MAX_SHORT_REPLIES, MAX_LONG_REPLIES = 1 << 14, 1 << 8  # whose ids are kept


class Written(NamedTuple):
    """A turn's thought (None: it has none) and message, and the tokens of the thought, its end included."""

    thought: str | None
    message: str
    num_thought_tokens: int


class ChatFormat:
    """Prompts and tool replies to ids, and ids to text, for one tokenizer and its chat template.

    `end_of_turn` is the token that the template writes after a turn, `end_of_calls` the one after a turn with calls,
    mostly the same; any of `end_ids`, of which they come first, completes one; `special_ids` are all special tokens. A
    template that writes nothing there (GLM's) ends a turn with the token that begins the next message, if
    generation_config.json says so. Llama's `<|eom_id|>` (before a built-in tool's answer) completes a turn where
    generation_config.json names it.

    `thinking` has the marks of a thought, None for a model that writes none; `end_of_thought` is the id of the closing
    one, None where that is several tokens; `opens_thought`: every prompt ends within a thought. `thoughts_are_learnt`:
    from demonstrations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str, further_end_ids: Sequence[int] = ()):
        self.tokenizer, self.source = tokenizer, source
        self.template = ChatTemplate(tokenizer, source=source)
        self.special_ids = find_special_ids(tokenizer)
        self._decode_plainly = plain_decoder(tokenizer)
        self.call_format, self.thinking = self.template.call_format, self.template.thinking
        self.template.refuse_if_it_rewrites()
        self._further = [token for token in further_end_ids if token in self.special_ids]
        self.end_of_turn = self._find_end(self.template.after_assistant or self._after_answer([USER]))
        self.end_of_calls = self._find_end(CALL if self.thinking == HARMONY else self._after_calls())
        prompts = [self.template.render([USER], continues=True), self._after_calls()]
        self.opens_thought, self._closes_thought = self._find_start(prompts)
        self.thoughts_are_learnt = bool(tokenizer.init_kwargs.get(THOUGHTS_ARE_LEARNT))
        self.thought_closing_ids = self.encode(self.thinking.closed) if self.thinking else []
        self.end_of_thought = self._find_end_of_thought()
        self.end_ids = tuple(dict.fromkeys((self.end_of_turn, self.end_of_calls, *self._further)))
        self._control = any_of(control_tokens(tokenizer, self.template.scaffold()) | self._thought_tokens())
        self._short_replies = lru_cache(maxsize=MAX_SHORT_REPLIES)(self._write_replies)
        self._long_replies = lru_cache(maxsize=MAX_LONG_REPLIES)(self._write_replies)

    def _after_answer(self, messages: list[Message]) -> str:
        return self.template.continuation(messages, what="a further request", after_calls=False)

    def _after_calls(self) -> str:
        replies = self.template.replies((PROBE_REPLY,))
        return self.template.continuation(replies, what="a tool reply", after_calls=True)

    def _find_end(self, text: str) -> int:
        """The first token of what follows an assistant message; ValueError unless that is a special one."""
        ids = self.encode(text)
        if not ids or (not self.template.after_assistant and ids[0] not in self._further):
            raise ValueError(
                f"{self.source}: the chat template writes nothing after an assistant message, so a turn would never "
                f"end. Save the tokenizer with a template that closes each message with an end-of-turn token. If the "
                f"model ends a turn with the token that begins the next message, its generation_config.json must say "
                f"so under eos_token_id."
            )
        if ids[0] not in {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}:
            raise ValueError(
                f"{self.source}: the chat template closes an assistant message with {self.decode(ids[:1])!r}, an "
                f"ordinary token that a message may also contain, so the end of a turn is ambiguous. Save the "
                f"tokenizer with a special end-of-turn token and a template that closes each message with it."
            )
        return ids[0]

    def _find_start(self, prompts: list[str]) -> tuple[bool, bool]:
        """Whether the prompts of all turns end within a thought, and whether they end with a closed one."""
        if self.thinking is None:
            return False, False
        found = {(self.thinking.is_open(text), text.rstrip().endswith(self.thinking.closing)) for text in prompts}
        if len(found) > 1:
            raise self.template.refusal("opens a thought before one turn and not before another", *prompts)
        return found.pop()

    def _find_end_of_thought(self) -> int | None:
        ids = [] if self.thinking is None else self.encode(self.thinking.closing)
        return ids[0] if len(ids) == 1 else None

    def _thought_tokens(self) -> set[str]:
        return set() if self.thinking is None else {self.thinking.opening, self.thinking.closing}

    def prompt_ids(self, request: str, tools: list[dict[str, Any]], rules: str = "") -> list[int]:
        """Ids of the opening: rules, tools unless learnt, the user's request, the assistant's header."""
        messages, rendered_tools = self.opening(request, tools, rules)
        return self.encode(self.template.render(messages, tools=rendered_tools, continues=True))

    def opening(
        self, request: str, tools: list[dict[str, Any]], rules: str = ""
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The messages a conversation opens with, and the tools for the template if it renders them."""
        return self._opening_of([self.asking(request)], tools, rules)

    def _opening_of(
        self, asked: Sequence[Message], tools: Sequence[dict[str, Any]], rules: str
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The system message, or the beginning of the first where there is none, has the rules and tools it does
        not.
        """
        rendered_tools = None
        before = [self.as_data(rules)] if rules else []
        if tools and not self.template.tools_are_learnt:
            safe_tools = [self._as_data_throughout(tool) for tool in tools]
            if self.template.renders_tools:
                rendered_tools = safe_tools
            else:
                before.append(instructions(safe_tools))
        if not before:
            return [*asked], rendered_tools
        text = "\n\n".join(before)
        if self.template.takes_system:
            return [{"role": "system", "content": text}, *asked], rendered_tools
        first, *others = asked
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *others], rendered_tools

    def opening_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """`prompt_ids` of any messages before the first answer: the system's come first, and others follow.

        ValueError where the template cannot render them or leaves one out.
        """
        rules = [message["content"] for message in _first_of("system", messages)]
        asked = [self._as_data_message(message) for message in messages[len(rules) :]]
        if not asked:
            raise ValueError("nobody asks anything: there is no message but the system's")
        opening, rendered_tools = self._opening_of(asked, tools, "\n\n".join(filter(None, rules)))
        text = self.template.render(opening, tools=rendered_tools, continues=True)
        _refuse_left_out(opening, text)
        return self.encode(text)

    def following_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that follow the end of a turn: tool replies, then messages of users and the system, then the next header.

        ValueError where the template cannot render them or leaves one out.
        """
        texts = tuple(message["content"] for message in _first_of("tool", messages))
        others = [self._as_data_message(message) for message in messages[len(texts) :]]
        if not others:
            return self.reply_ids(texts)
        replies = self.replies(texts) if texts else []
        what = "a further message"
        text = self.template.continuation([*replies, *others], what=what, after_calls=bool(texts))
        _refuse_left_out(others, text)
        return self._ids_after_a_turn([*replies, *others], what=what, after_calls=bool(texts))

    def given_ids(self, message: str, calls: Sequence[ToolCall]) -> list[int]:
        """A turn with its end that somebody else wrote, as the model would have written it; all of it is data."""
        text = self.as_data(message)
        if calls:
            safe = [
                ToolCall(name=self.as_data(call.name), arguments=self._as_data_throughout(call.arguments))
                for call in calls
            ]
            written = self.call_format.text(safe)
            text = f"{text}\n{written}" if text and self.call_format.marks else written
        else:
            text = self.call_format.closing(text)
        given, own = self.written_ids(text)
        return [*given, *own, self.end_of_calls if calls else self.end_of_turn]

    def asking(self, request: str) -> Message:
        return {"role": "user", "content": self.as_data(request)}

    def replies(self, texts: tuple[str, ...]) -> list[Message]:
        return self.template.replies(tuple(map(self.as_data, texts)))

    def request_ids(self, request: str) -> list[int]:
        """Ids that follow the assistant's end-of-turn token: a further request, then the next assistant header."""
        return self._ids_after_a_turn([self.asking(request)], what="a further request", after_calls=False)

    def reply_ids(self, texts: tuple[str, ...]) -> list[int]:
        """Ids that follow the end of a turn with calls. Errors come again throughout a run; a page comes again soon, in
        the other samples of its problem, and all pages of a run would fill the memory.
        """
        kept = self._short_replies if sum(map(len, texts)) <= SHORT_REPLY else self._long_replies
        return kept(texts).tolist()

    def _write_replies(self, texts: tuple[str, ...]) -> array[int]:
        return array("i", self._ids_after_a_turn(self.replies(texts), what="a tool reply", after_calls=True))

    def _ids_after_a_turn(self, messages: list[Message], *, what: str, after_calls: bool) -> list[int]:
        text = self.template.continuation(messages, what=what, after_calls=after_calls)
        end, *ids = self.encode(text)
        expected = self.end_of_calls if after_calls else self.end_of_turn
        if end != expected and not self._closes_otherwise_later(end):
            raise self.template.refusal(
                f"ends an assistant message otherwise when {what} follows", self.decode([expected]), text
            )
        return ids

    def _closes_otherwise_later(self, end: int) -> bool:
        """Harmony ends an answer with a token that its history writes as another: the sampled one remains."""
        return self.thinking == HARMONY and end in self.special_ids

    def read_turn(self, written: Sequence[int]) -> Written:
        """The thought and the message of a turn's ids, without its end."""
        text = self.decode(list(written))
        thoughts, message = self.thinking.split(text, is_open=self.opens_thought) if self.thinking else ([], text)
        if not thoughts:
            return Written(None, text, 0)
        return Written("\n\n".join(thoughts), message, self._length_of_thoughts(written, text, message, len(thoughts)))

    def is_within_thought(self, written: Sequence[int]) -> bool:
        """Whether a turn ended before its last thought did, so that it has no message."""
        if self.thinking is None:
            return False
        found = self.read_turn(written)
        if found.thought is None or found.message:
            return False
        return self.thinking.closing not in self.decode(list(written)).rpartition(self.thinking.opening)[2]

    def written_ids(self, text: str, thought: str = "") -> tuple[list[int], list[int]]:
        """Ids of a turn with this message, without its end: what is given and what is the model's own.

        Without a thought, a model that thinks is given an empty one, which teaches it nothing about thinking.
        """
        if self.thinking is None or self._closes_thought:
            return [], self.encode(text)
        opening = "" if self.opens_thought else f"{self.thinking.lead}{self.thinking.opening}{self.thinking.before}"
        whole = f"{opening}{thought}{self.thinking.closed}"
        return ([], self.encode(whole + text)) if thought else (self.encode(whole), self.encode(text))

    def _length_of_thoughts(self, written: Sequence[int], text: str, message: str, num_thoughts: int) -> int:
        if self.end_of_thought is None:
            return len(self.encode(text[: len(text) - len(message)]))
        ends = [place for place, token in enumerate(written, 1) if token == self.end_of_thought]
        return ends[num_thoughts - 1] if len(ends) >= num_thoughts else len(written)

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

    def _as_data_message(self, message: Message) -> Message:
        return {"role": message["role"], "content": self.as_data(message["content"])}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        if self._decode_plainly is not None:
            return str(self._decode_plainly(token_ids, skip_special_tokens=False))
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _first_of(role: str, messages: Sequence[Message]) -> Iterator[Message]:
    """Those before the first of another role."""
    return takewhile(lambda message: bool(message["role"] == role), messages)


def _refuse_left_out(messages: Sequence[Message], text: str) -> None:
    end = 0  # of the message before: searched from the start, 10,000 messages take seconds
    for message in messages:
        said = str(message["content"]).strip()
        if (place := text.find(said, end)) < 0 and (place := text.find(said)) < 0:
            raise ValueError(f"the chat template leaves out what this message of the {message['role']} says")
        end = place + len(said)


def load_chat(folder: Path, kind: type[ChatFormat] = ChatFormat) -> ChatFormat:
    """ValueError where the tokenizer or template cannot carry a conversation."""
    return kind(load_tokenizer(folder), source=str(resolve_model(folder)), further_end_ids=generation_end_ids(folder))
