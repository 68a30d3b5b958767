"""Who is champion, and how aliases move so that a crash at any moment leaves nothing half done.

`champion` is in production, `previous` is where a rollback leads, `challenger` waits. The journal is the record: an
entry decides in one step, and the aliases follow one at a time, so the registered model has the tag
`promotion.transition` until all are set. Without that tag aliases are as recorded, unless moved by hand; with it, the
next process to take the lock sets them first. Each step may be repeated.

Anybody can move an alias with one click. If that counted, removing one would make the next challenger a first champion
without an opponent. So where aliases and journal differ, a person chooses: `python -m tasks registry adopt` (the
registry becomes the record) or `restore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tasks.core.terminal import warn
from tasks.tracking.connection import mlflow_errors
from tasks.tracking.history import ChampionHistory, read_history, replaced_by
from tasks.tracking.journal import MAX_REASON, POINTER, Entry, append_all, mend, new_entry
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import RegistryLock, hold_lock
from tasks.tracking.relocate import copied_note
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.versions import CHALLENGER, CHAMPION, PREVIOUS, VERIFYING_TAGS, Version

TRANSITION = "promotion.transition"
LAST_EVENT = "last_event"  # a tag of a version
ADOPT = 'python -m tasks registry adopt --reason "…"'
RESTORE = "python -m tasks registry restore"
PUT_BACK = f"Put it back as recorded: {RESTORE}."
EITHER = f"{PUT_BACK.removesuffix('.')}; or make the record what is there now: {ADOPT}."


def open_registry(settings: TrackingSettings, model: str) -> Registry:
    """The registry, after completing what a killed promotion or rollback left half done."""
    registry = Registry(settings, model)
    if TRANSITION in registry.model_tags():
        with lock_registry(registry):
            pass
    if copied := copied_note(settings):
        warn(f"warning: {copied}")
    return registry


@contextmanager
def lock_registry(registry: Registry) -> Iterator[RegistryLock]:
    """Be the only one to move aliases, with nothing half done before. ValueError without a registered model: an empty
    one made here would take the name that a renamed one needs back.
    """
    with mlflow_errors(registry.settings):
        _refuse_no_model(registry)
        with hold_lock(registry.client, registry.model) as lock:
            for fault in mend(registry, lock):
                warn(f"warning: {registry.model}: {fault} in MLflow, by hand; it was put back from its copy.")
            registry.is_locked = True
            try:
                if TRANSITION in lock.tags:
                    align(registry, lock)
                yield lock
            finally:
                registry.is_locked = False


def _refuse_no_model(registry: Registry) -> None:
    if registry.all_aliases() is not None:
        return
    for discrepancy in find_discrepancies(registry, read_history(registry), None):
        raise ValueError(discrepancy.sentence)
    raise ValueError(
        f"{registry.model}: there is no registered model of this name, so there is nothing to change. Correct "
        f"promote.model_name, or run `python -m tasks promote`, which makes it."
    )


def current_champion(registry: Registry, *, quietly: bool = False) -> Version | None:
    """The champion by the record, None before the first. ValueError where the alias differs or the version was deleted,
    since a first champion has lower hurdles. Other differences are warnings.
    """
    history, aliases = read_settled(registry)
    for discrepancy in find_discrepancies(registry, history, aliases):
        if discrepancy.alias == CHAMPION:
            raise ValueError(discrepancy.sentence)
        if not quietly:
            warn(f"warning: {discrepancy.sentence}")
    return registry.version(history.champion) if history.champion is not None else None


def refuse_another_champion(registry: Registry, expected: Version | None) -> None:
    champion = current_champion(registry, quietly=True)
    if (champion and champion.version) == (expected and expected.version):
        return
    now = f"version {champion.version} is champion" if champion else "there is no champion"
    before = f"version {expected.version}" if expected else "no champion"
    raise ValueError(
        f"{registry.model}: {now} while this decision was made against {before}, so it says nothing about today's "
        f"champion. Nothing was moved; run `python -m tasks promote` again."
    )


def make_champion(
    registry: Registry, lock: RegistryLock, version: Version, event: Mapping[str, Any], *, after: Sequence[Entry] = ()
) -> None:
    """Make `version` champion and the champion `previous`; nothing changes if it already is champion. `event` is the
    body of the journal's entry, with its kind under `event`; `after` are entries written before it, all or none.
    """
    champion = read_history(registry).champion
    if champion == version.version:
        return
    body = {**event, "champion": version.version, "instead_of": champion, **identity(version)}
    record(registry, lock, [*after, _entry(body.pop("event"), body)])


def identity(version: Version) -> dict[str, Any]:
    """What the journal keeps of a version, so that tags edited by hand can be detected and put back."""
    kept = {name: version.tags[name] for name in VERIFYING_TAGS if name in version.tags}
    return {"weights": version.weights, "kept": kept}


def edited_tags(history: ChampionHistory, version: Version) -> dict[str, str]:
    """The tags of a version, as recorded, that verify its files and have another value or are gone by now."""
    number = version.version
    weights = {"weights_hash": history.weights[number]} if number in history.weights else {}
    recorded = {**weights, **history.kept.get(number, {})}
    return {
        name: recorded[name] for name in VERIFYING_TAGS if name in recorded and version.tags.get(name) != recorded[name]
    }


def describe_edited(version: Version, names: Iterable[str]) -> str:
    return (
        f"{version.name}: what verifies its files is not as recorded (tag {', '.join(names)}): edited or deleted in "
        f"MLflow, by hand, or by a promotion that was killed. Put it back: {RESTORE}."
    )


def refuse_edited_tags(history: ChampionHistory, version: Version) -> None:
    if edited := edited_tags(history, version):
        raise ValueError(describe_edited(version, edited))


def record(registry: Registry, lock: RegistryLock, entries: Sequence[Entry]) -> None:
    lock.check()
    registry.client.set_registered_model_tag(registry.model, TRANSITION, "the aliases are being set")
    append_all(registry, lock, entries)
    align(registry, lock)


def align(registry: Registry, lock: RegistryLock) -> None:
    """Set the aliases to what the journal says, as far as the versions exist; each step may be repeated."""
    history = read_history(registry)
    if history.came:
        _note(registry, lock, history.came)
    aims = {PREVIOUS: next(history.way_back(registry.exists), None)}  # in this order
    aims |= {CHAMPION: history.champion, CHALLENGER: history.challenger}
    found = registry.all_aliases() or {}
    for alias, number in aims.items():
        _point(registry, lock, alias, found.get(alias), number if registry.exists(number) else None)
    lock.check()
    registry.client.delete_registered_model_tag(registry.model, TRANSITION)


def _point(registry: Registry, lock: RegistryLock, alias: str, before: int | None, number: int | None) -> None:
    if number == before:
        return
    lock.check()
    if number is None:
        registry.client.delete_registered_model_alias(registry.model, alias)
    else:
        registry.client.set_registered_model_alias(registry.model, alias, str(number))


def _note(registry: Registry, lock: RegistryLock, entry: Entry) -> None:
    champion, before = entry.body.get("champion"), entry.body.get("instead_of")
    told = f"{entry.at} {entry.kind} by {entry.by}: version {champion}, instead of {before}: {entry.body.get('reason')}"
    for number in (champion, replaced_by(entry)):
        if registry.exists(number):
            lock.check()
            registry.client.set_model_version_tag(registry.model, str(number), LAST_EVENT, told)


def _entry(kind: Any, body: Mapping[str, Any]) -> Entry:
    return new_entry(kind, {**body, "reason": str(body.get("reason", ""))[:MAX_REASON]})


class Discrepancy(NamedTuple):
    """One difference between an alias and the record. `is_deleted`: the version itself is gone."""

    alias: str
    fault: str
    remedy: str
    is_deleted: bool = False
    is_tag: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.fault}. {self.remedy}"


Aliases = Mapping[str, int] | None  # None where there is no registered model


def read_settled(registry: Registry) -> tuple[ChampionHistory, Aliases]:
    """The record and the aliases of one moment. Whoever moves them meanwhile is waited for: read one after the other, a
    promotion in between would look like a click.
    """
    if registry.is_locked:  # nobody else moves them
        return read_history(registry), registry.all_aliases()
    before, history, now = registry.read_model(), read_history(registry), registry.read_model()
    if before is None or now is None:
        return history, None
    is_moving = TRANSITION in before.tags or TRANSITION in now.tags
    if not is_moving and before.tags.get(POINTER) == now.tags.get(POINTER):
        return history, before.aliases
    with lock_registry(registry):
        return read_history(registry), registry.all_aliases()


def find_discrepancies(registry: Registry, history: ChampionHistory, aliases: Aliases) -> list[Discrepancy]:
    """Differences between the aliases and the record; those of `champion` first."""
    if aliases is None:
        return [_gone(registry, history)] if history.champion is not None or history.before else []
    return [
        *_of_champion(registry, history, aliases.get(CHAMPION)),
        *_of_previous(registry, history, aliases.get(PREVIOUS)),
        *_of_alias(registry, CHALLENGER, history.challenger, aliases.get(CHALLENGER)),
    ]


def _gone(registry: Registry, history: ChampionHistory) -> Discrepancy:
    return Discrepancy(
        CHAMPION,
        f"{registry.model}: there is no registered model of this name, though {_recorded(history)}: somebody deleted "
        f"or renamed it in MLflow",
        f"If it was renamed, give it its name back, or name the new one as promote.model_name; if it was deleted, go "
        f"on without a champion: {ADOPT}.",
        is_deleted=True,
    )


def _of_champion(registry: Registry, history: ChampionHistory, found: int | None) -> list[Discrepancy]:
    expected = history.champion
    if expected is None or found is not None or registry.exists(expected):
        return _of_alias(registry, CHAMPION, expected, found) or _of_weights(registry, history)
    back = next(history.way_back(registry.exists), None)
    remedy = f"No champion before it is left: go on without one: {ADOPT}."
    if back is not None:
        remedy = (
            f"Make version {back}, which was before it, champion again: python -m tasks rollback "
            f'--reason "…"; or go on without a champion: {ADOPT}.'
        )
    return [
        Discrepancy(
            CHAMPION,
            f"{registry.model}: version {expected} was deleted, though {_recorded(history)}, and no "
            f"challenger can be compared with a model that is gone",
            remedy,
            is_deleted=True,
        )
    ]


def _of_previous(registry: Registry, history: ChampionHistory, found: int | None) -> list[Discrepancy]:
    """`previous` is where a rollback leads; where that version was deleted, it leads further back."""
    expected = next(history.way_back(registry.exists), None)
    if found == expected or (found is None and not all(map(registry.exists, history.before))):
        return []
    return _of_alias(registry, PREVIOUS, expected, found)


def _of_alias(registry: Registry, alias: str, expected: int | None, found: int | None) -> list[Discrepancy]:
    if found == expected or (found is None and not registry.exists(expected)):
        return []
    is_now = "was removed" if found is None else f"names version {found}"
    recorded = "names none" if expected is None else f"names version {expected}"
    fault = f"{registry.model}: the alias {alias} {is_now} in MLflow, by hand; as recorded it {recorded}"
    if expected is not None and not registry.exists(expected):
        return [Discrepancy(alias, f"{fault}, which was deleted", f"Make that the record: {ADOPT}.", is_deleted=True)]
    version = registry.version(found) if alias == CHAMPION and found is not None else None
    is_by_hand = version is not None and not version.weights  # it cannot be verified, so `adopt` refuses it
    return [Discrepancy(alias, fault, PUT_BACK if is_by_hand else EITHER)]


def _of_weights(registry: Registry, history: ChampionHistory) -> list[Discrepancy]:
    """Weights identify a version, so the champion's hash may not change either."""
    champion = registry.version(history.champion) if history.champion is not None else None
    if champion is None or champion.weights == history.weights.get(champion.version, champion.weights):
        return []
    fault = f"{champion.name}, the champion: its tag weights_hash was edited or deleted in MLflow, by hand"
    return [Discrepancy(CHAMPION, fault, PUT_BACK, is_tag=True)]


def _recorded(history: ChampionHistory) -> str:
    if history.champion is None or history.came is None:
        return "its journal records champions"
    return f"by its journal version {history.champion} is champion since {history.came.at} ({history.came.by})"
