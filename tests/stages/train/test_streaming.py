"""Groups that stream to the trainer: batches of whichever finished, episodes that go on under new weights, kills."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Group, Problem, Score, TokenSequence, Trajectory, Turn
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tasks.learning.grpo.metrics import rollout_metrics
from tasks.learning.grpo.mini_batches import divide, mini_batches
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes
from tasks.stages.train import run as training
from tasks.stages.train.group_stream import GroupStream
from tasks.stages.train.stage import warn_where_stale
from tests import tiny
from tests.stages.train.test_pipelined import collector_threads, result
from tests.stages.train.test_training import PROBLEMS, alarm_at, run, run_killed_after, settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("earnable")]
STREAMING = {"groups_under_way": 7, "batch_deadline_seconds": None, "least_batch_share": 0.5}


def streamed(**changed: Any) -> Any:
    common = {"problem_sampler": "adaptive", "importance_correction": "token_truncate", "max_staleness": 3}
    return settings(**{**common, "streaming": STREAMING, **changed})


def test_each_token_has_the_log_prob_of_its_version_over_episodes_that_several_wrote(
    start: Path, tmp_path: Path
) -> None:
    """Six batches of 4 groups, 7 under way: the recorded log-probs against those of the snapshot of each version."""
    options = streamed(snapshot_interval=1, temperature=1.0)
    batches: list[list[Group]] = []
    with closing(training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path / "resume")) as one:
        for _ in range(6):
            row, alarm = one.iterate()
            assert alarm is None
            batches.append(list(one.trainer.last_groups))
        one.snapshots.export(tmp_path / "snapshots")
        idle = [one.stopwatch.idle(number) for number in range(1, 7)]
    assert [len(batch) for batch in batches] == [4] * 6
    assert all(set(row) == {"trainer_idle_seconds", "engine_idle_seconds"} for row in idle)
    played = [item for batch in batches for group in batch for item in group.trajectories]
    keys = [(item.problem_id, item.draw, item.sample_index) for item in played]
    assert len(set(keys)) == len(keys) == 6 * 4 * 4
    of_several = [item for item in played if item.sequences[0].token_versions]
    assert len(of_several) >= 8
    assert any(len({*turn_versions(item)}) > 1 for item in of_several)
    versions = {version for item in of_several for version in item.sampled_versions(item.sequences[0])}
    assert versions <= {0, 1, 2, 3, 4}
    engines = {
        version: tiny.engine(tmp_path / "snapshots" / f"iteration-000{version}" if version else start)
        for version in versions
    }
    for item in of_several:
        (tokens,) = item.sequences
        places = [place for place, is_sampled in enumerate(tokens.sampled_mask) if is_sampled]
        found = [tokens.sampler_logp[place] for place in places]
        of_item = set(item.sampled_versions(tokens))
        logp = {version: engines[version].token_logp([tokens.token_ids])[0] for version in of_item}
        expected = [logp[tokens.token_versions[place]][place - 1] for place in places]
        assert found == pytest.approx(expected, abs=1e-4)
    assert row["staleness_max"] >= 2
    assert 1 <= row["staleness_mean"] <= row["staleness_max"]


def turn_versions(item: Trajectory) -> list[int]:
    return [turn.policy_version for turn in item.own_turns]


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint_interval": 1},
        {"checkpoint_interval": 2},
        {"checkpoint_interval": 2, "problem_sampler": "band", "streaming": {**STREAMING, "groups_under_way": 8}},
    ],
    ids=str,
)
def test_a_streaming_run_that_is_killed_goes_on_and_ends_bitwise_the_same(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """The tools answer at once. What was under way is played from its rows: no token of it is sampled again. With
    twice a batch under way some batch draws no problem: what the draw before it expected is in its metrics.
    """
    options = streamed(max_replacement_rounds=1, zero_variance_groups="drop", **changed)
    expected = run(options, start, tmp_path / "whole")
    assert max(row["staleness_max"] for row in expected) >= 2
    for count in (3, 5):
        run_killed_after(count, options, start, tmp_path / "killed", monkeypatch)
        assert not collector_threads()
    assert run(options, start, tmp_path / "killed") == expected
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_a_roll_back_discards_the_groups_under_way(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At iteration 4: batch 5 and all that is under way are of the abandoned policy, so batch 5 is of version 4. Its
    checkpoint has what is under way then: a run killed after iteration 5 goes on as if it never was.
    """
    alarm_at({4}, monkeypatch)
    options = streamed(action="roll_back", max_rollbacks=1, checkpoint_interval=100)
    rows = run(options, start, tmp_path / "whole")
    run_killed_after(5, options, start, tmp_path / "killed", monkeypatch)
    assert run(options, start, tmp_path / "killed") == rows
    assert rows[3]["rolled_back_to"] == 2
    assert rows[4]["staleness_max"] == 0
    assert rows[5]["staleness_max"] == 1


