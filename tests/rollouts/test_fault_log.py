"""Infrastructure that fails in 30% of the calls: what is not lost is exactly what a faultless run would have given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import load_environment
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector, sample_episodes
from tasks.rollouts.engine import TurnRequest
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.fault_log import FaultLog, JudgedTogether, TooManyFaults
from tasks.rollouts.finished import FinishedEpisodes
from tasks.rollouts.settings import PlaySettings
from tasks.stages.train.groups import score_group
from tasks.tools.base import Answer, Environment, EnvironmentFault
from tasks.tools.faults import FailingEpisode
from tasks.tools.settings import FaultSettings, ToolSettings
from tests import tiny
from tests.engine_benches import engine_settings
from tests.rewards.shaped import shaped
from tests.worlds import QUICK, environment_settings

pytestmark = pytest.mark.slow

ROOMY = tiny.ROOMY
# No two of one wording: the policy below knows a problem by its prompt.
PROBLEMS = list({problem.requests[0]: problem for problem in tiny.problems(240, max_level=4)}.values())[:200]
THIRTY_PERCENT = FaultSettings(
    seed=1, seen_by="turnwise", error_rate=0.1, timeout_rate=0.1, rate_limit_rate=0.1, latency_rate=0.2,
    latency_seconds=0.001, truncate_rate=0.0, rename_rate=0.0,
)  # fmt: skip


class Policy(ScriptedEngine):
    """An engine that writes each problem's reference solution, told which by the prompt: restarts change no turn."""

    def __init__(self, chat: ChatFormat, problems: list[Problem], environment: Environment):
        super().__init__([], end_of_turn=chat.end_of_turn)
        tools = [tool.schema() for tool in environment.tools]
        self.by_prompt = {
            tuple(chat.prompt_ids(problem.requests[0], tools)): [
                chat.encode(text) for text in (*map(call_text, problem.reference[0].calls), problem.reference[0].answer)
            ]
            for problem in problems
        }

    def submit(self, request: TurnRequest) -> None:
        self.turns_left.setdefault(request.episode, list(self.by_prompt.get(tuple(request.token_ids), ())))
        self.requests.append(request)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def collected(
    chat: ChatFormat, *, faults: FaultSettings | None = None, **limits: Any
) -> tuple[list[Trajectory], FaultLog]:
    tools = ToolSettings.model_validate({**QUICK.model_dump(), "backoff_seconds": 0.0, **limits})
    environment = load_environment(environment_settings(tools=tools, faults=faults))
    collector = Collector(
        EngineEpisodes(Policy(chat, PROBLEMS, environment), chat, ROOMY),
        environment,
        max_concurrent_episodes=32,
        seed=0,
        stage="test",
    )
    return collector.collect([EpisodeKey(problem, 0, 0) for problem in PROBLEMS]), collector.faults


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every fault on purpose, by type."""
    types: list[str] = []
    call = FailingEpisode._call

    def noted(self: FailingEpisode, name: str, arguments: Mapping[str, Any], error: Any) -> Answer:
        types.extend([error] if error else [])
        return call(self, name, arguments, error)

    monkeypatch.setattr(FailingEpisode, "_call", noted)
    return types


def test_with_30_percent_of_the_calls_failing_what_is_not_lost_is_what_no_fault_would_have_given(
    chat: ChatFormat, struck: list[str]
):
    whole, _ = collected(chat)
    played, faults = collected(chat, faults=THIRTY_PERCENT, max_attempts=2)

    lost = [trajectory for trajectory in played if trajectory.fault is not None]
    assert [t for t in played if t.fault is None] == [w for w, t in zip(whole, played, strict=True) if t.fault is None]
    assert [t.outcome for t in whole] == ["success"] * 200
    assert 0 < len(lost) < 60
    assert sorted(faults.dropped) == sorted((f"{t.problem_id}, draw 0, sample 0", t.fault) for t in lost)
    # Every fault was followed by a retry in place, by a fresh start, or by the loss of the episode.
    assert set(struck) == {"unavailable", "timeout", "rate_limited"}
    assert len(struck) == faults.num_retries + faults.restarts.total() + len(lost)
    counts = faults.counts()
    assert counts == {
        "tool_retries": faults.num_retries,
        "episode_restarts": faults.restarts.total(),
        "episodes_dropped": len(lost),
    }
    assert min(counts.values()) > 0


def test_the_same_episodes_are_lost_every_time(chat: ChatFormat):
    """Chance hangs on what a call is, so arrival order, which differs from run to run, changes nothing."""
    first, second = (collected(chat, faults=THIRTY_PERCENT, max_attempts=2) for _ in range(2))
    assert first[0] == second[0]
    assert first[1].counts() == second[1].counts()


def test_with_attempts_enough_nothing_is_lost(chat: ChatFormat):
    whole, _ = collected(chat)
    played, faults = collected(chat, faults=THIRTY_PERCENT, max_attempts=12)
    assert played == whole
    assert faults.dropped == []
    assert faults.restarts.total() > 0


def test_faults_of_ours_leave_what_the_model_is_meant_to_meet_as_it_was(chat: ChatFormat):
    """Truncated replies and renamed fields, with and without 30% of the calls failing."""
    worse = {"truncate_rate": 0.2, "rename_rate": 0.2}
    quiet = dict.fromkeys(("error_rate", "timeout_rate", "rate_limit_rate", "latency_rate"), 0.0)
    alone, _ = collected(chat, faults=THIRTY_PERCENT.model_copy(update={**worse, **quiet}))
    with_faults, faults = collected(chat, faults=THIRTY_PERCENT.model_copy(update=worse), max_attempts=12)
    assert with_faults == alone
    assert faults.dropped == []
    assert {t.environment_fingerprint for t in alone} != {t.environment_fingerprint for t in collected(chat)[0]}


def test_a_lost_episode_gets_no_reward(chat: ChatFormat):
    played, _ = collected(chat, faults=THIRTY_PERCENT, max_attempts=1)
    lost = next(trajectory for trajectory in played if trajectory.fault is not None)
    kept = next(trajectory for trajectory in played if trajectory.fault is None)
    problem = next(problem for problem in PROBLEMS if problem.id == kept.problem_id)
    assert (lost.outcome, lost.checks) == ("environment_error", {})

    group = score_group(
        problem,
        [lost, kept, lost],
        shaped(),
        0,
    )

    assert (group.trajectories, len(group.scores)) == ([kept], 1)


def test_too_many_lost_episodes_stop_the_run_with_the_tools_to_blame(chat: ChatFormat):
    with pytest.raises(TooManyFaults) as raised:
        collected(chat, faults=THIRTY_PERCENT, max_attempts=1, max_retries=0, max_dropped_share=0.05)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("the environment lost 11 of 200 episodes, more than environment.tools.max_dropped_share")
    assert "(5%) allows" in lines[0]
    assert lines[1].split() == ["attempts", "tool:", "fault:", "message"]
    table = [line.split(maxsplit=1) for line in lines[2:]]
    assert sum(int(count) for count, _ in table) == 11
    assert any(cause == "get_nearest_airport_by_city: unavailable: an injected fault" for _, cause in table)


def test_the_share_counts_episodes_finished_before_so_that_going_on_is_not_harder_than_one_go(
    chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Lost episodes alone are played again after a kill, and the same faults strike: of these 100% are lost."""
    monkeypatch.setattr("tasks.rollouts.load.load_checked_chat", lambda *_: chat)
    limits = {"backoff_seconds": 0.0, "max_attempts": 1, "max_retries": 0, "max_dropped_share": 0.9}
    tools = ToolSettings.model_validate({**QUICK.model_dump(), **limits})
    environment = load_environment(environment_settings(tools=tools, faults=THIRTY_PERCENT))
    engines: Any = SimpleNamespace(over=lambda *_: Policy(chat, PROBLEMS, environment), confirm=lambda *_: None)

    play = PlaySettings(
        engine=engine_settings("transformers"), sampling=ROOMY, seed=0, samples_per_problem=1, compute=on_cpu(1)
    )

    def played() -> list[Trajectory]:
        return sample_episodes(
            tmp_path, environment, PROBLEMS, play, stage="test", label="test", engines=engines,
            finished=FinishedEpisodes(tmp_path / "episodes.jsonl"),
        )  # fmt: skip

    first = played()
    assert 20 < sum(item.fault is not None for item in first) < 180
    assert [(item.problem_id, item.outcome) for item in played()] == [(item.problem_id, item.outcome) for item in first]


