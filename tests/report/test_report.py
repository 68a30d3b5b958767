"""The report says what was measured, leads to the episodes behind it, and takes nothing it shows for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks.core.files import content_hash, read_json, read_jsonl, write_json, write_jsonl
from tasks.core.settings import Paths
from tasks.report.build import build_all, build_report, shown_policies
from tasks.report.results import read_results
from tasks.report.script_files import address_of
from tasks.report.summary import build_summary
from tasks.stages.promote.page import render_decision
from tests.measurement.decisions import ROWS
from tests.measurement.hostile import CLOSING, SCRIPT, write_hostile_episodes
from tests.measurement.synthetic import RATES, add_frontier, write_artifacts

pytestmark = pytest.mark.slow  # each writes the whole report


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


@pytest.mark.usefixtures("pictures")
def test_build_all_leaves_chart_report_and_summary_and_returns_the_summary(finished_run: Paths):
    summary = build_all(finished_run)
    assert summary == read_json(finished_run.artifacts / "summary.json")
    for name in ("progress.png", "progress.svg"):
        assert (finished_run.artifacts / name).stat().st_size > 10_000
    assert {file.name for file in (finished_run.artifacts / "report").iterdir()} >= {
        *("index.html", "trajectories.html", "style.css", "data"),
        *("progress.png", "progress.svg", "progress-dark.png", "progress-narrow.png", "progress-narrow-dark.png"),
    }


def test_the_page_shows_the_measured_numbers(finished_run: Paths):
    page = page_of(finished_run)
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    for result in evaluation["test"].values():
        assert f"{100 * result['success_rate']:.1f}%" in page.text
        assert f"{100 * result['ci_low']:.1f}–{100 * result['ci_high']:.1f}" in page.text
    assert "travel-desk-agent version 1 became the champion" in page.words
    assert "Against the warm start (45.0%) that is +48.5 points" in page.words
    assert "the gate answered: warm start" in page.words


def test_the_titles_of_the_pages_name_the_model_which_tells_the_tabs_of_two_agents_apart(finished_run: Paths):
    page_of(finished_run)
    best = read_json(finished_run.stage("evaluate") / "evaluation.json")["best_snapshot"]
    folder = finished_run.artifacts / "report"
    assert f"<title>travel-desk-agent, {best}: " in (folder / "index.html").read_text(encoding="utf-8")
    index = next((folder / "data").glob("index*")).read_text(encoding="utf-8")
    assert f"travel-desk-agent, {best} · turnwise report" in index  # of trajectories.html, whose script reads it


def test_the_attempts_of_the_warm_start_are_told_with_the_one_that_was_kept(finished_run: Paths):
    assert "The warm start made" not in page_of(finished_run).words
    ended = {"num_steps": 150, "start": None, "learning_rate": 0.01, "held_out_loss": None, "end": "num_steps"}
    rows = [
        {**ended, "number": 0, "success": 0.125, "is_kept": False},
        {**ended, "number": 1, "success": 0.4, "is_kept": True},
        {**ended, "number": 2, "num_steps": 7, "success": None, "end": "not_finite", "is_kept": False},
    ]
    write_json(finished_run.stage("warm_start") / "attempts.json", rows)
    summary = build_summary(finished_run)
    assert [(row["success"], row["is_kept"]) for row in summary["warm_start_attempts"]] == [
        (0.125, False), (0.4, True), (None, False)
    ]  # fmt: skip
    words = page_of(finished_run).words
    assert "made 3 attempts: 150 steps, 12.5% solved on select; 150 steps, 40.0% solved on select (kept); 7 " in words
    assert "7 steps, given up, since its gradient was not finite." in words


def test_attempts_of_a_record_that_names_none_as_kept_are_told_without_one(finished_run: Paths):
    row = {"num_steps": 150, "start": None, "learning_rate": 0.01, "held_out_loss": None, "end": "num_steps"}
    write_json(finished_run.stage("warm_start") / "attempts.json", [{**row, "number": 0, "success": 0.4}])
    assert build_summary(finished_run)["warm_start_attempts"][0]["is_kept"] is None
    assert "made 1 attempt: 150 steps, 40.0% solved on select." in page_of(finished_run).words


def test_a_type_has_base_warm_start_and_best_in_the_columns_that_say_so(finished_run: Paths):
    html = build_report(finished_run).read_text(encoding="utf-8")
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    (row,) = re.findall(
        r'<tr>\s*<th scope="row"><a [^>]*>book/<wbr>sold_<wbr>out<wbr></a></th>(.*?)</tr>', html, re.DOTALL
    )
    cells = re.findall(r'<td class="(base|warm_start|best)">(.*?)</td>', row)
    assert [policy for policy, _ in cells] == ["base", "warm_start", "best"]
    for policy, text in cells:
        rate = evaluation["test"][policy]["by_category"]["book/sold_out"]["success_rate"]
        assert text == f"{100 * rate:.1f}%"


def test_the_page_leads_to_the_trajectories_behind_its_numbers(finished_run: Paths):
    hrefs = [attrs["href"] or "" for tag, attrs in page_of(finished_run).elements if tag == "a"]
    browser = address_of(finished_run.artifacts / "report" / "trajectories.html")
    places = [href.removeprefix(browser) for href in hrefs if href.startswith("trajectories.html")]
    assert places[:5] == ["#change=improved", "#change=regressed", "#change=same", "#of=best&outcome=not_success", ""]
    assert places[5:] == [f"#category={category.replace('/', '%2F')}" for category in sorted(RATES)]


def test_problems_are_counted_by_how_many_of_their_episodes_succeed(finished_run: Paths):
    folder = finished_run.stage("evaluate") / "trajectories"
    solved = {"base": dict[str, int](), "best": dict[str, int]()}
    for policy, counts in solved.items():
        for _, row in read_jsonl(folder / f"test_{policy}.jsonl"):
            counts[row["problem_id"]] = counts.get(row["problem_id"], 0) + (row["outcome"] == "success")
    assert set(solved["base"].values()) == {0}
    improved = sum(count > 0 for count in solved["best"].values())
    failing = sum(count < 2 for count in solved["best"].values())
    words = page_of(finished_run).words
    assert f"{improved} problems improved 0 problems regressed {110 - improved} problems unchanged" in words
    assert f"{failing} not always solved by" in words


def test_the_browser_shows_base_and_best_first_and_every_other_policy_that_was_measured(finished_run: Paths):
    def names() -> list[str]:
        return [policy.name for policy in shown_policies(finished_run, read_results(finished_run))]

    folder = finished_run.stage("evaluate") / "trajectories"
    rows = [row for _, row in read_jsonl(folder / "test_warm_start.jsonl")]
    write_jsonl(finished_run.stage("promote") / "trajectories.jsonl", rows)
    assert names() == ["base", "best", "warm_start"]  # no champion was met
    add_frontier(finished_run)
    assert names() == ["base", "best", "warm_start"]  # a result whose episodes are not there
    write_jsonl(folder / "test_frontier.jsonl", rows)
    file = finished_run.stage("promote") / "decision.json"
    decision = read_json(file)
    met = {"champion_before": {"version": 3, "weights": "d4"}, "is_champion": False}
    against = {"against": "the champion, version 3"}
    write_json(file, {**decision, **met, "comparison": against})
    policies = shown_policies(finished_run, read_results(finished_run))
    assert [(policy.name, policy.label) for policy in policies[2:]] == [
        ("warm_start", "warm start"),
        ("champion", "champion, version 3"),
        ("frontier", "big-model-1"),
    ]


def test_a_lora_adapter_that_was_registered_merged_is_the_champion_the_report_tells_of(finished_run: Paths):
    """The version's weights are the merged ones, `cc`; the evaluation measured the adapter, `c2`."""
    file = finished_run.stage("promote") / "decision.json"
    challenger = {"snapshot": "iteration-0110", "weights": "cc", "evaluated": "c2"}
    write_json(file, {**read_json(file), "challenger": challenger, "champion_after": {"version": 1, "weights": "cc"}})
    assert "travel-desk-agent version 1 became the champion" in page_of(finished_run).words


