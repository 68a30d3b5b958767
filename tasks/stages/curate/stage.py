"""Stage 1, curate: raw problems become three disjoint splits and the expert episodes of a warm start.

Takes the world's own generator or the user's JSONL of Problems; gives `train.jsonl`, `select.jsonl`, `test.jsonl`,
`demonstrations.jsonl`, `references.jsonl` (what tools answered some references of train and select, whose tokens
`assess` counts), the data card (`card.json`, with content hashes, and `card.html`), and `environment.json`, by which
later stages notice a world that has changed (`drift/pin.py`). It promises that every reference solution reaches
success when replayed, and that the same params (and file) give the same bytes. Nothing is written unless every
expectation of `validation` holds.

How raw problems are read is in `sources.py`; how they are divided, and what two sides may share, in
`splitting.py`. Left out: grading how hard a problem is
for a model, which is what `assess` measures.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, write_json, write_jsonl, write_text
from tasks.core.records import Demonstration, Problem
from tasks.core.settings import Paths
from tasks.core.splits import content_key
from tasks.core.terminal import tell, warn
from tasks.drift.leaks import REMEDY, find_leaks
from tasks.drift.pin import Pin, is_strict, make_pin, play_probes, write_pin
from tasks.drift.probes import choose_probes
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.stages.curate.data_card import describe_splits, render_card
from tasks.stages.curate.demonstrations import expert
from tasks.stages.curate.expectations import checks
from tasks.stages.curate.references import (
    Row,
    Splits,
    demonstration_table,
    problem_table,
    replay_references,
    sample_of_references,
)
from tasks.stages.curate.replays import Replays
from tasks.stages.curate.settings import CurateSections, CurateSettings
from tasks.stages.curate.sources import count_source, is_generated, published_halves, read_problems
from tasks.stages.curate.splitting import HELD_OUT, SPLITS, in_turn, missing_categories, other_test_sets, split_and_cap
from tasks.stages.curate.validation import raise_on_failure, validate
from tasks.tools.base import Environment, SourceCount

CARD = "card.html"


SETTINGS = CurateSections


def run(settings: CurateSections, paths: Paths) -> None:
    """Curate in the world without faults on purpose: a reference that meets one would not be at fault itself."""
    with closing(load_bare_environment(settings.environment, with_cache=True)) as environment:
        curate(settings, paths, environment)


def curate(settings: CurateSections, paths: Paths, environment: Environment) -> None:
    """Read and replay, deduplicate, split, demonstrate, validate, pin; write only what holds."""
    options = settings.curate
    found = read_problems(settings, environment)
    refuse_leaks(settings.environment, environment, [problem for _, problem in found])
    replays = Replays(environment)
    references = replay_references(replays, [problem for _, problem in found])
    rows = [
        Row(position, where, problem, replay)
        for position, ((where, problem), replay) in enumerate(zip(found, references, strict=True))
    ]
    unique = first_of_each(rows)
    probes = choose_probes([row.problem for row in unique if row.replay.score], options.num_probe_problems)
    first_play = play_probes(settings.environment, probes)
    halves = published_halves(settings, environment)
    splits = split_and_cap(unique, options, halves=halves)
    before, after = other_test_sets(unique, options, halves=halves)
    experts = [row.problem for row in splits["train"] if row.replay.score]
    demonstrations = expert_episodes(replays, experts, num=options.num_demonstrations, seed=settings.seed)

    source_count = count_source(settings, environment)
    tables = {
        "problems": problem_table(environment, rows, splits, apart=kept_apart(options)),
        "splits": [
            {"id": name, "where": f"{len(splits[name])} problems", "num_problems": len(splits[name])} for name in SPLITS
        ],
        "demonstrations": demonstration_table(replays, demonstrations, splits),
    }
    suite = checks(
        num_demonstrations=options.num_demonstrations,
        num_problems=None if source_count is None else source_count.num_problems,
        apart=kept_apart(options),
    )
    results = validate(suite, tables, paths.stage("validation"))
    source = "generated problems" if is_generated(settings) else options.source
    raise_on_failure(results, source=source, page=paths.stage("validation") / "index.html")

    card = {
        "environment": environment.name,
        "fingerprint": environment.fingerprint(),
        "split": options.split,
        **describe_splits(environment, splits, left_out(rows, unique, splits, before, after, source_count)),
        **({"test_rotation": options.test_rotation} if options.test_rotation else {}),
        "num_demonstrations": len(demonstrations),
        "num_duplicates_removed": len(rows) - len(unique),
        "expectations": [{"name": result.check.name, "success": result.success} for result in results],
    }
    # Played again only now: what a clock says has changed since, and so is not pinned.
    pin = make_pin(environment, probes, [first_play, play_probes(settings.environment, probes)])
    write_outs(paths.stage("curate"), splits, [demonstration for _, demonstration in demonstrations], card, pin)
    counts = ", ".join(f"{len(splits[name]):,} {name}" for name in SPLITS)
    tell(f"curate: {counts} problems, {len(demonstrations):,} demonstrations; {len(results)} expectations hold")
    tell(f"curate: the data card is {paths.stage('curate') / CARD}")
    warn_of_sharing(card["shared_split_groups"])
    warn_of_missing_categories(missing_categories(unique, options, halves=halves))
    warn_of_a_small_test(options, len(splits["test"]))


def refuse_leaks(settings: EnvironmentSettings, environment: Environment, problems: Sequence[Problem]) -> None:
    """ValueError where an episode finds what an earlier one left; the world is asked, never what a cache kept of it."""
    if is_strict(settings):
        return
    if settings.cache.mode == "off":
        leaks = find_leaks(environment, problems)
    else:
        with closing(load_bare_environment(settings)) as world:
            leaks = find_leaks(world, problems)
    if leaks:
        raise ValueError(
            f"the environment leaks from one episode into the next, so an agent would be paid for what another did, "
            f"or for nothing: {leaks[0]}. {REMEDY} No problem was curated."
        )


def kept_apart(options: CurateSettings) -> tuple[str, ...]:
    """The splits that share no split group: all, but a published train half has what it had."""
    return SPLITS if options.split == "groups" else HELD_OUT


def first_of_each(rows: Sequence[Row]) -> list[Row]:
    """The rows whose content did not occur before."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(content_key(row.problem), row)
    return list(first.values())


