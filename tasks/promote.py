"""promote: the best snapshot against the reigning champion on `test`; an MLflow version with the alias, or a clear no.

Reads what `evaluate` and `train` left, the registry and the environment; writes decision.json, which holds the verdict,
the reasons in plain sentences and every number they rest on. Not a DVC stage: it has a side effect. How the champion
does on today's test is `champion.py`'s. Left out for now: policies other than "better", approval by a person, rollback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from tasks.champion import measure_champion, measurement_key, read_trajectories, store_trajectories, stored_trajectories
from tasks.crown import settle
from tasks.environments.changes import listed, shown_name
from tasks.environments.options import EnvironmentSettings
from tasks.pinning import Checked, accepted_changes, check_pin
from tasks.records import Trajectory
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import read_json, require, write_json
from tasks.tracking.connection import TrackingSettings

if TYPE_CHECKING:
    from tasks.environments.base import Environment
    from tasks.tracking.registry import Registry, Version

Verdict = Literal["promote", "hold", "reject"]


class PromoteOptions(Settings):
    """The policy: the least success on `test`, and how sure one must be that the challenger is better."""

    model_name: str = Field(min_length=1, pattern=r"^[^/:'\"]+$")  # MLflow refuses / and :, quotes break its filters
    minimum_success: float = Field(ge=0, le=1)
    confidence: float = Field(gt=0, lt=1)


class PromoteSettings(Settings):
    """The sections of params.yaml that `promote` reads."""

    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    promote: PromoteOptions
    tracking: TrackingSettings


SETTINGS = PromoteSettings


class Challenger(NamedTuple):
    """The best snapshot as `evaluate` measured it on `test`, its weights still the ones that were measured."""

    snapshot: str
    folder: Path
    weights: str
    evaluation: dict[str, Any]
    trajectories: list[Trajectory]

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.evaluation["test"]["best"])

    @property
    def fingerprint(self) -> str:
        return self.trajectories[0].environment_fingerprint

    @property
    def pin(self) -> str:
        return str(self.evaluation["environment"]["pin"])


class Decision(NamedTuple):
    """A verdict with its reasons; `comparison` is the paired difference it rests on, None where none was needed.

    `differing_fields` are those in which the champion's environment was another than the challenger's.
    """

    verdict: Verdict
    reasons: list[str]
    comparison: dict[str, Any] | None
    differing_fields: Sequence[str] = ()


def run(settings: PromoteSettings, paths: Paths) -> None:
    """Decide, act on the registry (`crown.py`), then write decision.json: it never announces what did not happen."""
    from tasks.environments.catalog import load_environment

    challenger = read_challenger(paths, num_threads=settings.num_threads)
    checked = check_pin(settings.environment, paths, stage="promote")
    with closing(load_environment(settings.environment)) as environment:
        refuse_another_world(paths, challenger, environment.fingerprint(), checked)
        row, after = settle(
            settings.tracking,
            settings.promote.model_name,
            paths,
            challenger,
            environment,
            decide=lambda champion, registry: decide(settings, paths, challenger, champion, registry, environment),
            describe=lambda decision, champion: decision_row(
                settings.promote, paths, challenger, checked, decision, champion
            ),
        )
    if after is not None and after.weights == challenger.weights:
        keep_trajectories(settings, paths, challenger)
    write_decision(paths, challenger, row, after)
    print(f"{row['verdict']}: {' '.join(row['reasons'])}")


def read_challenger(paths: Paths, *, num_threads: int) -> Challenger:
    """The best snapshot, a LoRA adapter merged in. ValueError where its weights are not those `evaluate` measured."""
    from tasks.models import merged_snapshot, weights_hash

    evaluation = read_json(paths.stage("evaluate") / "evaluation.json")
    snapshot = evaluation["best_snapshot"]
    folder = require(paths.stage("train") / "snapshots" / snapshot)
    weights, measured = weights_hash(folder), evaluation["weights"]["best"]
    if weights != measured:
        raise ValueError(
            f"{folder}: its weights ({weights[:12]}) are not the ones evaluate measured ({measured[:12]}), so the "
            f"success on record is not theirs. Run `dvc repro evaluate`, then promote again."
        )
    folder = merged_snapshot(folder, paths.stage("promote") / "merged", num_threads=num_threads)
    trajectories = read_trajectories(_test_file(paths, "best"))
    return Challenger(snapshot, folder, weights_hash(folder), evaluation, trajectories)


def refuse_another_world(paths: Paths, challenger: Challenger, fingerprint: str, checked: Checked) -> None:
    """ValueError where `evaluate` measured in a world that described itself, or answered, otherwise than today's."""
    is_described_alike = all(item.environment_fingerprint == fingerprint for item in challenger.trajectories)
    if not is_described_alike or challenger.pin != checked.pin:
        raise ValueError(
            f"{_test_file(paths, 'best')}: measured in another version of the environment than today's, so it says "
            f"nothing about today's. Run `dvc repro --force --single-item evaluate`, then promote again."
        )


def decide(
    settings: PromoteSettings,
    paths: Paths,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    environment: Environment,
) -> Decision:
    """The policy. The champion is measured only where its numbers are needed and no stored ones fit."""
    from tasks.tracking.lineage import differing_fields
    from tasks.tracking.succession import why_rolled_back

    if champion is None:
        name, trajectories = baseline(paths)
        return judge(settings.promote, challenger, name, trajectories, has_champion=False)
    if champion.weights == challenger.weights:
        reason = f"{challenger.snapshot} is already champion: version {champion.version} holds the same weights."
        return Decision("hold", [reason], None)
    rolled_back = why_rolled_back(registry, challenger.weights)
    if rolled_back:
        return Decision("hold", [rolled_back, f"The champion, version {champion.version}, stays."], None)
    key = _key(settings, paths, challenger, champion.weights)
    stored = stored_trajectories(paths, key)
    if stored is None:
        measured = _measurement_settings(settings, challenger)
        stored = measure_champion(champion, registry, environment, paths, **measured)
        store_trajectories(paths, key, stored)
    name = f"the champion, version {champion.version}"
    fields = differing_fields(champion.tags, environment.describe())
    return judge(settings.promote, challenger, name, stored, has_champion=True, fields=fields)


