"""judge.json: how far a judge agrees with people, as `python -m tasks judge-check` measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tasks.core.files import file_hash, read_json
from tasks.core.records import Record
from tasks.core.text import counted
from tasks.tools.judge.judge import describe_judge
from tasks.tools.judge.settings import AgreementSettings, JudgeSettings

NOT_MEASURED = "not measured"
AGAIN = "Run `python -m tasks judge-check`"


class Table(Record):
    """Episodes by (what people said, what the judge said)."""

    yes_yes: int = Field(ge=0)
    yes_no: int = Field(ge=0)
    no_yes: int = Field(ge=0)
    no_no: int = Field(ge=0)


class Agreement(Record):
    """Of `num_labels` episodes, the share on which judge and people agree, its interval, and Cohen's kappa."""

    agreement: float
    ci_low: float
    ci_high: float
    confidence: float
    kappa: float
    num_labels: int
    table: Table


class Evidence(Record):
    """`judge`: `describe_judge` of the judge that was measured; `labels`: the SHA-256 of the labelled set."""

    judge: dict[str, Any]
    labels: str
    measured: Agreement


def shortfalls(settings: AgreementSettings, measured: Agreement) -> list[str]:
    """In which numbers the judge is below the thresholds."""
    found = []
    if measured.ci_low < settings.min_agreement:
        found.append(
            f"it agrees with people on {measured.agreement:.1%} of {counted(measured.num_labels, 'episode')}, surely "
            f"on {measured.ci_low:.1%}, below environment.judge.agreement.min_agreement = {settings.min_agreement:.1%}"
        )
    if measured.kappa < settings.min_kappa:
        found.append(
            f"Cohen's kappa is {measured.kappa:.3f}, below environment.judge.agreement.min_kappa = {settings.min_kappa}"
        )
    return found


def measured_agreement(settings: JudgeSettings) -> dict[str, Any] | str:
    """For the lineage. ValueError where this judge was not measured on these labels, or agrees too little."""
    if settings.agreement is None:
        return NOT_MEASURED
    file, labels = Path(settings.agreement.evidence), Path(settings.agreement.labels)
    evidence = _read(file)
    if evidence.judge != describe_judge(settings):
        names = [name for name, value in describe_judge(settings).items() if evidence.judge.get(name) != value]
        raise ValueError(
            f"{file}: another judge was measured (it differs in {', '.join(names)}), so nobody knows how far this one "
            f"agrees with people. {AGAIN} for it."
        )
    if not labels.is_file() or file_hash(labels) != evidence.labels:
        raise ValueError(
            f"{file}: was measured on other labels than {labels} has, so its numbers are not of this set. "
            f"{AGAIN} again."
        )
    too_low = shortfalls(settings.agreement, evidence.measured)
    if too_low:
        raise ValueError(
            f"{file}: the judge is refused, since {', and '.join(too_low)}; a policy would learn what this judge likes "
            f"instead of what people want. Improve environment.judge.rubric, use a better model, or add labels, and "
            f"run `python -m tasks judge-check`."
        )
    return {"labels": evidence.labels, **evidence.measured.model_dump()}


def _read(file: Path) -> Evidence:
    if not file.is_file():
        raise ValueError(
            f"environment.judge.agreement.evidence: {file} does not exist, so nobody knows how far the judge agrees "
            f"with people. {AGAIN}, which measures it on environment.judge.agreement.labels and writes the file."
        )
    try:
        return Evidence.model_validate(read_json(file))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(
            f"{file}: is not what judge-check writes ({place}), so it shows nothing. {AGAIN} again."
        ) from None
