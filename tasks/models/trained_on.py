"""What a model learnt from: `trained_on.json` in its folder, hashed ids of the problems it was trained and chosen on.

It includes every ancestor's, since weights remember, and is copied with the folder, so `promote` can leave out what
either side has seen (`unseen.py`). A problem has four digests, of its id, content, split group and question, each the
first 6 bytes of a SHA-256 (two of a million collide with a chance of 0.2%). Records of earlier versions have none of
questions. A folder without the file is `unknown` if turnwise made it, since it may have seen any test problem, as is
what grows from it; any other, such as a hub model, is `elsewhere`: it saw no split of this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from hashlib import sha256
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.files import read_json, write_json
from tasks.core.kept_files import damaged
from tasks.core.packed_hashes import pack_hashes, unpack_hashes
from tasks.core.records import Problem
from tasks.core.splits import content_key, question_key
from tasks.models.files import LINEAGE, TRAINED_ON
from tasks.models.folders import is_adapter, resolve_model

DIGEST_BYTES = 6
NO_QUESTIONS = {"questions": ""}  # of a record of earlier versions


class Digests(NamedTuple):
    """Problems as one set of hashes per way to identify them."""

    ids: frozenset[bytes] = frozenset()
    contents: frozenset[bytes] = frozenset()
    split_groups: frozenset[bytes] = frozenset()
    questions: frozenset[bytes] = frozenset()

    def __or__(self, other: Digests) -> Digests:
        return Digests(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


class TrainedOn(NamedTuple):
    """Of a model and its ancestors. `unknown` names those whose record is missing, `elsewhere` those from outside."""

    trained: Digests = Digests()
    chosen: Digests = Digests()
    unknown: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()

    def __or__(self, other: TrainedOn) -> TrainedOn:
        return TrainedOn(
            self.trained | other.trained,
            self.chosen | other.chosen,
            self.unknown | other.unknown,
            self.elsewhere | other.elsewhere,
        )

    def seen_ids(self, problems: Iterable[Problem], *, by_group: bool) -> set[str]:
        """The ids of problems among them, or with `by_group` of those that share a split group with one."""
        seen = self.trained | self.chosen
        return {
            problem.id
            for problem, one in ((problem, digests_of([problem])) for problem in problems)
            if one.ids & seen.ids
            or one.contents & seen.contents
            or one.questions & seen.questions
            or (by_group and one.split_groups & seen.split_groups)
        }


def digests_of(problems: Iterable[Problem]) -> Digests:
    known = [(item.id, content_key(item), item.split_group, question_key(item)) for item in problems]
    return Digests(*(frozenset(map(_digest, texts)) for texts in zip(*known, strict=True))) if known else Digests()


def read_trained_on(model: Path) -> TrainedOn:
    """From the folder, pointers followed, or a fetched version's lineage; else `unknown` or `elsewhere`."""
    folder = resolve_model(model)
    files = [folder / TRAINED_ON] if (folder / TRAINED_ON).exists() else sorted((folder / LINEAGE).rglob(TRAINED_ON))
    if files:
        return reduce(or_, map(read_trained_on_file, files))
    name = frozenset([folder.resolve().name])
    return TrainedOn(unknown=name) if _made_by_turnwise(folder) else TrainedOn(elsewhere=name)


def read_trained_on_file(file: Path) -> TrainedOn:
    """ValueError where it is damaged: the model would be tested on what it learnt."""
    row = read_json(file)
    try:
        trained, chosen = (
            Digests(**{kind: unpack_hashes(known[kind], DIGEST_BYTES) for kind in Digests._fields})
            for known in (NO_QUESTIONS | row[part] for part in ("trained", "chosen"))
        )
        unknown, elsewhere = (_names(row[part]) for part in ("unknown", "elsewhere"))
    except (KeyError, TypeError, ValueError):
        raise damaged(file, "not the hashed ids of problems") from None
    return TrainedOn(trained, chosen, unknown, elsewhere)


def write_trained_on(folder: Path, known: TrainedOn) -> None:
    row: dict[str, Any] = {
        part: {kind: pack_hashes(digests) for kind, digests in getattr(known, part)._asdict().items()}
        for part in ("trained", "chosen")
    }
    write_json(folder / TRAINED_ON, {**row, "unknown": sorted(known.unknown), "elsewhere": sorted(known.elsewhere)})


def _made_by_turnwise(folder: Path) -> bool:
    """It has a fetched version's lineage, an adapter's base, or the place of `warm_start` or `train`."""
    place = folder.resolve().parts
    is_in_place = place[-2:] == ("warm_start", "model") or place[-3:-1] == ("train", "snapshots")
    return is_in_place or (folder / LINEAGE).is_dir() or is_adapter(folder)


def _names(names: Any) -> frozenset[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(names)
    return frozenset(names)


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()[:DIGEST_BYTES]
