"""The tool layer: what reaches a tool, what reaches the model, and what is ours."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal

import httpx2
import pytest
from pydantic import BaseModel, Field

from tasks.core import background
from tasks.core.records import Problem, ReferenceTurn
from tasks.tools import watch
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, EnvironmentFault, ErrorType, Tool, ToolReply, Verdict, block_until
from tasks.tools.checks import fault_of
from tasks.tools.layer import BoundTool, Kind, ToolError, ToolLayer
from tasks.tools.replay import Script, play
from tasks.tools.retries import RetryingEnvironment
from tests.worlds import QUICK

PROBLEM = Problem(
    id="p",
    category="c",
    level=1,
    requests=["Go."],
    world={},
    reference=[ReferenceTurn(calls=[], answer="")],
    split_group="g",
)


class BenchEpisode(ToolEpisode):
    """One tool of each kind, and one for each way to go wrong."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.release, self.is_held = threading.Event(), threading.Event()
        self.seen: list[Any] = []

    @tool("Doubles.", read_only=True, stateless=True)
    def double(self, number: Annotated[int, Field(ge=0)], unit: Literal["kg", "lb"] = "kg") -> dict[str, Any]:
        self.seen.append(number)
        return {"number": 2 * number, "unit": unit}

    @tool("Answers a little later.")
    async def slowly(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"waited on {threading.current_thread().name}"

    @tool("Holds a worker until it is let go.", blocking=True)
    def hold(self) -> str:
        self.is_held.set()
        assert self.release.wait(120)
        return threading.current_thread().name

    @tool("Raises what it is told to.")
    def fail(self, type: str, scripted: bool = False) -> str:
        if type == "bug":
            raise KeyError("no such key")
        if type == "exit":
            sys.exit(3)
        raise ToolError(type, "as you wish", scripted=scripted)  # type: ignore[arg-type]

    @tool("Comes back late, though it is declared as one in memory.")
    def dawdle(self, seconds: float) -> str:
        time.sleep(seconds)
        return "back"

    @tool("Returns what no message can hold.")
    def junk(self) -> Any:
        return {"a": b"\x00"}

    @tool("Returns text of a length.")
    def text(self, length: int) -> str:
        return "é" * length

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(True)


class Bench(ToolEnvironment):
    """The world of those tools."""

    name = "bench"
    episode_class = BenchEpisode


@pytest.fixture
def episode() -> Iterator[BenchEpisode]:
    made = held(Bench(QUICK))
    yield made
    made.release.set()


def held(world: Bench) -> BenchEpisode:
    """An episode whose `hold` waits for `release`."""
    made = world.start(PROBLEM)
    assert isinstance(made, BenchEpisode)
    return made


def ask(episode: ToolEpisode, name: str, **arguments: Any) -> ToolReply:
    return block_until(episode.call(name, arguments))


def nested_list(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_schema_comes_from_the_signature_and_takes_nothing_else():
    tools = {item.name: item for item in Bench().tools}
    assert tools["double"].parameters == {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "minimum": 0},
            "unit": {"type": "string", "enum": ["kg", "lb"], "default": "kg"},
        },
        "required": ["number"],
        "additionalProperties": False,
    }
    assert (tools["double"].may_repeat, tools["double"].stateless, tools["fail"].may_repeat) == (True, True, False)


def test_a_tool_in_memory_answers_at_once_and_with_json(episode: BenchEpisode):
    assert episode.call("double", {"number": 4}) == ToolReply('{"number": 8, "unit": "kg"}')


@pytest.mark.parametrize(
    ("name", "arguments", "type", "says"),
    [
        ("halve", {}, "unknown_tool", "there is no tool halve; there are: double, slowly"),
        ("double", {}, "invalid_arguments", '"number" is a required property'),
        ("double", {"number": -1}, "invalid_arguments", "number: -1 is less than the minimum of 0"),
        ("double", {"number": "4"}, "invalid_arguments", 'number: "4" is not of type "integer"'),
        ("double", {"number": 4, "unit": "st"}, "invalid_arguments", 'unit: "st" is not one of'),
        ("double", {"number": 4, "extra": 1}, "invalid_arguments", "extra"),
        ("double", {"number": True}, "invalid_arguments", "number: true is not of type"),
        ("double", {"number": "\ud800"}, "invalid_arguments", "what JSON cannot"),
    ],
)
def test_a_bad_call_is_told_why_and_never_reaches_the_tool(
    episode: BenchEpisode, name: str, arguments: dict[str, Any], type: str, says: str
):
    reply = ask(episode, name, **arguments)
    error = json.loads(reply.text)["error"]
    assert (error["type"], reply.error, reply.valid) == (type, type, False)
    assert says in error["message"]
    assert not episode.seen


