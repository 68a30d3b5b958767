"""Episodes in worker processes: what they play, and what one costs that dies, hangs, leaks or sends nonsense."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import ReferenceTurn, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.base import Environment, EnvironmentFault, ToolReply, Verdict, block_until
from tasks.tools.pool.environment import PooledEnvironment, PooledEpisode
from tasks.tools.pool.messages import LENGTH_BYTES, MAX_BYTES, BadFrame, Frames, answer_row, frame, read_answer
from tasks.tools.replay import Script, play
from tests import tiny
from tests.tools.pool_worlds import WAYS_OUT, make, pooled, problem, problems

pytestmark = pytest.mark.slow  # they start processes
END = {"die": "ended with status 9", "leak": "ended with status 3", "hang": "gave no sign of life for"}


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


@pytest.fixture
def world() -> Iterator[PooledEnvironment]:
    made = pooled(2, max_restarts=1)
    yield made
    made.close()


def collect(world: Environment, chat: ChatFormat, folder: Path, calls: tuple[str, ...]) -> list[Trajectory]:
    """Six episodes of each of two problems, which make these calls and then say that they are done."""
    texts = [call_text(ToolCall(name=name, arguments={"word": name} if name == "note" else {})) for name in calls]
    script = [chat.encode(text) for text in (*texts, "Done.")]
    roomy = {"max_turns": 9, "max_tokens_per_turn": 200, "max_tokens_per_episode": 4000}
    sampling = tiny.ROOMY.model_copy(update=roomy)
    episodes = EngineEpisodes(ScriptedEngine([script], end_of_turn=chat.end_of_turn), chat, sampling)
    collector = Collector(episodes, world, max_concurrent_episodes=5, seed=0, stage="test")
    played = collector.collect([EpisodeKey(one, 0, sample) for one in problems(folder, 2) for sample in range(6)])
    assert [one.fault for one in played] == [None] * 12
    return played


@pytest.mark.parametrize("trouble", ["die", "hang", "leak"])
def test_a_worker_that_ends_costs_its_episodes_a_restart_and_the_trajectories_are_those_of_one_process(
    trouble: str, chat: ChatFormat, tmp_path: Path
):
    """Each of two problems makes the worker of one of its episodes end."""
    calls = ("note", "wait", trouble, "note")
    for number in range(2):  # in this process nothing happens
        (tmp_path / f"once{number}").write_text("0", encoding="utf-8")
    alone = collect(make({}), chat, tmp_path, calls)
    for number in range(2):
        (tmp_path / f"once{number}").unlink()
    world = pooled(2, max_restarts=9, timeout_seconds=8.0 if trouble == "hang" else 120.0)
    world.inner.limits = world.inner.limits.model_copy(update={"max_attempts": 9})
    try:
        assert collect(world, chat, tmp_path, calls) == alone
        assert world.ended
        assert all(END[trouble] in how for how in world.ended)
    finally:
        world.close()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_changes_no_trajectory(num_workers: int, chat: ChatFormat, tmp_path: Path):
    alone = collect(make({}), chat, tmp_path, ("note", "wait", "note"))
    world = pooled(num_workers)
    try:
        assert collect(world, chat, tmp_path, ("note", "wait", "note")) == alone
        assert len(world.workers) == num_workers
    finally:
        world.close()


def test_an_episode_stays_in_its_worker_and_its_state_is_its_own(world: PooledEnvironment, tmp_path: Path):
    episodes = [world.start(problem(tmp_path), stream=str(number)) for number in range(8)]
    pids = {block_until(episode.call("pid", {})).text for episode in episodes}
    assert pids == {str(worker.child.pid) for worker in world.workers.values()}
    assert len(pids) == 2
    for word, said in (("a", '["a"]'), ("b", '["a", "b"]')):
        assert {block_until(episode.call("note", {"word": word})).text for episode in episodes} == {said}


def test_who_no_longer_waits_for_an_answer_ends_no_worker(world: PooledEnvironment, tmp_path: Path):
    """The next question is answered; and where the worker dies, all who still wait are told."""
    episode = world.start(problem(tmp_path), stream="p")
    assert isinstance(episode, PooledEpisode)
    for name in ("wait", "pid"):
        episode.call(name, {}).cancel()
    assert episode.call("note", {"word": "on"}).result(timeout=60).text == '["on"]'
    assert not world.ended
    episode.call("wait", {}).cancel()
    for asked in [episode.call("die", {}), episode.call("pid", {})]:
        with pytest.raises(EnvironmentFault, match="ended with status 9"):
            asked.result(timeout=60)


def test_beyond_the_limit_of_restarts_the_run_ends_with_the_cause_and_close_leaves_no_process(tmp_path: Path):
    world = pooled(1, max_restarts=0)
    child = psutil.Process(world.start(problem(tmp_path)).worker.child.pid)  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFault, match=r"worker: unavailable: .* ended with status 9"):
        block_until(world.start(problem(tmp_path)).call("die", {}))
    with pytest.raises(ValueError, match=r"ended, more than environment\.pool\.max_restarts \(0\) .* status 9"):
        world.start(problem(tmp_path))
    world.close()
    assert not child.is_running()


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("make", "tests.tools.pool_worlds:missing", "has no attribute 'missing'"),
        ("make", "tests.tools.nowhere:make", "No module named 'tests.tools.nowhere'"),
        ("memory_bytes", "much", "not supported between|an integer"),
    ],
)
def test_what_a_worker_cannot_open_is_what_its_first_episode_says(
    part: str, value: str, says: str, world: PooledEnvironment
):
    world.opening[part] = value
    with pytest.raises(RuntimeError, match=says):
        block_until(world.start(problem(Path())).call("pid", {}))


def test_a_machine_with_less_memory_than_the_pool_allows_plays_all_the_same(
    world: PooledEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`ulimit -d` is the hard limit of what it starts, here 0.86 GiB of the pool's 1."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -d 900000\nexec {sys.executable} "$@"\n', encoding="utf-8")
    limited.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(limited))
    assert block_until(world.start(problem(tmp_path)).call("note", {"word": "a"})).text == '["a"]'


EXPECTED: dict[str, type[Exception]] = {
    "exit": RuntimeError, "ValueError": ValueError, "RecursionError": RuntimeError, "lost connection": EnvironmentFault,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_OUT)
def test_however_a_users_code_leaves_it_is_the_same_error_as_in_one_process_and_no_worker_ends(
    way: str, world: PooledEnvironment, tmp_path: Path
):
    for step in ("start", "call", "end_turn", "verdict"):
        turns = [ReferenceTurn(calls=[ToolCall(name="leave", arguments={})], answer="Done.")] * 2
        given = {"category": way, "reference": turns, "world": {"leaves_at": step}}
        script = Script.reference(problem(tmp_path).model_copy(update=given))
        expected = EnvironmentFault if step == "call" else EXPECTED[way]
        for played in (*play(make({}), [script]), *play(world, [script])):
            assert isinstance(played.error, expected), (step, played.error)
            if way == "exit":
                assert "SystemExit" in str(played.error)
    assert world.ended == []


@pytest.mark.parametrize(
    ("call", "how"), [("die_with_a_child", "ended with status 9"), ("choke", "gave no sign of life for")]
)
def test_a_tool_that_waits_ends_its_worker_where_no_answer_can_come(call: str, how: str, tmp_path: Path):
    """A forked child holds the connection open; or the event loop that would time the tool is blocked by it."""
    world = pooled(1, timeout_seconds=1.0 if call == "choke" else 120.0)
    try:
        with pytest.raises(EnvironmentFault, match=how):
            world.start(problem(tmp_path)).call(call, {}).result(timeout=300)  # type: ignore[union-attr]
    finally:
        world.close()


GOOD_VERDICT: list[Any] = [True, {"a": False}, {"seen": [1, None]}]


def test_an_answer_is_of_its_question_and_has_the_types_that_it_declares():
    assert read_answer({"reply": ["x", True, None, 0]}, "call") == ToolReply("x")
    assert read_answer({"verdict": GOOD_VERDICT}, "verdict") == Verdict(*GOOD_VERDICT)
    assert read_answer({"done": True}, "end_turn") is None
    with pytest.raises(EnvironmentFault, match="down: timeout: late"):
        read_answer({"fault": ["late", "down", "timeout", 1]}, "verdict")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("call", {"reply": [5, "x", None, "a"]}),
        ("call", {"reply": ["x", True, "sunshine", 0]}),
        ("call", {"reply": "four"}),
        ("call", {"verdict": GOOD_VERDICT}),
        ("call", {"done": True}),
        ("verdict", {"verdict": ["no", {}, {}]}),
        ("verdict", {"verdict": [True, {"a": 1}, {}]}),
        ("verdict", {"verdict": ["no", 3, []]}),
        ("verdict", {"fault": ["late", "down", "sunshine", 0]}),
        ("close", {}),
        ("start", {"reply": ["x", True, None, 0]}),
    ],
)
def test_an_answer_of_another_shape_or_to_another_question_is_no_message(step: str, message: dict):
    with pytest.raises(BadFrame):
        read_answer(message, step)


def test_what_a_worker_would_send_with_other_types_is_refused_there():
    with pytest.raises(BadFrame, match=r"verdict is of another shape: .* dictionary"):
        answer_row(Verdict(True, details=["no"]))  # type: ignore[arg-type]


def test_what_is_too_long_or_no_json_is_no_message():
    assert list(Frames().take(frame({"a": 1}) + frame({"b": "\ud800"}))) == [{"a": 1}, {"b": "\ud800"}]
    with pytest.raises(BadFrame, match="beyond the limit"):
        list(Frames().take((MAX_BYTES + 1).to_bytes(LENGTH_BYTES, "big")))
    for text in (b"[1]", b"{", b"[" * 100_000):
        with pytest.raises(BadFrame):
            list(Frames().take(len(text).to_bytes(LENGTH_BYTES, "big") + text))
    with pytest.raises(ValueError, match="no JSON"):
        frame({"a": object()})
