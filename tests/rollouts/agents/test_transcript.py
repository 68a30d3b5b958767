"""From an agent's messages to ids: what was recorded is continued token by token, anything else says why it is not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.chat.format import ChatFormat
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.gateway.completions import CompletionRequest, Message, ProtocolError
from tasks.rollouts.agents import said, transcript
from tasks.rollouts.agents.answers import as_completion, before_stop, cut_at_stop, read_answer
from tasks.rollouts.agents.said import Said
from tasks.rollouts.agents.transcript import Place, Transcript
from tasks.rollouts.engine import Finish
from tests import tiny
from tests.chat import templates

TOOLS = [tool.schema() for tool in TravelDesk().tools]
CALL = '<tool_call>\n{"name": "cancel_booking", "arguments": {"booking_id": "B1", "fast": true}}\n</tool_call>'
SHOWN = tiny.EMBEDDED.model_copy(update={"tools_in_prompt": True})


@pytest.fixture(scope="module", params=["learnt tools", "tools in the prompt"])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(tiny.tokenizer(SHOWN if "prompt" in request.param else tiny.EMBEDDED), source="test")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str, call: str = "") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call}


class Model:
    """Answers whatever is asked with the next text; keeps the ids of each sequence as an engine would have them."""

    def __init__(self, chat: ChatFormat):
        self.chat, self.transcript = chat, Transcript(chat)
        self.ids: dict[int, list[int]] = {}
        self.num_turns = 0

    def ask(
        self, messages: list[Message], text: str, *, is_cut: bool = False, tools: Any = TOOLS
    ) -> tuple[Place, Message]:
        place = self.transcript.place(messages, tools)
        if not place.is_new:
            assert self.ids[place.sequence] == place.held
        written = [*self.chat.encode(text), *([] if is_cut else [self.chat.end_of_turn])]
        request = CompletionRequest("policy", messages, tools)
        ended_by: Finish = "length" if is_cut else "end_of_turn"
        answer = read_answer(self.chat, written, request, ended_by, name=f"call_{self.num_turns}")
        self.num_turns += 1
        number = self.transcript.record(place, written, answer.said)
        self.ids[number] = [*place.prompt, *written]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
        return place, {"role": "assistant", "content": answer.text, "tool_calls": calls}


def test_an_agent_that_sends_our_opening_gets_our_prompt_and_replies_only_append(chat: ChatFormat):
    model, history = Model(chat), [user("Cancel B1.")]
    first, answer = model.ask(history, CALL)
    assert first.prompt == chat.prompt_ids("Cancel B1.", TOOLS)
    history += [answer, reply("done", answer["tool_calls"][0]["id"])]
    second, answer = model.ask(history, "It is cancelled.")
    assert (second.is_new, second.given) == (False, chat.reply_ids(("done",)))
    third, _ = model.ask([*history, answer, user("Thanks.")], "You are welcome.", is_cut=True)
    assert (third.sequence, third.given) == (0, chat.request_ids("Thanks."))
    assert [*first.prompt, *chat.encode(CALL), chat.end_of_turn] == second.held


def test_rules_and_a_request_are_the_prompt_that_our_own_loop_renders(chat: ChatFormat):
    messages: list[Message] = [{"role": "system", "content": "Be <|im_end|> brief."}, user("Cancel <|im_end|> B1.")]
    expected = chat.prompt_ids("Cancel <|im_end|> B1.", TOOLS, "Be <|im_end|> brief.")
    assert Transcript(chat).place(messages, TOOLS).prompt == expected
    assert Transcript(chat).place([user("Hello.")], TOOLS).prompt == chat.prompt_ids("Hello.", TOOLS)


def _reserialised(message: Message, draw: Any) -> Message:
    """The same message after a client has parsed it and written it anew."""
    if message["role"] != "assistant":
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        keys = draw(st.permutations(sorted(arguments)))
        arguments = {key: arguments[key] for key in keys}
        written = json.dumps(arguments, indent=draw(st.sampled_from([None, 2]))) if draw(st.booleans()) else arguments
        identifier = call["id"] if draw(st.booleans()) else "renamed"
        calls.append({"id": identifier, "function": {"arguments": written, "name": call["function"]["name"]}})
    content = message["content"]
    if calls and draw(st.booleans()):
        content = None
    changed: Message = {"role": "assistant", "content": content and f" {content}\n"}
    if calls or draw(st.booleans()):
        changed["tool_calls"] = calls
    if draw(st.booleans()):
        changed["reasoning_content"] = "Hm."
    return changed


@pytest.mark.parametrize(
    ("content", "arguments", "is_edited"),
    [
        (None, {"fast": True, "booking_id": "B1"}, False),
        (None, {"booking_id": "B1", "fast": 1}, True),
        (None, {"booking_id": "B2", "fast": True}, True),
        ("It said this.", {"booking_id": "B1", "fast": True}, True),
    ],
)
def test_what_a_client_changes_in_a_call_is_an_edit_though_its_id_is_ours(
    content: str | None, arguments: dict[str, Any], is_edited: bool, chat: ChatFormat
):
    model, history = Model(chat), [user("Cancel B1.")]
    _, called = model.ask(history, CALL)
    (call,) = called["tool_calls"]
    sent: Message = {
        "role": "assistant", "content": content,
        "tool_calls": [{**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}],
    }  # fmt: skip
    place, _ = model.ask([*history, sent, reply("done", call["id"])], "Done.")
    assert place.begun == ("edited_history" if is_edited else "")


def test_replies_that_come_in_another_order_are_those_of_the_calls_that_they_name(chat: ChatFormat):
    """As they came in where they name none, or all the same."""
    model, history = Model(chat), [user("Cancel both.")]
    _, called = model.ask(history, f"{CALL}\n{CALL}")
    first, second = (call["id"] for call in called["tool_calls"])
    transcript = model.transcript
    place = transcript.place([*history, called, reply("two", second), reply("one", first)], TOOLS)
    assert place.given == chat.reply_ids(("one", "two"))
    assert [message.number for message in place.said[-2:]] == [0, 1]
    unnamed = transcript.place([*history, called, reply("one"), reply("two")], TOOLS)
    assert unnamed.given == place.given
    (alone,) = transcript.place([*history, called, reply("two", second)], TOOLS).said[-1:]
    assert alone.number == 1


ANSWERS = st.sampled_from(
    [CALL, f"{CALL}\n{CALL}", f"Let me see.\n{CALL}", "Done.", "<tool_call>\n{oops", "  spaces around  ", "<|im_end|>"]
)


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_whatever_a_client_does_to_our_messages_its_ids_are_those_that_were_sampled(chat: ChatFormat, data: Any):
    """What is new is what the environment's own loop would append after such a turn."""
    model, history = Model(chat), [user("Cancel B1.")]
    expected = chat.prompt_ids("Cancel B1.", TOOLS)
    for number in range(data.draw(st.integers(2, 4))):
        is_cut = data.draw(st.booleans())
        place, answer = model.ask(
            [_reserialised(item, data.draw) for item in history], data.draw(ANSWERS), is_cut=is_cut
        )
        assert (place.is_new, place.sequence, place.begun) == (number == 0, 0, "")
        assert place.given == expected
        closing = [chat.end_of_turn] if is_cut and model.ids[0][-1] not in chat.end_ids else []
        texts = [f"reply {count}" for count in range(len(answer["tool_calls"]))]
        history += [answer, *(map(reply, texts) if texts else [user("Go on.")])]
        expected = [*closing, *(chat.reply_ids(tuple(texts)) if texts else chat.request_ids("Go on."))]


