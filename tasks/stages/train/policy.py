"""The policy and its trainer, as every rank of a run makes them. Rank 0 has the rest of the run (`run.py`) around them;
the others follow it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.whole_policy import refuse_other_weights
from tasks.models.folders import load_model, weights_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.stages.train.settings import TrainSections


def refuse_cut(settings: TrainSections, num_ranks: int, *, num_here: int, num_gpus: int) -> None:
    """ValueError for what several ranks cannot do with a policy that is cut over them; `num_here` of them are on this
    machine, which has `num_gpus`.
    """
    compute, lora, engine = settings.compute, settings.train.lora, settings.engine.own
    mode, transfer = getattr(engine, "mode", None), getattr(engine, "transfer", "disk")
    per_server = getattr(engine, "tensor_parallel_size", 1)
    crowded = engine.crowd_fault(num_trainers=num_here, num_gpus=num_gpus)
    for is_wrong, message in (
        (
            compute.offload == "optimizer",
            "compute.offload is optimizer, which moves whole tensors. Set compute.offload to none: each rank has its "
            "part of the optimizer's state only",
        ),
        (
            lora is not None and compute.weights == "bfloat16" and compute.frozen == "float32",
            "compute.weights is bfloat16 and compute.frozen float32, and a layer computes in one dtype. Set "
            "compute.frozen to bfloat16, or compute.weights to float32",
        ),
        (
            transfer == "ipc",
            "engine.settings.transfer is ipc, which vLLM has every rank of a process group send, and rank 0 alone has "
            "the whole policy. Set engine.settings.transfer to disk (a folder in /dev/shm is fastest), or to nccl with "
            "engine.settings.mode: server",
        ),
        (
            mode == "in_process" and per_server > 1,
            f"engine.settings.tensor_parallel_size is {per_server} in process, on the GPUs of ranks that do not make "
            f"room for it. Set engine.settings.tensor_parallel_size to 1, or engine.settings.mode to server",
        ),
        (crowded is not None, f"{crowded}. Lower launch.num_trainers or engine.settings.num_servers"),
    ):
        if is_wrong:
            raise ValueError(f"{num_ranks} ranks train one policy, and {message}; or set launch.num_trainers to 1.")


def load_policy(settings: TrainSections, start: Path) -> tuple[PreTrainedModel, Adapter | None]:
    """The order matters: the generators are seeded between the model and the adapter, which draws from them."""
    compute, lora = settings.compute, settings.train.lora
    model = load_model(start, compute=compute, dtype=compute.frozen if lora else None)
    seed_generators(settings.seed)
    return model, None if lora is None else Adapter(model, lora, weights=compute.weights)


def build_trainer(
    settings: TrainSections, model: PreTrainedModel, adapter: Adapter | None, ranks: Ranks
) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        settings.train,
        compute=settings.compute,
        temperature=settings.sampling.temperature,
        max_tokens=settings.sampling.max_tokens_per_episode,
        adapter=adapter,
        ranks=ranks,
    )


def call_followers(start: Path, ranks: Ranks) -> None:
    """On rank 0, once the model to start from is there: the others may load it."""
    if ranks.size > 1:
        ranks.call(weights_hash(start))


def follow_leader(settings: TrainSections, start: Path, ranks: Ranks) -> None:
    """On every rank but 0: load what rank 0 has, and take part in each step until it ends."""
    weights = ranks.await_start()
    if weights is None:
        return
    refuse_other_weights(start, weights)
    build_trainer(settings, *load_policy(settings, start), ranks).follow()
