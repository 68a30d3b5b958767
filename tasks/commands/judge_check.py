"""`judge-check`: how far does the judge of params.yaml agree with people?

Asks the judge about each episode of `environment.judge.agreement.labels` and writes `agreement.evidence`: raw agreement
with an interval clustered by group, Cohen's kappa and the four counts. Without that file, or below the thresholds, no
stage uses the judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.commands.outputs import first_json, refuse_to_replace
from tasks.core import background
from tasks.core.files import file_hash, write_json
from tasks.core.settings import Settings, load, read_params
from tasks.core.text import counted
from tasks.environments.settings import EnvironmentSettings
from tasks.measurement.points import level_text
from tasks.tools.base import EnvironmentFault
from tasks.tools.judge.evidence import Agreement, Evidence, Table, shortfalls
from tasks.tools.judge.judge import Judge, Judgement, describe_judge
from tasks.tools.judge.labels import Labelled, read_labels
from tasks.tools.judge.prompt import Judged
from tasks.tools.judge.settings import AgreementSettings, JudgeSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_SHOWN = 20  # disagreements


class JudgeCheckSections(Settings):
    environment: EnvironmentSettings


def judge_check() -> bool:
    """Measure, write and print; False where the judge is below a threshold. ValueError where nothing was measured."""
    from tasks.core.console import SafeConsole

    settings, wanted = find_settings()
    labels, evidence = Path(wanted.labels), Path(wanted.evidence)
    refuse_to_replace(
        evidence,
        kind="what judge-check writes",
        is_own=_is_evidence,
        remedy="Name a new file in environment.judge.agreement.evidence.",
    )
    labelled = read_labels(labels, show_reference=settings.show_reference)
    # As they are now: a person may edit labels or rubric while the judge is asked, which takes minutes.
    judge, hash_of_labels = describe_judge(settings), file_hash(labels)
    judgements = judge_all(settings, [item.judged for item in labelled])
    measured = measure(labelled, judgements, confidence=wanted.confidence)
    write_json(evidence, Evidence(judge=judge, labels=hash_of_labels, measured=measured).model_dump())
    console, too_low = SafeConsole(), shortfalls(wanted, measured)
    console.print(f"{settings.model} on {counted(len(labelled), 'episode')} of {labels}", style="bold", soft_wrap=True)
    for part in printout(wanted, labelled, judgements, measured):
        console.print(part, soft_wrap=True)
    for line in too_low:
        console.print(f"refused: {line}", style="red", soft_wrap=True)
    console.print(wanted.evidence)
    return not too_low


def _is_evidence(file: Path) -> bool:
    found = first_json(file)
    return isinstance(found, dict) and Evidence.model_fields.keys() <= found.keys()


def find_settings() -> tuple[JudgeSettings, AgreementSettings]:
    """ValueError where there is no judge, or nothing to measure it with."""
    judge = load(JudgeCheckSections, read_params()).environment.judge
    if judge is None:
        raise ValueError(
            "environment.judge is null, so there is no judge to check. Fill it in; "
            "tasks/tools/README.md has an example."
        )
    if judge.agreement is None:
        raise ValueError(
            "environment.judge.agreement is null, so there is nothing to compare the judge with. Name episodes that "
            "you judged yourself; tasks/tools/README.md has the format."
        )
    return judge, judge.agreement


def judge_all(settings: JudgeSettings, episodes: Sequence[Judged]) -> list[Judgement]:
    """In order. ValueError where the judge cannot be asked; the votes that arrived are stored."""
    judge = Judge(settings)

    async def ask() -> list[Judgement | BaseException]:
        try:
            return await asyncio.gather(*(judge.judge(judged) for judged in episodes), return_exceptions=True)
        finally:
            await judge.close()

    found = background.run(ask()).result()
    faults = [item for item in found if isinstance(item, BaseException)]
    if faults and isinstance(faults[0], EnvironmentFault):
        raise ValueError(
            f"{settings.url or settings.model}: {len(faults)} of {len(episodes)} episodes could not be judged "
            f"({faults[0]}), so nothing is known of them all. Repair the judge and run again; the votes "
            f"that arrived are stored."
        )
    if faults:
        raise faults[0]
    return [item for item in found if isinstance(item, Judgement)]


def measure(labelled: Sequence[Labelled], judgements: Sequence[Judgement], *, confidence: float) -> Agreement:
    """Success against the labels; scores are not compared, since labels have none."""
    from tasks.measurement.agreement import agreement_interval, cohens_kappa, confusion

    said, judged = [item.label for item in labelled], [item.success for item in judgements]
    groups = [item.group for item in labelled]
    low, high = agreement_interval(said, judged, groups, confidence=confidence)
    counts = confusion(said, judged)
    return Agreement(
        agreement=(counts[True, True] + counts[False, False]) / len(said),
        ci_low=low,
        ci_high=high,
        confidence=confidence,
        kappa=cohens_kappa(said, judged),
        num_labels=len(said),
        table=Table(
            yes_yes=counts[True, True],
            yes_no=counts[True, False],
            no_yes=counts[False, True],
            no_no=counts[False, False],
        ),
    )


def printout(
    wanted: AgreementSettings, labelled: Sequence[Labelled], judgements: Sequence[Judgement], measured: Agreement
) -> list[RenderableType]:
    parts: list[RenderableType] = [_numbers(wanted, measured), _table(measured.table)]
    apart = [(item, found) for item, found in zip(labelled, judgements, strict=True) if item.label != found.success]
    return [*parts, *([_disagreements(apart)] if apart else [])]


def _numbers(wanted: AgreementSettings, measured: Agreement) -> RenderableType:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2))
    interval = f"{measured.ci_low:.1%} to {measured.ci_high:.1%} at {level_text(measured.confidence)}"
    grid.add_row("agreement", f"{measured.agreement:.1%}", interval, f"wanted: surely {wanted.min_agreement:.1%}")
    grid.add_row("Cohen's kappa", f"{measured.kappa:.3f}", "", f"wanted: {wanted.min_kappa:.3f}")
    return grid


def _table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for title in ("", "judge: success", "judge: failure"):
        grid.add_column(title, justify="right" if title else "left")
    grid.add_row("people: success", str(table.yes_yes), str(table.yes_no))
    grid.add_row("people: failure", str(table.no_yes), str(table.no_no))
    return grid


def _disagreements(apart: Sequence[tuple[Labelled, Judgement]]) -> RenderableType:
    from rich import box
    from rich.table import Table as Grid

    title = "Where they disagree" + (f" (the first {MAX_SHOWN} of {len(apart)})" if len(apart) > MAX_SHOWN else "")
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for name in ("episode", "people", "judge", "score", "the judge's reason"):
        grid.add_column(name, overflow="fold")
    for item, found in apart[:MAX_SHOWN]:
        reason = next((vote.reason for vote in found.votes if vote.success == found.success), "")
        words = ["success" if one else "failure" for one in (item.label, found.success)]
        grid.add_row(item.name, *words, f"{found.score:.2f}", reason[:200])
    return grid