def test_what_does_not_extend_a_conversation_begins_a_sequence_and_says_why(chat: ChatFormat):
    """Asked again: parallel. Another system prompt: another agent. A changed reply: edited. Only a summary: compaction.
    A fork keeps the ids up to the last answer that it shares.
    """
    model, history = Model(chat), [user("Cancel B1.")]
    _, called = model.ask(history, CALL)
    history += [called, reply("busy")]
    second, answer = model.ask(history, "Sorry.")
    history += [answer, user("Try again.")]
    model.ask(history, "No.")
    again, _ = model.ask(history, "Yes.")
    assert (again.begun, again.held) == ("parallel", [*second.prompt, *chat.encode("Sorry."), chat.end_of_turn])
    edited, _ = model.ask([*history[:2], reply("done"), answer, user("Try again.")], "Good.")
    assert (edited.begun, edited.held) == ("edited_history", second.held)
    assert edited.given == [
        *chat.reply_ids(("done",)), *chat.given_ids("Sorry.", []), *chat.request_ids("Try again.")
    ]  # fmt: skip
    short, _ = model.ask([user("Summary: B1 could not be cancelled. Go on.")], "Fine.")
    assert (short.begun, short.held) == ("compaction", [])
    other, _ = model.ask([{"role": "system", "content": "You plan."}, user("Cancel B1.")], "A plan.")
    assert other.begun == "another_agent"
    assert model.ask(history[:1], "Tools?", tools=TOOLS[:1])[0].begun == "another_agent"
    assert sorted(model.ids) == list(range(6))


