"""Chooses by a fixed rule which of evaluation's episodes become traces, and reads their files."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tasks.core.files import read_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.core.text import encodable
from tasks.rollouts.finished import EpisodeId, episode_id

POLICIES = ("base", "warm_start", "best")
BEFORE, AFTER = "warm_start", "best"  # `improved` and `regressed` compare these


class Episode(NamedTuple):
    category: str
    is_success: bool


Index = dict[EpisodeId, Episode]


class Choice(NamedTuple):
    policy: str
    chosen_as: str
    key: EpisodeId


class Shown(NamedTuple):
    policy: str
    chosen_as: str
    trajectory: Trajectory


def trajectories_folder(paths: Paths) -> Path:
    return paths.stage("evaluate") / "trajectories"


def test_files(paths: Paths) -> dict[str, Path]:
    """The file of each policy's episodes on test. A base that is also the warm start is there once."""
    files = {policy: file for policy in POLICIES if (file := paths.test_episodes(policy)).exists()}
    if "base" in files and BEFORE in files and filecmp.cmp(files["base"], files[BEFORE], shallow=False):
        del files["base"]
    return files


def read_index(file: Path) -> Index:
    """What choosing needs of each episode, in file order: whole files may not fit in memory."""
    rows = read_jsonl(file, is_only_shown=True)
    return {episode_id(row): Episode(row["category"], row["outcome"] == "success") for _, row in rows}


def read_chosen(files: Mapping[str, Path], choices: Sequence[Choice]) -> list[Shown]:
    """The chosen episodes, in order. Lone surrogates, which no database takes, and invalid UTF-8 become U+FFFD."""
    wanted = {(choice.policy, choice.key) for choice in choices}
    rows = {
        (policy, key): encodable(json.dumps(row, ensure_ascii=False))
        for policy, file in files.items()
        for _, row in read_jsonl(file, is_only_shown=True)
        if (policy, key := episode_id(row)) in wanted
    }
    return [
        Shown(policy, chosen_as, Trajectory.from_row(json.loads(rows[policy, key])))
        for policy, chosen_as, key in choices
    ]


def choose(episodes: Mapping[str, Index], most: int) -> list[Choice]:
    """In turns an improved episode, a regressed one and a failure of each policy, until `most` are chosen.

    Improved and regressed are from warm start to best snapshot; both are shown. Within a kind each category gives its
    first episode, then each its second, and so on. Nothing is chosen twice.
    """
    before, after = episodes.get(BEFORE, {}), episodes.get(AFTER, {})
    both = [key for key in after if key in before]
    kinds: list[list[list[Choice]]] = []
    for kind, was, now in (("improved", False, True), ("regressed", True, False)):
        changed = [key for key in both if (before[key].is_success, after[key].is_success) == (was, now)]
        in_order = _by_category(after, changed)
        kinds.append([[Choice(policy, kind, key) for policy in (BEFORE, AFTER)] for key in in_order])
    for policy, index in episodes.items():
        failed = [key for key, entry in index.items() if not entry.is_success]
        kinds.append([[Choice(policy, "failure", key)] for key in _by_category(index, failed)])
    in_turns = [choice for row in zip_longest(*kinds) for choices in row if choices for choice in choices]
    once = {(choice.policy, choice.key): choice for choice in reversed(in_turns)}
    order = dict.fromkeys((choice.policy, choice.key) for choice in in_turns)
    return [once[item] for item in order][:most]


def _by_category(index: Index, keys: list[EpisodeId]) -> list[EpisodeId]:
    queues: dict[str, list[EpisodeId]] = {}
    for key in keys:
        queues.setdefault(index[key].category, []).append(key)
    in_turns = zip_longest(*(queues[category] for category in sorted(queues)))
    return [key for row in in_turns for key in row if key is not None]
