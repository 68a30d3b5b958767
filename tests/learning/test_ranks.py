"""Training on several ranks equals training on one: the same losses, norms and weights, whoever computes what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.files import read_json
from tasks.learning.shared.batching import share_of
from tasks.learning.shared.dealing import deal
from tasks.learning.shared.ranks import ALONE, Ranks
from tasks.learning.shared.sharding import gather_whole
from tasks.learning.shared.tensor_files import read_tensors
from tests import tiny
from tests.learning.rank_cases import CASES, train_cases
from tests.learning.rank_endings import be_late_in_a_step, end_one_after_the_other, let_the_leader_collect
from tests.learning.resume_cases import go_on, load_one_by_one
from tests.learning.rows import branching_group
from tests.ranks import RankProcesses

USUAL = ["padded rows of several sequences", "packed trees", "an adapter", "one group, so that only one rank has work"]
OTHERS = [case for case in CASES if case not in USUAL]


def test_the_costliest_goes_first_to_the_rank_with_the_least_so_far() -> None:
    """Loads of 7 + 3 and 5 + 4 + 2; dealt in the order given they would be 2 + 4 + 7 and 3 + 5."""
    assert deal([2, 3, 4, 5, 7], 2) == [[4, 1], [3, 2, 0]]
    assert deal([2, 3, 4], 1) == [[0, 1, 2]]
    assert deal([6], 3) == [[0], [], []]


@given(costs=st.lists(st.integers(1, 50), max_size=12), num_ranks=st.integers(1, 4))
def test_every_item_is_dealt_once_and_no_rank_exceeds_the_bound_of_greedy_dealing(
    costs: list[int], num_ranks: int
) -> None:
    shares = deal(costs, num_ranks)
    assert sorted(item for share in shares for item in share) == [*range(len(costs))]
    loads = [sum(costs[item] for item in share) for share in shares]
    assert max(loads) <= sum(costs) / num_ranks + max(costs, default=0)


@given(seed=st.integers(0, 100), num_ranks=st.integers(1, 4), packing=st.sampled_from(["tree", "none"]))
def test_every_trajectory_is_in_one_ranks_share_and_all_ranks_have_as_many_micro_batches(
    seed: int, num_ranks: int, packing: Any
) -> None:
    groups = [branching_group(seed + number, 2 + number) for number in range(3)]
    shares = [
        share_of(groups, packing=packing, max_tokens=40, device=torch.device("cpu"), rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    assert len({len(share.batches) for share in shares}) == 1
    lengths = sorted(sum(row.sampled_mask) for group in groups for row in group)
    own = [int(length) for share in shares for batch in share.batches for length in batch.episode_length_S]
    assert sorted(own) == lengths
    assert all(sorted(share.episode_lengths) == lengths for share in shares)


def test_one_process_that_a_launcher_started_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of one would cut a model for which nothing else expects it."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    ranks = Ranks.meet(torch.device("cpu"), meet_seconds=1.0, step_seconds=1.0)
    assert (ranks.number, ranks.size, ranks.num_here, ranks.mesh) == (0, 1, 1, None)
    assert not torch.distributed.is_initialized()


def test_what_is_gathered_has_the_dtype_it_had_before_it_was_cut() -> None:
    """Under compute.weights: bfloat16 the trained weights are float32 while they are cut; a float32 buffer stays so."""
    leader = cast(Ranks, SimpleNamespace(size=2, leads=True))
    third = torch.tensor([1 / 3])
    found = gather_whole(
        {"weight": third, "bias": third}, leader, dtypes={"weight": torch.bfloat16, "bias": torch.float32}
    )
    assert found["weight"].dtype == torch.bfloat16
    assert found["bias"].item() == third.item()


@pytest.mark.bench
def test_ranks_wait_for_the_leader_as_long_as_it_collects_and_in_a_step_for_a_time() -> None:
    hasty = RankProcesses(2, step_seconds=1.0)
    hasty.call(let_the_leader_collect, 3.0)
    hasty.call(be_late_in_a_step, 3.0)
    hasty.close()


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("is_in_a_step", [False, True])
def test_a_rank_whose_other_has_ended_ends_with_its_own_status(late: int, is_in_a_step: bool) -> None:
    """And not by signal 6, as gloo's threads end a process that leaves a group to Python's end."""
    ranks = RankProcesses(2)
    ranks.begin(end_one_after_the_other, late, is_in_a_step)
    assert [process.wait(timeout=600) for process in ranks.processes] == [7, 7]
    ranks.close()


def a_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ranks")
    tiny.model_folder(folder / "model")
    return str(folder)


@pytest.fixture(scope="module")
def usual(two_ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one rank and on two."""
    folder = a_folder(tmp_path_factory)
    train_cases(ALONE, folder, USUAL)
    two_ranks.call(train_cases, folder, USUAL)
    return Path(folder)


