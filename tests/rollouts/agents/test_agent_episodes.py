"""Agents that drive themselves, played by the collector: what our own loop plays they play alike, and what they do
wrong is told to them, recorded, or a fault of theirs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import ChatFormat
from tasks.chat.formats.recipe import RECIPE
from tasks.core.records import Group, Problem, Score, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.environments.catalog import load_environment
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.gateway.completions import CompletionRequest, ProtocolError
from tasks.gateway.server import Gateway
from tasks.rewards.stored import turn_tokens
from tasks.rollouts.agents.kind import AgentEpisodes
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.engine import never
from tasks.rollouts.kinds import kind_of
from tasks.rollouts.under_way import restore, suspend
from tasks.tools.judge.prompt import Judged, encode
from tests import tiny
from tests.conftest import ROOT
from tests.learning.test_plain_grpo import by_the_trainer
from tests.rollouts.agents.conftest import (
    AGENTS,
    VERDICT,
    Imitator,
    agent_settings,
    agent_world,
    collect,
    reference_texts,
)
from tests.tools.judge.endpoint import Endpoint as JudgeEndpoint
from tests.tools.judge.endpoint import judge_row, serve
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow
PROGRAM = [sys.executable, str(Path(__file__).with_name("scripted_agents.py"))]
AS_OURS = {"environment": {"PYTHONPATH": {"value": str(ROOT)}}}
ALL = [problem for problem in tiny.problems(340, max_level=4) if len(problem.requests) == 1]
PROBLEMS = list({problem.requests[0]: problem for problem in ALL}.values())[:64]
CALLING = [problem for problem in PROBLEMS if len(reference_texts(problem)) > 2]


def imitator(chat: ChatFormat) -> Imitator:
    return Imitator(chat, {problem.requests[0]: reference_texts(problem) for problem in PROBLEMS})


def played_by(agent: str, chat: ChatFormat, problems: Sequence[Problem], **changed: Any) -> list[Trajectory]:
    options = {key: changed.pop(key) for key in ("sampling", "at_once") if key in changed}
    world = agent_world(object=f"{AGENTS}:{agent}", **changed)
    return collect(world, imitator(chat), chat, problems, **options)


def as_rows(played: Sequence[Trajectory]) -> list[dict[str, Any]]:
    return [item.to_row() | {"environment_fingerprint": ""} for item in played]


def test_an_agent_in_our_world_plays_what_our_own_loop_plays_and_trains_alike(chat: ChatFormat, tmp_path: Path):
    """Ids, masks, log-probs, turns, verdicts, and the gradient of a GRPO step; a function and a program."""
    some = CALLING[:6]
    own = collect(TravelDesk(), imitator(chat), chat, some)
    theirs = played_by("play", chat, some)
    assert [item.outcome for item in own] == ["success"] * 6
    assert as_rows(theirs) == as_rows(own)
    program = collect(agent_world(command=PROGRAM, object=None, **AS_OURS), imitator(chat), chat, some[:2])
    assert as_rows(program) == as_rows(own[:2])
    folder = tiny.model_folder(tmp_path / "m")
    scores = [Score(float(number % 2), {}) for number in range(6)]
    gradients = [by_the_trainer(folder, [Group("p", "c", played, scores)])[1] for played in (own, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)
    assert gradients[0].abs().max() > 1e-3


def test_what_an_agent_reads_of_a_message_is_stored_beside_its_text_as_our_own_loop_stores_it():
    """In a format whose messages have marks, which only the policy writes."""
    chat = ChatFormat(tiny.tokenizer(), source="test")
    chat.call_format = RECIPE
    policy: dict[str, Sequence[str]] = {PROBLEMS[0].requests[0]: [RECIPE.closing("Yes, done.")]}
    own, theirs = (
        collect(world, Imitator(chat, policy), chat, PROBLEMS[:1]) for world in (TravelDesk(), agent_world())
    )
    assert as_rows(theirs) == as_rows(own)
    assert (own[0].turns[0].text, own[0].turns[0].answer) == ("Yes, done.\n<TASK_FINISHED>", "Yes, done.")


def test_calls_that_the_policy_did_not_make_are_not_counted_as_its_own(chat: ChatFormat):
    (own,) = collect(TravelDesk(), imitator(chat), chat, CALLING[:1])
    assert as_rows(played_by("calls_on_its_own", chat, CALLING[:1])) == as_rows([own])


def test_64_agents_are_under_way_at_once(chat: ChatFormat):
    """Each waits for 63 others before it asks."""
    played = played_by("meets_63_others", chat, PROBLEMS, at_once=64)
    assert [item.outcome for item in played] == ["success"] * 64


@pytest.mark.parametrize(
    ("agent", "changed", "told"),
    [
        ("crashes", {}, "raised KeyError"),
        ("hangs", {"deadline_seconds": 0.2}, "did not end in 0.2 s of its own"),
        ("never_asks", {}, "without a turn"),
    ],
)
def test_an_agent_that_fails_is_a_fault_tried_again_and_dropped(
    agent: str, changed: dict[str, Any], told: str, chat: ChatFormat
):
    (played,) = played_by(agent, chat, PROBLEMS[:1], **changed)
    assert (played.outcome, played.sequences) == ("environment_error", [])
    assert told in str(played.fault)


def test_a_program_that_crashes_tells_its_last_line_and_leaves_nothing_behind(chat: ChatFormat, tmp_path: Path):
    """It starts a child that would sleep for ten minutes; the key is not in the message."""
    child = f"import time,os; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import subprocess, sys, os, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while not os.path.exists({str(tmp_path / 'child')!r}): time.sleep(0.01)\n"
        f"print('x' * 100_000, flush=True); sys.exit('no flight for ' + os.environ['OPENAI_API_KEY'])"
    )
    world = agent_world(command=[sys.executable, "-c", code], object=None)
    (played,) = collect(world, imitator(chat), chat, PROBLEMS[:1])
    assert "ended with status 1: no flight for [redacted]" in str(played.fault)
    until = time.monotonic() + 60
    while _lives(int((tmp_path / "child").read_text() or 0)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(int((tmp_path / "child").read_text()))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_a_flood_is_refused_and_what_was_answered_counts(chat: ChatFormat):
    """10 MB: 413. A thousand requests: ten turns are written, then the budget is told; too many at once: 429."""
    (played,) = played_by("floods", chat, PROBLEMS[:1])
    assert (played.outcome, played.limit, len(played.turns)) == ("max_turns", "max_turns", 10)


def test_another_key_is_refused_and_one_of_an_ended_episode_too(chat: ChatFormat):
    world, keys = agent_world(object=f"{AGENTS}:uses_another_key"), list[str]()

    class Noting(AgentEpisodes):
        def complete(self, key: str, request: CompletionRequest) -> Any:
            keys.append(key)
            return super().complete(key, request)

    kind = Noting(imitator(chat), chat, tiny.ROOMY)
    collector = Collector(kind, world, max_concurrent_episodes=1, seed=0, stage="test")
    (played,) = collector.collect([EpisodeKey(PROBLEMS[0], 0, 0)])
    assert played.outcome == "success"
    with pytest.raises(ProtocolError) as refused:
        kind.complete(keys[-1], CompletionRequest("policy", []))
    assert refused.value.status == 401
    kind.close()


@pytest.mark.parametrize(
    ("agent", "begun"), [("edits_its_history", ["edited_history"]), ("asks_thrice_at_once", ["parallel"] * 2)]
)
def test_what_does_not_extend_a_sequence_begins_one(agent: str, begun: list[str], chat: ChatFormat):
    """The three answers at once are of equal tokens, and each turn has those of its own sequence."""
    (played,) = played_by(agent, chat, CALLING[:1])
    assert [sequence.begun for sequence in played.sequences] == ["", *begun]
    assert len(turn_tokens(played)) == len(played.turns)
    assert sum(len(sequence.sampled_ids) for sequence in played.sequences) == played.num_sampled_tokens
    assert played.turns[-1].sequence == len(begun)
    assert played.fault is None


def test_what_cannot_be_honoured_is_an_error_and_a_stop_string_cuts_what_was_sampled(chat: ChatFormat):
    (played,) = played_by("asks_for_too_much", chat, CALLING[:1])
    assert played.fault is None
    assert [turn.stop_reason for turn in played.turns] == ["end_of_turn", "stop_string", "max_tokens_per_turn"]
    (sequence,) = played.sequences
    written = chat.decode(sequence.sampled_ids)
    first = reference_texts(CALLING[0])[0] + "<|im_end|>"
    assert written.startswith(first)
    assert "}" not in written.removeprefix(first)  # two calls, each cut in its middle


def test_what_agents_set_and_is_not_used_is_told_once_in_a_stage_with_its_value(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A top-p of 1 is what the run has. Each batch of episodes has a gateway of its own."""
    monkeypatch.setattr(AgentEpisodes, "has_told_ignored", False)
    for _ in range(2):
        played_by("sets_its_own_distribution", chat, PROBLEMS[:1])
    lines = [line for line in capsys.readouterr().out.splitlines() if "agents set" in line]
    assert [line.split(":")[0] for line in lines] == [
        "agents set temperature to 0.25 (1 is used) and seed to 20261129 (the run's own is used)"
    ]


