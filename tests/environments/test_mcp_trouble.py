"""What an MCP server can do wrong: each is a fault of ours that says what it was, and the next episode goes on."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tasks.core.records import ReferenceTurn, ToolCall
from tasks.environments.mcp import stdio as mcp_stdio
from tasks.environments.mcp.connector import MAX_MESSAGE_BYTES
from tasks.environments.mcp.environment import MCPEnvironment, MCPEpisode
from tasks.stages.curate.references import Replays, replay_references
from tasks.tools.base import Answer, Environment, EnvironmentFault, block_until
from tasks.tools.retries import RetryingEnvironment
from tests.conftest import ROOT
from tests.environments import mcp_server, raw_http
from tests.environments.test_mcp import WORLDLESS, children

pytestmark = pytest.mark.slow
PATIENCE = 120  # seconds, on a busy machine

RAW = Path(__file__).with_name("raw_server.py")
Make = Callable[..., MCPEnvironment]


def raw(how: str, *arguments: str, **changed: Any) -> dict[str, Any]:
    """Settings of a server that misbehaves, each episode with its own."""
    command = [sys.executable, str(RAW), how, *arguments]
    return {"command": command, "allowed_tools": None, "reset": "process", "reset_tool": None, **changed}


def act(environment: Environment, name: str = "act", **arguments: Any) -> str:
    episode = environment.start(WORLDLESS)
    try:
        return block_until(episode.call(name, arguments)).text
    finally:
        episode.close()


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("exit", "act: unavailable: the server ended with status 7; it last logged: first line | last line: disk full"),
        ("garbage", "act: unavailable: the server floods its stdout with what is no MCP message and was stopped"),
        ("long line", "act: unavailable: the server sent a message of more than 8 MB and was stopped"),
        ("closes stdout", "act: unavailable: the server closed its stdout"),
        ("error -32700", "act: unavailable: the server answered: no to call 1"),
        ("error -32600", "act: unavailable: the server answered: no to call 1"),
        ("error -32601", "act: unavailable: the server answered: no to call 1"),
        ("error -32000", "act: unavailable: the server closed the connection: no to call 1"),
        ("error -32001", "act: unavailable: the server answered: no to call 1"),
        ("error -32002", "act: unavailable: the server answered: no to call 1"),
        ("nonsense", "act: unavailable: the server breaks the protocol: "),
    ],
)
def test_a_call_the_server_cannot_answer_is_a_fault_that_says_why(
    mcp_world: Make, monkeypatch: pytest.MonkeyPatch, how: str, fault: str
) -> None:
    if how == "closes stdout":  # and stays, which is found out by waiting
        monkeypatch.setattr(mcp_stdio, "EXIT_SECONDS", 0.5)
    environment = mcp_world(**raw(how))
    for _ in range(2):  # an episode after it meets a fresh server, which does the same
        with pytest.raises(EnvironmentFault) as caught:
            act(environment)
        assert str(caught.value).startswith(fault)


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("endless", "act: unavailable: the server sent a message of more than 8 MB"),
        ("packed", "act: unavailable: the server sent a packed answer, though asked for none"),
        ("breaks off", "act: unavailable: the server could not be used: RemoteProtocolError: Server disconnected"),
        ("401", "act: unavailable: the server answered HTTP 401"),
        ("404", "act: unavailable: the server answered HTTP 404"),
        ("429", "act: rate_limited: the server answered HTTP 429"),
        ("503", "act: unavailable: the server answered HTTP 503"),
        ("504", "act: timeout: the server answered HTTP 504"),
        ("400", "act: unavailable: the server answered HTTP 400"),
        ("error 503 -32603", "act: unavailable: the server answered HTTP 503"),
        ("error 403 -32603", "act: unavailable: the server answered HTTP 403"),
        ("error 429 -32603", "act: rate_limited: the server answered HTTP 429"),
        ("error 200 -32601", "act: unavailable: the server answered: no such customer"),
    ],
)
def test_the_same_over_http(mcp_world: Make, how: str, fault: str) -> None:
    with raw_http.serving() as url:
        environment = mcp_world(command=None, url=url, allowed_tools=None, reset="none", reset_tool=None, max_servers=1)
        for _ in range(2):
            with pytest.raises(EnvironmentFault) as caught:
                act(environment, how=how)
            assert str(caught.value).startswith(fault)
            assert act(environment, how="well") == "well"


def end_of(answer: Answer) -> str:
    """How a call ends: its text, or its fault."""
    try:
        return block_until(answer).text
    except EnvironmentFault as fault:
        return str(fault)


@contextmanager
def sharing(mcp_world: Make) -> Iterator[tuple[MCPEpisode, MCPEpisode]]:
    """Two episodes in one session over HTTP."""
    with raw_http.serving() as url:
        environment = mcp_world(command=None, url=url, allowed_tools=None, reset="none", reset_tool=None, max_servers=1)
        episodes = environment.start(WORLDLESS), environment.start(WORLDLESS)
        for episode in episodes:
            assert end_of(episode.call("act", {"how": "fine"})) == "fine"
        yield episodes
        for episode in episodes:
            episode.close()


def end_both(one: MCPEpisode, how: str, another: MCPEpisode, later: str) -> tuple[str, str]:
    """The second is asked before the first, and answered after it."""
    held = another.call("act", {"how": f"held {later}"})
    try:
        assert raw_http.HELD.wait(PATIENCE)
        first = end_of(one.call("act", {"how": how}))
    finally:
        raw_http.RELEASED.set()
    second = end_of(held)
    raw_http.HELD.clear()
    raw_http.RELEASED.clear()
    return first, second


def test_episodes_that_share_a_session_get_the_answers_that_each_gets_alone(mcp_world: Make) -> None:
    """An HTTP status belongs to one call, not to the connection."""
    errors = ("200 -32603", "200 -32601", "400 -32602", "429 0", "503 -32603")
    ways = ["fine", "504", *(f"error {error}" for error in errors)]
    with sharing(mcp_world) as (one, another):
        alone = {how: end_of(one.call("act", {"how": how})) for how in ways}
        assert len(set(alone.values())) == len(ways)
        for how, later in product(ways, ways):
            assert end_both(one, how, another, later) == (alone[how], alone[later])


def test_a_session_that_the_server_forgot_still_answers_the_calls_under_way(mcp_world: Make) -> None:
    """The next calls are made in a new one, and the old one ends with its last answer."""
    with sharing(mcp_world) as (one, another):
        sessions = one.environment.sessions.open_sessions
        (before,) = sessions
        held = another.call("act", {"how": "held fine"})
        assert isinstance(held, Future)
        try:
            assert raw_http.HELD.wait(PATIENCE)
            assert "the server answered HTTP 404" in end_of(one.call("act", {"how": "404"}))
            assert end_of(one.call("act", {"how": "fine"})) == "fine"
            assert not held.done() and len(sessions) == 2
        finally:
            raw_http.RELEASED.set()
        assert end_of(held) == "fine"
        raw_http.HELD.clear()
        raw_http.RELEASED.clear()
        assert end_of(another.call("act", {"how": "fine"})) == "fine"
        until = time.monotonic() + PATIENCE
        while before in sessions and time.monotonic() < until:
            time.sleep(0.01)
        assert len(sessions) == 1 and before not in sessions


@pytest.mark.parametrize(("how", "why"), [("endless", "more than 8 MB"), ("breaks off", "RemoteProtocolError")])
def test_an_answer_that_ends_a_session_is_told_to_all_who_share_it(mcp_world: Make, how: str, why: str) -> None:
    with sharing(mcp_world) as (one, another):
        for end in end_both(one, how, another, "fine"):
            assert end.startswith("act: unavailable: the server ")
            assert why in end


def test_an_http_server_killed_in_mid_call_is_a_fault_and_stays_one_while_it_is_gone(
    mcp_world: Make, tmp_path: Path
) -> None:
    command = [sys.executable, str(mcp_server.FILE), "--http", "--trouble"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    environment = mcp_world(command=None, url=url, allowed_tools=None)
    kill_once_asked(tmp_path / "asked", process)
    with pytest.raises(EnvironmentFault, match=r"hang: unavailable: the server "):
        act(environment, "hang", there=str(tmp_path / "asked"))
    with pytest.raises(EnvironmentFault, match=r"server: unavailable: the server could not be used: ConnectError"):
        act(environment, "price", room="attic")
    process.wait()


def test_an_event_over_http_is_bounded_too(mcp_world: Make, mcp_url: str) -> None:
    environment = mcp_world(command=None, url=mcp_url, allowed_tools=None)
    with pytest.raises(EnvironmentFault, match=r"flood: unavailable: the server .*exceed"):
        act(environment, "flood", megabytes=20)
    assert act(environment, "price", room="attic").startswith("{")


def test_memory_stays_bounded_whatever_a_server_writes(mcp_world: Make) -> None:
    """125 MB on stderr are read and the end of them kept; an endless line ends at 8 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert act(mcp_world(**raw("stderr"))) == "done"
    with pytest.raises(EnvironmentFault):
        act(mcp_world(**raw("long line")))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 * MAX_MESSAGE_BYTES / 1024


