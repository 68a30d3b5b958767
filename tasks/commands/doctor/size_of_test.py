"""Where test is smaller than promotion asks for: the settings that make it so, and what others would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.commands.doctor.context import DoctorSections
from tasks.core.files import read_json
from tasks.core.records import Problem
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.stages.curate.data_card import OF_OTHER_TEST_SETS
from tasks.stages.curate.settings import SplitSettings
from tasks.stages.curate.splitting import side_of, which_test_set
from tasks.stages.promote.settings import MORE_PROBLEMS

SHARES = [number / 20 for number in range(19, 4, -1)]  # of train: 0.95 to 0.25; with less, little is learnt


def more_test_problems(settings: DoctorSections, paths: Paths) -> str:
    """`Set curate.num_test_sets to 1 (then 14), or … . Else bring problems …`"""
    ways = [*_ways(settings, paths)]
    return f"Set {', or '.join(ways)}. Else: {MORE_PROBLEMS}" if ways else MORE_PROBLEMS


def _ways(settings: DoctorSections, paths: Paths) -> Iterator[str]:
    card, options = read_json(paths.stage("curate") / "card.json"), settings.curate
    asked, found = settings.promote.min_unseen_problems, card["num_problems"]["test"]
    if options.max_test_problems < asked:
        yield f"curate.max_test_problems to at least {asked:,}"
    others = sum(row["num_problems"] for row in card["left_out"] if row["reason"] in OF_OTHER_TEST_SETS)
    if others:
        rotation = " and curate.test_rotation to 0" if options.test_rotation else ""
        yield f"curate.num_test_sets to 1{rotation} (then {min(found + others, options.max_test_problems):,} problems)"
    if options.split == "groups":
        sizes = _sizes_by_share(read_split(paths, "train"), options, found)
        enough = next(((share, size) for share, size in sizes if size >= asked), None)
        if enough:
            yield f"curate.train_share to {enough[0]:g} (then {enough[1]:,}), before the first champion"


def _sizes_by_share(train: Sequence[Problem], options: SplitSettings, found: int) -> Iterator[tuple[float, int]]:
    """How many test problems a smaller share of train would give, the largest share first."""
    for share in (share for share in SHARES if share < options.train_share):
        sides = [side_of(item.split_group, seed=options.split_seed, train_share=share) for item in train]
        moved = [item for item, side in zip(train, sides, strict=True) if side == "test"]
        more = sum(which_test_set(item.split_group, options) == options.test_rotation for item in moved)
        yield share, min(found + more, options.max_test_problems)
