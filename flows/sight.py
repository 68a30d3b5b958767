"""What a run shows on its page in Prefect beside its log: how far a long stage is, the stages, the decision, links.

They are for the eye alone: where they cannot be written the run goes on.
"""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    MarkdownArtifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.steps import StageRun
from tasks.core.files import read_json
from tasks.core.progress import PROGRESS_VARIABLE
from tasks.core.settings import Paths
from tasks.core.text import one_line
from tasks.report.marks import SIGNS, marks_of
from tasks.stages.promote.decision import remarks_of
from tasks.stages.promote.record import PAGE_FILE, headline
from tasks.tracking.versions import DECISION_FILE

LOOK_SECONDS = 5.0
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#+!|~&])")


@contextmanager
def show_progress(stage: str, model: str, paths: Paths) -> Iterator[Mapping[str, str]]:
    """Pass the block's variables to a stage; what its progress bars show becomes a progress artifact."""
    file = (paths.artifacts / ".progress" / f"{stage}.json").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    is_over = threading.Event()
    watch = contextvars.copy_context().run  # the artifact belongs to this run
    thread = threading.Thread(target=watch, args=(_follow, file, stage, model, is_over), daemon=True)
    thread.start()
    try:
        yield {PROGRESS_VARIABLE: str(file)}
    finally:
        is_over.set()
        thread.join()
        file.unlink(missing_ok=True)


def _follow(file: Path, stage: str, model: str, is_over: threading.Event) -> None:
    artifact, shown = None, None
    while not is_over.wait(LOOK_SECONDS):
        with suppress(Exception):
            row = read_json(file) if file.exists() else shown
            if row is not None and row != shown:
                artifact = _show(row, stage, model, artifact)
                shown = row


def _show(row: Mapping[str, Any], stage: str, model: str, artifact: UUID | None) -> UUID:
    percent = 100 * row["done"] / max(1, row["total"])
    told = f"{row['label']}: {row['done']:,} of {row['total']:,} {row['detail']}"
    if artifact is None:
        return UUID(str(create_progress_artifact(percent, key=artifact_key(model, stage), description=told)))
    update_progress_artifact(artifact, percent, description=told)
    return artifact


def show_results(
    done: Sequence[StageRun], reason: str, model: str, paths: Paths, *, run_id: str, run_page: str | None
) -> None:
    """The stages and their seconds, the decision, and where MLflow's run and the report are."""
    rows = [
        {"stage": run.stage, "seconds": f"{run.seconds:.1f}", "": "nothing changed" if run.is_cached else ""}
        for run in done
    ]
    with suppress(Exception):
        create_table_artifact(rows, key=artifact_key(model, "stages"), description=f"Why: {escape(reason)}")
    show_decision(model, paths)
    show_places(model, paths, run_id=run_id, run_page=run_page)


def show_decision(model: str, paths: Paths, *, run_id: UUID | None = None) -> None:
    """On the page of this run, or of another one that made it."""
    with suppress(Exception):
        told = describe_decision(read_json(paths.stage("promote") / DECISION_FILE))
        MarkdownArtifact(key=artifact_key(model, "decision"), markdown=told, flow_run_id=run_id).create()


def show_places(model: str, paths: Paths, *, run_id: str, run_page: str | None) -> None:
    with suppress(Exception):
        create_markdown_artifact(describe_places(paths, run_id, run_page), key=artifact_key(model, "links"))


def artifact_key(model: str, what: str) -> str:
    """Prefect takes small letters, digits and dashes; the model's name keeps agents on one server apart."""
    return re.sub(r"[^a-z0-9]+", "-", f"{model}-{what}".lower()).strip("-")


def describe_decision(row: Mapping[str, Any]) -> str:
    lines = [f"# {escape(row['decision'])}: {escape(headline(row))}", ""]
    lines += [f"- {SIGNS[mark]} {escape(sentence)}" for mark, sentence in marks_of(row)]
    lines += [f"- {escape(remark)}" for remark in remarks_of(row)]
    lines += [f"- **{escape(warning)}**" for warning in row["warnings"]]
    return "\n".join(lines)


def describe_places(paths: Paths, run_id: str, run_page: str | None) -> str:
    report, page = paths.artifacts / "report" / "index.html", paths.stage("promote") / PAGE_FILE
    run = f"[{run_id}]({run_page})" if run_page else f"`{run_id}` (`mlflow ui`)"
    return "\n".join([f"- MLflow's run: {run}", f"- report: `{report.absolute()}`", f"- decision: `{page.absolute()}`"])


def escape(text: object) -> str:
    """What models, tools and people wrote is no markup."""
    return MARKDOWN.sub(r"\\\1", one_line(text, 2000))
