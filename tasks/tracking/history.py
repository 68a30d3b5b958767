"""The journal's summary: who is champion, who was before, what was rolled back, and whether promotions are held.

`before` is a path, like a browser's history: a promotion adds the replaced champion, and a rollback goes back along it.
What it skips is `undone`: no further rollback leads there, and no policy promotes it again. A rollback that is taken
back, to a version that was undone, undoes nothing itself. Bodies read here:

    promotion       champion, instead_of, weights, reason, anchor, decided_at (which decision; not in old entries)
    rollback        champion, instead_of, weights, reason, undone (versions), defect (true: for a defect)
    adoption        champion, challenger (versions or null), instead_of, weights, reason, anew (true: version
                    numbers begin again, since the registered model was deleted)
    waiting         version, weights: the challenger from now on; withdrawal: version, which ends that
    hold, release   reason
    pruning         versions whose weights were removed; registered again they have them back

The anchor, which a cheaper champion's success may not fall below, is the first champion, then each one shown to be
better than the anchor. A promotion's `anchor` is the version that stays it, None where the new champion becomes it. A
version that was rolled back is no anchor any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.tracking.journal import Entry, read_journal
from tasks.tracking.registry import Registry
from tasks.tracking.versions import Version

# In the body of a promotion: the version that stays the anchor (None where the new champion becomes it), and a time.
ANCHOR, DECIDED_AT = "anchor", "decided_at"


@dataclass(slots=True)
class ChampionHistory:
    """`came` is the entry that made the champion, or ended having one; `weights` are hashes by version, `kept` the tags
    that verify them; `set_aside` are weights that were rolled back; `fate` of a version is the last entry that made it
    champion or ended that.
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
    pruned: dict[int, Entry] = field(default_factory=dict)

    def way_back(self, exists: Callable[[int], bool]) -> Iterator[int]:
        """The versions that a rollback may lead to and that are still there, the nearest first."""
        closed = {*self.undone, *self.defects, *self.pruned, self.champion}
        way = (version for version in dict.fromkeys(reversed(self.before)) if version not in closed)
        return filter(exists, way)

    def pruned_before(self, target: int) -> list[int]:
        """The versions that the way back to `target` would lead to first, had they not lost their weights."""
        after = self.before[_place(self.before, target) + 1 :]
        return sorted({version for version in after if version in self.pruned and version not in self.undone})

    def was_champion(self, version: int) -> bool:
        return version in self.fate

    def gone_back_over(self, target: int, *, defect: bool = False) -> list[int]:
        """What a rollback to a version undoes: the champion and those between on the path. Nothing where it takes a
        rollback back, to a newer version, unless for a `defect`: the champion was good enough to lead back to.
        """
        is_after_one = self.came is not None and self.came.kind == "rollback"
        if target in self.undone and is_after_one and target > (self.champion or 0) and not defect:
            return []
        on_the_way = self.before[_place(self.before, target) + 1 :] if target in self.before else []
        champion = [] if self.champion is None else [self.champion]
        return sorted({*on_the_way, *champion} - {target})


def summarise_journal(entries: Iterable[Entry]) -> ChampionHistory:
    history = ChampionHistory()
    for entry in entries:
        if entry.body.get("anew"):
            history = ChampionHistory(hold=history.hold, set_aside=history.set_aside)
        if entry.kind in ("promotion", "rollback", "adoption"):
            _change_champion(history, entry)
        elif entry.kind == "waiting":
            history.challenger = entry.body.get("version")
            _remember(history, history.challenger, entry.body)
        elif entry.kind == "withdrawal" and history.challenger == entry.body.get("version"):
            history.challenger = None
        elif entry.kind in ("hold", "release"):
            history.hold = entry if entry.kind == "hold" else None
        elif entry.kind == "pruning":
            history.pruned |= dict.fromkeys(entry.body["versions"], entry)
    return history