def test_answers_of_somebody_else_are_rendered_as_data(chat: ChatFormat):
    """A few-shot history in which a control token is spelt out; our own ids of such text would be a forged turn."""
    shots: list[Message] = [user("Hello."), {"role": "assistant", "content": "Hi<|im_end|>"}, user("Cancel B1.")]
    place = Transcript(chat).place(shots, TOOLS)
    expected = [*chat.prompt_ids("Hello.", TOOLS), *chat.encode("Hi< |im_end|>"), chat.end_of_turn]
    assert place.prompt == [*expected, *chat.request_ids("Cancel B1.")]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("Hello."), {"role": "assistant", "content": "Hi."}],
        [{"role": "assistant", "content": "How may I help?"}, user("Hello.")],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "critic", "content": "Be brief."}],
        [user("Hello."), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": ""}}]}, reply("x")],
        [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}],
    ],
)
def test_a_history_that_no_template_renders_is_refused_in_one_sentence(chat: ChatFormat, messages: list[Message]):
    with pytest.raises(ProtocolError) as refused:
        Transcript(chat).place(messages, TOOLS)
    assert refused.value.status == 400
    assert "\n" not in refused.value.message


def test_a_turn_is_cut_after_the_token_that_completes_a_stop_string(chat: ChatFormat):
    written = chat.encode("Done. Observation: none")
    cut = cut_at_stop(chat, written, ["Observation:"])
    assert cut is not None
    assert "Observation:" in chat.decode(written[:cut])
    assert "Observation:" not in chat.decode(written[: cut - 1])
    assert cut_at_stop(chat, written, ["Thought:"]) is None


def test_a_stop_string_within_a_thought_is_none_of_the_message():
    thinking = ChatFormat(tiny.tokenizer(tiny.THINKING), source="test")
    thought = thinking.encode("<think>\nDone?\n</think>\n\n")
    whole = [*thought, *thinking.encode("It is Done. More.")]
    cut = cut_at_stop(thinking, whole, ["Done"])
    assert cut is not None
    assert thinking.decode(whole[len(thought) : cut]).startswith("It is Done")
    assert cut_at_stop(thinking, [*thought, *thinking.encode("It is.")], ["Done"]) is None


def test_the_line_ends_after_a_thought_are_none_of_the_message():
    """A stop string of line ends would end every message of a model that thinks before it began."""
    thinking = ChatFormat(tiny.tokenizer(tiny.THINKING), source="test")
    whole = thinking.encode("<think>\nDone?\n</think>\n\nIt is.\n\nMore.")
    cut = cut_at_stop(thinking, whole, ["\n\n"])
    assert cut is not None and thinking.decode(whole[:cut]).endswith("It is.\n\n")


@pytest.mark.parametrize(("text", "stop"), [("😀é.", "😀"), ("abé€😀é€", "é"), ("😀 é", "é")])
def test_a_character_of_several_tokens_hides_no_stop_string(chat: ChatFormat, text: str, stop: str):
    """The decoder shows no character of a run of byte tokens until the run is whole."""
    written = chat.encode(text)
    first = next(end for end in range(1, len(written) + 1) if stop in chat.decode(written[:end]))
    assert [cut_at_stop(chat, written[:end], [stop]) for end in range(first, len(written) + 1)] == [first] * (
        len(written) + 1 - first
    )


@pytest.mark.parametrize(("text", "stop", "left"), [("It is Done", "Done", "It is "), ("It is.\n", "\n", "It is.")])
def test_an_answer_says_which_stop_string_ended_it_and_how_long_it_thought(text: str, stop: str, left: str):
    """A stop string that no message keeps, as a line's end, is told too."""
    thinking, request = ChatFormat(tiny.tokenizer(tiny.THINKING), source="test"), CompletionRequest("policy", [])
    thought = thinking.encode(f"<think>\n{stop}?\n</think>\n\n")
    written = [*thought, *thinking.encode(text)]
    answer = read_answer(thinking, written, request, "length", name="call_0")
    cut = before_stop(answer, thinking, written, ["More", stop])
    assert (cut.text, cut.stop_string, cut.finish) == (left, stop, "stop")
    logp = [0.0] * len(written)
    told = as_completion(cut, thinking, request, written, logp, id="t", model="policy", version="1",
                         num_prompt_tokens=1, num_cached_tokens=0, ignored=())  # fmt: skip
    assert (told.stop_string, told.num_thought_tokens) == (stop, len(thought) - 2)  # the two line ends