def test_a_stop_string_ends_a_message_that_a_thinking_model_wrote_in_place_of_its_thought():
    """The first request of the turn has 12 tokens; a second would go on beyond the string."""
    thinking = ChatFormat(tiny.tokenizer(tiny.THINKING), source="test")
    policy = Imitator(thinking, {CALLING[0].requests[0]: ["It is B12 or else it is B13, and there is nothing more."]})
    sampling = tiny.ROOMY.model_copy(update={"max_thinking_tokens_per_turn": 12})
    world = agent_world(object=f"{AGENTS}:stops_at_a_word")
    (played,) = collect(world, policy, thinking, CALLING[:1], sampling=sampling)
    assert (played.fault, [turn.stop_reason for turn in played.turns]) == (None, ["stop_string"])
    assert thinking.decode(played.sequences[0].sampled_ids) == "It is B12"


def test_a_client_that_rewrites_its_history_still_says_what_follows_an_answer(chat: ChatFormat):
    (played,) = played_by("goes_on_with_another_history", chat, CALLING[:1])
    assert [turn.sequence for turn in played.turns] == [0, 1]
    assert played.turns[0].follow_up == "Again."


def test_an_opening_that_leaves_no_room_is_a_fault_and_no_reward(chat: ChatFormat):
    sampling = tiny.ROOMY.model_copy(update={"max_tokens_per_episode": 8})
    (played,) = played_by("play", chat, CALLING[:1], sampling=sampling)
    assert (played.outcome, played.sequences) == ("environment_error", [])
    assert "leaves no room" in str(played.fault)