def _change_champion(history: ChampionHistory, entry: Entry) -> None:
    version, instead_of = entry.body.get("champion"), history.champion
    if version in history.before and entry.kind != "promotion":  # back along the path
        undone = entry.body.get("undone") or history.gone_back_over(version)
        history.before = history.before[: _place(history.before, version)]
    else:
        undone = entry.body.get("undone", [entry.body.get("instead_of")]) if entry.kind == "rollback" else []
        history.before = [*history.before, *([instead_of] if instead_of not in (None, version) else [])]
    history.undone |= {number for number in undone if number is not None}
    history.set_aside |= {history.weights[number]: entry for number in undone if number in history.weights}
    if entry.body.get("defect"):
        history.defects |= dict.fromkeys(undone, entry)
    history.champion, history.came = version, entry
    for number in (instead_of, replaced_by(entry), *undone, version):
        if number is not None:
            history.fate[number] = entry
    if version is not None:
        history.undone.discard(version)
        history.defects.pop(version, None)
        _remember(history, version, entry.body)
        history.set_aside.pop(history.weights.get(version, ""), None)
    if entry.kind == "adoption":
        history.challenger = entry.body.get("challenger")
    elif history.challenger == version:
        history.challenger = None


def _remember(history: ChampionHistory, version: int | None, body: dict[str, Any]) -> None:
    if version is None:
        return
    history.pruned.pop(version, None)
    if body.get("weights"):
        history.weights[version] = body["weights"]
    if body.get("kept"):
        history.kept[version] = body["kept"]


def _place(path: Sequence[int], version: int) -> int:
    """The last place of a version on the path, where it may be twice."""
    return len(path) - 1 - list(reversed(path)).index(version)


def anchors(entries: Iterable[Entry]) -> list[int]:
    path: list[int] = []
    for entry in entries:
        body, champion = entry.body, entry.body.get("champion")
        if body.get("anew"):
            path = []
        if entry.kind == "rollback":
            undone = body.get("undone", [body.get("instead_of")])
            path = [version for version in path if version not in undone]
        if champion is None or entry.kind not in ("promotion", "rollback", "adoption"):
            continue
        stays = body.get(ANCHOR) if entry.kind == "promotion" else (path[-1] if path else None)
        anchor = champion if stays is None else stays  # not always the last: that may have been deleted
        path = [*(version for version in path if version != anchor), anchor]
    return path


def read_history(registry: Registry) -> ChampionHistory:
    return summarise_journal(read_journal(registry).entries)


def hold_note(history: ChampionHistory) -> str | None:
    hold = history.hold
    if hold is None:
        return None
    return (
        f"Promotions are held since {hold.at} by {hold.by}: {hold.body['reason']}. "
        f'Release them: python -m tasks registry release --reason "…".'
    )


def refuse_held(registry: Registry) -> None:
    held = hold_note(read_history(registry))
    if held:
        raise ValueError(f"{registry.model}: {held} Nothing was moved.")


def rollback_note(history: ChampionHistory, registry: Registry, weights: str) -> str | None:
    """A sentence where these weights were champion and then rolled back, whatever other files are beside them: a
    scheduled flow would promote them again. If a newer tokenizer fixed them, a person can force it.
    """
    last = history.set_aside.get(weights)
    if last is None:
        return None
    same = registry.with_weights(weights)
    name = f"Version {same[0].version}" if same else "A version that was deleted"
    why = f": {last.body['reason']}" if last.body.get("reason") else ""
    return f"{name} has the same weights, and {last.by} rolled it back at {last.at}{why}."


def first_promotion_note(history: ChampionHistory) -> str | None:
    """A sentence where somebody removed the champion, so that the hurdles are those of a first one."""
    came = history.came
    if came is None or came.body.get("champion") is not None:
        return None
    return (
        f"There is no champion since {came.at}, when {came.by} went on without version {came.body.get('instead_of')} "
        f"({came.body.get('reason')}), so this counts as a first promotion."
    )


def events_of(registry: Registry, version: Version) -> list[dict[str, Any]]:
    """What happened to a version, the oldest first: kind, time, person and body of each entry that names it. Where
    numbers began again, those before named another version.
    """
    entries: list[Entry] = []
    for entry in read_journal(registry).entries:
        if entry.body.get("anew"):
            entries = []
        if version.version in _named_in(entry):
            entries.append(entry)
    return [{"event": entry.kind, "at": entry.at, "by": entry.by, **entry.without_tags()} for entry in entries]


def _named_in(entry: Entry) -> set[int | None]:
    body = entry.body
    return {
        *(body.get(name) for name in ("champion", "version")),
        replaced_by(entry),
        *body.get("undone", []),
        *body.get("versions", []),
    }


def replaced_by(entry: Entry) -> int | None:
    """The champion that an entry ended; None where version numbers begin again, since that one is gone."""
    return None if entry.body.get("anew") else entry.body.get("instead_of")
