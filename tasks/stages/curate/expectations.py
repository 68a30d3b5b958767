"""The suite of the validation: what must be true of curated rows, in Great Expectations' JSON (`suite.json`).

Of an expectation, `description` is the sentence that must be true, `notes` says why it matters, `meta` contains the
table to read, the remedy, and the column (`detail`) that explains a failing row. Severity `critical` stops curation,
`warning` prints a line. `curate` fills in the values `{"$PARAMETER": name}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tasks.stages.curate.failures import AFRESH

SUITE = Path(__file__).with_name("suite.json")


@dataclass(frozen=True, slots=True)
class Check:
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.config["description"])

    @property
    def table(self) -> str:
        return str(self.config["meta"]["table"])

    @property
    def why(self) -> str:
        return str(self.config["notes"])

    @property
    def remedy(self) -> str:
        return str(self.config["meta"]["remedy"])

    @property
    def detail(self) -> str | None:
        return self.config["meta"].get("detail")

    @property
    def is_critical(self) -> bool:
        return bool(self.config["severity"] == "critical")


def load_suite(parameters: Mapping[str, int | None], *, starts_afresh: bool = True) -> list[Check]:
    """Causes before consequences, so that the first failure is the one to read; without those whose parameter is
    unknown. Where episodes do not start afresh, that is a cause of references that fail.
    """
    suite = []
    for config in read_json(SUITE)["expectations"]:
        values = {key: _fill_in(value, parameters) for key, value in config["kwargs"].items()}
        if None not in values.values():
            suite.append(Check({**config, "kwargs": values}))
    return suite if starts_afresh else [*map(_with_reset, suite)]


def _with_reset(check: Check) -> Check:
    if check.config["kwargs"].get("column") != "reference_score":
        return check
    return Check({**check.config, "meta": {**check.config["meta"], "remedy": f"{AFRESH} Else: {check.remedy}"}})


def _fill_in(value: Any, parameters: Mapping[str, int | None]) -> Any:
    return parameters[value["$PARAMETER"]] if isinstance(value, dict) else value
