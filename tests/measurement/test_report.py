"""The report says what was measured, shows a fair choice of episodes, and takes nothing it shows for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tasks.measurement.report.build import build_all, build_report
from tasks.measurement.report.trajectories import MAX_CHARACTERS, choose, printable, shorten
from tasks.settings import Paths
from tasks.storage import read_json
from tests.measurement.hostile import HANDLER, SCRIPT, write_hostile_episodes
from tests.measurement.synthetic import RATES, write_artifacts


class Page(HTMLParser):
    """The elements and the text of a page, as a browser would take them."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def page_of(paths: Paths) -> Page:
    return Page(build_report(paths).read_text(encoding="utf-8"))


def test_build_all_leaves_chart_report_and_summary_and_returns_the_summary(finished_run: Paths):
    summary = build_all(finished_run)
    assert summary == read_json(finished_run.artifacts / "summary.json")
    for name in ("progress.png", "progress.svg"):
        assert (finished_run.artifacts / name).stat().st_size > 10_000
    assert {file.name for file in (finished_run.artifacts / "report").iterdir()} == {
        "index.html",
        "progress.png",
        "progress.svg",
        "progress-dark.png",
        "progress-narrow.png",
        "progress-narrow-dark.png",
    }


def test_the_page_shows_the_measured_numbers(finished_run: Paths):
    page = page_of(finished_run)
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    for result in evaluation["test"].values():
        assert f"{100 * result['success_rate']:.1f}%" in page.text
        assert f"{100 * result['ci_low']:.1f}–{100 * result['ci_high']:.1f}" in page.text
    assert "travel-desk-agent version 1 is the champion" in page.words
    assert "Against the warm start (45.0%) that is +48.5%" in page.words
    assert "the gate answered: warm start" in page.words


def test_a_type_has_base_warm_start_and_best_in_the_columns_that_say_so(finished_run: Paths):
    html = build_report(finished_run).read_text(encoding="utf-8")
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    (row,) = re.findall(r'<tr>\s*<th scope="row">book/<wbr>sold_<wbr>out<wbr></th>(.*?)</tr>', html, re.DOTALL)
    cells = re.findall(r'<td class="(base|warm_start|best)">(.*?)</td>', row)
    assert [policy for policy, _ in cells] == ["base", "warm_start", "best"]
    for policy, text in cells:
        rate = evaluation["test"][policy]["by_type"]["book/sold_out"]["success_rate"]
        assert text == f"{100 * rate:.1f}%"


def test_ten_pairs_stand_side_by_side_base_first(finished_run: Paths):
    page = page_of(finished_run)
    sides = [
        attrs["aria-label"]
        for tag, attrs in page.elements
        if tag == "section" and "side " in (attrs.get("class") or "")
    ]
    assert len(sides) == 20
    assert sides[0::2] == ["base"] * 10
    assert sides[1::2] == [read_json(finished_run.stage("evaluate") / "evaluation.json")["best_snapshot"]] * 10


def test_the_page_asks_for_nothing_but_the_pictures_beside_it(finished_run: Paths):
    page = page_of(finished_run)
    wanted = [attrs[name] or "" for _, attrs in page.elements for name in ("src", "href", "srcset") if name in attrs]
    assert {address for address in wanted if not address.startswith(("#", "data:,"))} == {
        "progress.png",
        "progress.svg",
        "progress-dark.png",
        "progress-narrow.png",
        "progress-narrow-dark.png",
    }
    assert "script" not in {tag for tag, _ in page.elements}


@pytest.mark.parametrize(("promoted", "words"), [(False, "was not promoted"), (None, "is the best snapshot")])
def test_the_page_stands_without_a_promotion_and_says_so(tmp_path: Path, promoted: bool | None, words: str):
    page = page_of(write_artifacts(tmp_path, promoted=promoted))
    assert words in page.words
    assert ("Promotion has not run" in page.words) == (promoted is None)