@pytest.mark.usefixtures("pictures")
def test_the_decisions_page_is_beside_its_numbers_and_leads_back_to_the_overview(finished_run: Paths):
    page = finished_run.stage("promote") / "decision.html"
    page.write_text(render_decision(ROWS["reject"], "headline"), encoding="utf-8")
    report = build_report(finished_run).parent
    copied = Page((report / "decision.html").read_text(encoding="utf-8"))
    links = {attrs["href"] for tag, attrs in copied.elements if tag == "a"}
    assert "index.html" in links and not [link for link in links if link and "/" in link]
    assert read_json(report / "decision.json") == read_json(page.with_suffix(".json"))
    there = {attrs["href"] for tag, attrs in Page(page.read_text(encoding="utf-8")).elements if tag == "a"}
    assert (page.parent / "../report/index.html").exists() and "../report/index.html" in there


@pytest.mark.usefixtures("pictures")
def test_the_overview_asks_for_nothing_but_the_pictures_beside_it(finished_run: Paths):
    page = page_of(finished_run)
    wanted = [attrs[name] or "" for _, attrs in page.elements for name in ("src", "srcset") if name in attrs]
    names = ("progress.png", "progress-dark.png", "progress-narrow.png", "progress-narrow-dark.png")
    assert set(wanted) == {address_of(finished_run.artifacts / "report" / name) for name in names}
    assert not {"script", "link"} & {tag for tag, attrs in page.elements if attrs.get("href") != "data:,"}