@pytest.fixture(scope="module")
def others(two_ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one rank and on two; and the usual cases on four."""
    folder = a_folder(tmp_path_factory)
    train_cases(ALONE, folder, [*CASES])
    two_ranks.call(train_cases, folder, OTHERS)
    four_ranks = RankProcesses(4)
    four_ranks.call(train_cases, folder, USUAL)
    four_ranks.close()
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", USUAL)
def test_losses_and_weights_of_twenty_steps_on_two_ranks_equal_those_on_one(usual: Path, case: str) -> None:
    expect_equal(read_json(usual / f"1-{case}.json"), read_json(usual / f"2-{case}.json"), most=1e-5)


@pytest.mark.bench
@pytest.mark.parametrize(("size", "case"), [*((2, case) for case in OTHERS), *((4, case) for case in USUAL)])
def test_so_do_those_of_other_settings_and_on_four(others: Path, case: str, size: int) -> None:
    """In bfloat16 a digit is 1/256, and which trajectories share a micro-batch decides where gradients are rounded."""
    most = 5e-3 if "bfloat16" in case else 1e-5
    expect_equal(read_json(others / f"1-{case}.json"), read_json(others / f"{size}-{case}.json"), most=most)


def expect_equal(one: dict[str, Any], several: dict[str, Any], *, most: float) -> None:
    """Sums in another order differ in the last digits; a mean instead of a sum would be off by a factor, and a
    micro-batch that is lost or counted twice by its share.
    """
    assert one["rows"][-1]["optimizer_steps"] == several["rows"][-1]["optimizer_steps"] == 20
    for expected, found in zip(one["rows"], several["rows"], strict=True):
        assert found.keys() == expected.keys()
        assert found["loss"] == pytest.approx(expected["loss"], abs=most)
        assert found["kl"] == pytest.approx(expected["kl"], abs=most)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=5 * most)
        assert found["grad_norm"] > 10 * most
        assert found["clip_share"] == pytest.approx(expected["clip_share"], abs=max(0.01, 10 * most))
        assert found["success_rate"] == expected["success_rate"]
    assert several["weights"] == {name: pytest.approx(norm, rel=most) for name, norm in one["weights"].items()}
    assert several["probe"] == pytest.approx(one["probe"], abs=10 * most)


@pytest.fixture(scope="module")
def resumed(two_ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six iterations at once and in two halves on two ranks; and two each on 2, 1 and 2 ranks."""
    folder = a_folder(tmp_path_factory)
    for name, first, last in (("whole", 0, 6), ("halves", 0, 3), ("halves", 3, 6), ("thirds", 0, 2)):
        two_ranks.call(go_on, folder, name, first, last)
    go_on(ALONE, folder, "thirds", 2, 4)
    two_ranks.call(go_on, folder, "thirds", 4, 6)
    return Path(folder)


@pytest.mark.slow
def test_a_resume_on_as_many_ranks_is_bitwise_and_on_others_the_same_to_the_last_digits(resumed: Path) -> None:
    """Weights, reference, both averages of each weight and the step count: the reference moved at iteration 4."""
    whole, halves, thirds = (read_json(resumed / f"{name}-6.json") for name in ("whole", "halves", "thirds"))
    assert halves == whole
    assert thirds["norms"] == {name: pytest.approx(norm, rel=1e-5) for name, norm in whole["norms"].items()}


@pytest.mark.slow
def test_a_rank_takes_its_part_of_each_tensor_before_the_next_arrives(two_ranks: RankProcesses, resumed: Path) -> None:
    two_ranks.call(load_one_by_one, str(resumed))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_has_the_files_and_tensors_of_one(resumed: Path) -> None:
    """So any number of ranks can read it, and what it is checked by does not change."""
    two, one = resumed / "thirds" / "iteration-000006", resumed / "thirds" / "iteration-000004"
    assert sorted(item.name for item in two.iterdir()) == sorted(item.name for item in one.iterdir())
    found, expected = read_tensors(two), read_tensors(one)
    shapes = {part: {name: tensor.shape for name, tensor in named.items()} for part, named in expected.items()}
    assert {part: {name: tensor.shape for name, tensor in named.items()} for part, named in found.items()} == shapes


@pytest.mark.slow
def test_a_resume_in_bfloat16_on_other_numbers_of_ranks_is_the_same_to_its_digits(
    two_ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two ranks have float32 weights that are their own masters, one has bfloat16 with masters: the files fit both.
    Six iterations at once, and two each on 2, 1 and 2. Forwards and gradients are rounded to 1/256, and micro-batches
    differ with the ranks.
    """
    folder = a_folder(tmp_path_factory)
    two_ranks.call(go_on, folder, "whole", 0, 6, "bfloat16")
    two_ranks.call(go_on, folder, "thirds", 0, 2, "bfloat16")
    go_on(ALONE, folder, "thirds", 2, 4, "bfloat16")
    two_ranks.call(go_on, folder, "thirds", 4, 6, "bfloat16")
    whole, thirds = (read_json(Path(folder) / f"{name}-6.json") for name in ("whole", "thirds"))
    assert thirds["norms"] == {name: pytest.approx(norm, rel=5e-3) for name, norm in whole["norms"].items()}
    assert thirds["norms"].keys() == whole["norms"].keys() and thirds["state"] != whole["state"]