def test_tokens_too_old_carry_no_loss_and_their_rewards_are_compared() -> None:
    """Iteration 8 with `max_staleness` 3 counts tokens from version 4 on. Versions 3 and 5 wrote two tokens each; the
    other trajectory is of version 1 alone.
    """
    params = streamed(zero_variance_groups="drop", advantage="mean").train
    both, old = written([3, 3, 5, 5]), written([1, 1])
    group = Group("p", "c", [both, old], [Score(1.0, {}), Score(0.0, {})])
    (kept,), dropped = divide([group], params, iteration=8)
    (row,) = kept.rows
    assert row.sampled_mask == [False, False, False, True, True]
    assert row.advantage == 0.5  # 1 less the mean of 1 and 0
    assert (row.num_beside, kept.too_old, dropped) == (2, [2], [])  # of each two: the denominator is of all six
    alone = Group("p", "c", [old, written([2])], [Score(1.0, {}), Score(0.0, {})])
    assert divide([alone], params, iteration=8) == ([], [[2, 1]])
    constant = params.model_copy(update={"aggregation": "constant", "constant_length": 9})
    (kept,), dropped = divide([group, alone], constant, iteration=8)
    assert (kept.too_old, dropped) == ([2], [[2, 1]])  # with any aggregation
    rows = [rollout_metrics([group, alone], params, oldest) for oldest in (None, 4)]
    assert [row["informative_group_share"] for row in rows] == [1.0, 0.5]
    (all_kept,), none_dropped = divide([group], params, iteration=0)
    assert [sum(row.sampled_mask) for row in all_kept.rows] == [4, 2]
    assert (all_kept.too_old, none_dropped) == ([], [])
    by_turn = divide([group], params.model_copy(update={"advantage": "turn_leave_one_out"}), iteration=8)[0][0]
    assert by_turn.rows[0].advantage == [1.0, 1.0]


def test_tokens_too_old_count_in_the_step_of_their_own_group() -> None:
    """Two groups, two steps: of the first 3 of its 4 tokens are too old, two of them in an episode that carries loss.
    Each step divides by the 4 of its group; dealt out with the dropped ones, they would be the second step's.
    """
    params = streamed(zero_variance_groups="drop", advantage="mean", steps_per_batch=2).train
    groups = [
        Group("p", "c", [written([3, 3, 5]), written([3])], [Score(1.0, {}), Score(0.0, {})]),
        Group("q", "c", [written([5, 5]), written([5, 5])], [Score(1.0, {}), Score(0.0, {})]),
    ]
    steps = mini_batches(*divide(groups, params, iteration=8), num_steps=2)
    with_loss = [[(row.num_sampled, row.num_beside) for rows in step.rows for row in rows] for step in steps]
    assert with_loss == [[(1, 2)], [(2, 0), (2, 0)]]
    assert [step.dropped_lengths for step in steps] == [[1], []]


def test_a_batch_most_of_whose_tokens_are_too_old_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert not warn_where_stale({"iteration": 2}) and not warn_where_stale({"iteration": 3, "stale_token_share": 0.5})
    assert warn_where_stale({"iteration": 4, "stale_token_share": 0.87})
    assert "87% of the tokens of iteration 4 are older" in " ".join("".join(capsys.readouterr()).split())