@pytest.mark.parametrize(("promoted", "words"), [(False, "was not promoted"), (None, "is the best snapshot")])
def test_the_page_stands_without_a_promotion_and_says_so(tmp_path: Path, promoted: bool | None, words: str):
    page = page_of(write_artifacts(tmp_path, promoted=promoted))
    assert words in page.words
    assert ("Promotion has not run" in page.words) == (promoted is None)


def test_each_check_of_the_decision_has_its_sign_and_the_champion_is_told_once(tmp_path: Path):
    paths = write_artifacts(tmp_path, promoted=False)
    file = paths.stage("promote") / "decision.json"
    checks = [
        {"name": name, "passed": passed, "sentence": f"It is {name}."}
        for name, passed in {"better": True, "cheaper": False, "minimum": False}.items()
    ]
    stays = "There is still no champion."
    reasons = [*(check["sentence"] for check in checks), stays]
    write_json(file, {**read_json(file), "checks": checks, "reasons": reasons, "champion_after": None})
    words = page_of(paths).words
    for told in ("✓ It is better. (passed)", "– It is cheaper. (not needed)", "✗ It is minimum. (not passed)"):
        assert words.count(told) == 1 and words.count(told[2:].partition(" (")[0]) == 1
    assert words.count("no champion") == 1 and f"·{stays}" in words


def test_a_snapshot_that_knows_its_own_problems_by_heart_is_told_with_both_numbers(finished_run: Paths):
    assert "by heart" not in page_of(finished_run).words
    file = finished_run.stage("train") / "metrics.jsonl"
    rows = [{**row, "success_rate": 1.0} for _, row in read_jsonl(file)]
    write_jsonl(file, rows)
    evaluation = finished_run.stage("evaluate") / "evaluation.json"
    found = read_json(evaluation)
    found["test"]["best"] |= {"success_rate": 0.65, "ci_high": 0.79}
    write_json(evaluation, found)
    assert "on 100% of the problems it trained on" in page_of(finished_run).words


def test_a_run_of_one_problem_and_one_snapshot_has_a_report(tmp_path: Path):
    paths = write_artifacts(tmp_path, problems_per_type=1, samples_per_problem=1, num_snapshots=1)
    assert "iteration-0010" in page_of(paths).text