def test_a_server_that_knows_no_handshake_is_spoken_to_without(mcp_world: Make) -> None:
    environment = mcp_world(**raw("modern"))
    assert environment.describe()["server"] == {"name": "raw", "version": "3"}
    assert act(environment) == "done"


def test_a_stray_print_is_forgiven(mcp_world: Make) -> None:
    assert act(mcp_world(**raw("chatty"))) == "done"


@pytest.mark.parametrize(
    ("code", "type"), [(-32602, "invalid_arguments"), (-32603, "conflict"), (0, "conflict"), (1404, "conflict")]
)
def test_a_call_that_is_refused_by_a_json_rpc_error_is_asked_once_and_the_episode_goes_on(
    mcp_world: Make, code: int, type: str
) -> None:
    """-32603 is what most servers make of an exception, 0 what the SDK for Python makes of it."""
    bare = mcp_world(**raw(f"error {code}"))
    episode = RetryingEnvironment(bare, bare.limits).start(WORLDLESS)
    for number in (1, 2):
        reply = block_until(episode.call("act", {}))
        error = {"error": {"type": type, "message": f"no to call {number}"}}
        assert (json.loads(reply.text), reply.valid, reply.error, reply.num_retries) == (error, False, type, 0)
    episode.close()


def test_the_same_over_http_where_the_status_does_not_blame_the_server(mcp_world: Make) -> None:
    with raw_http.serving() as url:
        environment = mcp_world(command=None, url=url, allowed_tools=None, reset="none", reset_tool=None)
        for how in ("error 200 -32603", "error 400 -32602", "error 422 1"):
            assert "no such customer" in act(environment, how=how)


