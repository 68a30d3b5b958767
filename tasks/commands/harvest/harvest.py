"""`harvest SOURCE OUT`: recorded conversations that succeeded become problems, a line each, for `curate.source`.

A conversation is its own reference. Left out is what failed, what is there already (in OUT, or in train or select as
they are curated here) and above all what is in test, or would be in another test set, which would no longer measure
anything. OUT grows: what it has stays as it is, also where two at once add to it. It is not written to the folder of
code while a run is at work.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.commands.harvest.conversations import Conversation, read_conversations
from tasks.commands.harvest.labels import Label, label_by_checker, label_by_judge
from tasks.core.files import json_hash, read_records, write_jsonl
from tasks.core.json_text import json_line
from tasks.core.provenance import CODE
from tasks.core.records import Problem
from tasks.core.secrets import HIDDEN
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.targets import only_writer
from tasks.core.terminal import warn
from tasks.environments.catalog import load_bare_environment
from tasks.pipeline.run_lock import RUN, only_run
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.sources import is_generated, published_halves, read_file, read_problems
from tasks.stages.curate.splitting import divide
from tasks.storage.inputs import copy_argument

if TYPE_CHECKING:
    from rich.table import Table

TAKEN = "taken"
HARM = f"all of {CODE} counts as its code, so it would stop after the next stage"
UNSEEN = "Cf"  # soft hyphens, joiners, marks of direction
# NFKC leaves these as they are, or takes them apart in other ways.
TYPED = str.maketrans(
    {**dict.fromkeys("‘’‚‛′´`", "'"), **dict.fromkeys("“”„‟«»″", '"'), **dict.fromkeys("‐‑‒–—―−", "-")}
)
SPLITS = {"train": "it is in train", "select": "it is in select", "test": "it is in test"}


def harvest(source: Path, out: Path, *, checker: str | None = None) -> Table:
    """Returns what was taken, and why the rest was not, by count. ValueError where OUT may not be written now."""
    params = read_params()
    settings, paths = load(CurateSections, params), load_paths(params)
    with _no_run_with(out, paths):  # before a judge is asked for minutes
        recorded = read_conversations(source)
    if recorded.num_unreadable:
        warn(f"warning: rows that cannot be read: {recorded.num_unreadable:,}. The first: {recorded.first_fault}.")
    known = Known(settings, paths, harvested(out))
    fates: Counter[str] = Counter({TAKEN: 0, "its row cannot be read": recorded.num_unreadable})
    candidates = []
    for conversation in recorded.conversations:
        if fault := conversation.fault or known.fault(conversation):
            fates[fault] += 1
        else:
            candidates.append(conversation)
    labels = _labels(candidates, settings, checker)
    with _no_run_with(out, paths), only_writer(out):
        before, taken = harvested(out), []  # read again: a judge takes minutes, in which another may have added to it
        known.add_harvested(before)
        for conversation, label in zip(candidates, labels, strict=True):
            problem = problem_of(conversation, label)
            fault = _fault(label) or _redacted_call(problem) or known.fault(conversation)
            fates[fault or TAKEN] += 1
            if fault is None:
                taken.append(problem)
                known.add(problem, "another conversation asks the same")
        if taken:
            write_jsonl(out, (problem.model_dump() for problem in [*before, *taken]))
    return _table(fates, out, num_problems=len(before) + len(taken))


def _no_run_with(out: Path, paths: Paths) -> AbstractContextManager[object]:
    """AnotherRun where a run is at work and OUT is part of its code. Elsewhere a run takes new problems at any time."""
    is_code = out.resolve().is_relative_to(Path(CODE).resolve())
    return only_run(paths.artifacts, RUN._replace(harm=HARM)) if is_code else nullcontext()


def harvested(out: Path) -> list[Problem]:
    return list(read_records(out, Problem)) if out.exists() else []


def problem_of(conversation: Conversation, label: Label) -> Problem:
    """Those that begin with the same request are of one split group."""
    return Problem(
        id=_id(conversation),
        category=label.category,
        level=label.level,
        requests=conversation.requests,
        world=label.world or {},
        reference=conversation.reference(with_calls=label.world is not None),
        split_group=f"served-{json_hash(plain(conversation.requests[0]))[:16]}",
    )


class Known:
    """Why a problem would be one too many: what was harvested before, the splits that are curated here, and the sides
    of `curate.source`, since another rotation or cap makes test of other problems of test's side.
    """

    def __init__(self, settings: CurateSections, paths: Paths, before: list[Problem]):
        self.why: dict[str, str] = {}  # by id, since a conversation goes on, and by requests
        self.asked_in_test = set[str]()  # each request of test: whoever asks it might tell its rest
        self.add_harvested(before)
        sides = divide_source(settings)
        for split, why in SPLITS.items():  # test is the last: where a problem is in several, that counts
            curated = read_records(paths.split(split), Problem) if paths.split(split).exists() else ()
            problems = [*curated, *sides.get(split, ())]
            for problem in problems:
                self.add(problem, why)
            if split == "test":
                self.asked_in_test = {plain(request) for problem in problems for request in problem.requests}

    def add_harvested(self, problems: list[Problem]) -> None:
        for problem in problems:
            self.add(problem, "it was harvested before")

    def add(self, problem: Problem, why: str) -> None:
        self.why |= dict.fromkeys((problem.id, _requests_key(problem.requests)), why)

    def fault(self, conversation: Conversation) -> str | None:
        """Of test is whatever says one of its requests, in a message of its own or in several."""
        said = (*conversation.user_messages, *conversation.requests)
        if not self.asked_in_test.isdisjoint(map(plain, said)):
            return SPLITS["test"]
        return self.why.get(_id(conversation)) or self.why.get(_requests_key(conversation.requests))


def divide_source(settings: CurateSections) -> dict[str, list[Problem]]:
    """All problems of `curate.source` by side; a file of the user's needs no environment."""
    source, halves = settings.curate.source, None
    if is_generated(settings):
        with closing(load_bare_environment(settings.environment)) as environment:
            rows = read_problems(settings, environment)
            halves = published_halves(settings, environment)
    elif (file := copy_argument(source)).exists():
        rows = read_file(file)
    else:
        warn(
            f"warning: curate.source {source} does not exist, so what is taken may ask what its test problems ask. "
            f"Unless this is the first harvest for it, correct curate.source and harvest into another file."
        )
        return {}
    return {side: [row.problem for row in found] for side, found in divide(rows, settings.curate, halves).items()}