def test_hostile_names_of_types_and_reasons_never_become_an_element(finished_run: Paths):
    tame = page_of(finished_run)
    write_hostile_episodes(finished_run)
    file = finished_run.stage("evaluate") / "evaluation.json"
    evaluation = read_json(file)
    for result in evaluation["test"].values():
        result["by_category"] = {f"{name}{SCRIPT}{CLOSING}": row for name, row in result["by_category"].items()}
    write_json(file, evaluation)
    page = page_of(finished_run)
    assert SCRIPT in page.text and CLOSING in page.text
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in tame.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]


def test_what_more_tries_would_reach_is_asked_and_answered_where_something_is_solved(finished_run: Paths):
    file = finished_run.stage("evaluate") / "evaluation.json"
    evaluation = read_json(file)
    evaluation["warm_start_best_of_k"] |= {"k": 1.0, "same_cost": 1.0, "tries_to_match": 1}
    for rate, told in ((0.5, "One is enough to reach 50.0%"), (0.0, None)):
        evaluation["test"]["best"]["success_rate"] = rate
        write_json(file, evaluation)
        text = " ".join(page_of(finished_run).text.split())
        assert ("with more tries?" in text) == (told is not None)
        assert told is None or told in text


def test_a_report_before_evaluation_says_which_stage_to_run_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Run `dvc repro` first.*`python -m tasks evaluate` alone"):
        build_all(Paths(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_trajectories_without_a_common_problem_are_refused_and_the_last_report_stays(finished_run: Paths):
    before = build_report(finished_run).read_bytes()
    file = finished_run.stage("evaluate") / "trajectories" / "test_base.jsonl"
    write_jsonl(file, [{**row, "problem_id": f"other-{row['problem_id']}"} for _, row in read_jsonl(file)])
    with pytest.raises(ValueError, match=r"share no problem.* Run `python -m tasks evaluate` again"):
        build_report(finished_run)
    assert (finished_run.artifacts / "report" / "index.html").read_bytes() == before


def test_every_type_of_the_run_is_in_the_table(finished_run: Paths):
    words = page_of(finished_run).words
    assert all(category in words for category in RATES)


def test_seconds_of_an_episode_and_idle_shares_are_shown_where_they_are_of_this_run(finished_run: Paths):
    spent = {policy: {"seconds": 3.0, "episodes": 1000} for policy in ("base", "warm_start", "best")}
    timed = {"select": {}, "test": spent}
    evaluation = finished_run.stage("evaluate") / "evaluation.json"
    file = finished_run.artifacts / "timings" / "evaluate.json"
    write_json(file, {**timed, "evaluation": content_hash(evaluation)})
    assert read_results(finished_run).seconds_per_episode == dict.fromkeys(("base", "warm_start", "best"), 0.003)
    words = page_of(finished_run).text
    assert "milliseconds of wall time, many at once" in words and "3.0" in words

    idle = {"iteration_seconds": 10.0, "trainer_idle_seconds": 2.5, "engine_idle_seconds": 8.0}
    metrics = content_hash(finished_run.stage("train") / "metrics.jsonl")
    write_json(finished_run.artifacts / "timings" / "idle.json", {**idle, "metrics": metrics})
    words = page_of(finished_run).words
    assert re.search(r"training \d+ s of it\. In the process that ended training,", words)
    assert "the trainer waited for episodes 25.0% of the time" in words and "wrote nothing 80.0%" in words
    write_json(finished_run.artifacts / "timings" / "idle.json", {**dict.fromkeys(idle, 0.0), "metrics": metrics})
    assert read_results(finished_run).idle == {}
    write_json(finished_run.artifacts / "timings" / "idle.json", {**idle, "metrics": "another"})
    assert "wrote nothing" not in page_of(finished_run).text

    write_json(file, {**timed, "evaluation": "another"})
    assert read_results(finished_run).seconds_per_episode == {}
