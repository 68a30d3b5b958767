"""The test problems that neither side of a promotion has seen: only on these are they compared.

Usually that is all. Where `split_seed`, `train_share` or the data's groups were changed, or a model came from another
project, a side may have memorised some: they are left out of both sides. With too few left, nothing is compared. A
warning names each side or model whose training data is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import read_json
from tasks.core.records import Problem, Trajectory
from tasks.core.splits import read_split
from tasks.core.text import counted
from tasks.models.files import TRAINED_ON
from tasks.models.trained_on import TrainedOn, read_trained_on, read_trained_on_file
from tasks.stages.promote.settings import MORE_PROBLEMS

if TYPE_CHECKING:
    from tasks.stages.promote.episodes import Conditions


class Side(NamedTuple):
    """One side of the comparison, and what it was trained on; None where that is unknown."""

    name: str
    trained_on: TrainedOn | None


class Unseen(NamedTuple):
    ids: frozenset[str]
    num_problems: int
    num_seen: dict[str, int]  # by the name of the side
    minimum: int
    warnings: list[str]
    base_models: dict[str, str]  # models without known training data, by name: unknown, or outside turnwise

    @property
    def num_left_out(self) -> int:
        return self.num_problems - len(self.ids)

    @property
    def sentence(self) -> str | None:
        if not self.num_left_out:
            return None
        by = " and ".join(f"{num:,} by {name}" for name, num in self.num_seen.items() if num)
        return (
            f"{self.num_left_out:,} of {self.num_problems:,} test problems are left out on both sides, since they were "
            f"seen in training ({by}); {len(self.ids):,} are compared on."
        )

    def to_row(self) -> dict[str, Any]:
        return {
            "num_problems": self.num_problems,
            "num_left_out": self.num_left_out,
            "num_left": len(self.ids),
            "num_seen": self.num_seen,
            "minimum": self.minimum,
            "base_models": self.base_models,
        }

    def refuse_too_few(self) -> None:
        if len(self.ids) >= self.minimum:
            return
        asked = f"promote.min_unseen_problems asks for {self.minimum:,}, since so few show nothing."
        if self.sentence is None:
            raise ValueError(f"The test set has {counted(self.num_problems, 'problem')}, and {asked} {MORE_PROBLEMS}")
        raise ValueError(
            f"{self.sentence} {asked} Take a fresh test set (curate.test_rotation), set curate.split_seed and "
            f"curate.train_share back to what the champion was trained with, or bring problems of new split groups; "
            f"then run the pipeline again."
        )

    def keep(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return [item for item in trajectories if item.problem_id in self.ids]


def find_unseen(problems: Sequence[Problem], sides: Sequence[Side], *, by_group: bool, minimum: int) -> Unseen:
    """The problems that no side has seen; with `by_group`, those of whose split group it has seen none."""
    known = {name: found if found is not None else TrainedOn() for name, found in sides}
    seen = {name: found.seen_ids(problems, by_group=by_group) for name, found in known.items()}
    ids = frozenset(item.id for item in problems).difference(*seen.values())
    all_known = reduce(or_, known.values())
    base_models = {
        **dict.fromkeys(sorted(all_known.elsewhere), "outside turnwise"),
        **dict.fromkeys(sorted(all_known.unknown), "unknown"),
    }
    num_seen = {name: len(found) for name, found in seen.items()}
    return Unseen(ids, len(problems), num_seen, minimum, _warnings(sides), base_models)


def _warnings(sides: Sequence[Side]) -> list[str]:
    silent = [
        f"{name} does not say what it was trained on (it has no {TRAINED_ON}), so nobody knows how many of the test "
        f"problems it has seen."
        for name, known in sides
        if known is None
    ]
    grown = {name: known.unknown for name, known in sides if known is not None}
    unknown = [
        f"Nobody knows what model {model} was trained on (it has no {TRAINED_ON}), and "
        f"{' and '.join(name for name, models in grown.items() if model in models)} grew from it or is that "
        f"model, so test problems that it has seen may count."
        for model in sorted(frozenset().union(*grown.values()))
    ]
    return [*silent, *unknown]


def unseen_problems(challenger: tuple[str, Path], conditions: Conditions, *, minimum: int) -> Unseen:
    """As `find_unseen`, for today's test; `challenger` is its name and model folder. Before the first champion the
    other side is what the challenger grew from, which saw no more than it.
    """
    (name, folder), champion, paths = challenger, conditions.champion, conditions.paths
    sides = [Side(name, read_trained_on(folder))]
    if champion is not None:
        trained_on = conditions.registry.read_lineage(champion, TRAINED_ON, read_trained_on_file)
        sides.append(Side(f"the champion, version {champion.version}", trained_on))
    by_group = read_json(paths.stage("curate") / "card.json")["split"] == "groups"
    return find_unseen(read_split(paths, "test"), sides, by_group=by_group, minimum=minimum)
