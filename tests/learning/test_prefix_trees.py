"""Problems whose prompts begin with the same rules and tools share those positions, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.learning.shared.batching import micro_batches, share_of
from tasks.learning.shared.prefix_trees import MIN_SHARED, trees_of
from tasks.learning.shared.rows import Row
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.options import supervised
from tests.learning.rows import after, branching_group, random_rows, weights
from tests.learning.test_batching import loss_and_gradient

CPU = torch.device("cpu")
TOOLS = [2 + place % 290 for place in range(100)]


def sizes(groups: Sequence[Sequence[Row]], max_tokens: int, *, num_ranks: int = 1, num_lanes: int = 1) -> list[int]:
    return [tree.size for tree in trees_of(groups, max_tokens, num_ranks=num_ranks, num_lanes=num_lanes)]


def demonstrations(start: Sequence[int], count: int) -> list[list[Row]]:
    """Ten tokens each behind the start, of which the last is predicted and not read: nine positions of its own."""
    return [
        after(start, [Row([200 + number, *range(9)], [False] * 9 + [True], [0.0] * 10, 1.0)]) for number in range(count)
    ]


def test_the_same_tools_are_computed_once_for_all_demonstrations_of_a_forward() -> None:
    """100 tokens of tools and 9 of each: 4 make 136, which fit into 136 and not into 135."""
    assert sizes(demonstrations(TOOLS, 4), 136) == [136]
    assert sizes(demonstrations(TOOLS, 4), 135) == [127, 109]
    assert sizes(demonstrations(TOOLS, 4), 50) == [109] * 4  # no trajectory is cut in two


def test_too_short_a_beginning_in_common_leaves_every_tree_as_it_was() -> None:
    few = TOOLS[: MIN_SHARED - 1]
    assert sizes(demonstrations(few, 4), 1000) == [len(few) + 9] * 4
    (other,) = demonstrations([7, *TOOLS], 1)
    assert sizes([*demonstrations(TOOLS, 2), other], 1000) == [118, 110]


def test_every_lane_and_rank_has_a_part_of_those_that_begin_alike() -> None:
    assert sizes(demonstrations(TOOLS, 4), 1000, num_ranks=2) == [118, 118]
    assert sizes(demonstrations(TOOLS, 4), 1000, num_lanes=2) == [118, 118]
    assert sizes(demonstrations(TOOLS, 4), 1000, num_ranks=2, num_lanes=2) == [109] * 4
    # A lane computes half as much at once: 109 positions alone would leave room for nothing, so there is one lane.
    assert sizes(demonstrations(TOOLS, 4), 400, num_lanes=2) == [136]


@pytest.mark.slow
@given(seed=st.integers(0, 100), num_ranks=st.integers(1, 3), num_lanes=st.integers(1, 2), budget=st.integers(50, 800))
def test_every_trajectory_is_computed_once_and_no_forward_is_larger_than_asked(
    seed: int, num_ranks: int, num_lanes: int, budget: int
) -> None:
    alike = [after(TOOLS, branching_group(seed + number, 3)) for number in range(4)]
    groups = [*alike, *(branching_group(seed + number, 3) for number in range(2))]
    shares = [
        share_of(
            groups, packing="tree", max_tokens=budget, device=CPU, rank=rank, num_ranks=num_ranks, num_lanes=num_lanes
        )
        for rank in range(num_ranks)
    ]
    rows = [row for group in groups for row in group]
    batches = [batch for share in shares for batch in share.batches]
    lengths = [int(length) for batch in batches for length in batch.episode_length_S]
    assert sorted(lengths) == sorted(row.num_sampled for row in rows)
    longest = max(len(row.token_ids) for row in rows)
    assert max(batch.ids_BT.numel() for batch in batches) <= max(budget, longest)
    targets = sorted(token for batch in batches for token in batch.target_M.tolist())
    assert targets == sorted(
        token for row in rows for token, is_sampled in zip(row.token_ids, row.sampled_mask, strict=True) if is_sampled
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(tmp_path: Path, architecture: str) -> None:
    model = load_model(tiny.model_folder(tmp_path / "m", architecture), compute=on_cpu(1))
    groups = [after(TOOLS, branching_group(number, 3)) for number in range(4)]
    found = {}
    for packing in ("tree", "none"):
        batches = micro_batches(groups, packing=packing, max_tokens=600, device=CPU)
        found[packing] = *loss_and_gradient(model, batches), sum(batch.ids_BT.numel() for batch in batches)
    assert found["tree"][2] < 300 < 1200 < found["none"][2]
    assert found["tree"][0] == pytest.approx(found["none"][0], abs=1e-5)
    torch.testing.assert_close(found["tree"][1], found["none"][1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_supervised_steps_on_demonstrations_with_the_same_tools_are_those_without_sharing(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "m")
    trained = {}
    for packing in ("tree", "none"):
        trainer = SupervisedTrainer(
            load_model(folder, compute=on_cpu(1)), after(TOOLS, random_rows(3, 8)),
            supervised(packing=packing, batch_size=8, micro_batch_tokens=2000), seed=1,
        )  # fmt: skip
        losses = [trainer.step()["loss"] for _ in range(4)]
        trained[packing] = losses, weights(trainer.model)
    assert trained["tree"][0] == pytest.approx(trained["none"][0], rel=1e-4)
    torch.testing.assert_close(trained["tree"][1], trained["none"][1], atol=1e-4, rtol=0)
