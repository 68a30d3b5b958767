"""What a journal says all in all: who is champion, who was before, what may never come back, and whether it holds.

Pure: entries in, a summary out; no MLflow. `before` is a path, as the pages of a browser are: a promotion adds the
champion it replaces, a rollback goes back along it, and what it went back over is `undone`: a further rollback never
leads there, and no policy promotes it again. The bodies of the entries that are read here:

    promotion             champion, instead_of, weights, reason
    rollback              champion, instead_of, weights, reason, undone (versions), defect (true: for a defect)
    adoption              champion, challenger (versions or null), instead_of, weights, reason, anew (true:
                          version numbers begin again, since the registered model was deleted)
    waiting               version, weights: the challenger from now on; withdrawal: version, which is it no more
    hold, release         reason
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.tracking.journal import Entry


@dataclass(slots=True)
class Reigns:
    """The summary. `came` is the entry that made the champion what it is (or made there be none); `weights` are the
    hashes of versions' weights; `kept` their tags that later verify them; `set_aside`
    are weights that were rolled back, whatever version has them; `fate` of a version the last entry that moved
    the champion to it or away from it.
    """

    champion: int | None = None
    challenger: int | None = None
    before: list[int] = field(default_factory=list)
    undone: set[int] = field(default_factory=set)
    defects: dict[int, Entry] = field(default_factory=dict)
    came: Entry | None = None
    hold: Entry | None = None
    set_aside: dict[str, Entry] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    kept: dict[int, dict[str, str]] = field(default_factory=dict)
    fate: dict[int, Entry] = field(default_factory=dict)

    def way_back(self, there_are: Sequence[int]) -> list[int]:
        """The versions a rollback may lead to, the nearest first, of those that were not deleted."""
        way: list[int] = []
        for version in reversed(self.before):
            is_open = version in there_are and version not in self.undone and version not in self.defects
            if is_open and version != self.champion and version not in way:
                way.append(version)
        return way

    def was_champion(self, version: int) -> bool:
        return version in self.fate

    def gone_back_over(self, target: int) -> list[int]:
        """What a rollback to a version undoes: the champion, and on the path those between."""
        on_the_way = self.before[_place(self.before, target) + 1 :] if target in self.before else []
        champion = [] if self.champion is None else [self.champion]
        return sorted({*on_the_way, *champion} - {target})


def summarise_journal(entries: Iterable[Entry]) -> Reigns:
    """Every entry in its order."""
    reigns = Reigns()
    for entry in entries:
        if entry.body.get("anew"):
            reigns = Reigns(hold=reigns.hold, set_aside=reigns.set_aside)
        if entry.kind in ("promotion", "rollback", "adoption"):
            _crown(reigns, entry)
        elif entry.kind == "waiting":
            reigns.challenger = entry.body.get("version")
            _remember(reigns, reigns.challenger, entry.body)
        elif entry.kind == "withdrawal" and reigns.challenger == entry.body.get("version"):
            reigns.challenger = None
        elif entry.kind in ("hold", "release"):
            reigns.hold = entry if entry.kind == "hold" else None
    return reigns


def _crown(reigns: Reigns, entry: Entry) -> None:
    version, instead_of = entry.body.get("champion"), reigns.champion
    if version in reigns.before and entry.kind != "promotion":  # back along the path
        undone = entry.body.get("undone") or reigns.gone_back_over(version)
        reigns.before = reigns.before[: _place(reigns.before, version)]
    else:
        undone = (entry.body.get("undone") or [entry.body.get("instead_of")]) if entry.kind == "rollback" else []
        reigns.before = [*reigns.before, *([instead_of] if instead_of not in (None, version) else [])]
    reigns.undone |= {number for number in undone if number is not None}
    reigns.set_aside |= {reigns.weights[number]: entry for number in undone if number in reigns.weights}
    if entry.body.get("defect"):
        reigns.defects |= dict.fromkeys(undone, entry)
    reigns.champion, reigns.came = version, entry
    for number in (instead_of, entry.body.get("instead_of"), *undone, version):
        if number is not None:
            reigns.fate[number] = entry
    if version is not None:
        reigns.undone.discard(version)
        reigns.defects.pop(version, None)
        _remember(reigns, version, entry.body)
        reigns.set_aside.pop(reigns.weights.get(version, ""), None)
    if entry.kind == "adoption":
        reigns.challenger = entry.body.get("challenger")
    elif reigns.challenger == version:
        reigns.challenger = None


def _remember(reigns: Reigns, version: int | None, body: dict[str, Any]) -> None:
    if version is not None and body.get("weights"):
        reigns.weights[version] = body["weights"]
    if version is not None and body.get("kept"):
        reigns.kept[version] = body["kept"]


def _place(path: Sequence[int], version: int) -> int:
    """Where a version is on a path that it may be on twice: the last time."""
    return len(path) - 1 - list(reversed(path)).index(version)
