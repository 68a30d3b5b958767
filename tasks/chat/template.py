"""What a model's chat template supports, found by rendering short probes and never by the model's name.

Templates differ in tools, call syntax, system messages, and whether a tool reply may follow a plain message. One that
does not support something raises, or drops the text silently. Ids are only appended, so all that is needed of a
template is the text after a turn: what follows the end of an assistant message, which must not depend on what the
message or the thought before it says. One that rewrites the prompt or another message is refused, at the place where it
differs; one that leaves earlier thoughts out may be (`model.template.keep_thinking`). Where a template renders calls in
no format of `formats/`, or moves the tools with the latest request, RECIPE is used.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.catalog import FORMATS
from tasks.chat.formats.hermes import HERMES
from tasks.chat.formats.recipe import RECIPE
from tasks.chat.thinking import ThoughtMarks, find_marks
from tasks.core.records import ToolCall
from tasks.core.text import one_line, show_difference
from tasks.models.folders import TOOLS_ARE_LEARNT
from tasks.models.template import template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
# A tool reply is its own message, or that only after a message with calls in a field, or a user's message.
ReplyStyle = Literal["tool", "tool after calls", "user"]

PROBE_SYSTEM, PROBE_USER, PROBE_ASSISTANT, PROBE_REPLY = "One word, please.", "Which city?", "Paris.", "sunny there"
PROBE_THOUGHT = "The capital, then."
PROBE_CALL = ToolCall(name="probe_weather", arguments={"city": "Zürich", "today": True})
PROBE_ID = "probe0id0"  # nine characters, as Mistral's templates require
USER: Message = {"role": "user", "content": PROBE_USER}
ASSISTANT: Message = {"role": "assistant", "content": PROBE_ASSISTANT}
SYSTEM: Message = {"role": "system", "content": PROBE_SYSTEM}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_CALL.name,
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "today": {"type": "boolean", "description": "Or tomorrow."},
            },
            "required": ["city"],
        },
    },
}
# Some templates write today's date into the prompt; the same seed must give the same episode tomorrow.
A_FIXED_DAY = datetime(2024, 7, 26)


class ChatTemplate:
    """The chat template of one tokenizer.

    `after_assistant` closes an assistant message. `call_format` is how the model calls tools; `renders_tools`: the
    template describes them; `tools_are_learnt`: the model was trained on them and needs no description. `takes_system`
    and `reply_style` say which messages are possible.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str):
        if not tokenizer.chat_template:
            raise ValueError(
                f"{source}: the tokenizer has no chat template, so conversations cannot be rendered as the model "
                f"expects. Use an instruction-tuned model, or save the tokenizer with a `chat_template`."
            )
        self.tokenizer, self.source = tokenizer, source
        self.tools_are_learnt = bool(tokenizer.init_kwargs.get(TOOLS_ARE_LEARNT))
        self.settings = template_of(tokenizer)
        self.thinking = find_marks(str(tokenizer.chat_template))
        _, written, self.after_assistant = self.render([USER, ASSISTANT]).rpartition(PROBE_ASSISTANT)
        if not written:
            raise ValueError(
                f"{source}: the chat template leaves out what an assistant message says, so no episode can be played. "
                f"Use a model for text, or save the tokenizer with a template that renders `content` as a string."
            )
        self.call_format = HERMES if self.tools_are_learnt else self._find_call_format()
        self.renders_tools = not self.tools_are_learnt and self.call_format is not RECIPE
        self.takes_system = self._finds_a_system_message()
        self.reply_style: ReplyStyle = self._find_reply_style()
        if self.thinking is not None:
            self.thinking = self._measure(self.thinking)
        self._heads: dict[bool, tuple[list[Message], str]] = {}

    def render(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, continues: bool = False
    ) -> str:
        """The text of a conversation; with `continues`, up to where the model's next turn begins."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=continues,
                strftime_now=A_FIXED_DAY.strftime,
                **self.settings.variables,
            )
        except Exception as error:  # templates are programs and may raise anything
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(
                f"{self.source}: the chat template cannot render messages of {roles} "
                f"({one_line(error)}), so no episode can be played. Save the tokenizer with a "
                f"template that can."
            ) from error
        return str(text)

    def continuation(self, messages: list[Message], *, what: str, after_calls: bool) -> str:
        """What the template writes for `messages` after an assistant message; `what` names them in an error."""
        if after_calls not in self._heads:
            self._heads[after_calls] = self._find_head(after_calls, what=what)
        history, head = self._heads[after_calls]
        rendered = self._render_following(history, messages)
        if not rendered.startswith(head):
            raise self.refusal(f"changes earlier text when {what} follows", head, rendered)
        return rendered[len(head) :]

    def _find_head(self, after_calls: bool, *, what: str) -> tuple[list[Message], str]:
        """A history, and its text up to the end of the assistant's message, as it is when something follows."""
        history = self._history() if after_calls else [USER, ASSISTANT]
        following = self.replies((PROBE_REPLY,)) if after_calls else [USER]
        rendered = self._render_following(history, following)
        head, suffix = self._cut(rendered, history)
        prompt = self.render([USER], tools=self._probe_tools, continues=True)
        if not head or not self.without_thoughts(head).startswith(self.without_thoughts(prompt)):
            raise self.refusal(f"changes earlier text when {what} follows", prompt, rendered)
        for thoughtful in self._with_thoughts(history):
            shown = self._attempt([*thoughtful, *following], tools=self._probe_tools, continues=True)
            _, same = self._cut(shown, history)
            if same and same != suffix:
                raise self.refusal(f"writes other text after a thought when {what} follows", suffix, same)
            if shown and not self.settings.keep_thinking and PROBE_THOUGHT not in shown:
                raise self._refuse_to_forget(what)
        return history, head

    def _cut(self, rendered: str, history: list[Message]) -> tuple[str, str]:
        """Text up to the end of the history's last message, and what follows; both empty where the message is not as
        it was written.
        """
        message = PROBE_ASSISTANT
        if history[-1] != ASSISTANT:
            closed = self._render_history(history).removesuffix(self.after_assistant)
            message = closed[closed.rfind(PROBE_CALL.name) :]
        place = rendered.find(message, rendered.find(PROBE_USER))
        end = place + len(message)
        return (rendered[:end], rendered[end:]) if place >= 0 else ("", "")

    def _with_thoughts(self, history: list[Message]) -> list[list[Message]]:
        """The history whose answer was thought about, in each way that the template can tell a thought."""
        if self.thinking is None:
            return []
        *before, answer = history
        written = f"{self.thinking.opening}\n{PROBE_THOUGHT}{self.thinking.closed}{answer['content']}"
        told = [[*before, {**answer, name: PROBE_THOUGHT}] for name in ("reasoning_content", "thinking")]
        known = [one for one in told if PROBE_THOUGHT in self._attempt(one, tools=self._probe_tools)]
        return [[*before, {**answer, "content": written}], *known]

    def _measure(self, marks: ThoughtMarks) -> ThoughtMarks:
        """The marks with the white space that this template writes around them, if it writes a thought at all."""
        told = {**ASSISTANT, "content": f"{marks.opening}\n{PROBE_THOUGHT}{marks.closed}{PROBE_ASSISTANT}"}
        rendered = self._attempt([USER, told]).removeprefix(self._attempt([USER], continues=True))
        opening, closing, gap = re.escape(marks.opening), re.escape(marks.closing), r"(\s*)"
        pattern = rf"(?:\A{gap}{opening})?\s*{PROBE_THOUGHT}{gap}{closing}{gap}{re.escape(PROBE_ASSISTANT)}"
        found = re.search(pattern, rendered)
        return marks if found is None else replace(marks, lead=found[1] or "", before=found[2], after=found[3])

    def without_thoughts(self, text: str) -> str:
        """A rendered conversation as it would be without any thought."""
        return text if self.thinking is None else self.thinking.strip(text)

    def _render_following(self, history: list[Message], messages: list[Message]) -> str:
        return self.render([*history, *messages], tools=self._probe_tools, continues=True)

    def replies(self, texts: tuple[str, ...]) -> list[Message]:
        return self._replies(texts, self.reply_style)

    def written(self, text: str) -> Message:
        """The message of the model's text, with calls in a field where tool replies require that."""
        calls = [call for call in self.call_format.calls(text) if call is not None]
        return _calling(calls) if calls and self.reply_style == "tool after calls" else {**ASSISTANT, "content": text}

    def scaffold(self) -> str:
        """A conversation with every kind of message, to find the tokens that structure one."""
        messages = [*self._history(), *self.replies((PROBE_REPLY, PROBE_REPLY))]
        rendered = self.render(messages, tools=self._probe_tools, continues=True)
        return rendered + self._render_history([USER, ASSISTANT])

    def refuse_if_it_rewrites(self) -> None:
        """ValueError where what follows changes the prompt or earlier messages."""
        prompt = self.without_thoughts(self.render([USER], tools=self._probe_tools, continues=True))
        closed = self.without_thoughts(self._render_history(self._history()))
        if not closed.startswith(prompt):
            raise self.refusal("changes the prompt when an answer follows", prompt, closed)
        self.continuation(self.replies((PROBE_REPLY,)), what="a tool reply", after_calls=True)

    def refusal(self, what: str, one: str, other: str) -> ValueError:
        """`one` and `other` are texts that should begin alike."""
        return ValueError(
            f"{self.source}: the chat template {what}, so past tokens would no longer match their log-probs. "
            f"{show_difference(one, other)}. Use a template whose history is a prefix of its continuation."
        )

    def _refuse_to_forget(self, what: str) -> ValueError:
        return ValueError(
            f"{self.source}: the chat template leaves an earlier thought out when {what} follows, and "
            f"model.template.keep_thinking is false: a server that renders the history anew for each turn would show "
            f"the model less than training did. Set keep_thinking to true, or enable_thinking to false beside it; or "
            f"save the tokenizer with a template that keeps thoughts as they were written."
        )

    def _find_call_format(self) -> CallFormat:
        """The format in which the template writes a call; if it writes none that we read, the one it describes."""
        prompt = self._attempt([USER], tools=[PROBE_TOOL], continues=True)
        if PROBE_CALL.name not in prompt or not self._keeps_tools_in_place():
            return RECIPE
        rendered = self._attempt([USER, _calling([PROBE_CALL])], tools=[PROBE_TOOL])
        message = rendered[len(prompt) :] if rendered.startswith(prompt) else rendered.rpartition(PROBE_USER)[2]
        message = message.removesuffix(self.after_assistant)
        written = [format for format in FORMATS if format.calls(message, [PROBE_TOOL]) == [PROBE_CALL]]
        described = [format for format in FORMATS if format.described_as and format.described_as in prompt]
        if written:
            return _closest(written, message)
        return described[0] if described else RECIPE

    def _keeps_tools_in_place(self) -> bool:
        """Mistral's templates before 2025 move them to the latest request, which changes the first one's text."""
        opening, asked, _ = self._attempt([USER], tools=[PROBE_TOOL]).partition(PROBE_USER)
        further = {"role": "user", "content": PROBE_REPLY}
        later = self._attempt([USER, ASSISTANT, further], tools=[PROBE_TOOL])
        return bool(asked) and later.startswith(opening)

    def _finds_a_system_message(self) -> bool:
        """Some templates move it to the latest user message, which counts as none."""
        prompt = self._attempt([SYSTEM, USER], continues=True)
        later = self._attempt([SYSTEM, USER, ASSISTANT, USER], continues=True)
        return PROBE_SYSTEM in prompt and later.startswith(prompt)

    def _find_reply_style(self) -> ReplyStyle:
        """The first style whose reply is in the text. A style that names the call would name the probe's."""
        styles: tuple[ReplyStyle, ...] = ("tool", "tool after calls")
        for style in styles[:1] if self.call_format is RECIPE else styles:
            history = self._history(style)
            closed = self._attempt(history, tools=self._probe_tools)
            messages = [*history, *self._replies((PROBE_REPLY,), style)]
            rendered = self._attempt(messages, tools=self._probe_tools, continues=True)
            names_the_call = any(rendered.count(name) > closed.count(name) for name in (PROBE_ID, PROBE_CALL.name))
            if PROBE_REPLY in rendered and not names_the_call and self._repeats(style, rendered):
                return style
        return "user"

    def _repeats(self, style: ReplyStyle, rendered: str) -> bool:
        """Whether a second reply follows a second message as the first did; in DeepSeek's templates it does not."""
        history = self._history(style)
        replies = self._replies((PROBE_REPLY,), style)
        twice = self._attempt([*history, *replies, history[-1], *replies], tools=self._probe_tools, continues=True)
        message = PROBE_ASSISTANT if history[-1] == ASSISTANT else PROBE_CALL.name
        return twice.rpartition(message)[2] == rendered.rpartition(message)[2]

    def _replies(self, texts: tuple[str, ...], style: ReplyStyle) -> list[Message]:
        if style == "tool":
            return [{"role": "tool", "content": text} for text in texts]
        if style == "tool after calls":
            return [{"role": "tool", "content": text, "tool_call_id": PROBE_ID} for text in texts]
        return [{"role": "user", "content": "\n\n".join(f"Tool reply:\n{text}" for text in texts)}]

    def _history(self, style: ReplyStyle | None = None) -> list[Message]:
        after_calls = (style or self.reply_style) == "tool after calls"
        return [USER, _calling([PROBE_CALL]) if after_calls else ASSISTANT]

    def _render_history(self, history: list[Message]) -> str:
        return self.render(history, tools=self._probe_tools)

    def _attempt(self, messages: list[Message], **options: Any) -> str:
        try:
            return self.render(messages, **options)
        except ValueError:
            return ""

    @property
    def _probe_tools(self) -> list[dict[str, Any]] | None:
        return [PROBE_TOOL] if self.renders_tools else None


def _closest(formats: list[CallFormat], message: str) -> CallFormat:
    """The first that writes the probe's call exactly as the template does, with escapes if need be."""
    candidates = [*formats, *(format.escaping() for format in formats)]
    return next((format for format in candidates if format.text([PROBE_CALL]) in message), formats[0])


def _calling(calls: list[ToolCall]) -> Message:
    fields = [
        {"id": PROBE_ID, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": fields}