def trajectory(number: int, fault: str | None) -> Trajectory:
    return Trajectory(
        problem_id=f"p{number}", category="c", request="r", draw=2, sample_index=1, policy_version=0,
        environment_fingerprint="f", sequences=[], turns=[],
        outcome="environment_error" if fault else "success", limit=None, checks={}, num_calls=0, num_invalid_calls=0,
        fault=fault,
    )  # fmt: skip


def fault_log(share: float, others: JudgedTogether | None = None) -> FaultLog:
    return FaultLog(ToolSettings.model_validate({**QUICK.model_dump(), "max_dropped_share": share}), others)


def test_the_run_stops_as_soon_as_no_faultless_rest_could_save_the_share():
    """10 episodes, 20% may be lost: the third loss is one too many, however many are still to come."""
    log = fault_log(0.2)
    for number in range(2):
        log.finish(trajectory(number, "book: timeout: late"), num_left=9 - number)
    log.restart(EnvironmentFault("down", tool="pay"))
    with pytest.raises(TooManyFaults, match=r"lost 3 of 10 episodes.*\(20%\)") as raised:
        log.finish(trajectory(2, "book: timeout: late"), num_left=7)
    assert str(raised.value).splitlines()[2:] == [
        "        3  book: timeout: late",
        "        1  pay: unavailable: down",
    ]