def _id(conversation: Conversation) -> str:
    return f"served-{conversation.id}"


def plain(text: str) -> str:
    """Two that differ in spaces, capitals, forms of Unicode, typographic quotes and dashes, or in letters that nobody
    sees alone are the same request: a keyboard or a word processor chose those.
    """
    seen = "".join(letter for letter in text.translate(TYPED) if unicodedata.category(letter) != UNSEEN)
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold()).split())


def _requests_key(requests: list[str]) -> str:
    return json_hash([plain(request) for request in requests])


def _labels(candidates: list[Conversation], settings: CurateSections, checker: str | None) -> list[Label]:
    if not candidates:
        return []
    if checker is not None:
        return label_by_checker(candidates, checker)
    return label_by_judge(candidates, settings.environment.judge)


def _fault(label: Label) -> str | None:
    if label.success:
        return None
    return "nobody can say whether it succeeded" if label.success is None else "it failed, so it shows no solution"


def _redacted_call(problem: Problem) -> str | None:
    calls = [call.model_dump() for turn in problem.reference for call in turn.calls]
    return "a call was redacted" if HIDDEN in json_line(calls) else None


def _table(fates: Counter[str], out: Path, *, num_problems: int) -> Table:
    from tasks.core.text import counted, printable
    from tasks.report.summary import new_table

    title = f"Served conversations: {printable(str(out))} has {counted(num_problems, 'problem')}"
    table = new_table(title, "", "conversations")
    for fate, count in sorted(fates.items(), key=lambda item: (item[0] != TAKEN, -item[1], item[0])):
        if count or fate == TAKEN:
            table.add_row(fate if fate == TAKEN else f"left out: {fate}", f"{count:,}")
    return table
