"""What a model learnt from: `trained_on.json` in its folder, hashed ids of the problems it was trained and chosen on.

Its own and those of every model it grew from, since weights remember what their ancestors were shown. The file goes
with the folder wherever that goes (snapshot, registry, `fetch`), so that a model trained on from a fetched champion has
it too, and `promote` can leave out what either side has seen (`unseen.py`). A problem is known by its id, by its
content and by its split group, each as the first 6 bytes of a SHA-256: two of a million problems are taken for one with
a chance of 0.2%, and a folder tells nothing of the data to who does not have them. Left out: what a model from
elsewhere was trained on, which only its makers know; such a folder has no file.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tasks.kept_files import damaged
from tasks.model_files import TRAINED_ON
from tasks.models import resolve_model
from tasks.problems import content_key
from tasks.records import Problem
from tasks.storage import read_json, write_json

DIGEST_BYTES = 6


class Digests(NamedTuple):
    """Problems as a set of hashes of each thing they are known by."""

    ids: frozenset[bytes] = frozenset()
    contents: frozenset[bytes] = frozenset()
    split_groups: frozenset[bytes] = frozenset()

    def __or__(self, other: Digests) -> Digests:
        return Digests(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


class TrainedOn(NamedTuple):
    """What a model and its ancestors were trained on, and what their snapshots were chosen on."""

    trained: Digests = Digests()
    chosen: Digests = Digests()

    def __or__(self, other: TrainedOn) -> TrainedOn:
        return TrainedOn(self.trained | other.trained, self.chosen | other.chosen)

    def seen_ids(self, problems: Iterable[Problem], *, by_group: bool) -> set[str]:
        """The ids of those that are among them, or with `by_group` share a split group with one."""
        seen = self.trained | self.chosen
        return {
            problem.id
            for problem, one in ((problem, digests_of([problem])) for problem in problems)
            if one.ids & seen.ids or one.contents & seen.contents or (by_group and one.split_groups & seen.split_groups)
        }


def digests_of(problems: Iterable[Problem]) -> Digests:
    known = [(problem.id, content_key(problem), problem.split_group) for problem in problems]
    return Digests(*(frozenset(map(_digest, texts)) for texts in zip(*known, strict=True))) if known else Digests()


def read_trained_on(model: Path) -> TrainedOn:
    """What the folder of a model says, pointers followed; nothing where it has no such file."""
    return read_trained_on_file(resolve_model(model) / TRAINED_ON)


def read_trained_on_file(file: Path) -> TrainedOn:
    """ValueError where it is damaged: a model that forgot what it learnt would be examined on it."""
    if not file.exists():
        return TrainedOn()
    row = read_json(file)
    try:
        found = {part: {kind: _unpack(row[part][kind]) for kind in Digests._fields} for part in TrainedOn._fields}
    except (KeyError, TypeError, ValueError):
        raise damaged(file, "not the hashed ids of problems") from None
    return TrainedOn(*(Digests(**found[part]) for part in TrainedOn._fields))


def write_trained_on(folder: Path, known: TrainedOn) -> None:
    """`trained_on.json` in a model folder; the same problems give the same bytes."""
    row = {
        part: {kind: _pack(getattr(getattr(known, part), kind)) for kind in Digests._fields}
        for part in TrainedOn._fields
    }
    write_json(folder / TRAINED_ON, row)


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()[:DIGEST_BYTES]


def _pack(digests: frozenset[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(digests))).decode()


def _unpack(text: str) -> frozenset[bytes]:
    packed = base64.b64decode(text, validate=True)
    if len(packed) % DIGEST_BYTES:
        raise ValueError("cut off")
    return frozenset(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))
