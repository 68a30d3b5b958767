"""Checks of the curated data: splits share nothing, and the files are those that curation wrote."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, failed, passed, some, warned
from tasks.core.files import json_hash, read_json, read_jsonl
from tasks.core.records import Problem
from tasks.stages.curate.splitting import HELD_OUT


def splits(context: DoctorContext) -> Finding:
    """No split group, id or content on two sides; demonstrations of train alone; no type that training never meets.

    Published halves share the groups they were published with: that is a warning, and a failure of select and test.
    """
    problems = context.problems
    is_published = context.settings.curate.split == "published"
    apart = {name: problems[name] for name in HELD_OUT} if is_published else problems
    for what, key, among in (("split groups", _group, apart), ("ids", _id, problems), ("problems", _content, problems)):
        shared = _on_two_sides(among, key)
        if shared:
            return failed(
                f"{len(shared):,} {what} are in two splits: {some(shared)}",
                "Scores on select and test would be inflated. Run `python -m tasks curate` again, on rows whose "
                "split_group names what a solution hinges on.",
            )
    trained = {problem.id for problem in problems["train"]}
    rows = read_jsonl(context.paths.stage("curate") / "demonstrations.jsonl")
    strangers = sorted({str(row["problem_id"]) for _, row in rows} - trained)
    if strangers:
        return failed(
            f"demonstrations show {len(strangers):,} problems that are not in train: {some(strangers)}",
            "The warm start would learn what it is judged by. Run `python -m tasks curate` again.",
        )
    shared = _on_two_sides(problems, _group)
    if shared:
        return warned(
            f"{len(shared):,} split groups are in train and held out, as published: {some(shared)}",
            "Select and test measure in part what train gives away. Set curate.split to groups to keep them apart.",
        )
    known = {problem.category for problem in problems["train"]}
    new = sorted({problem.category for name in ("select", "test") for problem in problems[name]} - known)
    if new:
        return warned(
            f"{len(new)} types of select or test are not in train: {some(new)}",
            "Training never meets them. Write more rows of these types, in more split groups.",
        )
    *others, last = (f"{len(members):,}" for members in problems.values())
    return passed(f"{', '.join(others)} and {last} share no group, id or content")


def curated_files(context: DoctorContext) -> Finding:
    """The hashes on the card against the files, which somebody may have edited since."""
    folder = context.paths.stage("curate")
    hashes = read_json(folder / "card.json")["hashes"]
    changed = [
        name
        for name, known in hashes.items()
        if not (folder / name).exists() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != known
    ]
    if changed:
        return failed(
            f"{', '.join(changed)} changed after curation",
            "Nobody validated these rows. Run `python -m tasks curate` again; edit curate.source, never its results.",
        )
    return passed(f"all {len(hashes)} are as curation wrote them")


def _on_two_sides(problems: dict[str, list[Problem]], key: Callable[[Problem], str]) -> list[str]:
    """What occurs in more than one split, with the splits: `route Oslo Rome (train, test)`."""
    sides: dict[str, dict[str, str]] = defaultdict(dict)
    for split, members in problems.items():
        for problem in members:
            sides[key(problem)].setdefault(split, problem.id)
    shared = [(name, found) for name, found in sides.items() if len(found) > 1]
    return [f"{next(iter(found.values())) if key is _content else name} ({', '.join(found)})" for name, found in shared]


def _group(problem: Problem) -> str:
    return problem.split_group


def _id(problem: Problem) -> str:
    return problem.id


def _content(problem: Problem) -> str:
    """Requests, whatever their case and spacing, and the world they are asked in."""
    asked = [" ".join(request.casefold().split()) for request in problem.requests]
    return json_hash([asked, problem.world])
