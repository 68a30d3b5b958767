"""Where the registry is not as its journal says: what somebody did to aliases, versions and tags in MLflow's pages.

An alias is one click away from anybody. Taken at its word, one that was removed would make the next challenger a first
champion, with nobody to beat, and one that was moved would put a model into production that nobody decided on. So the
journal is the record and the aliases follow it; where they differ people are told, and say which of the two it is to
be: `python -m tasks registry adopt` (the registry as it is becomes the record) or `restore` (it is put back).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tasks.tracking.versions import CHALLENGER, CHAMPION, PREVIOUS

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.history import ChampionHistory

ADOPT = 'python -m tasks registry adopt --reason "…"'
RESTORE = "python -m tasks registry restore"
EITHER = f"Put it back as recorded: {RESTORE}; or make the record what is there now: {ADOPT}."


class Discrepancy(NamedTuple):
    """One difference: of which alias, what it is and what to do. `is_deleted`: the version itself is gone."""

    alias: str
    fault: str
    remedy: str
    is_deleted: bool = False
    is_tag: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.fault}. {self.remedy}"


def find_discrepancies(registry: Registry, history: ChampionHistory) -> list[Discrepancy]:
    """Every difference between the aliases and the record; those of `champion` first."""
    aliases = registry.all_aliases()
    if aliases is None:
        return [_gone(registry, history)] if history.champion is not None or history.before else []
    numbers = registry.numbers()
    return [
        *_of_champion(registry, history, aliases.get(CHAMPION), numbers),
        *_of_previous(registry, history, aliases.get(PREVIOUS), numbers),
        *_of_alias(registry, CHALLENGER, history.challenger, aliases.get(CHALLENGER), numbers),
    ]


def _gone(registry: Registry, history: ChampionHistory) -> Discrepancy:
    return Discrepancy(
        CHAMPION,
        f"{registry.model}: there is no registered model of this name, though {_recorded(history)}: somebody deleted or "
        f"renamed it in MLflow",
        f"If it was renamed, give it its name back, or name the new one as promote.model_name; if it was deleted, go "
        f"on without a champion: {ADOPT}.",
        is_deleted=True,
    )


def _of_champion(registry: Registry, history: ChampionHistory, found: int | None, numbers: list[int]) -> list[Discrepancy]:
    expected = history.champion
    if expected is None or expected in numbers or found is not None:
        return _of_alias(registry, CHAMPION, expected, found, numbers) or _of_weights(registry, history)
    back = next(iter(history.way_back(numbers)), None)
    remedy = f"No champion before it is left: go on without one: {ADOPT}."
    if back is not None:
        remedy = (
            f"Make version {back}, which was before it, champion again: python -m tasks rollback "
            f'--reason "…"; or go on without a champion: {ADOPT}.'
        )
    return [
        Discrepancy(
            CHAMPION,
            f"{registry.model}: version {expected} was deleted, though {_recorded(history)}, and nobody can say whether "
            f"a challenger is better than a model that is gone",
            remedy,
            is_deleted=True,
        )
    ]


def _of_previous(registry: Registry, history: ChampionHistory, found: int | None, numbers: list[int]) -> list[Discrepancy]:
    """`previous` is where a rollback leads; with a version that was deleted it leads further back."""
    expected = next(iter(history.way_back(numbers)), None)
    if found is None and any(version not in numbers for version in history.before):
        return []
    return _of_alias(registry, PREVIOUS, expected, found, numbers)


def _of_alias(
    registry: Registry, alias: str, expected: int | None, found: int | None, numbers: list[int]
) -> list[Discrepancy]:
    if found == expected or (found is None and expected not in numbers):
        return []
    is_now = "was removed" if found is None else f"names version {found}"
    recorded = "names none" if expected is None else f"names version {expected}"
    fault = f"{registry.model}: the alias {alias} {is_now} in MLflow, by hand; as recorded it {recorded}"
    if expected is not None and expected not in numbers:
        return [Discrepancy(alias, f"{fault}, which was deleted", f"Make that the record: {ADOPT}.", is_deleted=True)]
    return [Discrepancy(alias, fault, EITHER)]


def _of_weights(registry: Registry, history: ChampionHistory) -> list[Discrepancy]:
    """Versions are told apart by their weights, so the champion's hash may not change either."""
    champion = registry.version(history.champion) if history.champion is not None else None
    if champion is None or champion.weights == history.weights.get(champion.version, champion.weights):
        return []
    fault = f"{champion.name}, the champion: its tag weights_hash was edited or deleted in MLflow, by hand"
    return [Discrepancy(CHAMPION, fault, f"Put it back as recorded: {RESTORE}.", is_tag=True)]


def _recorded(history: ChampionHistory) -> str:
    if history.champion is None or history.came is None:
        return "its journal knows champions"
    return f"by its journal version {history.champion} is champion since {history.came.at} ({history.came.by})"
