"""One step of generation: the forward of a packed row over the cache, and a sampled token for every live row.

The forward is the Hugging Face model's own. On CPU, for the families below, it is traced once: bit for bit the same
operations, run by torch's C++ interpreter. That saves the third of the time a small model spends in Python, and holds
no Python lock, so two shards run in parallel. Weights, temperature and top-p are arguments of the trace, so none can be
stale.

Shapes: P packed positions, N live rows, A appends of W positions each, T positions of the cache, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.traces import Traced, structure_of, trace_once
from tasks.models.attention import PromptPlan, StepPlan
from tasks.rollouts.sampling import sample_tokens

# Full attention in every layer and no branch on values: tracing would freeze either.
TRACED_FAMILIES = ("llama", "qwen2", "qwen3")
TRACED_ROTARY = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Step:
    """`packed_3P`: id, place and slot of each position, first appends in blocks of W, then the last position of each
    row.
    """

    packed_3P: Tensor
    last_N: Tensor
    span_T: Tensor
    noise_N: Tensor
    append_A: Tensor | None
    width_W: Tensor | None

    def tensors(self) -> list[Tensor]:
        appends = [] if self.append_A is None or self.width_W is None else [self.append_A, self.width_W]
        return [self.packed_3P, self.last_N, self.span_T, self.noise_N, *appends]


def packed_forward(
    model: Callable[..., Any],
    cache: RaggedCache,
    packed_3P: Tensor,
    span_T: Tensor,
    *,
    last_N: Tensor | None,
    append_A: Tensor | None,
    width_W: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Feed a packed row; logits [N, V] of its last positions. Every slot below `num_rows` may be read."""
    ids_P, position_P, slot_P = packed_3P.unbind(0)
    place_AW = None
    if append_A is not None and width_W is not None:
        num_appends, width = append_A.shape[0], width_W.shape[0]
        place_AW = position_P[: num_appends * width].view(num_appends, width)
    plan = StepPlan(
        span_T,
        place_N=None if last_N is None else position_P[last_N],
        place_AW=place_AW,
        append_A=append_A,
        dtype=dtype,
    )
    output = model(
        input_ids=ids_P[None],
        attention_mask=_no_mask(packed_3P.device),
        position_ids=position_P[None],
        past_key_values=cache.at(slot_P, position_P, num_rows=num_rows, length=span_T.shape[0]),
        use_cache=True,
        logits_to_keep=1 if last_N is None else last_N,
        plan=plan,
    )
    logits: Tensor = output.logits[0]
    return logits


