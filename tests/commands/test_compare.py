"""`python -m tasks report --compare A B`: paired on shared problems alone, in numbers checkable by hand."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.commands.compare import (
    compare_categories,
    compare_trajectories,
    print_comparison,
    refuse_another_folder,
    tell_apart,
)
from tasks.commands.policies import Source, find_policy
from tasks.core.console import SafeConsole
from tasks.core.files import write_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory, write_artifacts

LABELS = ("last week", "this week")


def source(folder: Path, name: str, episodes: list[Trajectory]) -> Source:
    write_jsonl(folder / f"{name}.jsonl", (episode.to_row() for episode in episodes))
    return Source(name, name, name, folder / f"{name}.jsonl")


def played(successes: str, *, first: int = 0, category: str = "quote/none") -> list[Trajectory]:
    """`+-` is a success on p0 and a failure on p1."""
    return [trajectory(f"p{first + number}", sign == "+", category=category) for number, sign in enumerate(successes)]


def test_the_difference_is_of_the_problems_both_met_and_the_rest_is_counted(tmp_path: Path):
    """Shared are p0 to p3: A solves one and B three, so B is 50 points ahead. A alone met p4, B alone p5 and p6."""
    a = source(tmp_path, "a", played("+---+"))
    b = source(tmp_path, "b", [*played("+++-"), *played("++", first=5)])
    compared = compare_trajectories([a, b], LABELS, confidence=0.95)
    assert compared.difference["difference"] == 0.5
    assert compared.difference["num_problems"] == 4
    assert [result["success_rate"] for result in compared.results] == [0.25, 0.75]
    assert list(compared.notes) == [
        "Left out: 1 problem that only last week played.",
        "Left out: 2 problems that only this week played.",
    ]


def test_a_category_has_its_own_difference(tmp_path: Path):
    a = source(tmp_path, "a", [*played("--"), *played("++", first=2, category="book/none")])
    b = source(tmp_path, "b", [*played("++"), *played("++", first=2, category="book/none")])
    compared = compare_trajectories([a, b], LABELS, confidence=0.95)
    assert {name: row["difference"] for name, row in compared.by_category.items()} == {"book/none": 0, "quote/none": 1}


def test_of_ten_categories_one_that_differs_by_luck_says_nothing():
    """Six of forty lost and none gained is p = 2/2⁶ = 0.03 alone and 0.31 among ten; twelve lost are 0.005 of ten."""

    def side(**solved: int) -> list[Trajectory]:
        names = [f"c{number}" for number in range(10)]
        return [e for i, n in enumerate(names) for e in played_of(solved.get(n, 40), first=40 * i, category=n)]

    rows, of_each = compare_categories(side(), side(c3=34), confidence=0.95)
    assert (rows["c3"]["p_value"], rows["c3"]["p_adjusted"], rows["c3"]["word"]) == (0.03125, 0.3125, "unclear")
    assert of_each == pytest.approx(0.995)
    assert rows["c3"]["ci_low"] < -0.15 < rows["c3"]["ci_high"]
    assert {row["word"] for row in rows.values()} == {"unclear"}
    rows, _ = compare_categories(side(), side(c3=28), confidence=0.95)
    assert {name for name, row in rows.items() if row["word"] == "worse"} == {"c3"}


def played_of(num_solved: int, *, first: int, category: str) -> list[Trajectory]:
    return played("+" * num_solved + "-" * (40 - num_solved), first=first, category=category)


def test_where_no_problem_is_shared_it_is_refused(tmp_path: Path):
    a, b = source(tmp_path, "a", played("++")), source(tmp_path, "b", played("++", first=2))
    with pytest.raises(ValueError, match="share no problem") as caught:
        compare_trajectories([a, b], LABELS, confidence=0.95)
    assert "\n" not in str(caught.value)


def test_a_file_without_trajectories_is_named_as_one(tmp_path: Path):
    for a, b in (([], played("+")), (played("+"), []), ([], [])):
        empty = "a" if not a else "b"
        with pytest.raises(ValueError, match=rf"{empty}\.jsonl: contains no trajectories") as caught:
            compare_trajectories([source(tmp_path, "a", a), source(tmp_path, "b", b)], LABELS, confidence=0.95)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reflexion", "retries"])
def test_attempts_are_no_samples_and_are_refused(tmp_path: Path, name: str):
    """p0 is solved at the second attempt, which the mean of its episodes would show as 50%."""
    attempts = [*played("-+"), *played("+")]
    attempts[2].draw = 1
    a, b = source(tmp_path, "test_best", played("++")), source(tmp_path, name, attempts)
    for sources in ([a, b], [b, a]):
        with pytest.raises(ValueError, match=rf"{name}\.jsonl: .*evaluation\.json.*test_") as caught:
            compare_trajectories(sources, LABELS, confidence=0.95)
        assert "\n" not in str(caught.value)
    own = source(tmp_path, name, played("+-"))  # a file of somebody's own by that name
    assert compare_trajectories([a, own], LABELS, confidence=0.95).difference["difference"] == -0.5


def test_a_user_who_words_a_request_otherwise_asks_for_the_same(tmp_path: Path):
    """p1 is of the same facts in both, p2 of others, which is another problem."""
    ours, theirs = played("+-"), played("+-")
    for item in (ours[1], theirs[1]):
        item.split_group = "booking 1"
    theirs[1].request = "I want to cancel."
    a, b = source(tmp_path, "a", ours), source(tmp_path, "b", theirs)
    assert compare_trajectories([a, b], LABELS, confidence=0.95).difference["num_problems"] == 2
    theirs[1].split_group = "booking 2"
    with pytest.raises(ValueError, match="the same id but another request"):
        compare_trajectories([a, source(tmp_path, "b", theirs)], LABELS, confidence=0.95)


def test_an_id_that_means_another_request_is_refused(tmp_path: Path):
    other = played("++")
    other[1].request = "Cancel everything."
    a, b = source(tmp_path, "a", played("++")), source(tmp_path, "b", other)
    with pytest.raises(ValueError, match=r"1 of their problems \(such as 'p1'\) have the same id but another request"):
        compare_trajectories([a, b], LABELS, confidence=0.95)


def test_another_version_of_the_environment_is_told(tmp_path: Path):
    changed = played("++")
    for episode in changed:
        episode.environment_fingerprint = "beef"
    a, b = source(tmp_path, "a", played("++")), source(tmp_path, "b", changed)
    (note,) = compare_trajectories([a, b], LABELS, confidence=0.95).notes
    assert "(last week: f00d; this week: beef)" in note


def test_the_table_says_how_far_b_is_from_a_and_shows_names_as_text(tmp_path: Path):
    category = "[red]quote\x1b[2J"
    a = source(tmp_path, "a", played("-" * 40, category=category))
    b = source(tmp_path, "b", played("+" * 40, category=category))
    out = io.StringIO()
    compared = compare_trajectories([a, b], LABELS, confidence=0.95)
    print_comparison(compared, LABELS, 0.95, SafeConsole(file=out, width=110))
    text = out.getvalue()
    assert "A  last week" in text
    assert "+100.0" in text
    assert "better" in text
    assert r"[red]quote\x1b[2J" in text


@pytest.mark.parametrize("width", [80, 140])
def test_a_path_is_never_broken_and_stands_above_a_table_that_it_does_not_fit(tmp_path: Path, width: int):
    paths = [f"artifacts/ablation/{name}-7/select.jsonl" for name in ("base", "kl_0_overlong_kept")]
    compared = compare_trajectories(
        [source(tmp_path, "a", played("--")), source(tmp_path, "b", played("++"))], LABELS, confidence=0.95
    )
    for labels, is_above in ((LABELS, False), (paths, width == 80)):
        out = io.StringIO()
        print_comparison(compared, labels, 0.95, SafeConsole(file=out, width=width))
        rows = [line.rstrip() for line in out.getvalue().splitlines() if line.startswith(("A ", "B "))][:-1]
        told = [f"{letter}  {label}" for letter, label in zip("AB", labels, strict=True)]
        if is_above:
            assert rows[:2] == told and [row.split()[:2] for row in rows[2:]] == [["A", "0.0%"], ["B", "100.0%"]]
        else:
            assert [row.partition(" 0.0%")[0].partition(" 100.0%")[0].rstrip() for row in rows] == told


def test_a_category_called_all_is_a_row_of_its_own_beside_that_of_all_categories(tmp_path: Path):
    """B solves one of its two problems more, and one of all four."""
    a = source(tmp_path, "a", [*played("--", category="all"), *played("++", first=2, category="book/none")])
    b = source(tmp_path, "b", [*played("+-", category="all"), *played("++", first=2, category="book/none")])
    out = io.StringIO()
    compared = compare_trajectories([a, b], LABELS, confidence=0.95)
    print_comparison(compared, LABELS, 0.95, SafeConsole(file=out, width=80))
    rows = {line[:16].strip(): line for line in out.getvalue().splitlines() if "unclear" in line}
    assert {name: row.split("+")[1].split()[0] for name, row in rows.items()} == {
        "all categories": "25.0", "all": "50.0", "book/none": "0.0",
    }  # fmt: skip


def test_the_demos_categories_have_two_lines_at_most_in_80_columns(tmp_path: Path):
    category = "quote/timeout/get_nearest_airport_by_city"
    a, b = (
        source(tmp_path, name, [*played(won * 40, category=category), *played("+", first=90)])
        for name, won in (("a", "-"), ("b", "+"))
    )
    out = io.StringIO()
    compared = compare_trajectories([a, b], LABELS, confidence=0.95)
    print_comparison(compared, LABELS, 0.95, SafeConsole(file=out, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("quote/timeout/g")]
    assert lines[first].split()[0] + lines[first + 1] == category
    assert max(map(len, lines)) <= 80


def test_labels_are_told_apart_and_another_folder_is_not_replaced(tmp_path: Path):
    assert tell_apart(["iteration-0100", "iteration-0090"], ["a", "b"]) == ["iteration-0100", "iteration-0090"]
    assert tell_apart(["agent version 1"] * 2, ["x/1", "x@champion"]) == [
        "agent version 1 (x/1)",
        "agent version 1 (x@champion)",
    ]
    assert tell_apart(["base"] * 2, ["f", "f"]) == ["base (A)", "base (B)"]
    (tmp_path / "thesis.txt").touch()
    for place in (tmp_path, tmp_path / "thesis.txt"):  # the file is empty, and no folder takes its place
        with pytest.raises(ValueError, match="is not replaced"):
            refuse_another_folder(place)
    report = tmp_path / "report"  # a browser and more: replaced by a comparison, its overview would be lost
    report.mkdir()
    for name in ("index.html", "trajectories.html"):
        (report / name).touch()
    with pytest.raises(ValueError, match="is not replaced"):
        refuse_another_folder(report)
    (report / "index.html").unlink()
    refuse_another_folder(report)  # a comparison alone makes way for the next
    (report / "data").mkdir()
    refuse_another_folder(report)
    (report / "trajectories.html").unlink()
    with pytest.raises(ValueError, match="is not replaced"):  # a folder of one's own with a `data` and no page
        refuse_another_folder(report)


def test_of_a_run_the_best_snapshot_is_compared_and_of_several_files_one_must_be_named(tmp_path: Path):
    run = write_artifacts(tmp_path / "run", problems_per_type=1, num_snapshots=1)
    ours = Paths(tmp_path / "artifacts")
    for place in (run.artifacts, run.stage("evaluate"), run.stage("evaluate") / "trajectories"):
        found = find_policy(str(place), ours)
        assert (found.name, found.details["snapshot"]) == ("best", "iteration-0010")
    source(tmp_path / "two", "one", played("+"))
    source(tmp_path / "two", "two", played("+"))
    with pytest.raises(ValueError, match=r"Name one file of: one\.jsonl, two\.jsonl"):
        find_policy(str(tmp_path / "two"), ours)


@pytest.mark.slow
def test_the_command_prints_the_tables_and_leaves_the_browser(tmp_path: Path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    write_artifacts(tmp_path / "artifacts", problems_per_type=2, num_snapshots=1)
    folder = "artifacts/evaluate/trajectories"
    command = [sys.executable, "-m", "tasks", "report", "--compare", f"{folder}/test_warm_start.jsonl", "artifacts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "A  warm start" in done.stdout
    assert "B  iteration-0010" in done.stdout
    assert done.stdout.rstrip().endswith("artifacts/compare/trajectories.html")
    assert (tmp_path / "artifacts" / "compare" / "trajectories.html").stat().st_size > 0