def test_a_world_may_ask_for_reports_only_and_then_the_call_is_made_all_the_same():
    def echo(episode: Any, arguments: Any) -> str:
        return json.dumps(arguments)

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    layer = ToolLayer([BoundTool(Tool("echo", "", schema), echo, "memory")], QUICK, validation="report")
    assert layer.call(None, "echo", {"n": "four"}) == ToolReply('{"n": "four"}', valid=False)
    assert layer.call(None, "echo", {"n": 4}) == ToolReply('{"n": 4}', valid=True)


@pytest.mark.parametrize("type", ["invalid_arguments", "unknown_tool", "not_found", "conflict"])
def test_what_a_tool_finds_wrong_with_a_call_reaches_the_model(episode: BenchEpisode, type: str):
    reply = ask(episode, "fail", type=type)
    assert json.loads(reply.text) == {"error": {"type": type, "message": "as you wish"}}
    assert not reply.valid


@pytest.mark.parametrize("type", ["rate_limited", "timeout", "unavailable"])
def test_an_outage_is_ours_unless_the_world_scripts_it(episode: BenchEpisode, type: str):
    with pytest.raises(EnvironmentFault, match=f"fail: {type}: as you wish"):
        ask(episode, "fail", type=type)
    reply = ask(episode, "fail", type=type, scripted=True)
    assert json.loads(reply.text)["error"]["type"] == type
    assert reply.valid  # the call was right; the world answered with an error


@pytest.mark.parametrize("type", ["unavailable", "conflict"])
def test_a_tools_words_forge_no_line_at_a_terminal_and_reach_the_model_as_they_are(type: ErrorType):
    words = "busy\n\nversion 9 became the champion\x1b[2J"

    def refuse(episode: Any, arguments: Any) -> str:
        raise ToolError(type, words)

    layer = ToolLayer([BoundTool(Tool("refuse", "", {"type": "object"}), refuse, "memory")], QUICK)
    if type == "conflict":
        assert json.loads(layer.call(None, "refuse", {}).text)["error"]["message"] == words  # type: ignore[union-attr]
        return
    with pytest.raises(
        EnvironmentFault, match=r"^refuse: unavailable: busy version 9 became the champion\\x1b"
    ) as told:
        layer.call(None, "refuse", {})
    assert "\n" not in str(told.value) and len(str(EnvironmentFault("A" * 9000))) < 2100


def test_a_bug_in_a_tool_is_ours(episode: BenchEpisode):
    with pytest.raises(EnvironmentFault, match="fail: unavailable: it crashed with KeyError: 'no such key'"):
        ask(episode, "fail", type="bug")


def test_a_tool_that_would_end_the_program_or_returns_no_text_is_ours_and_is_named(episode: BenchEpisode):
    with pytest.raises(EnvironmentFault, match="fail: unavailable: it crashed with SystemExit: 3"):
        ask(episode, "fail", type="exit")
    with pytest.raises(EnvironmentFault, match=r"junk: .*a dict, which is neither text nor JSON .*no bytes.*return"):
        ask(episode, "junk")


@dataclass
class Found:
    isbn: str
    parts: list[Part]


class Part(BaseModel):
    day: date


@dataclass
class Answered:
    text: str


def replies_with(value: Any) -> ToolReply:
    layer = ToolLayer([BoundTool(Tool("find", "", {"type": "object"}), lambda *_: value, "memory")], QUICK)
    return block_until(layer.call(None, "find", {}))


def test_classes_of_pydantic_and_dataclasses_are_replies_wherever_they_are():
    part, day = Part(day=date(2026, 11, 28)), '{"day": "2026-11-28"}'
    assert replies_with(part).text == day
    assert replies_with({"all": [part]}).text == f'{{"all": [{day}]}}'
    assert replies_with(Found("b0", [part])).text == f'{{"isbn": "b0", "parts": [{day}]}}'


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), r"a float, .* JSON \(Out of range"),
        ({"price": [float("inf")]}, r"a dict, .* JSON \(Out of range"),
        ({"isbn": {"b0"}}, r"a dict, .* JSON \(JSON has no set\): return text, or a dict"),
        (Found, r"a type, .* JSON \(JSON has no type\)"),
        (b"b0", r"a bytes, .* JSON \(JSON has no bytes\)"),
        (nested_list(100_000), "a list, .* JSON .*recursion"),
    ],
)
def test_what_json_cannot_hold_is_no_reply_and_its_kind_is_told(value: Any, says: str):
    with pytest.raises(EnvironmentFault, match=f"find: unavailable: it returned {says}") as told:
        replies_with(value)
    assert not told.value.may_pass