def test_a_short_play_is_judged_with_those_beside_it():
    """Three plays of 20 episodes of which 10% may be lost: 6 of 60. By itself one play could lose 2."""
    others = JudgedTogether(60)
    for num_lost in (4, 2):
        others.begin(20)
        log, played = (
            fault_log(0.1, others),
            [trajectory(number, "t" if number < num_lost else None) for number in range(20)],
        )
        for number, item in enumerate(played):
            log.finish(item, num_left=19 - number)
        others.end(played)
    others.begin(20)
    with pytest.raises(TooManyFaults, match="lost 7 of 60 episodes"):
        fault_log(0.1, others).finish(trajectory(0, "t"), num_left=19)
    alone = fault_log(0.1)
    for number in range(2):
        alone.finish(trajectory(number, "t"), num_left=19 - number)
    with pytest.raises(TooManyFaults, match="lost 3 of 20 episodes"):
        alone.finish(trajectory(2, "t"), num_left=17)


def test_a_log_goes_on_from_the_totals_of_another_and_forgets_what_was_given_up():
    """10% may be lost. 3 of 40 before, and 1 of 20 here: 4 of 60. Brought back to the 3 of 40, it may lose 2 of 10 and
    not 3.
    """
    log = fault_log(0.1)
    log.load_state({"num_finished": 40, "num_lost": 3})
    for number in range(20):
        log.finish(trajectory(number, "t" if number == 0 else None), num_left=19 - number)
    assert log.state() == {"num_finished": 60, "num_lost": 4}
    log.load_state({"num_finished": 40, "num_lost": 3})
    assert log.state() == {"num_finished": 40, "num_lost": 3}
    for number in range(2):
        log.finish(trajectory(number, "t"), num_left=9 - number)
    with pytest.raises(TooManyFaults, match="lost 6 of 50 episodes"):
        log.finish(trajectory(2, "t"), num_left=7)


def test_a_loss_within_the_share_is_listed_and_the_run_goes_on():
    log = fault_log(0.5)
    log.finish(trajectory(0, "book: timeout: late"), num_left=1)
    log.finish(trajectory(1, None), num_left=0)
    assert log.dropped == [("p0, draw 2, sample 1", "book: timeout: late")]


def test_the_table_is_of_bounded_length():
    log = fault_log(0.0)
    for number in range(40):
        log.restart(EnvironmentFault(f"error {number}", tool="t"))
    with pytest.raises(TooManyFaults) as raised:
        log.finish(trajectory(0, "t: unavailable: error 0"), num_left=0)
    assert len(str(raised.value).splitlines()) == 12
    assert str(raised.value).splitlines()[2] == "        2  t: unavailable: error 0"