def test_a_server_that_answers_every_call_with_an_error_solves_no_reference(mcp_world: Make) -> None:
    """As with a back end that is down."""
    environment = mcp_world(**raw("error -32603"))
    environment.checker = lambda problem, calls, final_message, call_tool: calls[-1]["reply"] == "done"
    reference = [ReferenceTurn(calls=[ToolCall(name="act", arguments={})], answer="")]
    (replay,) = replay_references(Replays(environment), [WORLDLESS.model_copy(update={"reference": reference})])
    assert replay.score == 0 and replay.fault.startswith("failed checks: success; act answered {")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (raw("dies at start"), r"the server ended with status 1; it last logged: no database at /nowhere\. Without it"),
        (
            raw("dies as Node does"),
            r"it last logged: Error: Cannot find module 'x' … at .* \| \} \| Node\.js v20\.20\.2",
        ),
        (raw("silent", start_timeout_seconds=0.3), r"the server did not answer within 0\.3 s of its start"),
        (raw("twins"), r"the server lists two tools called 'act'"),
        (raw("pages 101"), r"the server lists its tools on more than 100 pages"),
        (raw("doubling"), r"tool 'act': .*its references lead to more than a billion parts.*or leave the tool out"),
        (raw("nested"), r"the server lists a tool 'act' whose schema is nested deeper than 64 levels"),
        (raw("x", command=["no-such-program", "a b"]), r"could not be started: .*`no-such-program 'a b'` works"),
        (
            {"command": None, "url": "http://127.0.0.1:9/mcp?tenant=sesame"},
            r"the server could not be used: ConnectError: .*check by hand that http://127\.0\.0\.1:9/mcp works",
        ),
    ],
)
def test_a_server_that_does_not_start_is_one_clear_line(mcp_world: Make, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        mcp_world(**changed)
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_tools_on_a_hundred_pages_are_all_listed(mcp_world: Make) -> None:
    assert [tool.name for tool in mcp_world(**raw("pages 100")).tools] == [f"act-{page}" for page in range(1, 101)]


@pytest.mark.timeout(PATIENCE)  # each would take longer than the universe has been there
@pytest.mark.parametrize("how", ["promises a pattern", "promises to double"])
def test_no_schema_of_results_holds_up_the_process(mcp_world: Make, how: str) -> None:
    assert act(mcp_world(**raw(how)), what="a") == "done"


def test_a_server_that_ignores_its_end_is_killed(mcp_world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_stdio, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(mcp_stdio, "TERMINATE_SECONDS", 0.1)
    others = len(children())
    environment = mcp_world(**raw("stubborn"))
    assert act(environment) == "done"
    environment.close()
    assert len(children()) == others


def test_a_new_session_with_other_tools_is_a_fault_that_shows_the_difference(mcp_world: Make, tmp_path: Path) -> None:
    environment = mcp_world(**raw("changes", str(tmp_path / "changed")))
    assert act(environment) == "done"
    (tmp_path / "changed").touch()
    with pytest.raises(
        EnvironmentFault, match=r"server: unavailable: .*tools\.act\.parameters.*what is now called thing"
    ):
        act(environment)


def test_tools_that_change_under_an_episode_are_a_fault_at_its_next_call(mcp_world: Make) -> None:
    environment = mcp_world(trouble=True)
    episode = environment.start(WORLDLESS)
    assert block_until(episode.call("rebuild", {})).text == "rebuilt"
    with pytest.raises(EnvironmentFault, match=r"tools\.price\.parameters"):
        block_until(episode.call("price", {"room": "attic"}))
    episode.close()


def within(seconds: float, look: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def kill_once_asked(there: Path, process: psutil.Process | subprocess.Popen[str]) -> None:
    """Kill the server that was told to hang, as soon as it does."""

    def kill() -> None:
        within(PATIENCE, there.exists)
        process.kill()

    threading.Thread(target=kill, daemon=True).start()


@contextmanager
def hasty(environment: MCPEnvironment, seconds: float) -> Iterator[None]:
    """Inside, a call may take so long and no more."""
    patient = environment.limits
    environment.limits = patient.model_copy(update={"timeout_seconds": seconds})
    yield
    environment.limits = patient


def test_a_server_killed_in_mid_call_costs_its_episode_and_no_other(mcp_world: Make, tmp_path: Path) -> None:
    others = [child.pid for child in children()]
    environment = mcp_world(trouble=True, reset="process", reset_tool=None, max_servers=2)
    episode, other = environment.start(WORLDLESS), environment.start(WORLDLESS)
    (victim,) = [child for child in children() if child.pid not in others]
    assert block_until(episode.call("price", {"room": "attic"})).valid
    assert block_until(other.call("price", {"room": "attic"})).valid
    kill_once_asked(tmp_path / "asked", victim)
    with pytest.raises(EnvironmentFault, match="hang: unavailable: the server was ended by SIGKILL"):
        block_until(episode.call("hang", {"there": str(tmp_path / "asked")}))
    with pytest.raises(EnvironmentFault, match="price: unavailable: the server was ended by SIGKILL"):
        block_until(episode.call("price", {"room": "attic"}))  # a fresh server would not know what the episode did
    assert block_until(other.call("price", {"room": "attic"})).valid
    for item in (episode, other):
        item.close()
    assert act(environment, "price", room="attic").startswith("{")


def test_a_call_that_hangs_is_a_timeout_and_its_session_serves_no_other_episode(mcp_world: Make, mcp_url: str) -> None:
    environment = mcp_world(command=None, url=mcp_url, allowed_tools=None)
    (session,) = environment.sessions.open_sessions
    episode = environment.start(WORLDLESS)
    assert block_until(episode.call("price", {"room": "attic"})).valid
    with hasty(environment, 0.3), pytest.raises(EnvironmentFault) as caught:
        block_until(episode.call("hang", {}))
    assert str(caught.value) == "hang: timeout: no answer in 0.3 s"
    episode.close()
    assert act(environment, "price", room="attic").startswith("{")
    within(PATIENCE, lambda: session not in environment.sessions.open_sessions)


@pytest.mark.parametrize(
    ("reset", "changed"),
    [
        ("process", {}),
        ("scratch", {"environment": {"FOLDER": {"value": "{scratch}"}}}),
        ("tool", {"reset_tool": "reset"}),
        ("none", {}),
        ("none", {"command": None}),
    ],
    ids=["process", "scratch", "tool", "none", "none over HTTP"],
)
def test_after_a_call_that_hangs_its_server_the_next_episodes_are_answered(
    mcp_world: Make, mcp_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reset: str, changed: dict[str, Any]
) -> None:
    """A hanging server lists no tools either; the one over HTTP does, and is kept."""
    monkeypatch.setattr(mcp_stdio, "GRACE_SECONDS", 0.1)
    name, arguments, hang = "act", {"what": "x"}, ("act", {"what": "hang"})
    if "command" in changed:
        changed, name, arguments, hang = {**changed, "url": mcp_url}, "price", {"room": "attic"}, ("hang", {})
    environment = mcp_world(**raw("hangs", str(tmp_path / "never"), reset=reset, max_servers=1, **changed))
    before = act(environment, name, **arguments)
    for session in environment.sessions.open_sessions:
        session.start_timeout_seconds = 0.3
    episode = environment.start(WORLDLESS)
    with hasty(environment, 0.3), pytest.raises(EnvironmentFault, match=r"timeout: no answer in 0\.3 s"):
        block_until(episode.call(*hang))
    episode.close()
    assert [act(environment, name, **arguments) for _ in range(2)] == [before, before]


def test_a_server_that_is_busy_with_a_call_keeps_it_and_is_not_replaced(mcp_world: Make, tmp_path: Path) -> None:
    """It lists no tools meanwhile, which is the fault of the episode that asks for them."""
    environment = mcp_world(**raw("hangs", str(tmp_path / "go on"), reset="none", max_servers=1))
    assert act(environment) == "done"
    (session,) = environment.sessions.open_sessions
    episode = environment.start(WORLDLESS)
    assert block_until(episode.call("act", {})).valid
    answer = episode.call("act", {"what": "hang"})
    session.start_timeout_seconds = 0.1
    with pytest.raises(EnvironmentFault, match="server: timeout: the server did not list its tools"):
        act(environment)
    session.start_timeout_seconds = PATIENCE
    (tmp_path / "go on").touch()
    assert block_until(answer).text == "done"
    episode.close()
    assert act(environment) == "done"
    assert environment.sessions.open_sessions == {session}


def test_only_a_call_that_is_annotated_as_harmless_is_repeated_in_place(
    mcp_world: Make, mcp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call may take 0.3 s; its repetition, after the pause, as long as it needs."""
    bare = mcp_world(command=None, url=mcp_url, allowed_tools=None)
    environment, patient = RetryingEnvironment(bare, bare.limits), bare.limits

    async def pause(seconds: float) -> None:
        bare.limits = patient

    loop = SimpleNamespace(**{**vars(asyncio), "sleep": pause})
    monkeypatch.setattr("tasks.tools.retries.asyncio", loop)
    for tool in ("hang_once", "hang_once_unannotated"):
        episode = environment.start(WORLDLESS)
        assert block_until(episode.call("price", {"room": "attic"})).valid
        with hasty(bare, 0.3):
            if tool == "hang_once":
                reply = block_until(episode.call(tool, {}))
                assert (reply.text, reply.num_retries) == ("answer 2", 1)
            else:
                with pytest.raises(EnvironmentFault, match=rf"{tool}: timeout: no answer in 0\.3 s"):
                    block_until(episode.call(tool, {}))
        episode.close()


LEAVES_A_SERVER = """
import sys, time
from pathlib import Path
from tasks.environments.mcp import stdio as mcp_stdio
from tests.environments import mcp_server
mcp_stdio.GRACE_SECONDS = mcp_stdio.TERMINATE_SECONDS = 0.2
changed = {"trouble": True}
if sys.argv[2:]:
    changed = {"command": sys.argv[2:], "allowed_tools": None, "reset": "process", "reset_tool": None}
environment = mcp_server.make_environment(**changed)
tool = environment.tools[-1].name if sys.argv[2:] else "hang"
there = Path(sys.argv[1])
answer = environment.start(mcp_server.problems(1)[0]).call(tool, {"there": str(there)} if tool == "hang" else {})
while tool == "hang" and not there.exists():
    time.sleep(0.01)
if tool != "hang":
    answer.result()
print("ready", flush=True)
if tool == "hang":
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "server"), [("killed", []), ("exits", [sys.executable, str(RAW), "stubborn"])], ids=["killed", "exits"]
)
def test_no_server_outlives_the_process_that_started_it(end: str, server: list[str], tmp_path: Path) -> None:
    """A server in mid-call meets the end of its stdin; one that would stay even so is ended on the way out."""
    command = [sys.executable, "-c", LEAVES_A_SERVER, str(tmp_path / "asked"), *server]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    servers = psutil.Process(process.pid).children() if process.stdout.readline() == b"ready\n" else []
    assert len(servers) == 1
    if end == "killed":
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == (-signal.SIGKILL if end == "killed" else 0)
    _, alive = psutil.wait_procs(servers, timeout=PATIENCE)
    assert not alive
