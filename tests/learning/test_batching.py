"""Tree packing: what is shared is computed once, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared import policy
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.policy import token_logp
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import Packing
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.models.tree_blocks import tree_block_mask
from tests import tiny
from tests.learning.rows import branching_group, random_rows, subtree_end

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(tiny.model_folder(tmp_path_factory.mktemp("model") / "m", request.param), compute=on_cpu(1))


def packed(groups: Sequence[Sequence[Row]], packing: Packing = "tree", max_tokens: int = 10_000) -> list[MicroBatch]:
    return micro_batches(groups, packing=packing, max_tokens=max_tokens, device=CPU)


def loss_and_gradient(model: PreTrainedModel, batches: Sequence[MicroBatch]) -> tuple[float, Tensor]:
    """Σ advantage · logp over everything, each token weighted by its own advantage, and its gradient."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = (token_logp(model, batch) * batch.advantage_M).sum() / 100
        loss.backward()
        total += loss.item()
    return total, torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])


def row(ids: list[int], sampled: list[int]) -> Row:
    """A row whose sampled positions are listed; its log-probs are minus the position."""
    return Row(ids, [i in sampled for i in range(len(ids))], [-float(i) for i in range(len(ids))], 1.0)


def test_a_group_shares_its_prompt_and_every_longer_common_prefix() -> None:
    """Prompt 1 2 3; two rows go on with 4, one with 7; the last sampled token of each is predicted, not read.

    Distinct positions: 1 2 3 4 5 (first row reads up to 5), 6 (second row's own), 7 (third row's own).
    """
    rows = [row([1, 2, 3, 4, 5, 8], [3, 4, 5]), row([1, 2, 3, 4, 6, 9], [3, 4, 5]), row([1, 2, 3, 7, 8], [3, 4])]
    (batch,) = packed([rows])
    assert batch.tree is not None
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.tree.position_BT.tolist() == [[0, 1, 2, 3, 4, 4, 3]]
    assert subtree_end([rows]).tolist() == [7, 7, 7, 6, 5, 6, 7]


def test_a_token_sampled_by_several_trajectories_is_one_entry_of_each() -> None:
    rows = [row([1, 2, 4, 5], [2, 3]), row([1, 2, 4, 6], [2, 3])]
    (batch,) = packed([rows])
    assert batch.target_M.tolist() == [4, 4, 5, 6]
    assert batch.predictor_M.tolist() == [0, 0, 1, 1]
    assert batch.sequence_M.tolist() == [0, 1, 0, 1]
    assert batch.sampler_logp_M.tolist() == [-2.0, -2.0, -3.0, -3.0]
    assert batch.episode_length_S.tolist() == [2, 2]


def test_several_groups_lie_in_one_row_and_never_see_each_other() -> None:
    groups = [[row([1, 2, 3], [2])], [row([4, 5, 6], [2])]]
    (batch,) = packed(groups)
    assert batch.tree is not None
    assert batch.ids_BT.tolist() == [[1, 2, 4, 5]]
    assert subtree_end(groups).tolist() == [2, 2, 4, 4]


def test_a_group_too_large_for_a_micro_batch_is_split_between_trajectories() -> None:
    rows = branching_group(1, 6)
    batches = packed([rows], max_tokens=20)
    assert len(batches) > 1
    assert sum(len(batch.episode_length_S) for batch in batches) == 6
    assert sum(batch.num_tokens for batch in batches) == sum(sum(item.sampled_mask) for item in rows)


@pytest.mark.parametrize("packing", ["tree", "none"])
def test_a_micro_batch_keeps_to_its_budget_where_trajectories_allow(packing: Packing) -> None:
    batches = packed([[item] for item in random_rows(5, 30)], packing, max_tokens=90)
    assert max(batch.ids_BT.numel() for batch in batches) <= 90
    assert sum(len(batch.episode_length_S) for batch in batches) == 30


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(10, 400), order=st.randoms(use_true_random=False))
def test_packing_micro_batches_and_order_change_neither_loss_nor_gradient(
    model: PreTrainedModel, seed: int, max_tokens: int, order: random.Random
) -> None:
    groups = [branching_group(seed + n, 4) for n in range(3)]
    loss, gradient = loss_and_gradient(model, packed(groups, "none"))
    shuffled = [order.sample(group, len(group)) for group in order.sample(groups, len(groups))]
    for packing in ("tree", "none"):
        other_loss, other_gradient = loss_and_gradient(model, packed(shuffled, packing, max_tokens))
        assert other_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_logits_in_chunks_give_the_same_loss_and_gradient(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [branching_group(3, 5), branching_group(4, 5)]
    loss, gradient = loss_and_gradient(model, packed(groups))
    monkeypatch.setattr(policy, "chunk_size", lambda vocabulary, device: 7)
    other_loss, other_gradient = loss_and_gradient(model, packed(groups))
    assert other_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_flex_attention_mask_says_the_same_as_the_plan(model: PreTrainedModel) -> None:
    """The BlockMask is for CUDA; here its mask function is read out whole and used as a dense one."""
    from torch.nn.attention.flex_attention import create_mask

    groups = [branching_group(7, 6), branching_group(8, 4)]
    (batch,) = packed(groups)
    assert batch.tree is not None
    length = batch.ids_BT.shape[1]
    mask = tree_block_mask(subtree_end(groups), device=CPU)
    visible = create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=batch.ids_BT, attention_mask=bias, position_ids=batch.tree.position_BT, use_cache=False
        ).last_hidden_state[0]
        logp = model.get_output_embeddings()(hidden).log_softmax(-1)[batch.predictor_U][batch.predictor_M]
        expected = token_logp(model, batch)
    torch.testing.assert_close(logp.gather(-1, batch.target_M[:, None])[:, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_bfloat16_autocast_is_close_to_float32(model: PreTrainedModel) -> None:
    (batch,) = packed([branching_group(7, 6)])
    with torch.no_grad():
        exact, rounded = token_logp(model, batch), token_logp(model, batch, autocast="bfloat16")
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.1


@pytest.mark.slow
def test_a_tool_reply_is_attended_to_but_carries_no_gradient_of_its_own(model: PreTrainedModel) -> None:
    """Change a token outside the mask: later log-probs move; the loss counts only the sampled ones."""
    ids = list(range(10, 22))
    sampled = [4, 5, 6, 10, 11]
    changed = [*ids[:8], 99, *ids[9:]]
    with torch.no_grad():
        first, second = (token_logp(model, packed([[row(x, sampled)]])[0]) for x in (ids, changed))
    assert len(first) == 5
    torch.testing.assert_close(first[:3], second[:3])
    assert (first[3:] - second[3:]).abs().max() > 1e-4
