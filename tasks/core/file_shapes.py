"""What readers take for granted in the files that stages and flows leave for each other; a file may hold more.

`kept_files.py` says which file is of which shape, and refuses one that is not.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12


class Rate(TypedDict):
    success_rate: float
    ci_low: float
    ci_high: float
    num_problems: int
    samples_per_problem: int


class TypeRate(TypedDict):
    success_rate: float


class Result(Rate):
    by_category: dict[str, TypeRate]


class OnTest(TypedDict):
    base: Result
    warm_start: Result
    best: Result


class Weights(TypedDict):
    best: str


class Measurement(TypedDict):
    parts: dict[str, Any]


class Evaluation(TypedDict):
    best_snapshot: str
    select: dict[str, Result]
    test: OnTest
    weights: Weights
    folders: NotRequired[dict[str, str]]
    contents: NotRequired[dict[str, str]]
    measurement: NotRequired[Measurement]


class Baseline(Rate):
    gate: Literal["skip_rl", "rl", "warm_start"]


class Card(TypedDict):
    hashes: dict[str, str]
    split: str


class Pin(TypedDict):
    fingerprint: str
    description: dict[str, Any]
    probes: list[dict[str, Any]]


class AcceptedDrift(TypedDict):
    pinned: str
    today: str
    changes: list[str]
    stages: list[str]
    environment: Pin


AcceptedDrifts = list[AcceptedDrift]


class Challenger(TypedDict):
    snapshot: str
    weights: str


class Version(TypedDict):
    version: int


class Decision(TypedDict):
    decision: Literal["promote", "hold", "reject"]
    reasons: NotRequired[list[str]]
    checks: NotRequired[list[dict[str, Any]]]
    model: str
    challenger: Challenger
    champion_before: NotRequired[Version | None]
    champion_after: Version | None
    is_champion: bool


class Spent(TypedDict):
    seconds: float
    episodes: int


class Timings(TypedDict):
    select: dict[str, Spent]
    test: dict[str, Spent]
    evaluation: str


class FlowRecord(TypedDict):
    seconds: dict[str, float]
    cached: dict[str, bool]


class Pointer(TypedDict):
    path: str
    folder_hash: str


class Iteration(TypedDict):
    iteration: int


class Learnt(TypedDict):
    is_trained: bool
    num_iterations: int
    num_with_signal: int
    success_rate: float | None
    untrained_snapshots: list[str]


class Provenance(TypedDict):
    stage: str
    settings: dict[str, Any]
    git_commit: str
    git_dirty: Literal["true", "false", "unknown"]
    dvc_lock_hash: str
    code: dict[str, str]
    data: dict[str, str]
    packages: dict[str, str]
    python: str
    platform: str
    cpu: str
    num_threads: int
    outs: str


class Replies(TypedDict):
    problem_id: str
    replies: list[Any]


@with_config(ConfigDict(extra="allow"))
class LockedFile(TypedDict):
    path: str
    md5: NotRequired[str]
    size: NotRequired[int]
    nfiles: NotRequired[int]


@with_config(ConfigDict(extra="forbid"))
class LockedStage(TypedDict):
    cmd: str | list[str]
    deps: NotRequired[list[LockedFile]]
    outs: NotRequired[list[LockedFile]]
    params: NotRequired[dict[str, dict[str, Any]]]


@with_config(ConfigDict(extra="forbid"))
class Lock(TypedDict):
    """As DVC itself checks it, but for what only stores in the cloud add."""

    schema: Literal["2.0"]
    stages: NotRequired[dict[str, LockedStage]]
    datasets: NotRequired[Any]