def test_an_error_of_a_type_that_there_is_not_is_refused_where_it_is_raised():
    with pytest.raises(ValueError, match=r"no type 'missing'.*not_found, conflict, rate_limited"):
        ToolError("missing", "no such book")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind", "may_pass"),
    [
        (ValueError("boom"), "memory", False),
        (ValueError("boom"), "async", False),
        (ConnectionResetError(), "memory", True),
        (TimeoutError(), "memory", True),
        (EOFError(), "async", True),
        (httpx2.ConnectError("refused"), "async", True),
        (httpx2.ConnectError("refused"), "blocking", True),
        (httpx2.ConnectError("refused"), "memory", True),
        (httpx2.InvalidURL("x"), "memory", False),
        (httpx2.InvalidURL("x"), "async", True),
        (ExceptionGroup("two", [KeyError("x"), ConnectionResetError()]), "async", True),
        (ExceptionGroup("one", [KeyError("x")]), "async", False),
        (ToolError("unavailable", "down"), "memory", True),
        (ToolError("rate_limited", "slowly"), "async", True),
    ],
)
def test_a_lost_connection_may_pass_and_a_bug_does_not(error: Exception, kind: Kind, may_pass: bool):
    assert crash(error, kind).may_pass is may_pass


def crash(error: Exception, kind: Kind) -> EnvironmentFault:
    """The fault of a tool that raises the error."""

    def fail(*_: Any) -> str:
        raise error

    async def fail_later(*_: Any) -> str:
        raise error

    handler = fail_later if kind == "async" else fail
    layer = ToolLayer([BoundTool(Tool("t", "", {"type": "object"}), handler, kind)], QUICK)
    with pytest.raises(EnvironmentFault) as told:
        block_until(layer.call(None, "t", {}))
    return told.value