class Decoder:
    def __init__(self, model: PreTrainedModel, *, temperature: float, top_p: float):
        self.model = model
        self.places = _find_tensors(model)
        self.take_weights()
        self.traced: dict[tuple[bool, bool, bool], Traced] = {}  # has appends, is greedy, has a nucleus
        self.traced_prefill: Traced | None = None
        self.set_distribution(temperature=temperature, top_p=top_p)
        if is_traceable(model):
            example = [torch.zeros(2, 3, dtype=torch.long), torch.arange(3)]
            self.traced_prefill = self._trace("prefill", run_prefill, example)

    def set_distribution(self, *, temperature: float, top_p: float) -> None:
        """Of the steps from now on. Other values need no other trace: only greedy steps, and those with a nucleus."""
        self.is_greedy, self.has_nucleus = temperature == 0, top_p < 1
        self.distribution = [torch.tensor(value, dtype=torch.float64) for value in (temperature, top_p)]
        for has_appends in (False, True):
            kind = has_appends, self.is_greedy, self.has_nucleus
            if kind not in self.traced and is_traceable(self.model):
                self.traced[kind] = self._trace_step(kind, *_example(self.model, has_appends=has_appends))

    def take_weights(self, *, have_changed: bool = False) -> None:
        """Look up the model's tensors again: needed after tensors were replaced, not after in-place changes."""
        self.weights = [getattr(module, name).detach() for module, name in self.places.values()]

    def step(self, cache: RaggedCache, step: Step) -> tuple[Tensor, Tensor]:
        traced = self.traced.get((step.append_A is not None, self.is_greedy, self.has_nucleus))
        if traced is None or not cache.is_initialized:
            return self._sampled(self.model, cache, *self.distribution, *step.tensors())
        tokens, logps = traced(*self.distribution, *step.tensors(), *cache.storage, *self.weights)
        return tokens, logps

    def prefill(self, ids_BT: Tensor, place_T: Tensor) -> tuple[Tensor, ...]:
        if self.traced_prefill is None:
            return run_prefill(self.model, ids_BT, place_T)
        return self.traced_prefill(ids_BT, place_T, *self.weights)

    def feed(
        self,
        cache: RaggedCache,
        packed_3P: Tensor,
        span_T: Tensor,
        *,
        append_A: Tensor,
        width_W: Tensor,
        num_rows: int,
    ) -> None:
        packed_forward(
            self.model, cache, packed_3P, span_T, last_N=None, append_A=append_A, width_W=width_W, num_rows=num_rows,
            dtype=self.model.dtype,
        )  # fmt: skip

    def _sampled(
        self,
        model: Callable[..., Any],
        cache: RaggedCache,
        temperature: Tensor,
        top_p: Tensor,
        packed_3P: Tensor,
        last_N: Tensor,
        span_T: Tensor,
        noise_N: Tensor,
        append_A: Tensor | None = None,
        width_W: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits = packed_forward(
            model, cache, packed_3P, span_T, last_N=last_N, append_A=append_A, width_W=width_W,
            num_rows=last_N.shape[0], dtype=self.model.dtype,
        )  # fmt: skip
        return sample_tokens(
            logits,
            noise_N,
            temperature=0.0 if self.is_greedy else temperature,
            top_p=top_p if self.has_nucleus else 1.0,
        )

    def _trace_step(self, kind: Hashable, step: Step, cache: RaggedCache) -> Traced:
        example = [*self.distribution, *step.tensors()]
        num_inputs, num_layers = len(example), len(cache.layers)

        def run(model: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, Tensor]:
            inputs, storage = tensors[:num_inputs], tensors[num_inputs:]
            return self._sampled(model, RaggedCache.over(storage[:num_layers], storage[num_layers:]), *inputs)

        return self._trace(kind, run, [*example, *cache.storage])

    @torch.no_grad()
    def _trace(self, kind: Hashable, run: Callable[..., tuple[Tensor, ...]], example: list[Tensor]) -> Traced:
        # As torch.func.functional_call, which itself cannot be traced.
        from torch.nn.utils.stateless import _reparametrize_module

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            weights = dict(zip(self.places, tensors[len(example) :], strict=True))
            with _reparametrize_module(self.model, weights, tie_weights=True):
                return run(self.model, *tensors[: len(example)])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends export; the tracer warns of sizes that never change
            return trace_once(structure_of(self.model), kind, of_tensors, (*example, *self.weights))


def run_prefill(model: Callable[..., Any], ids_BT: Tensor, place_T: Tensor) -> tuple[Tensor, ...]:
    """Causal forward of rows side by side; the keys of every layer, [B, K, T, D], then the values."""
    cache = DynamicCache()
    model(
        input_ids=ids_BT,
        attention_mask=_no_mask(ids_BT.device),
        position_ids=place_T[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        plan=PromptPlan(),
    )
    return (*(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers))


def _no_mask(device: torch.device) -> Tensor:
    """NaN in place of a mask: a model that ignores the plan gives only NaN."""
    return torch.full((1, 1, 1, 1), float("nan"), device=device)


def is_traceable(model: PreTrainedModel) -> bool:
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    is_known = config.model_type in TRACED_FAMILIES and rotary in TRACED_ROTARY
    return is_known and model.device.type == "cpu" and hasattr(torch.jit, "trace")


def _find_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    found = {}
    for full_name, _ in (*model.named_parameters(), *model.named_buffers()):
        module, _, name = full_name.rpartition(".")
        found[full_name] = model.get_submodule(module), name
    return found


def _example(model: PreTrainedModel, *, has_appends: bool) -> tuple[Step, RaggedCache]:
    ids = [0, 0, 0, 0] if has_appends else []
    packed = [[*ids, 0, 0], [*(place for _ in range(2) for place in range(len(ids) // 2)), 2, 2], [*ids, 0, 1]]
    step = Step(
        packed_3P=torch.tensor(packed),
        last_N=torch.arange(len(ids), len(ids) + 2),
        span_T=torch.arange(3),
        noise_N=torch.zeros(2, dtype=torch.float64),
        append_A=torch.arange(2) if has_appends else None,
        width_W=torch.arange(2) if has_appends else None,
    )
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    storage = [
        torch.zeros(3, config.num_key_value_heads, 4, head_size, dtype=model.dtype)
        for _ in range(2 * config.num_hidden_layers)
    ]
    return step, RaggedCache.over(storage[: config.num_hidden_layers], storage[config.num_hidden_layers :])
