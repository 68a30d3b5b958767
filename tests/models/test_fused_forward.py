"""Layers in C give the hidden states and gradients of the model's own forward, and are left out where they do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared import policy
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.policy import token_entropy, token_logp
from tasks.learning.shared.rows import Row
from tasks.models import fused_forward
from tasks.models.attention import TreePlan
from tasks.models.fused_forward import fits, hidden_states
from tests.models.test_tree_attention import CPU, grow
from tests.small_models import KINDS, SIZES, a_model, compute_attention_otherwise

Forward = Callable[[PreTrainedModel, Tensor, Tensor, TreePlan], Tensor]
needs_compiler = pytest.mark.skipif(fused_forward._library() is None, reason="no compiler")
pytestmark = needs_compiler


def own_forward(model: PreTrainedModel, ids: Tensor, position: Tensor, plan: TreePlan) -> Tensor:
    nothing = torch.full((1, 1, 1, 1), float("nan"))
    output = model.get_decoder()(
        input_ids=ids, position_ids=position, attention_mask=nothing, plan=plan, use_cache=False
    )
    found: Tensor = output.last_hidden_state[0]
    return found


def some_of(ids: Tensor) -> Tensor:
    """Positions in stretches, as tokens are sampled."""
    return torch.tensor([number for number in range(ids.shape[1]) if number % 5 in (2, 3)])


def of_some(model: PreTrainedModel, ids: Tensor, position: Tensor, plan: TreePlan) -> Tensor:
    return hidden_states(model, ids, position, plan, some_of(ids))


def own_of_some(model: PreTrainedModel, ids: Tensor, position: Tensor, plan: TreePlan) -> Tensor:
    return own_forward(model, ids, position, plan)[some_of(ids)]


def a_row(model: PreTrainedModel, seed: int) -> tuple[Tensor, Tensor, TreePlan]:
    """Random ids in a random tree: ids and positions [1, P], and the plan."""
    branches = grow(seed, num_branches=7, longest=40)
    position = np.concatenate([np.arange(len(item.path) - item.num_new, len(item.path)) for item in branches])
    ids = torch.randint(0, model.config.vocab_size, (1, len(position)), generator=torch.Generator().manual_seed(seed))
    return ids, torch.from_numpy(position)[None], TreePlan(branches, device=CPU)


def results(forward: Forward, model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Hidden states, and the gradient of every parameter that has one, by name."""
    model.zero_grad()
    hidden = forward(model, *a_row(model, seed))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed + 1))
    (hidden * weights).sum().backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return {"hidden states": hidden.detach(), **gradients}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, most: float = 2e-5) -> None:
    """To `most` of each tensor's largest entry: gradients of weights are sums over all positions."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        scale = max(1.0, float(one.abs().max()))
        torch.testing.assert_close(
            found[name], one, rtol=0, atol=most * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_hidden_states_and_gradients_are_those_of_the_models_own_forward(
    kind: str, sizes: dict[str, int], seed: int
) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if kind == "llama" and seed else {}
    model = a_model(kind, sizes, seed=seed, tie_word_embeddings=kind == "qwen3", **biases)
    assert fits(model)
    assert_close(results(hidden_states, model, seed), results(own_forward, model, seed))
    assert_close(results(of_some, model, seed), results(own_of_some, model, seed))


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    model = a_model("qwen3", SIZES[0])
    whole = results(hidden_states, model, 3)
    frozen = {"model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    frozen.add("model.layers.0.input_layernorm.weight")
    for name, item in model.named_parameters():
        item.requires_grad_(name not in frozen)
        item.grad = None
    found = results(hidden_states, model, 3)
    assert found.keys() == whole.keys() - frozen
    assert all(torch.equal(found[name], whole[name]) for name in found)


def test_bits_are_the_same_without_gradients_and_beside_another_thread() -> None:
    model = a_model("qwen3", SIZES[0])
    alone = [results(hidden_states, model, seed)["hidden states"] for seed in (1, 2)]

    @torch.no_grad()
    def compute(seed: int) -> Tensor:
        return hidden_states(model, *a_row(model, seed))

    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            assert all(map(torch.equal, threads.map(compute, (1, 2)), alone))


def test_large_gates_and_small_rows_overflow_nowhere() -> None:
    both = torch.tensor([[-1e4, 1e4, -90.0, 88.0, 1.0, 1.0, 1.0, 2.0]], requires_grad=True)
    found = fused_forward._Gate.apply(both)
    expected = torch.nn.functional.silu(both[:, :4]) * both[:, 4:]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(item.sum(), both)[0] for item in (found, expected)]
    torch.testing.assert_close(*gradients)
    zeros = torch.zeros(2, 8)
    assert torch.equal(fused_forward._Norm.apply(zeros, torch.ones(8), 1e-6), zeros)


def a_batch(packing: Any = "tree") -> MicroBatch:
    rows = [
        Row(list(range(1, 9)) + tail, [False] * 8 + [True] * len(tail), [0.0] * (8 + len(tail)), 1.0)
        for tail in ([11, 12, 13], [11, 21])
    ]
    (batch,) = micro_batches([rows], packing=packing, max_tokens=200, device=CPU)
    return batch


def test_log_probs_and_entropies_of_the_policy_are_computed_so_and_are_those_of_padded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, computed = a_model("qwen3", SIZES[0]), list[int]()

    def counted(*given: Any) -> Tensor:
        computed.append(1)
        return hidden_states(*given)

    monkeypatch.setattr(policy, "hidden_states", counted)
    for quantity in (token_logp, token_entropy):
        in_trees = quantity(model, a_batch(), temperature=0.7)
        assert len(computed) == 1
        torch.testing.assert_close(
            in_trees.sort().values, quantity(model, a_batch("rows"), temperature=0.7).sort().values
        )
        assert computed.pop() and not computed
    token_logp(model, a_batch(), autocast="bfloat16")
    assert not computed


def test_any_other_model_is_left_to_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("llama", SIZES[0])
    assert fits(model)
    assert not fits(a_model("llama", SIZES[0], hidden_act="gelu"))
    assert not fits(a_model("llama", SIZES[0]).to(torch.bfloat16))
    assert not fits(get_peft_model(a_model("llama", SIZES[0]), LoraConfig(target_modules=["q_proj"])))
    assert not fits(get_peft_model(a_model("llama", SIZES[0]), LoraConfig(target_modules=["q_proj"])).base_model.model)
    mlp = model.model.layers[0].mlp
    for register in (
        mlp.register_forward_hook, mlp.register_forward_pre_hook, mlp.register_full_backward_hook,
        mlp.register_full_backward_pre_hook,
    ):  # fmt: skip
        hook = register(lambda *_: None)
        assert not fits(model)
        hook.remove()
    assert fits(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fits(model)
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda x: x)
        assert not fits(model)
    assert fits(model)
    assert fits(a_model("llama", SIZES[0], attention_dropout=0.5))  # which is at work in training mode alone
    assert not fits(a_model("llama", SIZES[0], attention_dropout=0.5).train())
    model.gradient_checkpointing_enable()
    assert not fits(model)
    model.gradient_checkpointing_disable()
    with monkeypatch.context() as patch:
        patch.setattr(fused_forward, "MAX_BYTES", 1000)
        assert not fits(model)
    monkeypatch.setattr(fused_forward, "_library", lambda: None)
    assert not fits(model)


def test_a_family_that_computes_otherwise_than_the_code_is_left_to_its_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute_attention_otherwise(monkeypatch)
    assert not fits(a_model("llama", SIZES[0]))


def test_what_is_no_float_is_never_read_as_one() -> None:
    with pytest.raises(AssertionError):
        fused_forward._Gate.apply(torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        fused_forward._Norm.apply(torch.zeros(2, 8), torch.ones(8, dtype=torch.float64), 1e-6)
    halves = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        fused_forward._TurnedHeads.apply(halves, None, None, torch.ones(2, 4), torch.ones(2, 4), 0.0, 4)


def test_a_want_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("qwen3", SIZES[0])
    library = fused_forward._library()
    monkeypatch.setattr(library, "turn_all", lambda *_: 1)
    with pytest.raises(MemoryError, match="micro_batch_tokens"):
        hidden_states(model, *a_row(model, 1))
