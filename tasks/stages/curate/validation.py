"""Validates curated data with Great Expectations, before a model learns from it or is judged by it.

The only module that imports great_expectations (seconds, 330 MB), and only when called. The page is our own: Great
Expectations' Data Docs (1.24.1) load scripts, styles and a picture with the time in its address from seven hosts, and
do not escape values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, write_json, write_text
from tasks.core.pages import render
from tasks.core.terminal import warn
from tasks.core.text import first_few, one_line
from tasks.core.workspace import as_shell_sees
from tasks.stages.curate.expectations import Check

Table = list[dict[str, Any]]

TEMPLATES = Path(__file__).parent / "templates"
PAGE, DOCUMENT = "index.html", "validation.json"
POSITION = "position"  # added to every table, so that a result can name its rows
ROWS_ON_THE_PAGE = 100
ROWS_IN_THE_MESSAGE = 3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `rows` describes each row that fails it: id, place, detail."""

    check: Check
    success: bool
    observed: str
    rows: list[str]


@dataclass(frozen=True, slots=True)
class Validation:
    """The results in the suite's order; `document` is Great Expectations' own, by table, without times and ids."""

    results: list[CheckResult]
    document: dict[str, Any]

    def num_passed(self) -> int:
        return sum(result.success for result in self.results)


def validate(suite: list[Check], tables: dict[str, Table], folder: Path) -> Validation:
    """Write the page and document into `folder`, which is replaced whole. Every row needs `id` and `where` (for
    people).
    """
    with atomic_folder(folder) as temporary:
        document = _run_great_expectations(suite, tables)
        outcomes = {
            item["expectation_config"]["description"]: item for table in document.values() for item in table["results"]
        }
        results = [_result(check, outcomes[check.name], tables[check.table]) for check in suite]
        write_json(temporary / DOCUMENT, document)
        write_text(temporary / PAGE, render_page(results))
    return Validation(results, document)


def act_on_failures(results: list[CheckResult], *, source: str, folder: Path) -> None:
    failures = [result for result in results if not result.success]
    critical = [result for result in failures if result.check.is_critical]
    for result in failures:
        if not critical:
            warn(f"warning: {_told(result, source)} All results: {as_shell_sees(folder / PAGE)}.")
    if critical:
        num_others = len(failures) - 1
        others = (
            f" ({num_others} other expectation{'s' * (num_others > 1)} failed too, perhaps for this reason.)"
            if failures[1:]
            else ""
        )
        raise ValueError(f"{_told(critical[0], source)}{others} Nothing was curated; all results: {folder / PAGE}.")


def _told(result: CheckResult, source: str) -> str:
    rows = first_few(result.rows, ROWS_IN_THE_MESSAGE) or result.observed
    check = result.check
    return f"{source}: the expectation {check.name!r} failed: {rows}. {check.why} {check.remedy}"


def _run_great_expectations(suite: list[Check], tables: dict[str, Table]) -> dict[str, Any]:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import; even the ephemeral context would report usage
    import great_expectations as gx
    import pandas as pd

    context = _context()
    source = context.data_sources.add_pandas("curate")
    document: dict[str, Any] = {}
    for name, table in tables.items():
        members = [check for check in suite if check.table == name]
        columns = dict.fromkeys(column for row in table for column in row) or _columns_read(members)
        # dtype=object keeps each value as it is: types are checked per row, not for a converted column.
        frame = pd.DataFrame(table, columns=list(columns), dtype=object)
        frame.insert(0, POSITION, range(len(frame)))
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        gx_suite = gx.ExpectationSuite(name=name, expectations=[check.config for check in members])
        definition = gx.ValidationDefinition(name=name, data=batch, suite=context.suites.add(gx_suite))
        outcome = context.validation_definitions.add(definition).run(
            batch_parameters={"dataframe": frame},
            result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [POSITION]},
        )
        document[name] = _without_times(outcome.to_json_dict())
    return document


def _without_times(outcome: dict[str, Any]) -> dict[str, Any]:
    """Remove the times and the random ids, so that equal data has equal results."""
    for item in outcome["results"]:
        del item["expectation_config"]["id"]
    return {**outcome, "meta": {"great_expectations_version": outcome["meta"]["great_expectations_version"]}}


def _context() -> Any:
    import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
        data_docs_sites={},
        progress_bars=ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    return gx.get_context(mode="ephemeral", project_config=config)


def _columns_read(members: list[Check]) -> list[str]:
    """The columns that an empty table still needs, so that expectations of its rows can run."""
    arguments = [item for check in members for item in check.config["kwargs"].items()]
    return list(dict.fromkeys(value for key, value in arguments if "column" in key))


def _result(check: Check, outcome: dict[str, Any], table: Table) -> CheckResult:
    found = outcome["result"]
    positions = [int(item[POSITION]) for item in found.get("unexpected_index_list") or []]
    if "unexpected_count" in found:
        observed = f"{found['unexpected_count']} of {found['element_count']} rows break it"
    elif "observed_value" in found:
        observed = f"found {found['observed_value']}"
    else:
        observed = f"it could not be tested: {outcome['exception_info']}"
    rows = [describe_row(table[position], check.detail) for position in positions]
    return CheckResult(check, bool(outcome["success"]), observed, rows)


def describe_row(row: dict[str, Any], detail: str | None) -> str:
    """`'td-7' (line 12: teleport)`; quoted and cut short, since a row may contain anything."""
    said = f": {one_line(row[detail])}" if detail and row[detail] else ""
    return f"{one_line(repr(row['id']))} ({row['where']}{said})"


def render_page(results: list[CheckResult]) -> str:
    sections = {"Failed": [result for result in results if not result.success]}
    for result in results:
        if result.success:
            sections.setdefault(f"Passed, of {result.check.table}", []).append(result)

    def arguments(check: Check) -> str:
        named = check.config["kwargs"].items()
        return ", ".join(f"{name.rstrip('_')}={one_line(repr(value))}" for name, value in named)

    return render(
        TEMPLATES,
        "validation.html.jinja",
        results=results,
        sections=sections,
        limit=ROWS_ON_THE_PAGE,
        arguments=arguments,
    )
