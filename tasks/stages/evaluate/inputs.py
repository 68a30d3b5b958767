"""What `evaluate` plays, read and checked before its first episode."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tasks.core.files import json_hash, numbered_folders, require
from tasks.core.records import Problem
from tasks.core.resume import resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.drift.pin import DriftCheck, check_pin
from tasks.stages.evaluate.measurement_key import Parts, key_parts
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.transfer import OtherProblems, read_others


class Inputs(NamedTuple):
    """What is played."""

    snapshots: dict[str, Path]
    select: list[Problem]
    test: list[Problem]
    others: dict[str, OtherProblems]
    drift: DriftCheck
    parts: Parts
    resume: Path  # DVC does not watch packages, so its name does: never resume episodes that other versions sampled


def read_inputs(settings: EvaluateSections, paths: Paths) -> Inputs:
    snapshots = {folder.name: folder for folder in numbered_folders(require(paths.stage("train") / "snapshots"))}
    select, test = read_split(paths, "select"), read_split(paths, "test")
    others = read_elsewhere(settings, paths, snapshots.values())
    refuse_no_room_for_notes(settings, paths)
    drift = check_pin(settings.environment, paths, stage="evaluate")
    parts = key_parts(settings.plays["test"], paths, settings.environment, drift)
    resume = resume_folder("evaluate", settings, paths) / json_hash(parts)[:16]
    return Inputs(snapshots, select, test, others, drift, parts, resume)


def read_elsewhere(settings: EvaluateSections, paths: Paths, snapshots: Iterable[Path]) -> dict[str, OtherProblems]:
    """The problems of `evaluate.also`, checked while nothing has been played yet."""
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config

    if not settings.evaluate.also:
        return {}
    base = paths.base_model
    return read_others(settings, load_chat(base), model_config(base), snapshots)


def refuse_no_room_for_notes(settings: EvaluateSections, paths: Paths) -> None:
    """ValueError where `evaluate.reflexion` could not be played, while nothing has been played yet."""
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config
    from tasks.stages.evaluate.reflexion import tokens_with_notes

    if settings.evaluate.reflexion is not None:
        base = paths.base_model
        sampling = settings.plays["test"].sampling
        tokens_with_notes(settings.evaluate.reflexion, load_chat(base), model_config(base), sampling)
