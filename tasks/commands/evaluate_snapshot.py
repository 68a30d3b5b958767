"""`evaluate-snapshot SOURCE`: any model on `select`, as evaluate plays its snapshots there; never on test.

SOURCE is a snapshot of the last training (`iteration-0040`), a model folder, `models:/NAME@ALIAS` or an `s3://` URL. It
plays with evaluate's own random numbers, so its episodes pair with those of every other model under the same params:
`report --compare` reads the file that is left in artifacts/evaluate_snapshot. The result is a run in MLflow too. A
killed command goes on from the episodes that ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.commands.select_play import play_select, refuse_drift
from tasks.core.files import content_hash, file_hash, json_hash, write_json, write_jsonl
from tasks.core.resume import clear_resume, resume_root
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.splits import read_split
from tasks.core.terminal import tell
from tasks.core.urls import is_url
from tasks.core.workspace import as_shell_sees
from tasks.drift.pin import PIN_FILE
from tasks.pipeline.order import check_params, prepare_process
from tasks.pipeline.run_lock import only_run
from tasks.stages.evaluate.measurement_key import play_parts
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.promote.settings import PromoteSections
from tasks.storage.inputs import copy_argument
from tasks.tracking.model_uri import SCHEME, find_version

if TYPE_CHECKING:
    from rich.table import Table

ROOM, RESULT = "evaluate_snapshot", "result.json"
SHOWN = (
    "success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem", "mean_sampled_tokens", "mean_calls",
    "invalid_call_share",
)  # fmt: skip


class SnapshotSections(EvaluateSections, PromoteSections):
    pass


def evaluate_snapshot(source: str) -> dict[str, Any]:
    """Play it; returns the row of result.json. ValueError in one line where there is no such model."""
    from tasks.measurement.statistics import summarise
    from tasks.tracking.connection import refuse_lost_registry
    from tasks.tracking.measurements import SNAPSHOT, log_measurement

    check_params()
    params = read_params()
    prepare_process(params)
    settings, paths = load(SnapshotSections, params), load_paths(params)
    refuse_lost_registry(settings.tracking)
    with only_run(paths.artifacts), open_model(source, paths) as (name, model):
        refuse_drift(settings.environment, paths, what=f"{source}: its success")
        row = describe_model(model, settings, paths, name=name, source=source)
        play, problems = settings.plays["select"], read_split(paths, "select")
        key = [row["files"], row["select"], content_hash(paths.stage("curate") / PIN_FILE)]
        resume = resume_root(ROOM, paths) / json_hash([*key, play_parts(play, settings.environment)])[:16]
        played = play_select(model, problems, play, settings.environment, stream="select", resume=resume)
        result = summarise(played, confidence=settings.evaluate.confidence)
        row |= {key: result[key] for key in SHOWN}  # type: ignore[literal-required]
        episodes = paths.artifacts / ROOM / f"select_{row['name']}.jsonl"
        write_jsonl(episodes, (item.to_row() for item in played))
        model_name = settings.promote.model_name
        run_id = log_measurement(settings.tracking, SNAPSHOT, f"select of {row['name']}", row, model=model_name)
        row |= {"mlflow_run_id": run_id, "by_category": result["by_category"]}
        write_json(paths.artifacts / ROOM / RESULT, row)
        clear_resume(ROOM, paths)
        tell(f"evaluate-snapshot: its episodes are in {as_shell_sees(episodes)}")
    return row


@contextmanager
def open_model(source: str, paths: Paths) -> Iterator[tuple[str, Path]]:
    """(what it is called, its folder)."""
    if source.startswith(SCHEME):
        registry, version = find_version(source)
        (paths.artifacts / ROOM).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=paths.artifacts / ROOM, prefix="model-") as folder:
            yield f"{_safe(version.model)}-{version.version}", registry.fetch_model(version, Path(folder) / "model")
        return
    place = copy_argument(source) if is_url(source) else find_folder(source, paths)
    yield _safe(place.name), place


def find_folder(source: str, paths: Paths) -> Path:
    from tasks.models.folders import is_model

    snapshots = paths.stage("train") / "snapshots"
    place = next((place for place in (Path(source), snapshots / source) if is_model(place)), None)
    if place is None:
        found = ", ".join(sorted(item.name for item in snapshots.glob("*"))) or "none"
        raise ValueError(
            f"{source}: is no model, so there is nothing to evaluate. Name a model folder, models:/NAME@champion, an "
            f"s3:// URL, or a snapshot of the last training: {found}."
        )
    return place


def describe_model(model: Path, settings: SnapshotSections, paths: Paths, *, name: str, source: str) -> dict[str, Any]:
    """Its `name`, which files are called by, has digits of its hash: many folders are called `model`."""
    from tasks.models.folders import folder_hash, weights_hash

    sampling, files = settings.plays["select"].sampling, folder_hash(model)
    return {
        "name": f"{name}-{files[:8]}",
        "source": source,
        "weights": weights_hash(model),
        "files": files,
        "select": file_hash(paths.split("select")),
        "seed": settings.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "confidence": settings.evaluate.confidence,
    }


def table_of(row: dict[str, Any]) -> Table:
    from tasks.core.text import printable
    from tasks.measurement.points import level_text
    from tasks.report.results import interval, percent
    from tasks.report.summary import new_table

    columns = (
        "success",
        f"{level_text(row['confidence'])} interval",
        "problems",
        "samples",
        "tokens",
        "calls",
        "invalid",
    )
    table = new_table("On select", *columns)
    for label, result in [(row["name"], row), *row["by_category"].items()]:
        table.add_row(
            printable(label),
            percent(result["success_rate"]),
            interval(dict(result)),
            str(result["num_problems"]),
            str(result["samples_per_problem"]),
            f"{result['mean_sampled_tokens']:.1f}",
            f"{result['mean_calls']:.1f}",
            percent(result["invalid_call_share"]),
        )
    return table


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