def test_a_request_that_shows_no_tool_gets_text_and_no_call(chat: ChatFormat):
    """Nor under `tool_choice: none`; also of a model that learnt its tools, and an answer like Llama's calls."""
    written = [*chat.encode(CALL), chat.end_of_turn]
    for request in (CompletionRequest("policy", []), CompletionRequest("policy", [], TOOLS, tool_choice="none")):
        answer = read_answer(chat, written, request, "end_of_turn", name="call_0")
        assert (answer.text, answer.calls, answer.finish, answer.is_malformed) == (CALL, (), "stop", False)
    llama = ChatFormat(templates.tokenizer(templates.LLAMA), source="test")
    said = '{"name": "Alice", "parameters": {"age": 30}}'
    for tools, text, finish in (((), said, "stop"), (TOOLS, "", "tool_calls")):
        written = [*llama.encode(said), llama.end_of_turn]
        answer = read_answer(llama, written, CompletionRequest("policy", [], tools), "end_of_turn", name="call_0")
        assert (answer.text, answer.finish) == (text, finish)


@pytest.mark.parametrize(
    ("ended_by", "finish"), [("end_of_turn", "stop"), ("stop_string", "stop"), ("length", "length")]
)
def test_what_the_engines_own_stop_string_ended_was_not_cut(chat: ChatFormat, ended_by: Finish, finish: str):
    written = [*chat.encode("Done."), *([chat.end_of_turn] if ended_by == "end_of_turn" else [])]
    answer = read_answer(chat, written, CompletionRequest("policy", []), ended_by, name="call_0")
    assert (answer.text, answer.finish, answer.stop_string) == ("Done.", finish, None)


def test_beyond_the_most_the_sequence_that_was_used_least_recently_is_forgotten(chat: ChatFormat):
    model = Model(chat)
    model.transcript.most = 2
    for text in ("One.", "Two.", "Three."):
        model.ask([user(text)], "Yes.")
    assert list(model.transcript.recorded) == [1, 2]


class Unrendered(Transcript):
    """Every message is one token."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def _render(self, new: Sequence[Said], tools: Any, *, held: Sequence[int]) -> list[int]:
        return [1] * len(new)


def num_steps_of_an_editor(num_turns: int) -> int:
    """Lines of the two modules that run where an agent shortens all tool replies but the last three, as many do."""
    steps, files = 0, {transcript.__file__, said.__file__}

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count if frame.f_code.co_filename in files else None

    recorder, history = Unrendered(), [user("To Rome.")]
    for number in range(num_turns):
        answer = Said("assistant", "", (("look_up", {"number": number}),), (f"c{number}",))
        sys.settrace(count)
        try:
            recorder.record(recorder.place(history), [2], answer)
        finally:
            sys.settrace(None)
        function = {"name": "look_up", "arguments": {"number": number}}
        history.append({"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": function}]})
        history.append(reply(f"reply {number}", f"c{number}"))
        for place in range(2, len(history) - 6, 2):
            history[place] = reply("(left out)", f"c{place // 2 - 1}")
    assert len(recorder.recorded) == num_turns - 3
    return steps


def test_work_grows_with_the_square_of_the_turns_where_an_agent_edits_its_history():
    """It sends n messages in each of n turns. Compared with each of n recorded ones, it was eight times as much."""
    assert num_steps_of_an_editor(48) < 4.5 * num_steps_of_an_editor(24)


def called(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


@pytest.mark.slow
def test_a_long_request_is_read_and_written_in_time_that_grows_with_its_messages():
    """Of 1 to 4 MB; a request may have 8. The square of their number takes half a minute, on the engine's thread."""
    row = [{"role": "assistant", "content": "", "tool_calls": [called(number)]} for number in range(8000)]
    parallel = {"role": "assistant", "content": "", "tool_calls": [called(number) for number in range(30_000)]}
    replies = [reply("sunny", f"c{number}") for number in reversed(range(30_000))]
    chat = ChatFormat(tiny.tokenizer(tiny.EMBEDDED), source="test")
    begun = time.process_time()
    assert len(said.read_messages(row)) == 1
    assert said.read_messages([parallel, *replies])[-1].number == 29_999
    assert Transcript(chat).place([user(f"q{number:07}") for number in range(20_000)]).is_new
    assert time.process_time() - begun < 5
