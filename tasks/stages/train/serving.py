"""How the engine gets the weights in training, and whether it computes what the trainer does.

An engine in the same memory generates with the trainer's model itself, adapter included, or with rank 0's copy of it
where several ranks train; where the pipeline's thread writes (`train.max_staleness` above 0), with a copy of what is
trained, which shares what is frozen. One with its own memory gets tensors or the adapter, and no copy of the model is
kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from tasks.core.records import Group
from tasks.learning.shared.host_memory import host_copies
from tasks.learning.shared.lora import POLICY, SERVED, frozen_copy
from tasks.learning.shared.reference import trained_tensors, with_tied
from tasks.learning.shared.sharding import copy_tensors
from tasks.learning.shared.whole_policy import WholePolicy
from tasks.models.differences import Tolerance
from tasks.models.policy_weights import PolicyWeights
from tasks.models.torch_setup import free_unused, product_dtype
from tasks.rollouts.engine import AdjustableEngine, Engine
from tasks.rollouts.probe import CheckedRefresh, LogProbs
from tasks.stages.train.collect_ahead import Copy

if TYPE_CHECKING:
    from tasks.learning.grpo.trainer import GRPOTrainer
    from tasks.stages.train.settings import TrainSections


class Serving:
    """`served` is the model that an engine in the same memory generates with."""

    def __init__(self, settings: TrainSections, policy: WholePolicy):
        self.settings, self.policy = settings, policy
        self.model, self.adapter = policy.model, policy.adapter
        self.is_ahead = settings.train.max_staleness > 0
        self.has_own_memory = settings.engine.own.has_own_memory
        self.served = frozen_copy(self.model) if self.is_ahead and not self.has_own_memory else self.model
        if self.adapter is not None and self.is_ahead and self.has_own_memory:
            self.adapter.add_copy(SERVED)
        self.checked_refresh: CheckedRefresh | None = None
        self.is_compared = False

    def connect(self, trainer: GRPOTrainer, engine: Engine, probe: Sequence[list[int]]) -> None:
        """Give `engine` the trainer's weights from now on; one with its own memory is held to the trainer's log-probs
        of `probe` after each refresh.
        """
        self.trainer, self.engine = trainer, engine
        if engine.has_own_memory:
            self.checked_refresh = CheckedRefresh(engine, probe, tolerance=self._tolerance())

    def refresh(self, version: int) -> None:
        """With the policy as it is now."""
        self.policy.take(self.trainer.policy_tensors())
        probe_logp = self._probe_logp()
        if self.has_own_memory:
            free_unused(self.trainer.model.device)
        weights = PolicyWeights.of(self.model) if self.adapter is None else self.adapter.weights(POLICY)
        self._refresh(weights, version, probe_logp)

    @torch.no_grad()
    def copy(self) -> Copy:
        """In host memory: what is trained, the whole model or its adapter."""
        self.policy.take(self.trainer.policy_tensors())
        return Copy(host_copies(self.policy.tensors(), self.model.device), self._probe_logp())

    def serve(self, given: Copy, version: int) -> None:
        """In the collector's thread, while the trainer changes its own weights."""
        self._refresh(self._weights_of(given), version, given.probe_logp)

    def compare(self, groups: Sequence[Group], *, version: int, temperature: float, top_p: float) -> None:
        """Before this process's first step, on episodes that the trainer's own weights wrote."""
        if not self.is_compared:
            self.is_compared = self.trainer.check_engine(
                groups, version, {"temperature": temperature, "top_p": top_p}, self._tolerance()
            )

    def counts(self) -> dict[str, float]:
        return self.checked_refresh.counts() if self.checked_refresh else {}

    def metrics(self) -> dict[str, float]:
        return self.checked_refresh.metrics() if self.checked_refresh else {}

    def _weights_of(self, given: Copy) -> PolicyWeights:
        if not self.has_own_memory:
            cast(AdjustableEngine, self.engine).pause()
            copy_tensors(given.tensors, trained_tensors(self.served, self.adapter))
            return PolicyWeights.of(self.served)
        if self.adapter is None:
            return PolicyWeights(self.model, lambda: with_tied(self.model, given.tensors))
        copy_tensors(given.tensors, self.adapter.tensors(SERVED))
        return self.adapter.weights(SERVED)

    def _refresh(self, weights: PolicyWeights, version: int, probe_logp: LogProbs) -> None:
        weights = replace(weights, device=self.trainer.model.device)
        if self.checked_refresh is None:
            self.engine.refresh(weights, version)
        else:
            self.checked_refresh(weights, version, probe_logp)

    def _probe_logp(self) -> LogProbs:
        """What the trainer's own forward says of the probe, where the engine is probed."""
        if self.checked_refresh is None:
            return []
        return self.trainer.logp_of(self.checked_refresh.sequences)

    def _tolerance(self) -> Tolerance:
        """By the dtypes that engine and trainer compute in."""
        compute, train, engine = self.settings.compute, self.settings.train, self.settings.engine
        dtypes = [engine.own.weights_dtype(compute), compute.weights, product_dtype(self.trainer.model.device)]
        dtypes += [compute.frozen] if train.lora else []
        return engine.tolerance(*dtypes, *([] if train.autocast == "none" else [train.autocast]))


def add_hit_rate(counts: dict[str, float]) -> dict[str, float]:
    """The counts, with the share of prompt tokens found in the engine's prefix cache where the engine counts them."""
    queries = counts.get("prefix_cache_queries", 0)
    return counts | ({"prefix_cache_hit_rate": counts["prefix_cache_hits"] / queries} if queries else {})
