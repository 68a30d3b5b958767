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
from tasks.stages.curate.expectations import Check

Table = list[dict[str, Any]]

POSITION = "position"  # added to every table, so that a result can name its rows
ROWS_ON_THE_PAGE = 100
ROWS_IN_THE_MESSAGE = 3
TEXT_LENGTH = 160  # of a quoted value; a row may hold a novel


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
    said = f": {quote(str(row[detail]))}" if detail and row[detail] else ""
    return f"{quote(repr(row['id']))} ({row['where']}{said})"


def quote(text: str) -> str:
    """Foreign text on one line, without control characters and cut to a readable length."""
    flat = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return flat if len(flat) <= TEXT_LENGTH else flat[: TEXT_LENGTH - 1] + "…"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>turnwise: validation of the curated data</title><style>
:root { color-scheme: light dark; --line: #8884; --quiet: #6b6b6b; --good: #0a6b2b; --bad: #a40000 }
:root { background: #fff; color: #1b1b1b }
@media (prefers-color-scheme: dark) { :root { background: #161616; color: #eee }
:root { --quiet: #a0a0a0; --good: #5bc17f; --bad: #ff8a80 } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } h2 span { color: var(--quiet); font-weight: 400 }
table { border-collapse: collapse; width: 100% } tr { border-top: 1px solid var(--line) }
td { padding: .5rem 1rem .5rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere }
td:first-child { width: 4.5rem; font-weight: 600 } td:last-child { width: 45% }
.failed { color: var(--bad) } .passed { color: var(--good) }
code { font-size: .85em; color: var(--quiet) } p { margin: .3rem 0 } ul { margin: .3rem 0; padding-left: 1.2rem }
</style></head><body><main>
<h1>Validation of the curated data</h1>
<p>{{ results | selectattr("success") | list | length }} of {{ results | length }} expectations hold.
{% if results | rejectattr("success") | list %}Nothing was curated: correct what is listed and run again.{% endif %}
Great Expectations checked them, each over the rows of a table.</p>
{% for title, members in sections.items() if members %}
<h2>{{ title }} <span>{{ members | length }}</span></h2>
<table><tbody>
{% for result in members %}{% set word = "passed" if result.success else "failed" %}
<tr><td class="{{ word }}">{{ word }}</td>
<td>{{ result.check.name }}<br><code>{{ result.check.expectation }}({{ arguments(result.check) }})</code></td>
<td>{{ result.observed }}
{% if not result.success %}<p>{{ result.check.why }} {{ result.check.remedy }}</p>{% endif %}
{% if result.rows %}<ul>{% for row in result.rows[:limit] %}<li>{{ row }}</li>{% endfor %}
{% if result.rows | length > limit %}<li>and {{ result.rows | length - limit }} more</li>{% endif %}</ul>{% endif %}
</td></tr>
{% endfor %}</tbody></table>
{% endfor %}</main></body></html>
"""


def render_page(results: list[CheckResult]) -> str:
    """The page of the results, failures first: one file, no script, nothing from the network, every value escaped."""
    import jinja2

    sections = {"Failed": [result for result in results if not result.success]}
    for result in results:
        if result.success:
            sections.setdefault(f"Passed, of {result.check.table}", []).append(result)

    def arguments(check: Check) -> str:
        return ", ".join(f"{name.rstrip('_')}={quote(repr(value))}" for name, value in check.arguments.items())

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(results=results, sections=sections, limit=ROWS_ON_THE_PAGE, arguments=arguments) + "\n"
