"""report: build the pages of the run under `paths.artifacts`, or compare two policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.core.console import SafeConsole
from tasks.core.settings import Settings, load, load_paths, read_params
from tasks.core.urls import local_path
from tasks.pipeline.run_lock import only_run
from tasks.rewards.settings import RewardSettings
from tasks.storage.mirror import FOLDERS, RUN
from tasks.storage.settings import StorageSections
from tasks.storage.uploader import uploading


class ReportSections(Settings):
    reward: RewardSettings


def report(compared: tuple[str, str] | None, out: Path | None) -> None:
    if compared is not None:
        from tasks.commands.compare import compare

        compare(compared, out, SafeConsole())
        return
    if out is not None:
        raise ValueError("--out is for --compare: the report of this run is always artifacts/report.")
    params = read_params()
    from tasks.report.summary import print_summary

    print_summary(build_report(params), load_paths(params), SafeConsole())


def build_report(params: dict[str, Any]) -> dict[str, Any]:
    """Write the report and the summary of this run, and upload them where that is set; returns the summary."""
    paths, settings = load_paths(params), load(ReportSections, params)
    frozen = params["environment"]["cache"]["frozen"]
    mirrored = uploading(
        load(StorageSections, params), [*FOLDERS, RUN], stage="report", frozen=frozen and local_path(frozen)
    )
    with only_run(paths.artifacts), mirrored:
        from tasks.report.build import build_all

        return build_all(paths, settings.reward)