def expert_episodes(
    replays: Replays, problems: Sequence[Problem], *, num: int, seed: int
) -> list[tuple[Problem, Demonstration]]:
    """`num` error-free expert episodes, cycling over the problems that have one; fewer only where none has.

    A problem of level n is shown n times a cycle: longer tasks have more to imitate.
    """
    episodes: list[tuple[Problem, Demonstration]] = []
    by_turns = in_turn(problems, category=lambda problem: problem.category)
    willing, draw = [problem for problem in by_turns for _ in range(problem.level)], 0
    demonstrate = expert(replays, willing[:num])
    while willing and len(episodes) < num:
        tried = [(problem, random.Random(f"{seed}/curate/{draw}/{place}")) for place, problem in enumerate(willing)]
        played = ((problem, demonstrate(problem, rng)) for problem, rng in tried)
        made = ((problem, demonstration) for problem, demonstration in played if demonstration is not None)
        cycle = list(islice(made, num - len(episodes)))
        episodes += cycle
        willing, draw = [problem for problem, _ in cycle], draw + 1
    return episodes


def left_out(
    rows: Sequence[Row],
    unique: Sequence[Row],
    splits: Splits,
    before: Sequence[Row],
    after: Sequence[Row],
    source_count: SourceCount | None,
) -> dict[str, Sequence[str]]:
    """The ids that are in no split, by reason. `before` and `after` are the rows of the other test sets."""
    first = {row.position for row in unique}
    used = {row.position for some in (before, after, *(splits[name] for name in SPLITS)) for row in some}
    return {
        **(source_count.left_out if source_count else {}),
        "the same content under another id": [row.problem.id for row in rows if row.position not in first],
        "more than curate.max_select_problems or curate.max_test_problems": [
            row.problem.id for row in unique if row.position not in used
        ],
        "in a test set before curate.test_rotation": [row.problem.id for row in before],
        "kept for a test set after curate.test_rotation": [row.problem.id for row in after],
    }


def warn_of_sharing(shared: Mapping[str, Any]) -> None:
    """One line where splits share ground truth, which `published` allows."""
    if shared["num_shared"]:
        num_problems = sum(shared["num_problems"].values())
        warn(
            f"warning: {shared['num_shared']} of {shared['num_groups']} split groups ({num_problems} problems) are "
            f"in several splits, so select and test measure in part what train gave away. Set curate.split to groups "
            f"to keep them apart."
        )


def warn_of_missing_categories(missing: Mapping[str, Sequence[str]]) -> None:
    """One line for each split in which some category has no split group, since groups never move to fill it."""
    for name, categories in missing.items():
        more = f" and {len(categories) - 3} more" if len(categories) > 3 else ""
        lost = "training never meets it" if name == "train" else "nothing there is measured of it"
        warn(
            f"warning: no split group of {', '.join(categories[:3])}{more} is in {name}, so {lost}. Bring more split "
            f"groups of that category; or, before the first champion, another curate.split_seed."
        )


def warn_of_a_small_test(options: CurateSettings, num_problems: int) -> None:
    """One line where a rotated test set is smaller than asked for."""
    if options.test_rotation and num_problems < options.max_test_problems:
        warn(
            f"warning: test set {options.test_rotation} (curate.test_rotation) has {num_problems:,} problems of "
            f"curate.max_test_problems ({options.max_test_problems:,}), so small differences will not show."
        )


def write_outs(
    folder: Path, splits: Splits, demonstrations: Sequence[Demonstration], card: dict[str, Any], pin: Pin
) -> None:
    """Every file of the stage at once: the folder appears whole or stays as it was."""
    with atomic_folder(folder) as temporary:
        for name in SPLITS:
            write_jsonl(temporary / f"{name}.jsonl", (row.problem.model_dump() for row in splits[name]))
        write_jsonl(temporary / "demonstrations.jsonl", (item.model_dump() for item in demonstrations))
        solved = [row for name in ("train", "select") for row in splits[name] if row.replay.score]
        write_jsonl(temporary / "references.jsonl", sample_of_references(solved))
        hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(temporary.iterdir())}
        write_json(temporary / "card.json", {**card, "hashes": hashes})
        write_text(temporary / CARD, render_card(card))
        write_pin(temporary, pin)
