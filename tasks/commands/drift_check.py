"""`drift-check`: does the environment still answer as at curation, and is the champion as good as when promoted?

Leaves artifacts/drift_check (result.json, the check's episodes) and a run in MLflow. It changes nothing else: what a
drift or a fall leads to is decided by the next run (`tasks/pipeline/reasons.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.commands.select_play import play_select
from tasks.core.files import read_json, require, write_json, write_jsonl
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.splits import read_split
from tasks.core.text import counted
from tasks.drift.pin import PIN_FILE, find_drift
from tasks.pipeline.champion_check import check_error, choose_problems, confidence_of, has_fallen, most_change
from tasks.pipeline.order import check_params, prepare_process
from tasks.pipeline.reasons import listed
from tasks.pipeline.run_lock import only_run
from tasks.pipeline.settings import PipelineSettings
from tasks.rollouts.settings import DistributionSettings
from tasks.stages.promote.settings import PromoteSections

if TYPE_CHECKING:
    from tasks.core.records import Problem, Trajectory
    from tasks.measurement.statistics import Result
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

RETRAIN = "; `python -m flows run` retrains"
TOOLS_CHANGED = f"; the tools changed, so rolling back does not help{RETRAIN}"
ROOM, RESULT = "drift_check", "result.json"


class DriftCheckSections(PromoteSections):
    pipeline: PipelineSettings


def drift_check() -> str:
    """Check both; returns the line that says what was found. ValueError where nothing was curated here."""
    from tasks.tracking.connection import refuse_lost_registry

    check_params()
    params = read_params()
    prepare_process(params)
    settings, paths = load(DriftCheckSections, params), load_paths(params)
    refuse_lost_registry(settings.tracking)
    with only_run(paths.artifacts):
        require(paths.stage("curate") / PIN_FILE, made_by="curate")
        drift = find_drift(settings.environment, paths)
        row = {"environment": drift, "champion": None, "fell": False, **check_champion(settings, paths)}
        write_json(paths.artifacts / ROOM / RESULT, {**row, "sentence": describe(row)})
    return f"drift-check: {describe(row)}"


def check_champion(settings: DriftCheckSections, paths: Paths) -> dict[str, Any]:
    """Measure the champion and record the check in MLflow; empty where there is no champion."""
    from tasks.measurement.statistics import summarise
    from tasks.tracking.aliases import current_champion, open_registry
    from tasks.tracking.measurements import CHAMPION_CHECK, log_measurement, read_checks

    options, model = settings.pipeline.drift_check, settings.promote.model_name
    registry = open_registry(settings.tracking, model)
    champion = current_champion(registry)
    if champion is None:
        return {}
    past, at = read_checks(settings.tracking, model), datetime.now(UTC)
    alpha, number = check_error(options, past, at=at), len(past) + 1
    require(paths.split("select"), made_by="curate")
    select = read_split(paths, "select")
    then = promoted_episodes(registry, champion)
    problems, kept = of_one_mix(select, then)
    not_compared = sorted({item.category for item in select} - {item.category for item in kept})
    if not kept:
        return {"not_compared": not_compared}
    promoted = summarise(kept, confidence=confidence_of(alpha))
    played = play_champion(settings, paths, registry, champion, problems, number=number)
    fresh = summarise(played, confidence=confidence_of(alpha))
    row = {
        "number": number,
        "at": at.isoformat(timespec="seconds"),
        "champion": champion.version,
        "fell": has_fallen(fresh, promoted),
        "alpha": alpha,
        "most_change": round(most_change(fresh, promoted), 6),
        "num_problems": fresh["num_problems"],
        **interval_of(fresh),
        "promoted": interval_of(promoted),
        "not_compared": not_compared,
    }
    episodes = paths.artifacts / ROOM / "select_champion.jsonl"
    write_jsonl(episodes, (item.to_row() for item in played))
    name = f"drift check {number} of version {champion.version}"
    return {**row, "mlflow_run_id": log_measurement(settings.tracking, CHAMPION_CHECK, name, row, model=model)}


def of_one_mix(problems: Sequence[Problem], promoted: Sequence[Trajectory]) -> tuple[list[Problem], list[Trajectory]]:
    """Both with the same share of each category, the smaller of its two shares, as far as whole problems allow; else
    data that grew, by a category that is new or harder ones, would look like a fall. A category that is too rare on one
    side is left out of both. Empty if they have none in common.
    """
    today = {problem.id: problem.category for problem in problems}
    then = {episode.problem_id: episode.category for episode in promoted}
    both = set(today.values()) & set(then.values())
    today, then = ({id: category for id, category in side.items() if category in both} for side in (today, then))
    ours, theirs = _shares(today), _shares(then)
    shares = {category: min(ours[category], theirs[category]) for category in both}
    common = {category: share for category, share in shares.items() if round(share * min(len(today), len(then)))}
    ids, ids_then = _first_of_each(today, common), _first_of_each(then, common)
    return [item for item in problems if item.id in ids], [item for item in promoted if item.problem_id in ids_then]


def _shares(category_of: Mapping[str, str]) -> dict[str, float]:
    counts = Counter(category_of.values())
    return {category: count / counts.total() for category, count in counts.items()}


def _first_of_each(category_of: Mapping[str, str], shares: Mapping[str, float]) -> set[str]:
    """The first ids of each category, as many as its share says; their order is that of their hashes, so a fair one."""
    left = Counter({category: round(share * len(category_of)) for category, share in shares.items()})
    kept = set()
    for id, category in category_of.items():
        if left[category] > 0:
            left[category] -= 1
            kept.add(id)
    return kept


def play_champion(
    settings: DriftCheckSections,
    paths: Paths,
    registry: Registry,
    champion: Version,
    problems: Sequence[Problem],
    *,
    number: int,
) -> list[Trajectory]:
    """Fresh episodes, sampled as at its promotion, of some of the problems."""
    options = settings.pipeline.drift_check
    chosen = choose_problems(problems, options, seed=settings.seed, number=number)
    (paths.artifacts / ROOM).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=paths.artifacts / ROOM, prefix="model-") as folder:
        distribution = promoted_sampling(registry, champion)
        play = settings.play(options.samples_per_problem, drawn_from=distribution)
        model = registry.fetch_model(champion, Path(folder) / "champion")
        return play_select(model, chosen, play, settings.environment, stream=f"champion_check.{number}")


def promoted_episodes(registry: Registry, champion: Version) -> list[Trajectory]:
    from tasks.stages.promote.episodes import registered_episodes

    kept = registered_episodes(registry, champion)
    found = kept.read() if kept else None
    if found is None:
        raise ValueError(
            f"{champion.name}: the episodes it was promoted with are gone or altered, so its success today has nothing "
            f"to be compared with. Restore {registry.settings.artifact_location}, or promote a model again."
        )
    return found


def promoted_sampling(registry: Registry, champion: Version) -> DistributionSettings | None:
    """The temperature and top-p of its evaluation; None, today's, where they are not recorded."""
    sampling = (registry.read_lineage(champion, "evaluation.json", read_json) or {}).get("sampling")
    return DistributionSettings(**sampling) if sampling else None


def interval_of(result: Result) -> dict[str, float]:
    return {"success_rate": result["success_rate"], "ci_low": result["ci_low"], "ci_high": result["ci_high"]}


def describe(row: dict[str, Any]) -> str:
    drift, champion = row["environment"], row["champion"]
    environment = (
        f"the environment changed since curation: {listed(drift)}" if drift else "the environment is as curated"
    )
    if champion is None and "not_compared" in row:
        return f"{environment}; the champion was promoted with no category of select: {listed(row['not_compared'])}"
    if champion is None:
        return f"{environment}; there is no champion to measure"
    remedy = TOOLS_CHANGED if drift else RETRAIN if row["fell"] else ""
    verdict = f"fell by at least {-100 * row['most_change']:.1f} points" if row["fell"] else "shows no fall"
    new = row["not_compared"]
    return (
        f"{environment}; version {champion} {verdict}: {_range(row)} on {counted(row['num_problems'], 'problem')} of "
        f"select, promoted with {_range(row['promoted'])}"
        + (f"; new since then and not compared: {listed(new)}" if new else "")
        + remedy
    )


def _range(row: dict[str, Any]) -> str:
    return f"{row['success_rate']:.1%} ({row['ci_low']:.1%} to {row['ci_high']:.1%})"