def test_the_calls_of_a_turn_count_up_to_the_bound_of_our_own_loop(chat: ChatFormat):
    """Three wrong calls where one is allowed: it and one more count, and no more than they can be invalid."""
    wrong = call_text(ToolCall(name="no_such_tool", arguments={}))
    problem = CALLING[0]
    world = agent_world()
    world.limits = world.limits.model_copy(update={"max_calls_per_turn": 1})
    policy = Imitator(chat, {problem.requests[0]: ["\n".join([wrong] * 3), "Sorry."]})
    (played,) = collect(world, policy, chat, [problem])
    assert (played.num_calls, played.num_invalid_calls) == (2, 2)


@pytest.mark.parametrize(
    ("limits", "outcome", "limit"),
    [
        ({"max_turns": 1}, "max_turns", "max_turns"),
        ({"max_tokens_per_episode": 60}, "overlong", "max_tokens_per_episode"),
    ],
)
def test_a_budget_ends_the_episode_as_in_our_own_loop(
    limits: dict[str, int], outcome: str, limit: str, chat: ChatFormat
):
    sampling = tiny.ROOMY.model_copy(update=limits)
    (played,) = played_by("play", chat, CALLING[:1], sampling=sampling)
    (own,) = collect(TravelDesk(), imitator(chat), chat, CALLING[:1], sampling=sampling)
    assert (played.outcome, played.limit) == (outcome, limit)
    assert as_rows([played]) == as_rows([own])


def close(gateway: Gateway) -> None:
    threading.Thread(target=gateway.close).start()


def kill(gateway: Gateway) -> None:
    """Its loop stops with connections open, so that no agent is told."""
    assert gateway._loop is not None
    gateway._loop.call_soon_threadsafe(gateway._loop.stop)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("end", [close, kill])
def test_a_gateway_that_dies_is_started_again_and_its_agents_play_again(
    end: Callable[[Gateway], None], chat: ChatFormat
):
    killed = list[Gateway]()

    class Dying(AgentEpisodes):
        def complete(self, key: str, request: CompletionRequest) -> Any:
            if not killed and self._gateway is not None:
                killed.append(self._gateway)
                end(self._gateway)
            return super().complete(key, request)

    world = agent_world(deadline_seconds=3600.0)
    kind = Dying(imitator(chat), chat, tiny.ROOMY)
    collector = Collector(kind, world, max_concurrent_episodes=4, seed=0, stage="test")
    played = collector.collect([EpisodeKey(problem, 0, 0) for problem in PROBLEMS[:8]])
    kind.close()
    assert [item.outcome for item in played] == ["success"] * 8
    assert 0 < collector.faults.restarts.total() <= 4  # one for each that was under way


def test_agents_under_way_go_on_after_a_checkpoint_and_play_from_their_start_after_a_resume(chat: ChatFormat):
    some = CALLING[:4]
    own = as_rows(collect(TravelDesk(), imitator(chat), chat, some))
    with kind_of(world := agent_world(), imitator(chat), chat, tiny.ROOMY) as kind:
        stopped, resumed = (Collector(kind, world, max_concurrent_episodes=4, seed=0, stage="test") for _ in range(2))
        stopped.begin()
        stopped.add([EpisodeKey(problem, 0, 0) for problem in some])
        while not any(run.turns for run in stopped.running):
            stopped.step()
        rows = suspend(stopped)
        assert (rows["running"], [row["number"] for row in rows["waiting"]]) == ([], [0, 1, 2, 3])
        resumed.begin()
        restore(resumed, rows, {problem.id: problem for problem in some})
        for collector in (stopped, resumed):
            while collector.running or collector.waiting:
                collector.step()
            assert as_rows([collector.ended[number] for number in range(4)]) == own