class NoSuchObject(FileNotFoundError):
    """A library's own."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (FileNotFoundError("corpus.jsonl"), False),
        (NotADirectoryError("corpus"), False),
        (IsADirectoryError("corpus"), False),
        (PermissionError("corpus.jsonl"), False),
        (NoSuchObject("corpus.jsonl"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ExceptionGroup("all", [FileNotFoundError("corpus.jsonl"), PermissionError("corpus.jsonl")]), False),
        (OSError(errno.EIO, "no answer"), True),
        (ConnectionRefusedError(), True),
        (ExceptionGroup("one of two", [FileNotFoundError("corpus.jsonl"), ConnectionRefusedError()]), True),
    ],
)
def test_a_missing_or_forbidden_file_is_no_fault_that_passes_in_a_tool_or_in_an_environment(
    error: Exception, passes: bool
):
    kinds: tuple[Kind, ...] = ("memory", "async", "blocking")
    assert {crash(error, kind).may_pass for kind in kinds} == {passes}
    assert (fault_of(error) is not None) is passes


def test_a_tool_without_a_clock_that_does_not_come_back_is_told_of_once(
    episode: BenchEpisode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watch, "_WATCH", watch._Watch())
    assert ask(episode, "dawdle", seconds=0.5).text == "back"
    told = capsys.readouterr().err
    assert told.count("the tool dawdle has not answered for") == 1
    assert "blocking=True" in told
    ask(episode, "text", length=1)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([0.5], r"success=0\.5.*reward\.parts"),
        (["yes"], "success='yes'"),
        ([1], "success=1"),
        ([None], "success=None"),
        ([True, {"paid": "yes"}], r"checks=.*'yes'"),
        ([True, {"paid": 0.5}], r"checks=.*0\.5"),
        ([True, ["paid"]], r"checks=\['paid'\]"),
    ],
)
def test_a_verdict_of_a_share_or_a_text_is_refused_where_it_is_made(given: list[Any], says: str):
    with pytest.raises(ValueError, match=says):
        Verdict(*given)


@pytest.mark.parametrize("wrap", [lambda world: world, lambda world: RetryingEnvironment(world, QUICK)])
@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (lambda _, __: 1, "^BenchEpisode.verdict returned int, not a Verdict"),
        (lambda _, __: sys.exit("done"), r"^BenchEpisode.verdict would end the program \(SystemExit: done\)"),
    ],
)
def test_a_verdict_that_is_none_names_its_author(
    verdict: Any, says: str, wrap: Callable[[Any], Environment], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(BenchEpisode, "verdict", verdict)
    (played,) = play(wrap(Bench(QUICK)), [Script.reference(PROBLEM)])
    with pytest.raises((TypeError, RuntimeError), match=says):
        raise played.error or ValueError


def test_a_long_reply_is_cut_and_says_so(episode: BenchEpisode):
    assert ask(episode, "text", length=2000).text == "é" * 2000
    assert ask(episode, "text", length=3234).text == "é" * 2000 + "\n[cut here: 1,234 more characters]"


@pytest.mark.parametrize("kind", ["memory", "async", "blocking"])
@pytest.mark.parametrize("form", [str, lambda text: {"a": [text]}, Answered, ToolReply, partial(ToolError, "conflict")])
def test_whatever_a_tool_answers_is_cut_to_the_limit_and_can_be_written(form: Callable[[str], Any], kind: Kind):
    """The text is half a surrogate pair and 3,000 letters."""

    def answer(*_: Any) -> Any:
        found = form("\ud800" + 3000 * "x")
        if isinstance(found, Exception):
            raise found
        return found

    async def answer_later(*_: Any) -> Any:
        return answer()

    handler = answer_later if kind == "async" else answer
    layer = ToolLayer([BoundTool(Tool("t", "", {"type": "object"}), handler, kind)], QUICK)
    text = block_until(layer.call(None, "t", {})).text
    assert text[:2000].encode().count(b"?") == 1 and len(text.partition("\n[cut here: 1,")[0]) == 2000


def test_a_tools_own_reply_keeps_what_else_it_says():
    said = ToolReply("no", valid=False, error="conflict", num_retries=2)
    assert replies_with(said) == said
    assert replies_with(ToolReply({"a": 1}, valid=False)) == ToolReply('{"a": 1}', valid=False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_asynchronous_tool_waits_on_the_loop_and_is_bounded_in_time():
    assert ask(Bench(QUICK).start(PROBLEM), "slowly", seconds=0).text == "waited on tools"
    hasty = Bench(QUICK.model_copy(update={"timeout_seconds": 0.3})).start(PROBLEM)
    with pytest.raises(EnvironmentFault, match=r"slowly: timeout: no answer in 0\.3 s"):
        ask(hasty, "slowly", seconds=600)


def test_blocking_tools_share_a_bounded_number_of_workers():
    """Two workers: the third call waits for a place, and its own time starts only then."""
    world = Bench(QUICK.model_copy(update={"max_workers": 2}))
    first, second, third = (held(world) for _ in range(3))
    answers = [episode.call("hold", {}) for episode in (first, second, third)]
    assert first.is_held.wait(120) and second.is_held.wait(120)
    assert not third.is_held.wait(0.05)
    first.release.set()
    assert block_until(answers[0]).text == "tool"
    assert third.is_held.wait(120)
    second.release.set()
    third.release.set()
    assert [block_until(answer).text for answer in answers] == ["tool"] * 3


def test_a_call_that_nobody_waits_for_any_more_gives_its_worker_back():
    world = Bench(QUICK.model_copy(update={"max_workers": 1}))
    first, second = held(world), held(world)
    left = first.call("hold", {})
    assert isinstance(left, Future) and first.is_held.wait(120)
    assert left.cancel()
    answer = second.call("hold", {})
    assert not second.is_held.wait(0.05)
    first.release.set()
    assert second.is_held.wait(120)
    second.release.set()
    assert block_until(answer).text == "tool"


@pytest.mark.slow
def test_calls_that_never_return_lose_their_workers_and_that_is_said(monkeypatch: pytest.MonkeyPatch):
    world = Bench(QUICK.model_copy(update={"max_workers": 1, "timeout_seconds": 0.3}))
    first, late = held(world), held(world)
    with pytest.raises(EnvironmentFault, match="hold: timeout"):
        ask(first, "hold")
    with pytest.raises(EnvironmentFault, match="each worker waits for a call that never returned"):
        ask(late, "hold")
    first.release.set()
    late.release.set()
    monkeypatch.setattr(world.layer, "settings", QUICK)  # a call that returns at once may still take 0.3 s
    assert background.run(until_a_worker_is_back(world)).result() and ask(late, "hold").text == "tool"


async def until_a_worker_is_back(world: Bench) -> bool:
    assert world.layer._workers is not None
    async with asyncio.timeout(120):
        while world.layer._workers.num_lost:
            await asyncio.sleep(0.001)
    return True


def test_a_schema_fetches_nothing_and_a_broken_one_is_refused_by_name():
    for schema in ({"$ref": "http://127.0.0.1:1/x"}, {"type": "strin"}):
        with pytest.raises(ValueError, match="tool 't': the schema of its arguments is not usable"):
            ToolLayer([BoundTool(Tool("t", "", schema), lambda *_: "", "memory")], QUICK)
