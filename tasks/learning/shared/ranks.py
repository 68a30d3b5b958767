"""The processes that train one policy together. Rank 0 leads: it collects, decides and writes; the others follow.

A method marked `on_all_ranks` is one that every rank must run, such as an update: rank 0 announces its name and
arguments, and the others, which wait in `follow`, call it too. Tensors are cut, added up and gathered by torch's
FSDP2 (`sharding.py`). What is sent here is plain data between processes of one run, over gloo. One process alone sends
nothing and needs no process group.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
Value = TypeVar("Value")
Shared = TypeVar("Shared", bound="HasRanks")
NEXT_STEP = timedelta(days=365)  # the others wait this long for rank 0, which may collect for days; its death ends it
START, END = "start", "end"


class HasRanks(Protocol):
    ranks: Ranks


class Ranks:
    """`number` of `size`; `group` is gloo's within a step, `idle` gloo's between steps, `mesh` that of the tensors;
    None for one process alone.
    """

    def __init__(
        self,
        number: int = 0,
        size: int = 1,
        group: ProcessGroup | None = None,
        idle: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.number, self.size, self.group, self.idle, self.mesh = number, size, group, idle, mesh
        self.is_stepping = False
        hosts = self.gather(socket.gethostname())
        self.num_here = hosts.count(hosts[number])

    @classmethod
    def meet(cls, device: torch.device, *, meet_seconds: float, step_seconds: float) -> Ranks:
        """All ranks of torch's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). torch's RuntimeError
        where they are not there within `meet_seconds`, and later where one waits in a step for `step_seconds`.
        """
        if os.environ["WORLD_SIZE"] == "1":
            return cls()
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=meet_seconds)))
        backend, in_step = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=step_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=in_step)
        group = dist.new_group(backend="gloo", timeout=in_step)
        idle = dist.new_group(backend="gloo", timeout=NEXT_STEP)
        return cls(rank, size, group, idle, init_device_mesh(device.type, (size,)))

    @property
    def leads(self) -> bool:
        return self.number == 0

    def gather(self, value: Value) -> list[Value]:
        """What each rank has, in the order of the ranks; every rank gets it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def share(self, tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Rank 0's tensor in host memory, on every rank."""
        import torch.distributed as dist

        sent = torch.empty(shape, dtype=dtype) if tensor is None else tensor.detach().cpu().contiguous()
        dist.broadcast(sent, src=0, group=self.group)
        return sent

    def announce(self, step: str, arguments: tuple[Any, ...] = ()) -> None:
        """On rank 0: the step that all ranks take now."""
        if self.leads and self.size > 1:
            self._broadcast((step, arguments))

    def await_start(self) -> Any:
        """On the others: what rank 0 calls them with (`call`); None where it ends without. Before, nothing is begun."""
        step, arguments = self._broadcast(None)
        return None if step == END else arguments

    def call(self, arguments: Any) -> None:
        """On rank 0: what it waits for is there, and the others may begin."""
        self.announce(START, arguments)

    @contextmanager
    def leading(self, arguments: Any) -> Iterator[None]:
        """On rank 0: `call` the others, and let them go at the end, so that they wait for the next call."""
        self.call(arguments)
        try:
            yield
        finally:
            if not self.is_stepping:
                self.announce(END)

    def follow(self, target: Any) -> None:
        """On the others: take every step of `target` that rank 0 announces, until it ends."""
        while True:
            step, arguments = self._broadcast(None)
            if step == END:
                return
            getattr(target, step)(*arguments)

    def end(self) -> None:
        """Let the others go. Where rank 0 left a step unfinished they wait in the middle of it, and end with rank 0.

        A gloo group that Python's own end destroys aborts the process: none is left, also where the others are gone.
        NCCL's in the middle of a step is left, since destroying it would wait for them.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        waits = self.is_stepping and self.mesh is not None and self.mesh.device_type != "cpu"
        try:
            if not self.is_stepping:
                self.announce(END)
        finally:
            self.group = self.idle = self.mesh = None
            if not waits:
                dist.destroy_process_group()

    def _broadcast(self, value: Any) -> Any:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.idle)
        return box[0]


ALONE = Ranks()


def on_all_ranks(method: Callable[Concatenate[Shared, P], Value]) -> Callable[Concatenate[Shared, P], Value]:
    """A step that rank 0 calls and the others follow. They get its positional arguments, which are plain data; what is
    given by keyword stays with rank 0.
    """

    @functools.wraps(method)
    def step(self: Shared, *arguments: P.args, **own: P.kwargs) -> Value:
        if self.ranks.size == 1:
            return method(self, *arguments, **own)
        assert not self.ranks.is_stepping, "a step inside a step would be announced to ranks that do not listen"
        self.ranks.announce(method.__name__, arguments)
        self.ranks.is_stepping = True
        result = method(self, *arguments, **own)
        self.ranks.is_stepping = False
        return result

    return cast(Callable[Concatenate[Shared, P], Value], step)
