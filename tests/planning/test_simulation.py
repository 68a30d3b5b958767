"""The simulation of trainers, engines and tools, against arithmetic; and the search for the best split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.planning.seconds import NCCL_BYTES, DecodeCosts
from tasks.planning.simulation.allocation import NOWHERE, TO_ENGINES, TO_TRAINERS, Search, sizes_to_plan
from tasks.planning.simulation.assumed import NODE_BYTES, share_weights
from tasks.planning.simulation.cluster import Outcome, simulate
from tasks.planning.simulation.measured import Records, fit_engine, measured_speeds, recorded_groups
from tasks.planning.simulation.workload import (
    Allocation,
    EngineSpeed,
    Speeds,
    TurnSizes,
    Workload,
    costs_of_group,
)
from tests.planning.setups import setup

# A step takes 0.1 s and 0.05 s per live turn; a token that is read takes 0.01 s.
ENGINE = EngineSpeed(DecodeCosts(overhead=0.1, weights=0.0, row=0.05, row_arithmetic=0.0), fed_token=0.01)
SPEEDS = Speeds(ENGINE, position=0.02, refresh=0.5, save=0.25)
TURN = TurnSizes(fed=10, sampled=20, tool_seconds=2.0)
WORKLOAD = Workload(
    groups=[[[TURN, TURN]]],
    problems=2,
    group_size=1,
    max_concurrent_episodes=8,
    max_staleness=0,
    packing="none",
    micro_batch_tokens=1000,
)


def outcome(workload: Workload = WORKLOAD, speeds: Speeds = SPEEDS, trainers: int = 1, engines: int = 1) -> Outcome:
    return simulate(workload, speeds, Allocation(trainers, engines), gpus_per_node=8, seed=0)


def test_an_iteration_in_turn_is_the_sum_of_its_parts() -> None:
    found = outcome()
    # A turn: 2 · 10 tokens read, 20 steps of two live turns, the tool. Two turns, both episodes alike.
    turn = 20 * 0.01 + 20 * (0.1 + 2 * 0.05) + 2.0
    assert found.rollout_seconds == pytest.approx(2 * turn)
    assert found.update_seconds == pytest.approx(2 * 60 * 0.02)  # two episodes of two turns of 30 positions
    assert found.iteration_seconds == pytest.approx(0.5 + 2 * turn + 2.4 + 0.25)
    assert found.engine_idle == pytest.approx(1 - 2 * (turn - 2.0) / found.iteration_seconds)
    assert found.trainer_idle == pytest.approx(1 - (2.4 + 0.25) / found.iteration_seconds)
    assert found.episodes_per_hour == pytest.approx(2 * 3600 / found.iteration_seconds)


def test_a_checkpoint_is_written_behind_the_next_iteration_and_the_next_save_waits_for_its_end() -> None:
    """An iteration takes 15.55 s with its save of 0.25 s."""
    alone = outcome()
    assert outcome(speeds=replace(SPEEDS, write=14.0)) == alone
    late = outcome(speeds=replace(SPEEDS, write=30.0))
    # The first of the four saves waits for none, the others for what is left of 30 s.
    waits = 30.0 - (alone.iteration_seconds - 0.25)
    assert late.iteration_seconds == pytest.approx(alone.iteration_seconds + waits * 3 / 4)
    assert late.update_seconds == pytest.approx(alone.update_seconds)
    assert late.trainer_idle > alone.trainer_idle


def test_two_engines_share_the_episodes_and_two_trainers_share_the_batch() -> None:
    found = outcome(trainers=2, engines=2)
    assert found.rollout_seconds == pytest.approx(2 * (0.1 + 20 * 0.15 + 2.0))  # one live turn in each
    assert found.update_seconds == pytest.approx(60 * 0.02)


def test_three_trainers_are_no_faster_than_two_where_two_episodes_are_trained_on() -> None:
    assert outcome(trainers=3).update_seconds == outcome(trainers=2).update_seconds


def test_collected_ahead_an_iteration_is_the_longer_of_rollout_and_update() -> None:
    ahead = replace(WORKLOAD, max_staleness=1)
    found = outcome(ahead)
    assert found.iteration_seconds == pytest.approx(0.5 + found.rollout_seconds)  # the trainer waits: 2.65 s of work
    slow = replace(SPEEDS, position=0.5)
    assert outcome(ahead, slow).iteration_seconds == pytest.approx(2 * 60 * 0.5 + 0.25)


def test_with_one_place_episodes_are_played_one_after_another() -> None:
    alone = 2 * (0.1 + 20 * 0.15 + 2.0)
    assert outcome(replace(WORKLOAD, max_concurrent_episodes=1)).rollout_seconds == pytest.approx(2 * alone)


def test_turns_wait_for_the_one_process_that_plays_the_environments() -> None:
    quick = replace(SPEEDS, engine=EngineSpeed(DecodeCosts(1e-9, 0.0, 0.0, 0.0)), host_turn=1.0)
    one_turn = replace(WORKLOAD, groups=[[[TurnSizes(10, 20)]]])
    assert outcome(one_turn, quick).rollout_seconds == pytest.approx(2.0)
    assert outcome(one_turn, quick, engines=2).rollout_seconds == pytest.approx(2.0)


def test_gathering_weights_costs_more_where_trainers_are_on_several_nodes() -> None:
    speeds = replace(SPEEDS, position=0.0, share_weights=(1.0, 10.0))
    many = replace(WORKLOAD, problems=16)
    assert outcome(many, speeds, trainers=1).update_seconds == 0
    assert outcome(many, speeds, trainers=8).update_seconds == pytest.approx(7 / 8)
    assert outcome(many, speeds, trainers=16).update_seconds == pytest.approx(10 * 15 / 16)


def test_under_lora_trainers_gather_the_frozen_base_and_add_up_the_adapters_gradients() -> None:
    """Forward and backward, 2 bytes per frozen weight; 4 per weight of the adapter; two passes over a batch."""
    wanted = setup("Qwen2.5-7B", "h100-80gb", compute__frozen="bfloat16", train__updates_per_batch=2)
    lora = wanted.settings.train.lora
    assert lora is not None
    moved = 2 * (2 * 2 * 7_615_616_512 + 4 * wanted.shape.adapter_parameters(lora))
    assert share_weights(wanted) == pytest.approx((moved / NODE_BYTES, moved / NCCL_BYTES))


def test_a_group_is_a_tree_with_its_prompt_once_and_several_where_it_is_too_large() -> None:
    group = [[TurnSizes(100, 10)], [TurnSizes(100, 30)]]
    assert costs_of_group(group, WORKLOAD) == [110, 130]
    assert costs_of_group(group, replace(WORKLOAD, packing="tree")) == [140]
    assert costs_of_group(group, replace(WORKLOAD, packing="tree", micro_batch_tokens=120)) == [120, 120]


def random_workload() -> Workload:
    groups = [[[TurnSizes(20, number + 1, 0.1 * number)] * (1 + number % 3) for number in range(6)] for _ in range(4)]
    return replace(WORKLOAD, groups=groups, problems=8, group_size=4, max_concurrent_episodes=32)


def test_a_seed_gives_its_numbers_again_and_another_gives_others() -> None:
    workload, split = random_workload(), Allocation(2, 3)
    one, again, other = (simulate(workload, SPEEDS, split, gpus_per_node=8, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@settings(max_examples=20, deadline=None)
@given(
    position=st.floats(0.001, 0.1), tool=st.floats(0, 3), max_staleness=st.integers(0, 1), shared=st.floats(0, 3),
    gpus=st.integers(2, 12),
)  # fmt: skip
def test_one_more_gpu_is_never_slower(
    position: float, tool: float, max_staleness: int, shared: float, gpus: int
) -> None:
    turn = TurnSizes(10, 20, tool)
    workload = replace(WORKLOAD, groups=[[[turn], [turn, turn]]], problems=4, max_staleness=max_staleness)
    speeds = replace(SPEEDS, position=position, share_weights=(shared, shared))
    search = Search(
        lambda split: simulate(workload, speeds, split, gpus_per_node=8, seed=0, counted=2), 1, most_trainers=4
    )
    before, after = search.rows([gpus, gpus + 1])
    assert after.outcome.iteration_seconds <= before.outcome.iteration_seconds
    following = search.next_gpu(before)
    assert following.outcome.iteration_seconds <= before.outcome.iteration_seconds


def costing(trainer: float, engine: float) -> Search:
    """Seconds as if work were divided without loss: trainer / trainers + engine / engines."""

    def made_up(split: Allocation) -> Outcome:
        seconds = trainer / split.trainers + engine / split.engines
        return Outcome(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    return Search(made_up, engine_size=1, most_trainers=1000)


def test_the_best_split_and_the_next_gpu_follow_the_work() -> None:
    # t + e = 8 with 9/t + 81/e is least at t = 2, e = 6: 4.5 + 13.5 = 18; then 9/2 + 81/7 = 16.07.
    found = costing(9, 81).best(8)
    assert (found.allocation.trainers, found.allocation.engines) == (2, 6)
    following = costing(9, 81).next_gpu(found)
    assert following.where == TO_ENGINES
    assert following.gain == pytest.approx(1 - (4.5 + 81 / 7) / 18)
    assert costing(81, 9).next_gpu(costing(81, 9).best(8)).where == TO_TRAINERS


def test_a_gpu_that_saves_nothing_goes_nowhere() -> None:
    search = Search(lambda split: Outcome(1.0, 0, 0, 0, 0, 0, 0), engine_size=1, most_trainers=8)
    assert search.next_gpu(search.best(8)).where == NOWHERE


def test_an_engine_of_several_gpus_leaves_the_rest_unused() -> None:
    search = Search(lambda split: Outcome(1 / split.engines, 0, 0, 0, 0, 0, 0), engine_size=4, most_trainers=1)
    found = search.best(8)
    assert (found.allocation.engines, found.unused) == (1, 3)


def test_sizes_double_from_8_to_1024_with_what_was_asked_for() -> None:
    assert sizes_to_plan(24) == [8, 16, 24, 32, 64, 128, 256, 512, 1024]


def reply(steps: int, live: float, fed: int, begun: int, reads: int) -> dict[str, float]:
    """Of an engine whose step takes 0.1 s, and 0.02 s per live turn; to read a token takes 0.003 s, to begin a turn
    0.05 s, and to begin at all 0.5 s. The process takes 0.25 s per turn.
    """
    seconds = steps * (0.1 + 0.02 * live) + 0.003 * fed + 0.05 * begun + 0.5 * reads
    return {
        "steps": steps, "seconds": seconds, "live_seconds": live * seconds, "fed": fed, "begun": begun, "reads": reads,
        "host_seconds": 0.5, "host_turns": 2,
    }  # fmt: skip


REPLIES = [
    reply(*sizes) for sizes in ((10, 1.0, 5, 1, 1), (20, 3.0, 50, 2, 1), (5, 2.0, 10, 4, 3), (8, 7.0, 100, 0, 0),
                                (7, 9.0, 0, 0, 0), (3, 3.0, 20, 3, 1))
]  # fmt: skip


def test_an_engines_speed_is_found_again_in_the_seconds_of_its_replies() -> None:
    speed = fit_engine(REPLIES, in_process=False)
    assert speed.decode.step_seconds(2) == pytest.approx(0.14)
    assert (speed.fed_token, speed.turn, speed.read) == pytest.approx((0.003, 0.05, 0.5))


def test_replies_without_time_show_no_speed() -> None:
    with pytest.raises(ValueError, match="no time per token"):
        fit_engine([reply(0, 1.0, 5, 1, 1)], in_process=False)


def test_a_trainers_speed_is_its_seconds_over_the_positions_of_the_batches() -> None:
    episodes = [{"problem_id": "p", "draw": 1, "turns": [{"fed": 10, "sampled": 20, "tool_seconds": 0.0}]}]
    row = {"episodes": 4, "update_seconds": 6.0, "refresh_seconds": 0.5, "save_seconds": 0.25}
    workload = replace(WORKLOAD, groups=recorded_groups(episodes))
    records = Records([row | {"update_seconds": 99.0}, row, row], episodes, REPLIES)
    speeds = measured_speeds(records, workload, in_process=True)
    assert speeds.position == pytest.approx(6.0 / (4 * 30))  # the first iteration does not count
    assert (speeds.refresh, speeds.save, speeds.host_turn) == (0.5, 0.25, 0.25)
    assert speeds.engine.in_process
    assert speeds.slowed_beside > 0


def test_an_engine_in_the_process_waits_while_it_plays_the_environments() -> None:
    instant = replace(WORKLOAD, groups=[[[replace(TURN, tool_seconds=0.0)] * 2]])
    beside, within = (
        outcome(instant, replace(SPEEDS, host_turn=0.5, engine=replace(ENGINE, in_process=in_process)))
        for in_process in (False, True)
    )
    # 2 · 10 tokens read, 20 steps of two live turns; then the process takes half a second for each of the two.
    assert within.rollout_seconds == pytest.approx(2 * (20 * 0.01 + 20 * 0.2 + 2 * 0.5))
    # Beside it, the first of them is written alone meanwhile.
    assert beside.rollout_seconds < within.rollout_seconds


def test_to_begin_turns_costs_each_of_them_and_once_for_all_that_begin_together() -> None:
    found = outcome(speeds=replace(SPEEDS, engine=replace(ENGINE, turn=0.25, read=1.0)))
    assert found.rollout_seconds == pytest.approx(outcome().rollout_seconds + 2 * (2 * 0.25 + 1.0))


def test_in_one_process_an_update_and_a_collection_slow_each_other() -> None:
    # An update takes 2.4 s. The next collection begins 0.5 s later, with a turn of 4.2 s.
    ahead = replace(WORKLOAD, max_staleness=1)
    found = outcome(ahead, replace(SPEEDS, slowed_beside=0.5))
    assert found.update_seconds == pytest.approx(0.5 + 1.5 * 1.9)
    assert found.iteration_seconds == pytest.approx(outcome(ahead).iteration_seconds + 0.5 * 1.9)


def test_groups_that_stream_do_not_wait_for_the_slowest() -> None:
    """Every fourth problem's tool takes 100 s, and the others' 2 s."""
    slow = replace(TURN, tool_seconds=100.0)
    batches = replace(WORKLOAD, groups=[[[TURN]]] * 3 + [[[slow]]], problems=4, max_staleness=1)
    streams = replace(batches, groups_under_way=8)
    found, whole = outcome(streams), outcome(batches)
    assert whole.iteration_seconds > 70
    assert found.iteration_seconds < 60
    assert found.trainer_idle < whole.trainer_idle