def test_a_run_of_one_problem_and_one_snapshot_has_a_report(tmp_path: Path):
    paths = write_artifacts(tmp_path, problems_per_type=1, samples_per_problem=1, num_snapshots=1)
    assert "step-0010" in page_of(paths).text


def test_what_models_and_tools_write_never_becomes_an_element(finished_run: Paths):
    tame = page_of(finished_run)
    write_hostile_episodes(finished_run)
    page = page_of(finished_run)
    assert SCRIPT in page.text
    assert HANDLER in page.text
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in tame.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert not [
        name for tag, attrs in page.elements for name in attrs if tag == "img" and attrs["src"] != "progress.png"
    ]
    assert "{{ 7 * 7 }}{% raw %}" in page.text


def test_marks_that_reorder_or_hide_text_are_spelled_out(finished_run: Paths):
    write_hostile_episodes(finished_run)
    text = page_of(finished_run).text
    assert "card⟨U+202E⟩8_drac⟨U+202C⟩ ends here" in text
    assert "half a pair: \N{REPLACEMENT CHARACTER}." in text
    assert "nul ⟨U+0000⟩, escape ⟨U+001B⟩[31m, bell ⟨U+0007⟩" in text
    assert "مرحبا" in text  # writing that runs from right to left is no trick


def test_a_reply_of_a_megabyte_is_cut_and_the_page_says_by_how_much(finished_run: Paths):
    write_hostile_episodes(finished_run)
    file = build_report(finished_run)
    assert file.stat().st_size < 500_000
    assert "… 996,000 more characters are in the trajectory file" in file.read_text(encoding="utf-8")


def test_printable_keeps_ordinary_text_newlines_and_tabs():
    text = "Łódź → 東京\n\t😀"
    assert printable(text) == text
    assert printable("a\r\nb\rc") == "a\nb⟨U+000D⟩c"


def test_shorten_leaves_what_fits_alone():
    assert shorten("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS
    assert shorten("x" * (MAX_CHARACTERS + 1)).endswith("\n… 1 more characters are in the trajectory file")


def rows(*episodes: tuple[str, int, str, str]) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (problem, sample): {"category": category, "outcome": outcome} for problem, sample, category, outcome in episodes
    }


def test_two_failures_come_from_the_weakest_types_and_every_other_type_gives_its_first_episode():
    best = rows(
        ("p1", 0, "a", "success"),
        ("p2", 0, "b", "success"),
        ("p3", 0, "b", "failure"),
        ("p4", 0, "c", "overlong"),
        ("p5", 0, "d", "failure"),
    )
    chosen = choose(best, ["b", "c", "d", "a"])
    assert {("p3", 0), ("p4", 0)} <= set(chosen)  # failures of b and c, the weakest
    assert len(chosen) == 5  # fewer than ten exist: all are shown
    assert chosen == [("p1", 0), ("p2", 0), ("p3", 0), ("p4", 0), ("p5", 0)]


def test_eleven_types_share_ten_places_and_the_strongest_waits():
    names = [f"type-{i:02d}" for i in range(11)]
    best = rows(*((f"p{i}{name}", 0, name, "success") for i in range(3) for name in names))
    assert [best[key]["category"] for key in choose(best, names)] == names[:10]


def test_few_types_fill_the_ten_places_in_turn():
    best = rows(*((f"p{i}", 0, "ab"[i % 2], "success") for i in range(40)))
    assert [best[key]["category"] for key in choose(best, ["a", "b"])] == ["a"] * 5 + ["b"] * 5


def test_a_report_before_evaluation_says_which_stage_to_run_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match="Run `python -m tasks evaluate` first"):
        build_all(Paths(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_trajectories_without_a_common_problem_are_refused(finished_run: Paths):
    folder = finished_run.stage("evaluate") / "trajectories"
    (folder / "test_base.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"share no problem.* Run `python -m tasks evaluate` again"):
        build_report(finished_run)


def test_every_type_of_the_run_is_in_the_table(finished_run: Paths):
    words = page_of(finished_run).words
    assert all(category in words for category in RATES)
