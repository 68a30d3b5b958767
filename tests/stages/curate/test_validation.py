"""The expectations: each holds of good rows and names the row that breaks it; the page is complete and escapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.stages.curate.expectations import SUITE, Check, load_suite
from tasks.stages.curate.stage import run
from tasks.stages.curate.validation import DOCUMENT, PAGE, CheckResult, act_on_failures, render_page, validate
from tests.sums import curate_settings, many, worlds, write_rows

__all__ = ["worlds"]

SCRIPT = "<script>alert(1)</script>"


def suite_of(num_demonstrations: int) -> list[Check]:
    return load_suite({"num_demonstrations": num_demonstrations, "num_problems": None})


def result(name: str, success: bool, rows: list[str], severity: str = "critical") -> CheckResult:
    meta = {"table": "problems", "remedy": "Do this."}
    config = {"type": "expect", "kwargs": {}, "severity": severity, "description": name, "notes": "It matters."}
    check = Check({**config, "meta": meta})
    return CheckResult(check, success, f"{len(rows)} of 9 rows break it", rows)


def test_the_first_failed_expectation_is_told_in_one_line_and_the_others_are_counted(tmp_path: Path) -> None:
    failed = [
        result("a", True, []),
        result("b", False, [f"'p{i}' (line {i})" for i in range(5)]),
        result("c", False, []),
    ]
    with pytest.raises(ValueError) as caught:
        act_on_failures(failed, source="mine.jsonl", folder=Path("v"))
    assert str(caught.value) == (
        "mine.jsonl: the expectation 'b' failed: 'p0' (line 0), 'p1' (line 1), 'p2' (line 2) and 2 more. It matters. "
        "Do this. (1 other expectation failed too, perhaps for this reason.) "
        "Nothing was curated; all results: v/index.html."
    )
    act_on_failures(failed[:1], source="", folder=Path())


def test_a_warning_is_printed_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    act_on_failures([result("a", False, ["'p0' (line 0)"], "warning")], source="mine.jsonl", folder=Path("v"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: mine.jsonl: the expectation 'a' failed: 'p0' (line 0). It matters. Do this.")


def test_the_page_shows_every_expectation_escapes_what_rows_hold_and_needs_no_network() -> None:
    page = render_page([result("ids are unique", True, []), result("tools exist", False, [SCRIPT] * 102)])
    assert "1 of 2 expectations passed" in page
    assert "ids are unique" in page
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;alert(1)") == 100
    assert "and 2 more" in page
    loaded = page.replace('href="data:,"', "")
    assert not any(word in loaded for word in ("://", "<script", "src=", "href=", "url(", "@import"))


def test_expectations_have_distinct_names_and_say_why_and_what_to_do() -> None:
    suite = suite_of(3)
    assert len({check.name for check in suite}) == len(suite) == 22
    assert all(check.why and check.remedy.endswith(".") for check in suite)


def with_row(index: int, **values: Any) -> list[dict[str, Any]]:
    rows = many()
    rows[index] |= values
    return rows


def solved_by(name: str, amount: object, answer: str = "1") -> list[dict[str, Any]]:
    return [{"calls": [{"name": name, "arguments": {"amount": amount}}], "answer": answer}]


BROKEN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "duplicate id": (with_row(7, id="p3"), "'each id is unique' failed: 'p3' (line 4), 'p3' (line 8)."),
    "row written twice": ([*many(), many()[0]], "'each id is unique' failed: 'p0' (line 1), 'p0' (line 61)."),
    "unknown tool": (
        with_row(2, reference=solved_by("teleport", 3)),
        "'each tool named by a reference exists' failed: 'p2' (line 3: teleport).",
    ),
    "invalid call": (
        with_row(2, reference=solved_by("add", "3")),
        "'each call of a reference is valid' failed: 'p2' (line 3: <tool_call> {",
    ),
    "unsolvable": (
        with_row(2, reference=solved_by("add", 99)),
        "'each reference solution scores 1' failed: 'p2' (line 3: failed checks: total, answer).",
    ),
    "foreign world": (
        with_row(2, world={}),
        "'each reference solution scores 1' failed: 'p2' (line 3: KeyError: 'target').",
    ),
    "blank request": (
        with_row(2, requests=["\u200b \n"]),
        "'each request has text' failed: 'p2' (line 3: request 1).",
    ),
    "unequal turns": (
        with_row(2, requests=["a", "b"]),
        "'each request has one turn of the reference' failed: 'p2' (line 3).",
    ),
    "one group": (many(group_size=60), "'no split is empty' failed: 'select' (0 problems), 'test' (0 problems)."),
    "hostile id": (
        with_row(2, id=SCRIPT, world={}),
        f"'each reference solution scores 1' failed: '{SCRIPT}' (line 3: KeyError: 'target').",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_expectation_names_its_rows_and_leaves_the_old_result_untouched(tmp_path: Path, what: str) -> None:
    rows, said = BROKEN[what]
    (tmp_path / "out" / "curate").mkdir(parents=True)
    (tmp_path / "out" / "curate" / "old").write_text("old")
    source = write_rows(tmp_path / "mine.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        run(curate_settings("sums", source=source), Paths(tmp_path / "out"))
    text = str(caught.value)
    assert text.startswith(f"{source}: the expectation {said}")
    assert "\n" not in text
    assert [path.name for path in (tmp_path / "out" / "curate").iterdir()] == ["old"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curate", "validation"]
    page = (tmp_path / "out" / "validation" / "index.html").read_text()
    assert "Nothing was curated" in page
    assert SCRIPT not in page
    assert sorted(path.name for path in (tmp_path / "out" / "validation").rglob("*")) == [PAGE, DOCUMENT]


def good_tables() -> dict[str, list[dict[str, Any]]]:
    """Two rows that meet every expectation, and the places of both."""
    problems = [
        {
            "id": f"p{i}", "where": f"line {i}", "category": "easy", "level": 1, "split_group": "g", "split": "train",
            "num_sides": 1, "num_splits": 1, "num_requests": 1, "num_reference_turns": 1, "blank_request": "",
            "unknown_tools": "", "invalid_call": "", "reference_score": 1, "fault": "",
        }
        for i in range(2)
    ]  # fmt: skip
    splits = [
        {"id": name, "where": "2 problems", "num_problems": 2, "num_missing": 0} for name in ("train", "select", "test")
    ]
    demonstrations = [
        {"id": f"p{i}", "where": f"demonstration {i}", "split": "train", "fault": "", "blank_answer": ""}
        for i in range(2)
    ]
    return {"problems": problems, "splits": splits, "demonstrations": demonstrations}


BREAKS: dict[str, tuple[str, str, object]] = {
    "each id is of type str": ("problems", "id", 1),
    "each category is of type str": ("problems", "category", 1),
    "each split_group is of type str": ("problems", "split_group", 1),
    "each level is of type int": ("problems", "level", 1.5),
    "no id is empty": ("problems", "id", ""),
    "no category is empty": ("problems", "category", ""),
    "no split_group is empty": ("problems", "split_group", ""),
    "each level is at least 1": ("problems", "level", 0),
    "each id is unique": ("problems", "id", "p0"),
    "each request has text": ("problems", "blank_request", "request 1"),
    "each request has one turn of the reference": ("problems", "num_requests", 2),
    "each tool named by a reference exists": ("problems", "unknown_tools", "teleport"),
    "each call of a reference is valid": ("problems", "invalid_call", "add"),
    "each reference solution scores 1": ("problems", "reference_score", 0),
    "no split is empty": ("splits", "num_problems", 0),
    "no split group is on two sides": ("problems", "num_sides", 2),
    "no split group is in several splits": ("problems", "num_splits", 2),
    "a rotated test set is as large as asked for": ("splits", "num_missing", 2),
    "each demonstration is of a train problem": ("demonstrations", "split", "test"),
    "each demonstration scores 1 without an invalid call": ("demonstrations", "fault", "failed"),
    "each answer of a demonstration has text": ("demonstrations", "blank_answer", "message 2"),
}


@pytest.mark.slow
def test_every_expectation_holds_of_good_rows_and_fails_for_the_one_row_that_breaks_it(tmp_path: Path) -> None:
    suite = suite_of(2)
    folder = tmp_path / "validation"
    validation = validate(suite, good_tables(), folder)
    assert all(result.success for result in validation.results)
    document = read_json(folder / DOCUMENT)
    assert document == validation.document == validate(suite, good_tables(), folder).document  # no time in it
    assert {name: table["statistics"]["success_percent"] for name, table in document.items()} == dict.fromkeys(
        good_tables(), 100.0
    )
    for name, (table, column, value) in BREAKS.items():
        tables = good_tables()
        tables[table][1][column] = value
        members = [check for check in suite if check.name == name]
        (failed,) = validate(members, tables, folder).results
        assert not failed.success, name
        assert tables[table][1]["where"] in failed.rows[-1], name
        assert len(failed.rows) == (2 if name == "each id is unique" else 1), name
    (failed,) = validate([c for c in suite_of(3) if "as many" in c.name], good_tables(), folder).results
    assert (failed.success, failed.observed) == (False, "found 2")
    assert len(BREAKS) + 1 == len(suite)


@pytest.mark.slow
def test_the_suite_is_one_that_great_expectations_reads() -> None:
    import great_expectations as gx

    suite = gx.ExpectationSuite(**read_json(SUITE))
    severities = {item.description: item.severity.value for item in suite.expectations}
    assert set(severities.values()) == {"critical", "warning"}
    assert severities["no split group is in several splits"] == "warning"