def written(versions: list[int]) -> Trajectory:
    count = len(versions)
    sequence = TokenSequence(list(range(count + 1)), [False] + [True] * count, [0.0] + [-0.1] * count)
    sequence.token_versions = [0, *versions] if len(set(versions)) > 1 else []
    return Trajectory(
        problem_id="p", category="c", request="r", draw=0, sample_index=0, policy_version=min(versions),
        environment_fingerprint="f", sequences=[sequence],
        turns=[Turn("t", policy_version=versions[-1])], outcome="success",
        limit=None, checks={}, num_calls=0, num_invalid_calls=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"max_staleness": 0}, r"Set train.max_staleness to 3 or more.$"),
        ({"streaming": STREAMING | {"groups_under_way": 3}}, r"Set train.streaming.groups_under_way to 4 or more"),
    ],
    ids=["on_policy", "too_few"],
)
def test_what_cannot_stream_is_refused_in_one_line(changed: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found) as error:
        streamed(**changed)
    assert "\n" not in str(error.value)


class HeldEpisode(TravelDeskEpisode):
    """Its verdict comes at once for the problems of `free`, and for the others when they are let go."""

    free: ClassVar[set[str]] = set()
    held: ClassVar[list[Future[Any]]] = []

    def verdict(self, final_message: str | None) -> Any:
        found = super().verdict(final_message)
        if self.problem.id in self.free:
            return found
        waiting: Future[Any] = Future()
        waiting.verdict = found  # type: ignore[attr-defined]
        self.held.append(waiting)
        return waiting

    @classmethod
    def let_go(cls) -> None:
        for waiting in cls.held:
            waiting.set_result(waiting.verdict)  # type: ignore[attr-defined]
        cls.held.clear()


class InOrder:
    """Draws the problems in their order."""

    def __init__(self) -> None:
        self.problems = {problem.id: problem for problem in tiny.problems(12)}
        self.rest = list(self.problems.values())
        self.learnt: list[str] = []

    def draw(self, iteration: int, round_number: int, count: int, *, draw_number: int) -> list[Problem]:
        drawn, self.rest = self.rest[:count], self.rest[count:]
        return drawn

    def learn(self, groups: list[Group]) -> None:
        self.learnt += [group.problem_id for group in groups]


def held_stream() -> tuple[GroupStream, Collector, list[str]]:
    """With four groups under way, and a deadline after 0.1 seconds."""
    chat, world, sampler = ChatFormat(tiny.tokenizer(), source="test"), TravelDesk(), InOrder()
    world.episode_class = HeldEpisode  # type: ignore[misc]
    engine = ScriptedEngine([[chat.encode("Done.")]], end_of_turn=chat.end_of_turn)
    collector = Collector(
        EngineEpisodes(engine, chat, tiny.SAMPLING), world, max_concurrent_episodes=99, seed=0, stage="test"
    )
    options = streamed(num_iterations=2, streaming=STREAMING | {"groups_under_way": 4, "batch_deadline_seconds": 0.1})
    drawn: Any = sampler
    stream = GroupStream(collector, drawn, rewards=options.reward, explore=lambda iteration: 2, params=options.train)
    return stream, collector, list(sampler.problems)


def test_at_the_deadline_a_batch_has_what_finished_and_the_stragglers_are_in_the_next() -> None:
    """Of four groups two finish; half a batch is enough. The others, held up until then, are the next batch's first."""
    stream, collector, names = held_stream()
    HeldEpisode.free = set(names[:2])
    stream.ask(1)
    assert [group.problem_id for group in stream.collect(1, 0, 4)] == names[:2]
    HeldEpisode.free = set(names)
    HeldEpisode.let_go()
    stream.ask(2)
    second = stream.collect(2, 0, 4)
    assert {group.problem_id for group in second} >= set(names[2:4])
    assert len(second) == 4
    sampler: Any = stream.sampler
    assert sampler.learnt == names[:2] + [group.problem_id for group in second]
    stream.discard(stored=3)
    assert not collector.running


def test_what_a_tool_answers_to_a_discarded_episode_concerns_no_other() -> None:
    """A roll back comes while two groups wait for a tool; its answers come while the next groups are played."""
    stream, collector, names = held_stream()
    HeldEpisode.free = set(names[:2])
    stream.ask(1)
    assert len(stream.collect(1, 0, 4)) == 2
    stream.discard(stored=2)
    HeldEpisode.free = set(names)
    HeldEpisode.let_go()
    assert [group.problem_id for group in stream.collect(2, 0, 4)] == names[8:]
    assert collector.num_waits == 0
