"""A turn as C writes it, and Python takes it in parts (`step_in_c.py`)."""

from __future__ import annotations

from array import array
from ctypes import Structure, addressof, c_int64, c_uint64, c_void_p


class _Row(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("fed", "num_ids")), ("ids", c_void_p),
        *((name, c_int64) for name in ("written", "room", "num_ends")),
        ("ends", c_void_p), ("seed", c_uint64), ("state", c_uint64 * 2), ("increment", c_uint64 * 2),
        *((name, c_void_p) for name in ("tokens", "logps")),
    ]  # fmt: skip


class WrittenTurn:
    """A turn of up to `room` tokens that C writes, drawn with its seed's `uniforms` (`tasks/rollouts/seeds.py`). Any of
    `ends` completes it. What C wrote is taken in parts.
    """

    __slots__ = ("address", "ends", "ids", "logps", "num_taken", "row", "tokens")

    def __init__(self, seed: int, *, room: int, ends: array[int]):
        self.ends, self.ids, self.num_taken = ends, array("q"), 0
        self.tokens, self.logps = array("q", bytes(8 * room)), array("f", bytes(4 * room))
        self.row = _Row(0, 0, 0, 0, room, len(ends), start_of(ends), seed)
        self.row.tokens, self.row.logps = start_of(self.tokens), start_of(self.logps)
        self.address = addressof(self.row)

    def feed(self, ids: list[int], *, fed: int) -> None:
        """What is read next: the episode's `ids` after the first `fed`, which the cache has."""
        self.ids = array("q", ids[fed:])
        self.row.fed, self.row.num_ids, self.row.ids = fed, len(self.ids), start_of(self.ids)

    def take(self) -> tuple[list[int], list[float]]:
        """The tokens and log-probs since the last time."""
        new = slice(self.num_taken, self.row.written)
        self.num_taken = new.stop
        return self.tokens[new].tolist(), self.logps[new].tolist()


def start_of(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]