class Judging(BaseHTTPRequestHandler):
    """Says yes to a text that is done."""

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        done = "done" in said["final_message"] and said["problem"]["id"] == PROBLEMS[0].id
        body = json.dumps({"success": done, "details": {"by": "us"}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def judging() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(
    ("by", "checks", "details"),
    [
        ("result", {"success": True}, {"tickets": 2}),
        ("checker", {"asked": True, "told": True}, {}),
        ("http", {"success": True}, {"by": "us"}),
    ],
)
def test_an_agent_with_its_own_tools_is_judged_by_what_it_tells(
    by: str, checks: dict[str, bool], details: dict[str, Any], judging: str, chat: ChatFormat
):
    named = {"checker": f"{AGENTS}:check" if by == "checker" else None, "url": judging if by == "http" else None}
    verdict = {**VERDICT, "by": by, **named}
    (played,) = played_by("answers_for_itself", chat, PROBLEMS[:1], world=None, verdict=verdict)
    assert (played.outcome, played.checks, played.details) == ("success", checks, details)


@pytest.mark.parametrize(("agent", "num_turns"), [("gives_up_and_asks_again", 1), ("gives_up", 2)])
def test_a_turn_whose_client_gave_up_is_told_to_its_next_equal_request(
    agent: str, num_turns: int, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
):
    class Slow(Imitator):
        """Its first turn is written once nobody waits for it."""

        def poll(self, until: Any = never) -> Any:
            deadline = time.monotonic() + 60
            while not any(run.turns or (run.asked and run.asked.answer.is_left) for run in kind.by_key.values()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return super().poll(until)

    world = agent_world(object=f"{AGENTS}:{agent}")
    kind = AgentEpisodes(Slow(chat, {PROBLEMS[0].requests[0]: ["Yes, done."]}), chat, tiny.ROOMY)
    collector = Collector(kind, world, max_concurrent_episodes=1, seed=0, stage="test")
    (played,) = collector.collect([EpisodeKey(PROBLEMS[0], 0, 0)])
    kind.close()
    assert (played.fault, len(played.turns), len(played.sequences)) == (None, num_turns, num_turns)
    assert ("no agent heard" in capsys.readouterr().out) == (agent == "gives_up")


def test_a_judge_reads_the_calls_that_an_agent_answered_itself_as_judge_check_does(chat: ChatFormat, tmp_path: Path):
    """Two calls, of which the last is never answered, and what the user says in between."""
    problem = PROBLEMS[0]
    pays = call_text(ToolCall(name="pay", arguments={"card": "1"}))
    with serve(JudgeEndpoint()) as endpoint:
        judge = judge_row(endpoint.url, tmp_path)
        settings = agent_settings(
            object=f"{AGENTS}:answers_its_own_calls", world=None, verdict={**VERDICT, "by": "judge"}
        )
        world = load_environment(environment_settings("agent", settings=settings, judge=judge))
        policy = Imitator(chat, {problem.requests[0]: [pays, "It is paid.", pays]})
        (played,) = collect(world, policy, chat, [problem])
        ((_, asked),) = (request["messages"] for request in endpoint.asked)
    stored = Judged.of_stored(problem, Trajectory.from_row(played.to_row()), show_reference=False)
    assert encode(stored.to_row()) in asked["content"]
    assert stored.final_message == "All is paid."
    assert [event.get("reply", event.get("user")) for event in stored.events] == [
        "DECLINED: the card has no money", "Is it paid?", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"command": ["agent"]}, "exactly one of command"),
        ({"object": "somewhere.else:play"}, "is not in tasks/custom"),
        ({"object": f"{AGENTS}:check"}, "is no async function"),
        ({"object": None, "command": ["no-such-program"]}, "there is no program"),
        ({"object": None, "command": ["python"], "environment": {"KEY": "sk-123"}}, "name of an environment variable"),
        ({"verdict": VERDICT}, "exactly one of world"),
        ({"world": None, "verdict": {**VERDICT, "by": "checker"}}, "belong together"),
        ({"world": None, "verdict": {**VERDICT, "by": "judge"}}, "set settings.verdict.by to result, checker or http"),
        ({"world": {"name": "agent", "settings": agent_settings()}}, "no world to play in"),
    ],
)
def test_bad_settings_are_refused_in_one_line_before_anything_runs(changed: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        agent_world(**changed)
    assert "sk-123" not in str(refused.value)
