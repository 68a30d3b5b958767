"""The validation of curated data by Great Expectations, before a model learns from it or is judged by it.

Why: a leaking split, a reference nobody can reach or a tool that does not exist costs days when it surfaces as an odd
success rate. The suite (`expectations.py`) is a list of `Check`s over plain tables that `curate` makes; here they are
run and their results are shown on a page. This is the only module that imports great_expectations (seconds, 330 MB),
and only when called.

The page is ours: Great Expectations' own (Data Docs, 1.24.1) load scripts, styles and a picture with the time in its
address from seven hosts, and do not escape the values they show. Left out: what to do about a failure beyond wording
it, for `curate` decides that nothing is written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder
from tasks.core.pages import render
from tasks.core.text import one_line
from tasks.stages.curate.expectations import Check

Table = list[dict[str, Any]]

TEMPLATES = Path(__file__).parent / "templates"
POSITION = "position"  # added to every table, so that a result can name its rows
ROWS_ON_THE_PAGE = 100
ROWS_IN_THE_MESSAGE = 3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one check. `rows` describes each row that breaks it: its id, where it came from, and the detail."""

    check: Check
    success: bool
    observed: str
    rows: list[str]


def validate(suite: list[Check], tables: dict[str, Table], folder: Path) -> list[CheckResult]:
    """Run the suite and leave its page in `folder`, which is replaced whole; results in the suite's order.

    Every row of a table has the keys `id` and `where` (the place a person finds it) beside what the checks read.
    """
    with atomic_folder(folder) as temporary:
        results = _run_great_expectations(suite, tables)
        (temporary / "index.html").write_text(render_page(results), encoding="utf-8")
    return results


def raise_on_failure(results: list[CheckResult], *, source: str, page: Path) -> None:
    """ValueError in one line about the first check that failed: which rows, why it matters, what to do."""
    failures = [result for result in results if not result.success]
    if not failures:
        return
    first, check = failures[0], failures[0].check
    shown = ", ".join(first.rows[:ROWS_IN_THE_MESSAGE]) or first.observed
    more = f" and {len(first.rows) - ROWS_IN_THE_MESSAGE} more" if len(first.rows) > ROWS_IN_THE_MESSAGE else ""
    others = f" ({len(failures) - 1} later expectations failed too, perhaps for this reason.)" if failures[1:] else ""
    raise ValueError(
        f"{source}: the expectation {check.name!r} failed: {shown}{more}. {check.why} {check.remedy}{others} "
        f"Nothing was curated; all results: {page}."
    )


def _run_great_expectations(suite: list[Check], tables: dict[str, Table]) -> list[CheckResult]:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import; the ephemeral context would report usage otherwise
    import great_expectations as gx
    import pandas as pd

    context = _context()
    source = context.data_sources.add_pandas("curate")
    outcomes: dict[str, Any] = {}
    for name, table in tables.items():
        members = [check for check in suite if check.table == name]
        columns = dict.fromkeys(column for row in table for column in row) or _columns_read(members)
        # dtype=object keeps each value as it is, so that types are checked row by row and not of a converted column.
        frame = pd.DataFrame(table, columns=list(columns), dtype=object)
        frame.insert(0, POSITION, range(len(frame)))
        expectations = [
            getattr(gx.expectations, check.expectation)(**check.arguments, meta={"name": check.name}, notes=check.why)
            for check in members
        ]
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        gx_suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=expectations))
        definition = gx.ValidationDefinition(name=name, data=batch, suite=gx_suite)
        outcome = context.validation_definitions.add(definition).run(
            batch_parameters={"dataframe": frame},
            result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [POSITION]},
        )
        outcomes |= {item.expectation_config.meta["name"]: item for item in outcome.results}
    return [_result(check, outcomes[check.name], tables[check.table]) for check in suite]


def _context() -> Any:
    """A context that lives in memory, draws no progress bars and leaves no file anywhere."""
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
    """The columns an empty table must still have, so that what is expected of its rows holds of none."""
    return list(dict.fromkeys(value for check in members for key, value in check.arguments.items() if "column" in key))


def _result(check: Check, outcome: Any, table: Table) -> CheckResult:
    found = outcome.result
    positions = [int(item[POSITION]) for item in found.get("unexpected_index_list") or []]
    if "unexpected_count" in found:
        observed = f"{found['unexpected_count']} of {found['element_count']} rows break it"
    elif "observed_value" in found:
        observed = f"found {found['observed_value']}"
    else:
        observed = f"it could not be tested: {outcome.exception_info}"
    rows = [describe_row(table[position], check.detail) for position in positions]
    return CheckResult(check, bool(outcome.success), observed, rows)


def describe_row(row: dict[str, Any], detail: str | None) -> str:
    """`'td-7' (line 12: teleport)`; quoted and cut short, since a row holds whatever its author wrote."""
    said = f": {one_line(row[detail])}" if detail and row[detail] else ""
    return f"{one_line(repr(row['id']))} ({row['where']}{said})"


def render_page(results: list[CheckResult]) -> str:
    """The page of the results, failures first."""
    sections = {"Failed": [result for result in results if not result.success]}
    for result in results:
        if result.success:
            sections.setdefault(f"Passed, of {result.check.table}", []).append(result)

    def arguments(check: Check) -> str:
        return ", ".join(f"{name.rstrip('_')}={one_line(repr(value))}" for name, value in check.arguments.items())

    return render(
        TEMPLATES,
        "validation.html.jinja",
        results=results,
        sections=sections,
        limit=ROWS_ON_THE_PAGE,
        arguments=arguments,
    )