def baseline(paths: Paths) -> tuple[str, list[Trajectory]]:
    """Whom a first champion must beat: the warm start, or the base where no warm start was needed."""
    is_pointer = (paths.stage("warm_start") / "model" / "pointer.json").exists()
    policy = "base" if is_pointer else "warm_start"
    return f"the {policy.replace('_', ' ')}", read_trajectories(_test_file(paths, policy))


def judge(
    policy: PromoteOptions,
    challenger: Challenger,
    name: str,
    trajectories: list[Trajectory],
    *,
    has_champion: bool,
    fields: Sequence[str] = (),
) -> Decision:
    """Promote if success reaches the minimum and the paired interval against `name` lies above 0.

    `fields` are those in which the champion's environment was another; both are measured in today's.
    """
    from tasks.measurement.statistics import paired_difference, summarise

    gain = paired_difference(challenger.trajectories, trajectories, confidence=policy.confidence)
    other = summarise(trajectories, confidence=policy.confidence)
    comparison = {"against": name, **gain, "challenger": _headline(challenger.result), "other": _headline(other)}
    success = challenger.result["success_rate"]
    is_good_enough, is_better, is_worse = success >= policy.minimum_success, gain["ci_low"] > 0, gain["ci_high"] < 0
    reasons = [
        f"{challenger.snapshot} succeeds on {success:.1%} of test, {'at least' if is_good_enough else 'below'} "
        f"promote.minimum_success ({policy.minimum_success:.1%}).",
        f"Against {name} ({other['success_rate']:.1%}) that is {gain['difference']:+.1%}, {policy.confidence:.0%} "
        f"interval {gain['ci_low']:+.1%} to {gain['ci_high']:+.1%}: {_in_words(is_better, is_worse)}.",
    ]
    if fields:
        shown = listed([shown_name(field) for field in fields])
        reasons.append(f"The environment differs from the champion's in: {shown}.")
    if is_good_enough and is_better:
        return Decision("promote", reasons, comparison, fields)
    verdict: Verdict = "reject" if not is_good_enough or is_worse else "hold"
    outcome = f"{name[0].upper()}{name[1:]}, stays." if has_champion else "There is still no champion."
    return Decision(verdict, [*reasons, outcome], comparison, fields)


def keep_trajectories(settings: PromoteSettings, paths: Paths, challenger: Challenger) -> None:
    """The challenger is champion and was just measured: kept, so that the next challenger finds it stored."""
    key = _key(settings, paths, challenger, challenger.weights)
    if stored_trajectories(paths, key) is None:
        store_trajectories(paths, key, challenger.trajectories)


def decision_row(
    policy: PromoteOptions,
    paths: Paths,
    challenger: Challenger,
    checked: Checked,
    decision: Decision,
    before: Version | None,
) -> dict[str, Any]:
    """The verdict, why, every number used, and the champion before; what the registry keeps with a version."""
    return {
        "verdict": decision.verdict,
        "reasons": decision.reasons,
        "model": policy.model_name,
        "challenger": {"snapshot": challenger.snapshot, "weights": challenger.weights},
        "policy": {"minimum_success": policy.minimum_success, "confidence": policy.confidence},
        "comparison": decision.comparison,
        "test": challenger.evaluation["test"],
        "select": challenger.evaluation["select"][challenger.snapshot],
        "environment": {
            "fingerprint": checked.fingerprint,
            "accepted_drift": accepted_changes(paths),
            "differs_from_champion": list(decision.differing_fields),
        },
        "champion_before": _describe(before),
    }


def write_decision(paths: Paths, challenger: Challenger, row: dict[str, Any], after: Version | None) -> None:
    """decision.json: the row, and the champion after with its lineage."""
    is_champion = after is not None and after.weights == challenger.weights
    outcome = {"champion_after": _describe(after), "is_champion": is_champion}
    write_json(paths.stage("promote") / "decision.json", {**row, **outcome})


def _measurement_settings(settings: PromoteSettings, challenger: Challenger) -> dict[str, Any]:
    """What `evaluate` measured the challenger under, and the champion must be measured under too."""
    return {
        "engine": settings.engine,
        "sampling": settings.sampling,
        "seed": settings.seed,
        "samples_per_problem": challenger.result["samples_per_problem"],
        "num_threads": settings.num_threads,
    }


def _key(settings: PromoteSettings, paths: Paths, challenger: Challenger, weights: str) -> str:
    measured = _measurement_settings(settings, challenger)
    plain = {name: value.model_dump() if isinstance(value, Settings) else value for name, value in measured.items()}
    return measurement_key(
        paths, weights=weights, fingerprint=challenger.fingerprint, pin=challenger.pin, settings=plain
    )


def _test_file(paths: Paths, policy: str) -> Path:
    return paths.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"


def _headline(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem")}


def _describe(version: Version | None) -> dict[str, Any] | None:
    if version is None:
        return None
    return {"version": version.version, "weights": version.weights, "lineage": version.tags}


def _in_words(is_better: bool, is_worse: bool) -> str:
    return "better" if is_better else "worse" if is_worse else "no clear difference"
