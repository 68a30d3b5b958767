"""A real vLLM server on loopback, spoken to through the chat API with tool calls: the tiny model cancels bookings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Trajectory
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.endpoint.episode import EndpointEpisodes, play_endpoint
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tests import tiny
from tests.engines.endpoint.chat_endpoint import KEY, VARIABLE, settings
from tests.engines.vllm.chat_server import MODEL, kill, serving, trained_model

pytestmark = pytest.mark.drill

PROBLEMS = tiny.problems(20, max_level=1)


@dataclass(frozen=True)
class Server:
    url: str
    group: int
    model: Path
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model, log = trained_model(folder / "model"), folder / "log.txt"
    with serving(model, key=KEY, log=log) as (url, group):
        yield Server(url, group, model, log)


@pytest.fixture(autouse=True)
def _a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def played(server: Server, *, max_turns: int = 4, **changed: Any) -> list[Trajectory]:
    changed = {"model": MODEL, "max_output_tokens": 40, "timeout_seconds": 120.0, **changed}
    with closing(Endpoint(settings(server.url, **changed))) as endpoint:
        return play_endpoint(endpoint, TravelDesk(), PROBLEMS, max_turns=max_turns, seed=0, label="test: vLLM")


def test_tool_calls_through_the_chat_api_are_the_turns_the_weights_write_token_by_token(server: Server) -> None:
    """Near temperature 0 the in-process engine writes what vLLM writes at 0; the calls reached the world, and success
    is the world's own verdict.
    """
    sampling = tiny.SAMPLING.model_copy(update={"temperature": 0.01, "max_tokens_per_turn": 40})
    in_process = tiny.collector(server.model, sampling=sampling).collect([EpisodeKey(p, 0, 0) for p in PROBLEMS])
    through_chat = played(server)
    assert sum(trajectory.is_success for trajectory in through_chat) == 20
    for ours, theirs in zip(in_process, through_chat, strict=True):
        assert [(turn.text, turn.calls, turn.replies) for turn in ours.turns] == [
            (turn.text, turn.calls, turn.replies) for turn in theirs.turns
        ]
        assert theirs.turns[0].calls[0]["name"] == "cancel_booking"


def test_the_server_counts_the_tokens_that_the_record_holds(server: Server) -> None:
    """A reply of n tokens is n − 1 of text and the end of the turn; both turns of each episode are read as one."""
    from tasks.chat.format import load_chat

    chat = load_chat(server.model)
    for trajectory in played(server):
        usage = trajectory.details["usage"]
        assert usage["num_requests"] == 2
        assert usage["output_tokens"] == sum(len(chat.encode(turn.text)) + 1 for turn in trajectory.turns)
        assert usage["cost"] == pytest.approx((usage["input_tokens"] * 2 + usage["output_tokens"] * 10) / 1e6)


def test_calls_cut_short_are_malformed_and_a_full_context_is_overlong(server: Server) -> None:
    """Five tokens hold no call: each is answered as malformed, until the 160 tokens of context are used up. No episode
    is lost to the endpoint for it.
    """
    trajectories = played(server, max_output_tokens=5, max_turns=12)
    assert {(t.outcome, t.limit) for t in trajectories} == {("overlong", "max_tokens_per_episode")}
    assert all(turn.calls == [{"malformed": True}] for t in trajectories for turn in t.turns)
    assert {turn.stop_reason for t in trajectories for turn in t.turns} == {"max_tokens_per_turn"}


def test_an_unknown_model_and_a_wrong_key_end_the_run_in_one_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"refuses to answer as 'nobody' .*404.*does not exist"):
        played(server, model="nobody")
    monkeypatch.setenv(VARIABLE, "sk-another-key")
    with pytest.raises(ValueError, match=rf"401.*Check the key in {VARIABLE}") as caught:
        played(server)
    assert "sk-another-key" not in str(caught.value)


def test_the_servers_log_does_not_hold_the_key(server: Server) -> None:
    played(server)
    log = server.log.read_text(encoding="utf-8", errors="replace")
    assert "POST /v1/chat/completions" in log and KEY not in log


def test_a_server_killed_in_mid_batch_costs_episodes_and_no_success(server: Server) -> None:
    """The last test of this file: after three episodes the server is gone. The rest is dropped, not scored."""
    done = []

    def kill_after_three(_: Trajectory) -> None:
        done.append(1)
        if len(done) == 3:
            kill(server.group)

    changed = {"model": MODEL, "max_output_tokens": 40, "max_retries": 0}
    keys = [EpisodeKey(problem, 0, 0) for problem in PROBLEMS]
    with closing(Endpoint(settings(server.url, **changed))) as endpoint:
        collector = Collector(
            EndpointEpisodes(endpoint, max_turns=4), TravelDesk(), max_concurrent_episodes=2, seed=0, stage="test"
        )
        trajectories = collector.collect(keys, on_end=kill_after_three)
    outcomes = [trajectory.outcome for trajectory in trajectories]
    assert set(outcomes) == {"success", "environment_error"}
    assert 3 <= outcomes.count("success") <= 5
    assert all(t.fault and t.fault.startswith("endpoint: unavailable: ") for t in trajectories if not t.is_success)
