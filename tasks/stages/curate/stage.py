"""curate: raw problems become three disjoint splits and the expert episodes of a warm start.

Also writes the replies whose tokens `assess` counts (references.jsonl), the data card, Great Expectations' results and
`environment.json`, by which later stages notice a changed environment. The same params and file give the same bytes.
Nothing is written unless every critical expectation is met.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, write_json, write_jsonl, write_text
from tasks.core.records import Demonstration, Problem
from tasks.core.settings import Paths
from tasks.core.terminal import tell, warn
from tasks.core.text import counted, first_few
from tasks.core.workspace import as_shell_sees
from tasks.drift.leaks import REMEDY, find_leaks
from tasks.drift.pin import Pin, is_strict, make_pin, play_probes, write_pin
from tasks.drift.probes import choose_probes
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.stages.curate.data_card import describe_splits, list_left_out, render_card
from tasks.stages.curate.demonstrations import demonstration_table, expert_episodes, tell_in_parts
from tasks.stages.curate.expectations import load_suite
from tasks.stages.curate.references import (
    Replays,
    Row,
    first_of_each,
    problem_table,
    replay_references,
    sample_of_references,
)
from tasks.stages.curate.settings import CurateSections, CurateSettings
from tasks.stages.curate.sources import count_source, is_generated, published_halves, read_problems
from tasks.stages.curate.splitting import (
    HELD_OUT,
    SPLITS,
    Splits,
    keep_on_one_side,
    missing_categories,
    other_test_sets,
    split_and_cap,
)
from tasks.stages.curate.validation import DOCUMENT, Validation, act_on_failures, validate
from tasks.tools.base import Environment

CARD = "card.html"
SETTINGS = CurateSections


def run(settings: CurateSections, paths: Paths) -> None:
    with closing(load_bare_environment(settings.environment, with_cache=True)) as environment:
        curate(settings, paths, environment)


def curate(settings: CurateSections, paths: Paths, environment: Environment) -> None:
    options, replays = settings.curate, Replays(environment)
    rows = read_rows(settings, replays)
    halves = published_halves(settings, environment)
    kept, asked_before = keep_on_one_side(rows, options, halves=halves)
    warn_of_asked_before(asked_before)
    unique = first_of_each(kept)
    probes = choose_probes([row.problem for row in unique if row.replay.score], options.num_probe_problems)
    first_play = play_probes(settings.environment, probes)
    splits = split_and_cap(unique, options, halves=halves)
    experts = [row.problem for row in splits["train"] if row.replay.score]
    demonstrations = expert_episodes(replays, experts, num=options.num_demonstrations, seed=settings.seed)
    if options.sharded is not None:
        demonstrations = tell_in_parts(environment, demonstrations, options.sharded, seed=settings.seed)
    source_count = count_source(settings, environment)

    tables = {
        "problems": problem_table(environment, rows, splits, apart=splits_kept_apart(options)),
        "splits": split_table(splits, options),
        "demonstrations": demonstration_table(replays, demonstrations, splits),
    }
    suite = load_suite(
        {
            "num_demonstrations": options.num_demonstrations,
            "num_problems": None if source_count is None else source_count.num_problems,
        },
        starts_afresh=environment.starts_afresh(),
    )
    validation = validate(suite, tables, paths.stage("validation"))
    source = "generated problems" if is_generated(settings) else options.source
    act_on_failures(validation.results, source=source, folder=paths.stage("validation"))

    other_tests = other_test_sets(unique, options, halves=halves)
    left_out = list_left_out(kept, unique, splits, other_tests, asked_before, source_count)
    card = {
        "environment": environment.name,
        "fingerprint": environment.fingerprint(),
        "split": options.split,
        **describe_splits(environment, splits, left_out),
        **({"test_rotation": options.test_rotation} if options.test_rotation else {}),
        "num_demonstrations": len(demonstrations),
        "demonstrations_by_category": dict(Counter(problem.category for problem, _ in demonstrations)),
        "num_duplicates_removed": len(kept) - len(unique),
        "expectations": [{"name": result.check.name, "success": result.success} for result in validation.results],
    }
    # Played again only now, so that replies with the time in them differ and are not pinned.
    pin = make_pin(environment, probes, [first_play, play_probes(settings.environment, probes)])
    shown = [demonstration for _, demonstration in demonstrations]
    write_outs(paths.stage("curate"), splits, shown, card, validation, pin)
    counts = ", ".join(f"{len(splits[name]):,} {name}" for name in SPLITS)
    num_shown = len({item.problem_id for item in shown})
    repeated = f" of {counted(num_shown, 'problem')}" if num_shown < len(shown) else ""
    passed = f"{validation.num_passed()} of {len(suite)} expectations are met"
    tell(f"curate: {counts} problems, {len(shown):,} demonstrations{repeated}; {passed}")
    if num_duplicates := len(kept) - len(unique):
        tell(f"curate: {num_duplicates:,} of {len(rows):,} problems are duplicates of others and were left out")
    tell(f"curate: the data card is {as_shell_sees(paths.stage('curate') / CARD)}")
    warn_of_missing_categories(missing_categories(unique, options, halves=halves))
    if options.num_demonstrations and environment.expert() is None:
        warn_of_undemonstrated(replays, experts, [problem for problem, _ in demonstrations])


def read_rows(settings: CurateSections, replays: Replays) -> list[Row]:
    found = read_problems(settings, replays.environment)
    problems = [problem for _, problem in found]
    refuse_leaks(settings.environment, replays.environment, problems)
    played = replay_references(replays, problems)
    return [
        Row(position, where, problem, replay)
        for position, ((where, problem), replay) in enumerate(zip(found, played, strict=True))
    ]


def split_table(splits: Splits[Row], options: CurateSettings) -> list[dict[str, Any]]:
    """One row per split, with what the suite reads; `num_missing`: how many problems a rotated test set lacks."""
    missing = max(0, options.max_test_problems - len(splits["test"])) if options.test_rotation else 0
    return [
        {
            "id": name,
            "where": f"{len(splits[name])} problems",
            "num_problems": len(splits[name]),
            "num_missing": missing if name == "test" else 0,
        }
        for name in SPLITS
    ]


def splits_kept_apart(options: CurateSettings) -> tuple[str, ...]:
    """The splits that share no split group: all, but a published train half is used as it is."""
    return SPLITS if options.split == "groups" else HELD_OUT


def refuse_leaks(settings: EnvironmentSettings, environment: Environment, problems: Sequence[Problem]) -> None:
    """ValueError where an episode finds what an earlier one left; asks the environment itself, never its cache."""
    if is_strict(settings):
        return
    if settings.cache.mode == "off":
        leaks = find_leaks(environment, problems)
    else:
        with closing(load_bare_environment(settings)) as uncached:
            leaks = find_leaks(uncached, problems)
    if leaks:
        raise ValueError(
            f"the environment leaks from one episode into the next, so an agent would be rewarded for what another "
            f"episode did: {leaks[0]}. {REMEDY} No problem was curated."
        )


def warn_of_asked_before(rows: Sequence[Row]) -> None:
    if rows:
        named = first_few([f"{row.problem.id} ({row.where})" for row in rows])
        warn(
            f"warning: left out of select and test, since an earlier split has the same requests and world under "
            f"another split_group, so what was learnt would be measured: {named}. Give such rows one split_group, or "
            f"remove these copies, not the earlier ones, from which models may have learnt."
        )


def warn_of_missing_categories(missing: Mapping[str, Sequence[str]]) -> None:
    """One line per split that lacks a category: groups never move to fill it."""
    for name, categories in missing.items():
        lost = "training never meets it" if name == "train" else "it is not measured there"
        warn(
            f"warning: no split group of {first_few(categories)} is in {name}, so {lost}. Add more split "
            f"groups of that category; or, before the first champion, another curate.split_seed."
        )


def warn_of_undemonstrated(replays: Replays, experts: Sequence[Problem], demonstrated: Sequence[Problem]) -> None:
    """Categories of train that no reference demonstrates; an expert of the environment leaves out what it wants to."""
    sizes = Counter(problem.category for problem in experts)
    missing = [category for category in sizes if category not in {problem.category for problem in demonstrated}]
    if not missing:
        return
    refusals = replays.first_refusals([problem for problem in experts if problem.category in missing])
    told = first_few(
        [f"{category} ({counted(sizes[category], 'problem')} of train{refusals[category]})" for category in missing]
    )
    warn(
        f"warning: no demonstration of {told}, so the warm start never sees it: a reference is shown only where "
        f"none of its calls meets an error and each request has its turn. Write an expert() of the environment that "
        f"shows it, or raise curate.num_demonstrations where it is below the number of categories."
    )


def write_outs(
    folder: Path,
    splits: Splits[Row],
    demonstrations: Sequence[Demonstration],
    card: dict[str, Any],
    validation: Validation,
    pin: Pin,
) -> None:
    with atomic_folder(folder) as temporary:
        for name in SPLITS:
            write_jsonl(temporary / f"{name}.jsonl", (row.problem.model_dump() for row in splits[name]))
        write_jsonl(
            temporary / "demonstrations.jsonl", (item.model_dump(exclude_defaults=True) for item in demonstrations)
        )
        solved = [row for name in ("train", "select") for row in splits[name] if row.replay.score]
        write_jsonl(temporary / "references.jsonl", sample_of_references(solved))
        hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(temporary.iterdir())}
        write_json(temporary / "card.json", {**card, "hashes": hashes})
        write_json(temporary / DOCUMENT, validation.document)
        write_text(temporary / CARD, render_card(card))
        write_pin(temporary, pin)
