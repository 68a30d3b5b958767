"""An MCP server as a world: what a model sees and gets, fresh worlds, verdicts, secrets; over stdio and over HTTP."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import psutil
import pytest
from mcp import types

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.catalog import load_environment
from tasks.environments.mcp.environment import MCPEnvironment, MCPEpisode
from tasks.environments.mcp.messages import checker_text
from tasks.environments.mcp.settings import MCPSettings
from tasks.stages.curate.references import Replays, replay_references
from tasks.tools.base import EnvironmentFault, ToolReply, Verdict, block_until
from tasks.tools.layer import ToolError
from tests.environments import mcp_server
from tests.worlds import as_custom

pytestmark = pytest.mark.slow

WORLDLESS = Problem(
    id="p", category="c", level=1, requests=["Go."], world={}, reference=[ReferenceTurn(calls=[], answer="")],
    split_group="g",
)  # fmt: skip
RAW_SERVER = mcp_server.FILE.with_name("raw_server.py")
Make = Callable[..., MCPEnvironment]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(scope="module")
def hotel() -> Iterator[MCPEnvironment]:
    """One over stdio for all tests that need nothing special."""
    environment = mcp_server.make_environment()
    yield environment
    environment.close()


def over_http(url: str, **changed: Any) -> dict[str, Any]:
    return {"command": None, "url": url, **changed}


def play(environment: MCPEnvironment, problem: Problem, answer: str | None = None) -> tuple[list[ToolReply], Verdict]:
    episode = environment.start(problem)
    calls = [call for turn in problem.reference for call in turn.calls]
    replies = [block_until(episode.call(call.name, call.arguments)) for call in calls]
    verdict = block_until(episode.verdict(problem.reference[-1].answer if answer is None else answer))
    episode.close()
    return replies, verdict


def call(environment: MCPEnvironment, name: str, **arguments: Any) -> ToolReply:
    """One call on an episode of its own."""
    episode = environment.start(WORLDLESS)
    try:
        return block_until(episode.call(name, arguments))
    finally:
        episode.close()


def test_references_score_1_and_anything_less_fails_by_stdio_and_by_http(
    hotel: MCPEnvironment, mcp_world: Make, mcp_url: str
) -> None:
    free, taken = mcp_server.problems(2)
    for environment in (hotel, mcp_world(**over_http(mcp_url))):
        for problem in (free, taken, taken, free):
            assert play(environment, problem)[1] == Verdict(True, {"bookings": True, "answer": True})
        assert play(environment, free, answer="Booked.")[1] == Verdict(False, {"bookings": True, "answer": False})
        idle = environment.start(free)
        assert block_until(idle.verdict("It costs 40 a night.")).checks == {"bookings": False, "answer": True}
        idle.close()


def test_the_model_sees_the_allowed_tools_as_the_server_describes_them(
    hotel: MCPEnvironment, mcp_world: Make, mcp_url: str
) -> None:
    price, book, cancel = hotel.tools
    assert (price.name, book.name, cancel.name) == ("price", "book", "cancel")
    assert (price.description, price.version) == ("What a room costs a night.", "1.4.0")
    assert price.parameters["required"] == ["room"]
    assert price.output_schema is not None
    assert [(tool.read_only, tool.idempotent) for tool in hotel.tools] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    description = hotel.describe()
    assert description["server"] == {"name": "hotel", "version": "1.4.0"}
    assert description["reset"]["how"] == "tool"
    assert list(description["tools"]) == ["price", "book", "cancel"]
    assert hotel.fingerprint() == mcp_world(**over_http(mcp_url)).fingerprint()


def test_a_tool_that_is_not_allowed_and_the_reset_tool_are_unknown_to_the_model(
    hotel: MCPEnvironment, mcp_world: Make, mcp_url: str
) -> None:
    for name in ("bookings", "reset"):
        assert call(hotel, name).error == "unknown_tool"
    assert "reset" not in [tool.name for tool in mcp_world(**over_http(mcp_url, allowed_tools=None)).tools]


def test_what_the_server_turns_down_is_the_calls_fault_in_the_servers_words(hotel: MCPEnvironment) -> None:
    reply = call(hotel, "book", guest="Ada", room="moon")
    assert (reply.valid, reply.error) == (False, "conflict")
    assert "there is no room called moon" in json.loads(reply.text)["error"]["message"]
    reply = call(hotel, "book", guest="Ada")
    assert (reply.valid, reply.error) == (False, "invalid_arguments")


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_resetting_by_a_tool_gives_every_episode_a_fresh_world_as_its_problem_says(
    hotel: MCPEnvironment, mcp_world: Make, mcp_url: str, way: str
) -> None:
    environment = mcp_world(**over_http(mcp_url)) if way == "http" else hotel
    free, taken = mcp_server.problems(2)
    for _ in range(2):
        assert [reply.valid for reply in play(environment, free)[0]] == [True]
        assert [reply.valid for reply in play(environment, taken)[0]] == [False, True]
    assert len(environment.sessions.open_sessions) == 1


def counting(**changed: Any) -> dict[str, Any]:
    """Settings of a server whose tool answers how often its process was called."""
    command = [sys.executable, str(RAW_SERVER), "counts"]
    return {"command": command, "allowed_tools": None, "reset": "process", "reset_tool": None, **changed}


def act(episode: MCPEpisode) -> str:
    return block_until(episode.call("act", {})).text


def test_a_process_of_its_own_gives_every_episode_a_fresh_world(mcp_world: Make) -> None:
    environment = mcp_world(**counting(max_servers=2))
    first, second = environment.start(WORLDLESS), environment.start(WORLDLESS)
    assert [act(first), act(second), act(first), act(second)] == ["1", "1", "2", "2"]
    third = environment.start(WORLDLESS)
    answer = third.call("act", {})
    assert isinstance(answer, Future)
    with pytest.raises(TimeoutError):  # it waits for a place, for longer than a call may take, which is no fault
        answer.result(timeout=0.3)
    first.close()
    assert answer.result().text == "1"
    for episode in (second, third):
        episode.close()


def test_where_starts_are_most_of_the_time_curation_names_the_cheaper_resets(
    mcp_world: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.stages.curate.references.WORTH_TELLING_SECONDS", 0.0)
    reference = [ReferenceTurn(calls=[ToolCall(name="act", arguments={})], answer="")]
    problems = [
        WORLDLESS.model_copy(update={"id": f"p{n}", "requests": [f"{n}"], "reference": reference}) for n in range(17)
    ]
    for reset in ("process", "none"):
        environment = mcp_world(**counting(reset=reset, max_servers=2))
        environment.checker = lambda problem, calls, final_message, call_tool: True
        replay_references(Replays(environment), problems)
        told = capsys.readouterr().out
        assert "1 more reference solutions to play" in told
        assert ("environment.settings.reset: process" in told) == (reset == "process")
        assert ("reset: tool" in told and "reset_tool" in told and "reset: scratch" in told) == (reset == "process")
    slow = mcp_world(**counting(max_servers=2))
    slow.sessions._seconds.extend([(0.1, 5.0)] * 3)
    assert slow.cheaper_starts() == ""  # the calls take the time


def test_without_a_reset_episodes_share_the_world_and_a_lost_server_is_replaced(mcp_world: Make) -> None:
    others = children()
    environment = mcp_world(**counting(reset="none", max_servers=1))
    first, second = environment.start(WORLDLESS), environment.start(WORLDLESS)
    assert [act(first), act(second), act(first)] == ["1", "2", "3"]
    (server,) = [child for child in children() if child not in others]
    server.kill()
    with suppress(EnvironmentFault):  # of a call that comes before the kill is noticed
        act(first)
    assert [act(first), act(second)] in (["1", "2"], ["2", "3"])
    for episode in (first, second):
        episode.close()


def test_without_a_reset_episodes_one_after_another_meet_in_one_server_where_what_is_left_is_found(
    mcp_world: Make,
) -> None:
    """With several servers too: by turns, each play of the check for leaks would find a fresh one."""
    environment = mcp_world(**counting(reset="none", max_servers=4))
    found = []
    for _ in range(3):
        episode = environment.start(WORLDLESS)
        found.append(act(episode))
        episode.close()
    assert found == ["1", "2", "3"]
    first, second = environment.start(WORLDLESS), environment.start(WORLDLESS)
    assert [act(first), act(second), act(first)] == ["4", "1", "5"]  # side by side they spread over the servers
    for episode in (first, second):
        episode.close()


def test_making_an_episode_starts_no_server_and_an_invalid_call_needs_none(mcp_world: Make) -> None:
    others = len(children())
    environment = mcp_world(**counting())
    episodes = [environment.start(WORLDLESS) for _ in range(50)]
    for episode in episodes:
        assert not block_until(episode.call("act", {"what": 3})).valid
        episode.close()
    assert len(children()) - others == 1  # the one that listed the tools


def test_content_that_is_no_text_becomes_a_note_and_a_long_reply_is_cut(mcp_world: Make, mcp_url: str) -> None:
    environment = mcp_world(**over_http(mcp_url, allowed_tools=None, max_reply_characters=1000))
    assert call(environment, "photo").text == "[image, 1000 bytes]\nthe tower"
    reply = call(environment, "flood", megabytes=1)
    assert reply.text == "x" * 1000 + "\n[cut here: 1,047,576 more characters]"


def test_a_file_in_a_reply_is_read_as_its_text_within_the_limit_of_a_reply(mcp_world: Make, mcp_url: str) -> None:
    """The file that is no text is a note of its 4 bytes."""
    shown = over_http(mcp_url, allowed_tools=None)
    whole = call(mcp_world(**shown), "download").text
    prices = "\n".join(["tower 12"] * 8)
    assert whole == f"downloaded\n[resource repo://hotel/list.txt]\n{prices}\n[resource repo://hotel/plan.png, 4 bytes]"
    cut = call(mcp_world(**shown, max_reply_characters=100), "download").text
    assert cut == f"{whole[:100]}\n[cut here: {len(whole) - 100} more characters]"


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_a_secret_reaches_the_server_and_comes_back_redacted(
    mcp_world: Make, mcp_url: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = 'Bearer sk-"quoted"-0815'
    monkeypatch.setenv("OUR_KEY", secret)
    monkeypatch.setenv("OUR_OTHER_KEY", "never passed on")
    given = {"environment": {"HOTEL_KEY": "OUR_KEY"}}
    environment = mcp_world(
        trouble=True, **(over_http(mcp_url, headers={"Authorization": "OUR_KEY"}) if way == "http" else given)
    )
    assert call(environment, "whisper").text == '[redacted] and {"[redacted]": ["[redacted]"]}'
    assert "sk-" not in json.dumps(environment.describe())
    if way == "stdio":
        names = call(environment, "variables").text.split()
        assert "HOTEL_KEY" in names
        assert not {"OUR_KEY", "OUR_OTHER_KEY", "PYTEST_CURRENT_TEST"} & set(names)
        episode = environment.start(WORLDLESS)
        block_until(episode.call("whisper", {}))
        with pytest.raises(EnvironmentFault, match=r"SIGKILL; it last logged: the key is \[redacted\]( \| |$)"):
            block_until(episode.call("die", {}))
        episode.close()


def test_a_variable_that_is_not_set_is_named(mcp_world: Make) -> None:
    with pytest.raises(ValueError, match=r"environment\.settings\.environment\.HOTEL_KEY .* NOT_THERE, which"):
        mcp_world(environment={"HOTEL_KEY": "NOT_THERE"})


def test_an_allowed_tool_the_server_lacks_is_an_error_that_names_its_neighbours(mcp_world: Make, mcp_url: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_tools names 'pric', which .*'hotel' does not have.*mean price\?"):
        mcp_world(**over_http(mcp_url, allowed_tools=["pric"]))


def test_a_url_that_answers_404_names_the_usual_path(mcp_world: Make, mcp_url: str) -> None:
    with pytest.raises(ValueError, match=r"HTTP 404; its path is often /mcp\. Without it"):
        mcp_world(**over_http(mcp_url.removesuffix("/mcp")))


def test_a_world_that_does_not_suit_the_reset_tool_is_one_clear_line(hotel: MCPEnvironment) -> None:
    broken = WORLDLESS.model_copy(update={"world": {"taken": "attic"}})
    with pytest.raises(ValueError, match=r"problem 'p': its `world` does not fit .* the reset tool 'reset'"):
        hotel.start(broken)


def decides(answer: Any) -> Callable[..., Any]:
    return lambda problem, calls, final_message, call_tool: answer


def asks_what_is_gone(problem: Any, calls: Any, final_message: Any, call_tool: Any) -> bool:
    """A checker that takes any trouble of its tools for a failure of the model."""
    try:
        call_tool("act", {})
    except Exception:
        return False
    return True


def raises(problem: Any, calls: Any, final_message: Any, call_tool: Any) -> bool:
    return bool(problem.world["no such key"])


def test_a_checker_is_given_what_happened_and_may_ask_the_server_for_more(mcp_world: Make, mcp_url: str) -> None:
    environment, seen = mcp_world(**over_http(mcp_url)), []

    def checker(problem: Problem, calls: Any, final_message: Any, call_tool: Any) -> bool:
        seen.append((problem.id, calls, final_message, json.loads(call_tool("bookings", {}))))
        return True

    environment.checker = checker
    (problem,) = mcp_server.problems(1)
    assert play(environment, problem)[1] == Verdict(True, {"success": True})
    ((problem_id, calls, final_message, rooms),) = seen
    assert (problem_id, final_message, rooms) == ("hotel-0", "It costs 40 a night.", {"attic": "Ada"})
    assert [(c["name"], c["arguments"], json.loads(c["reply"])["price"]) for c in calls] == [
        ("book", {"guest": "Ada", "room": "attic"}, 40)
    ]


def test_a_checker_that_fails_is_a_fault_of_ours_and_never_a_verdict(mcp_world: Make) -> None:
    command = [sys.executable, str(RAW_SERVER), "exit"]
    environment = mcp_world(command=command, allowed_tools=None, reset="process", reset_tool=None)
    for checker, fault in [
        (raises, r"checker: unavailable: problem 'hotel-0': it raised KeyError: 'no such key'"),
        (decides("yes"), r"checker: unavailable: it returned 'yes', and must return True, False, or a dict"),
        (decides({}), r"checker: unavailable: it returned {}"),
        (asks_what_is_gone, r"act: unavailable: the server ended with status 7"),
    ]:
        environment.checker = checker
        with pytest.raises(EnvironmentFault) as caught:
            block_until(environment.start(mcp_server.problems(1)[0]).verdict("Done."))
        assert re.match(fault, str(caught.value))


def answers_of(environment: MCPEnvironment, ask: Callable[[Callable[..., str]], Any]) -> Any:
    """What a checker gets that asks so; the fault where it meets one."""
    got: list[Any] = []

    def checker(problem: Any, calls: Any, final_message: Any, call_tool: Any) -> bool:
        got.append(ask(call_tool))
        return True

    environment.checker = checker
    play(environment, mcp_server.problems(1)[0])
    return got[0]


def test_a_tool_that_refuses_its_checker_is_a_fault_with_its_words_unless_the_checker_expects_it(
    mcp_world: Make, mcp_url: str
) -> None:
    """A state tool that fails says nothing of the model: compared with what is wanted, its error would be a failure."""
    environment = mcp_world(**over_http(mcp_url))
    with pytest.raises(EnvironmentFault, match=r"^price: unavailable: .*there is no room called barn .*ToolError of"):
        answers_of(environment, lambda call_tool: json.loads(call_tool("price", {"room": "barn"})) == {})

    def expect(call_tool: Callable[..., str]) -> str:
        with pytest.raises(ToolError) as refused:
            call_tool("price", {"room": "barn"})
        return refused.value.message

    assert answers_of(environment, expect).endswith("there is no room called barn")


def test_a_checkers_crash_quotes_the_reply_it_had_last(mcp_world: Make, mcp_url: str) -> None:
    environment = mcp_world(**over_http(mcp_url))
    with pytest.raises(EnvironmentFault, match=r"it raised JSONDecodeError: .*; call_tool\('reset'\) .*'reset'"):
        answers_of(environment, lambda call_tool: json.loads(call_tool("reset", {})))


def test_a_checker_gets_a_list_as_one_array_and_the_model_a_block_per_element(mcp_world: Make, mcp_url: str) -> None:
    environment = mcp_world(**over_http(mcp_url, allowed_tools=None))
    cellar, attic = {"room": "cellar", "price": 30}, {"room": "attic", "price": 40}
    for limit, rooms in [(0, []), (40, [cellar]), (41, [attic, cellar])]:
        asked = {"cheaper_than": limit}
        assert json.loads(answers_of(environment, lambda call_tool: call_tool("rooms", asked))) == rooms  # noqa: B023
        shown = call(environment, "rooms", **asked).text
        assert shown == ("\n".join(json.dumps(room, indent=2) for room in rooms) or '{"result": []}')


def test_a_tools_own_object_with_a_result_stays_an_object() -> None:
    own = {"result": [1, 2]}
    texts: list[types.ContentBlock] = [
        types.TextContent(type="text", text=text) for text in (json.dumps(own, indent=2), "1", "2")
    ]
    assert json.loads(checker_text(types.CallToolResult(content=texts[:1], structured_content=own))) == own
    assert json.loads(checker_text(types.CallToolResult(content=texts[1:], structured_content=own))) == [1, 2]
    assert checker_text(types.CallToolResult(content=texts[1:])) == "1\n2"
    assert checker_text(types.CallToolResult(content=texts[1:2], structured_content={"result": 1})) == "1"


@pytest.mark.parametrize(
    ("checker", "line"),
    [
        ("tasks.custom.no_such_module:check", r"importing tasks.custom.no_such_module failed \(ModuleNotFoundError"),
        ("tasks.custom.mcp_server:chek", r"no chek in .*did you mean check"),
        ("tasks.custom.mcp_server:serve_http", r"serve_http is not a plain function"),
    ],
)
def test_a_checker_that_cannot_be_had_is_told_before_a_server_is_started(
    mcp_world: Make, checker: str, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        mcp_world(checker=checker, command=["no-such-program"])


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"url": "http://localhost/mcp"}, "exactly one of command"),
        ({"command": None}, "exactly one of command"),
        ({"command": []}, "command is empty"),
        ({"command": None, "url": "localhost/mcp"}, "http:// or https://"),
        ({"command": None, "url": "https://me:secret@host/mcp"}, "user name or password"),
        ({"command": None, "url": "http://h/mcp", "environment": {"A": "B"}}, "use headers"),
        ({"headers": {"A": "B"}}, "use environment"),
        ({"command": None, "url": "http://h/mcp", "reset": "process", "reset_tool": None}, "takes command"),
        ({"reset_tool": None}, "reset_tool names the tool"),
        ({"reset": "none"}, "reset_tool names the tool"),
        ({"allowed_tools": ["reset"]}, "could undo its own episode"),
        ({"allowed_tools": []}, "allowed_tools is empty"),
        ({"allowed_tools": ["book", "book"]}, "a tool twice"),
        ({"checker": "package.module"}, "tasks.custom.module:name"),
        ({"checker": "shop.checks:paid"}, r"not in tasks/custom/.* write tasks\.custom\.checks:paid"),
        ({"checker": "tasks.customs:paid"}, r"not in tasks/custom/"),
    ],
)
def test_settings_that_contradict_each_other_are_told_apart(changed: dict[str, Any], line: str) -> None:
    good = mcp_server.environment_settings().settings
    assert good is not None
    with pytest.raises(ValueError, match=line):
        MCPSettings.model_validate(good.model_dump() | changed)


def test_a_published_server_is_a_world_like_any_other() -> None:
    """mcp-server-time, from the registry of Python packages, as anybody would start it."""
    environment = load_environment(
        mcp_server.environment_settings(
            command=[sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"], reset="none", reset_tool=None,
            allowed_tools=["convert_time"], checker=f"{as_custom(__name__)}:is_two_there",
        )
    )  # fmt: skip
    question = {"source_timezone": "Asia/Tokyo", "time": "17:30", "target_timezone": "Asia/Kolkata"}
    (tool,) = environment.tools
    assert (tool.name, tool.read_only) == ("convert_time", True)
    for arguments, success in [(question, True), ({**question, "target_timezone": "Mars/Base"}, False)]:
        episode = environment.start(WORLDLESS)
        reply = block_until(episode.call("convert_time", arguments))
        assert reply.valid is success
        assert block_until(episode.verdict("It is 14:00 there.")).success is success
        episode.close()
    environment.close()


def is_two_there(problem: Any, calls: Any, final_message: Any, call_tool: Any) -> bool:
    return bool(calls) and "T14:00:00" in calls[-1]["reply"] and "14:00" in final_message
