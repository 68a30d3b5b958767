"""The trajectory browser as a person meets it: filters, search, links, keys, columns, tokens, and hostile text."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tasks.core.files import read_jsonl, write_jsonl
from tasks.core.records import Outcome, TokenSequence, Turn
from tasks.report.browser import Policy, build_browser, write_browser
from tasks.report.build import place_in_browser
from tests.browser.conftest import CHROMIUM_FLAGS, PATIENCE, Tab, find_chromium
from tests.browser.test_report_page import SHAPES
from tests.core.test_records import with_a_helper
from tests.measurement.hostile import HANDLER, NO_UTF_8_SHOWN, PROBLEM, SCRIPT
from tests.measurement.small_world import TYPES, call_turn, small_episode, small_policies

pytestmark = pytest.mark.browser
Open = Callable[..., Tab]
NARROW = 600  # pixels: the list is shown alone, so nothing is opened by itself
# A wait is for a function throughout: an expression would be evaluated at every look, which the page's policy forbids.
IS_SEARCHED = "words => turnwise.state.q === words"


def listed(page: Any) -> list[str]:
    """The problems in the list, by id."""
    return page.locator(".row .id").all_inner_texts()


@pytest.fixture(scope="module")
def shared_page(browser, small: Path) -> Iterator:
    """One page for many tests, each of which leaves its filters to the next to clear."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(small.as_uri())
    page.wait_for_selector("html[data-ready]")
    yield page
    page.close()


def cleared(page: Any) -> Any:
    """The page with no filter on."""
    page.evaluate("turnwise.setSearch('')")
    page.evaluate("location.hash = ''")
    wait_for_rows(page, 4)
    return page


def wait_for_rows(page: Any, number: int) -> None:
    page.wait_for_function("number => document.querySelectorAll('.row').length === number", arg=number)


def wait_for_request(page: Any, words: str) -> None:
    page.wait_for_function("words => document.querySelector('.request').textContent.includes(words)", arg=words)


def loaded(tab: Tab, what: str) -> list[str]:
    """The files with these letters in their address that the page asked for, in order."""
    return [Path(urlsplit(address).path).name for address in tab.requests if what in address]


def place_of(page: Any) -> str:
    """The address, once it is that of the state."""
    page.wait_for_function("() => (location.hash || '#') === turnwise.addressOf(turnwise.state)")
    return unquote(page.evaluate("location.hash").removeprefix("#"))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_opens_from_disk_without_complaint_or_request_off_its_folder(small: Path, open_page: Open, shape: str):
    tab = open_page(small, "problem=p-better&heat=1", **SHAPES[shape])
    tab.page.wait_for_selector(".tokens")
    assert tab.complaints == []
    assert {address.rpartition("/")[0] for address in tab.requests} == {
        small.parent.as_uri(), (small.parent / "data").as_uri(),
    }  # fmt: skip


def test_the_first_problem_that_fits_is_open_where_there_is_room_for_it(small: Path, open_page: Open):
    page = open_page(small, "category=quote/none").page
    assert page.locator(".request").inner_text() == "What does Lima to Łódź cost?"
    assert place_of(page) == "problem=p-worse&sample=0&category=quote/none"
    narrow = open_page(small, width=NARROW).page
    assert narrow.locator(".row").count() == 4 and narrow.locator(".request").count() == 0
    nothing = open_page(small, "category=quote/none&tool=book_flight&outcome=max_turns").page
    assert nothing.locator(".row").count() == 0 and nothing.locator(".request").count() == 0


def test_problems_are_listed_with_outcomes_before_and_after(small: Path, open_page: Open):
    page = open_page(small).page
    assert listed(page) == ["p-better", "p-worse", "p-mixed", "p-same"]
    assert [text.replace("\n", "") for text in page.locator(".row .marks").all_inner_texts()] == [
        "✗✗→✓✓", "✓✓→✗✗", "✗✓→✓✗", "✓✓→✓✓",
    ]  # fmt: skip
    assert page.locator("#changes b").all_inner_texts() == ["4", "1", "1", "2"]
    assert page.get_by_role("option", name="quote/none, regressed, base 2 of 2, iteration-0100 0 of 2").count() == 1


@pytest.mark.parametrize(
    ("chosen", "problems"),
    [
        ({"category": "book/none"}, ["p-better", "p-same"]),
        ({"outcome": "max_turns"}, ["p-worse"]),
        ({"outcome": "not_success"}, ["p-better", "p-worse", "p-mixed"]),
        ({"outcome": "not_success", "of": "best"}, ["p-worse", "p-mixed"]),
        ({"outcome": "failure", "of": "best"}, ["p-mixed"]),
        ({"error": "timeout"}, ["p-worse"]),
        ({"error": "timeout", "of": "base"}, []),
        ({"tool": "get_cost"}, ["p-worse"]),
        ({"tool": "book_flight", "of": "best"}, ["p-better", "p-mixed", "p-same"]),
        ({"limit": "max_turns"}, ["p-worse"]),
        ({"tool": "get_cost", "outcome": "success"}, []),  # in one and the same episode
    ],
)
def test_filters_leave_the_problems_with_an_episode_that_fits(shared_page, chosen: dict[str, str], problems: list[str]):
    page = cleared(shared_page)
    for name, value in chosen.items():
        page.select_option(f"#{name}", value)
    wait_for_rows(page, len(problems))
    assert listed(page) == problems
    assert page.locator("#status").inner_text() == f"{len(problems)} of 4 problems"
    assert all(f"{name}={value}" in place_of(page) for name, value in chosen.items())
    page.click("#clear")
    wait_for_rows(page, 4)
    assert place_of(page) == ""


def test_changes_are_chosen_with_a_click_and_counted_under_the_other_filters(small: Path, open_page: Open):
    page = open_page(small).page
    page.get_by_role("radio", name="Regressed").check()
    wait_for_rows(page, 1)
    assert listed(page) == ["p-worse"]
    page.select_option("#category", "quote/none")
    assert page.locator("#changes b").all_inner_texts() == ["2", "0", "1", "1"]
    page.select_option("#before", "warm_start")  # p-mixed: ✓✓ before, ✓✗ after
    wait_for_rows(page, 2)
    assert page.locator("#changes b").all_inner_texts() == ["2", "0", "2", "0"]


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("vienna", ["p-same"]),
        ("Oslo ROME", ["p-better", "p-worse"]),  # p-worse: in a call
        ("flight B41", ["p-better", "p-worse", "p-mixed", "p-same"]),
        ("econ", ["p-better"]),
        ("no answer", ["p-worse"]),
        ("łódź", ["p-worse"]),
        ("東京", ["p-mixed"]),
        ("p-better", ["p-better"]),
        ("nowhere", []),
    ],
)
def test_a_search_finds_words_of_requests_calls_and_replies(shared_page, words: str, problems: list[str]):
    page = cleared(shared_page)
    page.fill("#q", words)
    page.wait_for_function(IS_SEARCHED, arg=words)
    wait_for_rows(page, len(problems))
    assert listed(page) == problems


def test_a_search_finds_words_of_escaped_text_and_beside_invisible_letters(tmp_path: Path, open_page: Open):
    policies = small_policies(tmp_path)[:2]
    for policy in policies:
        mail, korean = (small_episode(policy.name, problem, 0, True) for problem in ("p-better", "p-same"))
        call = {"name": "send", "arguments": {"body": "Dear Ann,\nrefund granted in Łódź"}}
        mail.turns = [Turn(text=json.dumps(call), calls=[call], replies=[json.dumps({"to": "x\nKraków"})])]
        korean.turns = [Turn(text="ｱｲｳ ｶﾅ \uffa0 việt viết vi\u115f")]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in (mail, korean)])
    page = open_page(build_browser(tmp_path / "report", policies, title="").absolute()).page
    for words in ("refund", "łódź", "Kraków", "nrefund", "ｱｲｳ", "ｶﾅ", "việt", "viết"):
        page.fill("#q", words)
        page.wait_for_function(IS_SEARCHED, arg=words)
        found = {"nrefund": []}.get(words, ["p-better"] if words in ("refund", "łódź", "Kraków") else ["p-same"])
        wait_for_rows(page, len(found))
        assert (words, listed(page)) == (words, found)


def test_a_search_reads_the_index_of_its_first_letters_and_no_episode(small: Path, open_page: Open):
    tab = open_page(small, width=NARROW)
    tab.page.fill("#q", "vienna")
    wait_for_rows(tab.page, 1)
    assert loaded(tab, "data/") == ["index.js", "words-v.js"]


def test_a_chunk_is_loaded_once_while_it_is_in_use_and_few_are_kept(tmp_path: Path, open_page: Open):
    policies, num_chunks = small_policies(tmp_path)[:2], 60
    for policy in policies:
        episodes = [small_episode(policy.name, "p-same", 0, True) for _ in range(num_chunks)]  # two fill a chunk
        for i, episode in enumerate(episodes):
            episode.problem_id, episode.turns = f"p-{i:02d}", [Turn(text=letters) for letters in ["x" * 9_000] * 15]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
    tab = open_page(build_browser(tmp_path / "report", policies, title="").absolute())
    assert len(list((tmp_path / "report" / "data").glob("episodes-*.js"))) == num_chunks
    tab.page.evaluate("""async () => {
      for (let e = 0; e < 120; e++) for (const one of [e, 0]) await turnwise.loadEpisode("episodes", one);
    }""")
    assert len(loaded(tab, "episodes-")) == num_chunks  # the first was in use throughout
    tab.page.evaluate("() => turnwise.loadEpisode('episodes', 2)")
    assert loaded(tab, "episodes-").count("episodes-0001.js") == 2


def test_a_link_shows_the_same_problem_sample_policies_and_filters(small: Path, open_page: Open):
    page = open_page(small).page
    page.fill("#q", "rome")
    page.wait_for_function(IS_SEARCHED, arg="rome")
    page.select_option("#of", "base")
    page.select_option("#before", "warm_start")
    page.locator(".row", has_text="p-better").click()
    page.get_by_role("button", name="sample 1").click()
    page.get_by_role("button", name="+ champion, version 3").click()
    page.get_by_role("button", name="log-probs").click()
    page.wait_for_selector(".tokens")
    place = place_of(page)
    assert place == "problem=p-better&sample=1&policies=warm_start,best,champion&q=rome&of=base&heat=1"
    again = open_page(small, place).page
    again.wait_for_selector(".tokens")
    for what in ("#filters", "#list", "#problem"):
        assert again.locator(what).inner_text() == page.locator(what).inner_text()
    assert again.locator("#q").input_value() == "rome"
    again.evaluate("location.hash = 'problem=p-same'")
    wait_for_request(again, "Vienna")


def test_a_link_to_what_is_not_there_opens_the_list(small: Path, open_page: Open):
    tab = open_page(small, "problem=gone&policies=nobody,best&category=none&outcome=__proto__")
    assert tab.page.locator("#problem").inner_text().startswith("a small world")
    assert tab.complaints == []


@pytest.mark.parametrize("words", ["$", "…!"])
def test_a_search_without_a_letter_matches_nothing_and_says_what_it_needs(shared_page, words: str):
    page = cleared(shared_page)
    page.fill("#q", words)
    wait_for_rows(page, 0)
    assert page.locator("#status").inner_text() == "A search finds words: type a letter or a digit."
    page.fill("#q", " ")
    wait_for_rows(page, 4)
    page.fill("#q", f"{words}vienna")
    wait_for_rows(page, 1)


def test_a_link_to_the_episodes_of_a_policy_that_is_not_there_is_of_any(small: Path, open_page: Open):
    page = open_page(small, "of=gone&outcome=max_turns").page
    assert listed(page) == ["p-worse"]
    assert page.locator("#of").evaluate("select => select.selectedOptions[0].text") == "any policy shown"


def test_a_category_with_an_invisible_character_is_found_by_the_overviews_link(tmp_path: Path, open_page: Open):
    policies, category = small_policies(tmp_path)[:2], "hotel\u200fbooking"
    for policy in policies:
        rows = [row for _, row in read_jsonl(policy.trajectories)]
        write_jsonl(
            policy.trajectories,
            [row | {"category": category} if row["problem_id"] == "p-same" else row for row in rows],
        )
    file = build_browser(tmp_path / "report", policies, title="").absolute()
    page = open_page(file, place_in_browser({"category": category})[1:]).page
    assert listed(page) == ["p-same"]
    assert page.locator("#category").input_value() == "hotel⟨U+200F⟩booking"


def test_back_shows_the_words_that_were_searched_there_while_the_cursor_is_in_the_field(small: Path, open_page: Open):
    page = open_page(small).page
    page.fill("#q", "o")
    page.wait_for_function(IS_SEARCHED, arg="o")
    page.locator(".row", has_text="p-worse").click()
    for words in ("vienna", "vienna is typed and not yet searched"):
        page.fill("#q", words)
        if words == "vienna":
            page.wait_for_function(IS_SEARCHED, arg=words)
        page.go_back()
        page.wait_for_function("() => turnwise.state.problem === 'p-better'")
        assert page.evaluate("document.activeElement.id") == "q"
        assert page.locator("#q").input_value() == "o"
        page.wait_for_timeout(300)  # longer than the pause after which typed words are searched
        assert place_of(page) == "problem=p-better&sample=0&q=o"
        page.go_forward()
        page.wait_for_function("() => turnwise.state.problem === 'p-worse'")


def test_s_goes_through_the_samples_that_any_shown_policy_has(tmp_path: Path, open_page: Open):
    base, best = small_policies(tmp_path)[:2]
    rows = [row for _, row in read_jsonl(best.trajectories)]
    write_jsonl(best.trajectories, [row for row in rows if row["problem_id"] != "p-same"])
    page = open_page(build_browser(tmp_path / "report", [base, best], title="").absolute(), "problem=p-same").page
    for sample in (1, 0):
        page.keyboard.press("s")
        page.wait_for_selector(f"button[aria-pressed=true]:has-text('sample {sample}')")


HOLD_J = """() => { for (let i = 0; i < 30; i++) document.body.dispatchEvent(
  new KeyboardEvent("keydown", { key: "j", bubbles: true, cancelable: true })); }"""


@pytest.fixture(scope="module")
def long_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A browser of 100 problems, p-00 to p-99, all of them the same."""
    folder = tmp_path_factory.mktemp("long")
    policies = small_policies(folder)[:2]
    for policy in policies:
        episodes = [replace(small_episode(policy.name, "p-same", 0, True), problem_id=f"p-{i:02d}") for i in range(100)]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
    return build_browser(folder / "report", policies, title="long").absolute()


def test_a_held_key_moves_on_where_the_browser_takes_no_more_addresses(browser, long_list: Path):
    """Chromium as people run it drops what is beyond 200 addresses in 10 seconds; Playwright's takes them all."""
    chromium = browser.browser_type.launch(
        executable_path=find_chromium(), args=CHROMIUM_FLAGS, timeout=PATIENCE,
        ignore_default_args=["--disable-ipc-flooding-protection"],
    )  # fmt: skip
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(long_list.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("() => { for (let i = 0; i < 250; i++) history.replaceState(null, '', i % 2 ? '#' : '#change='); }")
    page.evaluate(HOLD_J)
    assert page.evaluate("turnwise.currentRow()") == 30  # it began at 0
    page.get_by_role("radio", name="Improved").check(force=True)
    assert page.locator("#status").inner_text() == "0 of 100 problems"
    chromium.close()


def test_a_held_key_writes_few_addresses_and_back_leads_to_where_it_was_let_go(long_list: Path, open_page: Open):
    page = open_page(long_list).page
    page.wait_for_timeout(500)  # the address of the problem that opened by itself was written
    page.evaluate("""() => {
      const replace = history.replaceState;
      window.numWritten = 0;
      history.replaceState = (...said) => { window.numWritten++; replace.apply(history, said); };
    }""")
    page.evaluate(HOLD_J)
    page.locator("#row-32").click()  # a step of its own
    page.wait_for_selector(".where:has-text('p-32')")
    assert page.evaluate("window.numWritten") == 2  # of the first j, and of the last
    page.evaluate(HOLD_J)
    page.go_back()
    page.wait_for_selector(".where:has-text('p-30')")
    page.wait_for_timeout(500)  # no address of the place that was left is due
    assert place_of(page) == "problem=p-30&sample=0"


def test_everything_is_reached_from_the_keyboard(small: Path, open_page: Open):
    page = open_page(small).page
    press = page.keyboard.press

    def request() -> str:
        return page.locator(".request").inner_text()

    assert request() == "Book a seat from Oslo to Rome."
    press("j")
    wait_for_request(page, "Lima")
    press("ArrowDown")
    wait_for_request(page, "Quito")
    press("k")
    wait_for_request(page, "Lima")
    press("k")
    wait_for_request(page, "Rome")
    assert page.locator("#list").get_attribute("aria-activedescendant") == "row-0"
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "problem"
    press("s")
    page.wait_for_selector("button[aria-pressed=true]:has-text('sample 1')")
    press("t")
    page.wait_for_selector(".tokens")
    press("t")
    page.wait_for_selector(".differs")
    press("d")
    press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"
    press("/")
    page.keyboard.type("vienna")
    wait_for_rows(page, 1)
    press("Enter")
    wait_for_request(page, "Vienna")
    press("/")
    press("Escape")
    wait_for_rows(page, 4)
    press("Escape")
    press("?")
    assert page.locator("#help").is_visible()
    press("Escape")
    assert not page.locator("#help").is_visible()


def test_turns_of_all_columns_stand_level_and_a_fifth_column_does_not_fit(small: Path, open_page: Open):
    page = open_page(small, "problem=p-better&policies=base,best,warm_start,champion", width=1440).page
    assert page.locator(".side h3").all_inner_texts() == ["base", "iteration-0100", "warm start", "champion, version 3"]
    for number in (1, 2):
        tops = page.evaluate(
            f"[...document.querySelectorAll('.turn[value=\"{number}\"]')].map(turn => turn.getBoundingClientRect().top)"
        )
        assert len(tops) == 4 and max(tops) - min(tops) < 1
    assert page.get_by_role("button", name="+ big-model-1").is_disabled()
    assert page.evaluate("document.documentElement.scrollWidth") == 1440


def test_the_sequences_of_an_episode_are_told_apart(tmp_path: Path, open_page: Open):
    """A helper's turn between two of the agent: where each begins or goes on, and why another one began."""
    policies = small_policies(tmp_path)
    rows = [row for _, row in read_jsonl(policies[0].trajectories)]
    place = {name: rows[0][name] for name in ("problem_id", "sample_index", "category")}
    write_jsonl(policies[0].trajectories, [with_a_helper().to_row() | place, *rows[1:]])
    file = build_browser(tmp_path / "report", policies, title="sequences").absolute()
    page = open_page(file, f"problem={place['problem_id']}").page
    page.wait_for_selector(".sequence")
    notes = ["sequence 1 begins", "sequence 2 began: another agent", "sequence 1 goes on"]
    assert page.locator(".sequence").all_inner_texts() == notes
    assert page.locator(".turn.branch").count() == 1


def test_the_first_call_that_differs_is_marked_on_both_sides(small: Path, open_page: Open):
    page = open_page(small, "problem=p-better").page
    marks = page.locator(".differs")
    assert marks.all_inner_texts() == [
        "first call that differs from iteration-0100",
        "first call that differs from base",
    ]
    assert [mark.locator("xpath=..").locator(".tool").inner_text() for mark in marks.all()] == ["book_flight"] * 2
    assert [mark.locator("xpath=ancestor::li").get_attribute("value") for mark in marks.all()] == ["2", "2"]
    page.evaluate("location.hash = 'problem=p-same'")
    wait_for_request(page, "Vienna")
    assert marks.count() == 0


def test_a_column_shows_results_errors_checks_parts_and_tokens_of_each_turn(small: Path, open_page: Open):
    page = open_page(small, "problem=p-worse&sample=1").page
    text = page.locator(".side").nth(1).inner_text()
    for said in ("✗ max turns", 'get_cost to "Rome"', "timeout\nno answer in 3 s"):
        assert said in text
    for said in ("2 turns · 2 calls · 4 tokens written of 6", "as written · 2 tokens", "✗ state", "line 4 of"):
        assert said in text
    assert page.locator(".side").nth(1).locator(".parts").inner_text().split() == [
        "outcome", "0", "format", "1", "call_validity", "1",
    ]  # fmt: skip
    page.locator(".side").nth(1).get_by_text("details", exact=True).click()
    assert '"booking"' in page.locator(".side").nth(1).locator(".fold[open] pre").inner_text()


def test_tokens_are_loaded_when_asked_for_and_coloured_by_their_log_prob(small: Path, open_page: Open):
    tab = open_page(small, "problem=p-better&policies=base,frontier")
    assert not [address for address in tab.requests if "token" in address]
    tab.page.get_by_role("button", name="log-probs").click()
    tab.page.wait_for_selector(".tokens")
    base, frontier = tab.page.locator(".side").all()
    tokens = base.locator(".stream").nth(1).locator("span")
    assert tokens.all_inner_texts() == ["book_flight", "economy"]
    assert [token.get_attribute("class") for token in tokens.all()] == ["h0", "h3"]  # p 100% and 14%
    assert tokens.nth(1).get_attribute("title") == '"economy"\nlog-prob −2.00, p 14%'
    assert base.locator(".note").nth(1).inner_text() == "Mean log-prob −1.00; least likely economy, −2.00 (p 14%)."
    assert "No tokens are stored for this episode." in frontier.inner_text()


def test_a_turn_of_many_tokens_is_drawn_in_pieces(tmp_path: Path, open_page: Open):
    """Of 130,000: no call of JavaScript takes as many arguments."""
    policies = small_policies(tmp_path)[:2]
    for policy in policies:
        long, short = (small_episode(policy.name, problem, 0, True) for problem in ("p-same", "p-mixed"))
        for episode, number in ((long, 130_000), (short, 7_000)):
            ids, mask, logp = [0] * (number + 1), [False, *[True] * number], [0.0, *[-0.5] * (number - 1), -3.0]
            episode.turns, episode.sequences = [Turn(text="done")], [TokenSequence(ids, mask, logp)]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in (long, short)])
    file = build_browser(tmp_path / "report", policies, title="").absolute()
    page = open_page(file, "problem=p-same&heat=1").page
    side = page.locator(".side").first
    tokens, more = side.locator(".stream span"), side.locator(".tokens button")
    assert tokens.count() == 5_000
    assert "−3.00" in side.locator(".note").inner_text()
    assert more.inner_text() == "show 5,000 more tokens of 125,000"
    more.click()
    assert tokens.count() == 10_000 and more.inner_text() == "show 5,000 more tokens of 120,000"
    page.evaluate("location.hash = 'problem=p-mixed&heat=1'")
    page.wait_for_selector(".where:has-text('p-mixed')")
    assert more.inner_text() == "show 2,000 more tokens of 2,000"
    more.click()
    assert tokens.count() == 7_000 and more.count() == 0
    assert page.evaluate("document.activeElement.className") == "stream"


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        ("", "desk"),
        ("", "phone at night"),
        ("problem=p-worse&policies=base,best,warm_start", "desk"),
        ("problem=p-worse&policies=base,best,warm_start", "desk at night"),
        ("problem=p-better&heat=1", "phone"),
        ("problem=p-better&heat=1", "desk at night"),
    ],
)
def test_it_passes_the_accessibility_check(small: Path, open_page: Open, shape: str, place: str):
    tab = open_page(small, place, **SHAPES[shape], without_policy=True)
    if place:
        tab.page.wait_for_selector(".side")
    assert tab.violations() == []


def test_it_is_dark_when_the_reader_asks_for_dark(small: Path, open_page: Open):
    color = "getComputedStyle(document.body).backgroundColor"
    assert open_page(small, color_scheme="dark").page.evaluate(color) == "rgb(13, 15, 21)"
    assert open_page(small).page.evaluate(color) == "rgb(245, 246, 249)"


def test_on_a_phone_the_problem_takes_the_place_of_the_list_and_columns_are_a_swipe_apart(small: Path, open_page: Open):
    page = open_page(small, width=360, height=740).page
    page.locator(".row").first.click()
    page.wait_for_selector(".side")
    assert not page.locator("#list").is_visible()
    lefts = page.evaluate("[...document.querySelectorAll('.side')].map(side => side.getBoundingClientRect().left)")
    assert lefts[0] == pytest.approx(0, abs=2)
    assert 280 < lefts[1] < 360  # the second column peeks in
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.get_by_role("button", name="‹ problems").click()
    assert page.locator("#list").is_visible()
    page.locator(".row").first.click()
    page.go_back()
    page.wait_for_selector("body[data-view=list]")
    assert page.locator("#list").is_visible()
    page.go_forward()
    page.wait_for_selector(".side")


def test_what_models_and_tools_wrote_is_inert_and_readable(hostile_report: Path, open_page: Open):
    tab = open_page(hostile_report.parent / "trajectories.html", f"problem={PROBLEM}&q=owned", width=390, height=844)
    page = tab.page
    page.wait_for_selector(".side")
    page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    text = page.locator("#problem").inner_text()
    broken = ("half a pair: \N{REPLACEMENT CHARACTER}", f"no text: {NO_UTF_8_SHOWN}")
    for written in (SCRIPT, HANDLER, "card⟨U+202E⟩8_drac", *broken, "مرحبا"):
        assert written in text
    for control in ("⟨U+0000⟩", "⟨U+001B⟩[31m", "⟨U+0007⟩", "⟨U+E0070⟩", "{{ 7 * 7 }}"):
        assert control in text
    for piece in page.locator(".call, pre, .request, .row, option").all():
        piece.dispatch_event("mouseover")
    assert page.locator("#problem script, #problem img, pre *, .argument script").count() == 0
    assert "owned" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.complaints == []
    assert all(address.startswith("file://") for address in tab.requests)


def test_a_thought_is_folded_apart_from_the_message_and_says_what_cut_it(hostile_report: Path, open_page: Open):
    page = open_page(hostile_report.parent / "trajectories.html", f"problem={PROBLEM}").page
    thought = page.locator(".thought").first
    assert thought.locator("summary").inner_text() == "thought · 7 tokens · cut by its budget"
    assert not thought.locator("pre").is_visible()
    thought.locator("summary").click()
    assert HANDLER in thought.locator("pre").inner_text()
    assert page.locator(".thought").count() == 2  # one of each policy; no other turn has one


def test_a_reply_of_a_megabyte_opens_in_part_and_says_what_is_missing(hostile_report: Path, open_page: Open):
    page = open_page(hostile_report.parent / "trajectories.html", f"problem={PROBLEM}").page
    reply = page.locator(".reply", has_text="xxxx").first
    assert len(reply.inner_text()) < 1_300
    reply.get_by_role("button").click()
    assert "… 990,000 more characters are in the trajectory file …" in reply.inner_text()


def test_the_pages_policy_would_stop_what_slipped_through(small: Path, open_page: Open, tmp_path: Path):
    folder = shutil.copytree(small.parent, tmp_path / "report")
    page = folder / "trajectories.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</dl>", f"</dl>{SCRIPT}{HANDLER}", 1), encoding="utf-8")
    tab = open_page(page)
    assert "owned" not in tab.page.title()
    assert len([complaint for complaint in tab.complaints if "Content Security Policy" in complaint]) >= 2
    refused = tab.page.evaluate(
        "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"  # markup from text is refused wherever trusted types are known
    assert tab.page.evaluate("turnwise.load('../elsewhere').catch(error => error.name)") == "TypeError"
    assert not [address for address in tab.requests if "elsewhere" in address]


@pytest.mark.parametrize("kept", [None, 60])
def test_a_chunk_that_is_missing_or_cut_is_named_with_the_remedy(
    small: Path, open_page: Open, tmp_path: Path, kept: int | None
):
    folder = shutil.copytree(small.parent, tmp_path / "report")
    spoil(folder / "data" / "episodes-0000.js", kept)
    spoil(folder / "data" / "words-v.js", kept)
    page = open_page(folder / "trajectories.html", "problem=p-same").page
    alert = page.get_by_role("alert").inner_text()
    assert "data/episodes-0000.js did not load" in alert and "python -m tasks report" in alert
    page.fill("#q", "vienna")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('words-v.js did not load')")
    assert listed(page) == []
    page.click("#clear")
    wait_for_rows(page, 4)
    assert page.locator("#status").inner_text() == "4 problems"
    spoil(folder / "data" / "index.js", kept)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("about:blank")
    page.goto((folder / "trajectories.html").as_uri())
    page.get_by_role("alert").wait_for()
    assert "data/index.js did not load" in page.get_by_role("alert").inner_text()


def spoil(file: Path, kept: int | None) -> None:
    """Delete a file, or keep its first bytes."""
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:kept])


def test_a_page_left_open_shows_no_episode_of_a_report_that_was_built_again(tmp_path: Path, open_page: Open):
    policies = small_policies(tmp_path)
    file = build_browser(tmp_path / "report", policies, title="first").absolute()
    page = open_page(file, width=NARROW).page
    for policy in policies:
        write_jsonl(policy.trajectories, [row for _, row in read_jsonl(policy.trajectories)][::-1])
    build_browser(tmp_path / "report", policies, title="second")
    page.locator(".row", has_text="p-better").click()
    assert "The report was built again; reload this page" in page.get_by_role("alert").inner_text()
    page.reload()
    wait_for_request(page, "Book a seat from Oslo to Rome.")
    assert page.locator(".side .badge").all_inner_texts()[::2] == ["✗ failure", "✓ success"]


def test_the_focus_and_the_open_folds_outlast_what_is_drawn_again(small: Path, open_page: Open):
    page = open_page(small, "problem=p-better").page
    page.wait_for_selector(".side")
    focused = "document.activeElement.dataset.key || document.activeElement.id"
    for name, key in (("sample 1", "sample 1"), ("+ warm start", "policy warm_start"), ("log-probs", "heat")):
        page.get_by_role("button", name=name).focus()
        page.keyboard.press("Space")
        page.wait_for_selector(f"button[data-key='{key}'][aria-pressed=true]")
        assert page.evaluate(focused) == key
    page.keyboard.press("t")
    page.wait_for_selector(".fold")
    page.get_by_text("as written").first.click()
    page.get_by_role("radio", name="All").click(force=True)
    page.fill("#q", "oslo")
    page.wait_for_function(IS_SEARCHED, arg="oslo")
    wait_for_rows(page, 4)
    assert page.locator("#problem details[open]").count() == 1
    page.get_by_role("radio", name="Improved").click(force=True)
    page.keyboard.press("?")  # letters are commands on a radio button too
    assert page.locator("#help").is_visible()


def test_enter_opens_what_was_typed_and_never_what_an_input_method_is_still_composing(small: Path, open_page: Open):
    page = open_page(small).page
    page.focus("#q")
    page.locator("#q").dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert page.evaluate("document.activeElement.id") == "q" and place_of(page) == "problem=p-better&sample=0"
    page.keyboard.type("vienna")
    page.keyboard.press("Enter")  # before the pause that starts a search
    page.wait_for_selector(".request")
    assert place_of(page) == "problem=p-same&sample=0&q=vienna"
    assert page.locator(".request").inner_text() == "Book the night train to Vienna."


@pytest.mark.parametrize(("width", "height"), [(844, 390), (320, 256), (1280, 500)])
def test_in_a_low_window_the_list_can_be_scrolled_to_and_read(small: Path, open_page: Open, width: int, height: int):
    page = open_page(small, "category=book/none", width=width, height=height).page
    assert page.locator("#list").bounding_box()["height"] >= 240
    assert not page.locator("#more").evaluate("more => more.open")
    page.locator(".row", has_text="p-same").click()  # scrolls there as a person would
    page.wait_for_selector(".request")
    assert "Vienna" in page.locator(".request").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_rows_grow_with_the_readers_font(small: Path, open_page: Open):
    page = open_page(small).page
    page.evaluate("document.documentElement.style.fontSize = '32px'")
    page.wait_for_function("() => document.querySelector('.row:nth-child(2)').style.top === '156px'")
    clipped = page.evaluate(
        "[...document.querySelectorAll('.row')].filter(row => row.scrollHeight > row.clientHeight).length"
    )
    assert clipped == 0


def test_with_tokens_shown_replies_errors_and_the_first_difference_stay(small: Path, open_page: Open):
    page = open_page(small, "problem=p-worse&sample=1&heat=1").page
    page.wait_for_selector(".tokens")
    assert "no answer in 3 s" in page.locator(".reply.failed").inner_text()
    assert page.locator(".differs").count() == 2 and page.locator(".call .head").count() == 0
    assert page.locator(".jump").is_enabled()
    page.evaluate("location.hash = 'problem=p-same'")
    wait_for_request(page, "Vienna")
    assert page.locator(".jump").is_disabled()


def test_malformed_calls_and_long_arguments_that_differ_are_told_apart(tmp_path: Path, open_page: Open):
    """Two malformed calls look the same on the page but for their text; long arguments once their middle is cut."""
    policies = small_policies(tmp_path)[:2]
    for policy, letter in zip(policies, "ab", strict=True):
        malformed, long, same = (small_episode(policy.name, problem, 0, True) for problem in list(TYPES)[:3])
        malformed.turns[0] = Turn(text=f"<tool_call>{letter}</tool_call>", calls=[{}], replies=["?"])
        long.turns[1] = call_turn("book_flight", "ok", seat="x" * 9_000 + letter + "x" * 9_000)
        same.turns[0] = Turn(text="<tool_call>?</tool_call>", calls=[{}], replies=[letter])
        write_jsonl(policy.trajectories, [episode.to_row() for episode in (malformed, long, same)])
    page = open_page(build_browser(tmp_path / "report", policies, title="").absolute()).page
    marks = {}
    for problem in list(TYPES)[:3]:
        page.locator(".row", has_text=problem).click()
        page.wait_for_selector(f".where:has-text('{problem}')")
        marks[problem] = page.evaluate(
            "[...document.querySelectorAll('.differs')].map(mark => mark.closest('li').value)"
        )
    assert marks == {"p-better": [1, 1], "p-worse": [2, 2], "p-mixed": []}


def test_a_problem_that_only_one_policy_met_is_no_change_of_any_kind(tmp_path: Path, open_page: Open):
    base, best = small_policies(tmp_path)[:2]
    rows = [row for _, row in read_jsonl(base.trajectories)]
    write_jsonl(base.trajectories, [row for row in rows if row["problem_id"] in ("p-better", "p-same")])
    rows = [row for _, row in read_jsonl(best.trajectories)]
    write_jsonl(best.trajectories, [row for row in rows if row["problem_id"] != "p-same"])
    page = open_page(build_browser(tmp_path / "report", [base, best], title="").absolute()).page
    assert page.locator("#changes b").all_inner_texts() == ["4", "1", "0", "0"]
    assert page.locator("#status").inner_text() == "4 problems · 1 met by both"
    signs = dict(zip(listed(page), page.locator(".row .change").all_inner_texts(), strict=True))
    assert signs == {"p-better": "▲", "p-same": "–", "p-worse": "–", "p-mixed": "–"}


def test_an_episode_that_the_environment_lost_is_marked_and_counts_for_neither(tmp_path: Path, open_page: Open):
    policies = small_policies(tmp_path)[:2]
    lose(policies[1], {("p-better", 0), ("p-worse", 0), ("p-worse", 1), ("p-same", 1)})
    lose(policies[0], {("p-mixed", 1)})
    page = open_page(build_browser(tmp_path / "report", policies, title="").absolute(), "problem=p-same").page
    assert [text.replace("\n", "") for text in page.locator(".row .marks").all_inner_texts()] == [
        "✗✗→–✓", "✓✓→––", "✗–→✓✗", "✓✓→✓–",
    ]  # fmt: skip
    assert page.locator(".row .change").all_inner_texts() == ["▲", "–", "▲", "="]
    assert page.get_by_role("option", name="book/none, same, base 2 of 2, iteration-0100 1 of 1").count() == 1
    assert page.locator(".samples button").all_inner_texts() == ["sample 0 ✓ ✓", "sample 1 ✓ –"]
    page.get_by_role("button", name="sample 1").click()
    page.wait_for_selector(".badge:has-text('– environment error')")


def test_the_page_counts_what_the_overview_counts(tmp_path: Path, open_page: Open):
    """Two policies on problems of one to five samples; either may have lost, or not met, any of them."""
    rng, policies = random.Random(3), small_policies(tmp_path)[:2]
    outcomes: tuple[Outcome, ...] = ("success", "failure", "environment_error")
    for policy in policies:
        episodes = [
            replace(
                small_episode(policy.name, "p-same", sample, True), problem_id=f"p-{i}", outcome=rng.choice(outcomes)
            )
            for i in range(200)
            for sample in range(1 + i % 5)
            if rng.random() < 0.9
        ]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
    folder = tmp_path / "report"
    folder.mkdir()
    changes = write_browser(folder, policies, title="")
    page = open_page((folder / "trajectories.html").absolute()).page
    assert [int(count) for count in page.locator("#changes b").all_inner_texts()[1:]] == [
        changes[change] for change in ("improved", "regressed", "same")
    ]
    page.evaluate("location.hash = 'of=best&outcome=not_success'")  # as the overview links to it
    page.wait_for_function("() => turnwise.state.of === 'best'")
    assert len(page.evaluate("turnwise.rows()")) == changes["failing"]
    assert min(changes.values()) > 20


def lose(policy: Policy, places: set[tuple[str, int]]) -> None:
    """Have the environment lose the policy's episodes at these problems and samples."""
    rows = [row for _, row in read_jsonl(policy.trajectories)]
    for row in rows:
        if (row["problem_id"], row["sample_index"]) in places:
            row |= {"outcome": "environment_error", "limit": None, "fault": "the booking server was down"}
    write_jsonl(policy.trajectories, rows)


def test_in_high_contrast_what_is_chosen_has_an_outline_and_policies_have_shapes(small: Path, open_page: Open):
    page = open_page(small, "problem=p-better").page
    page.emulate_media(forced_colors="active")
    page.wait_for_selector(".side")
    chosen = (".row[aria-selected=true]", ".toggle[aria-pressed=true]", "#changes input:checked + span")
    others = (".row[aria-selected=false]", ".toggle[aria-pressed=false]", "#changes input:not(:checked) + span")
    outline = "element => getComputedStyle(element).outlineStyle"
    assert {page.locator(which).first.evaluate(outline) for which in chosen} == {"solid"}
    assert {page.locator(which).first.evaluate(outline) for which in others} == {"none"}
    look = "dot => [getComputedStyle(dot).borderRadius, getComputedStyle(dot).backgroundColor]"
    base, best = (page.locator(f"h3 .dot.{name}").evaluate(look) for name in ("base", "best"))
    assert base == ["1px", "rgb(102, 109, 126)"] and best == ["50%", "rgb(11, 122, 83)"]


def test_long_labels_and_many_samples_leave_room_for_the_turns(tmp_path: Path, open_page: Open):
    label = "models_of_/home/someone/experiments/2026-11-28/long-name-without-spaces-iteration-0110"
    policies = [replace(policy, label=f"{label}{policy.name}") for policy in small_policies(tmp_path)[:2]]
    for policy in policies:
        episodes = [small_episode(policy.name, "p-same", sample, True) for sample in range(128)]
        write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
    file = build_browser(tmp_path / "report", policies, title="").absolute()
    page = open_page(file, "problem=p-same&sample=100", width=1000).page
    page.wait_for_selector(".side")
    too_wide = (
        "[...document.querySelectorAll('.side, .top h3')].filter(part => part.scrollWidth > part.clientWidth).length"
    )
    assert page.evaluate(too_wide) == 0
    assert page.locator("header.head").bounding_box()["height"] < 320
    samples, chosen = (
        page.locator(".samples").bounding_box(),
        page.locator(".samples [aria-pressed=true]").bounding_box(),
    )
    assert samples["y"] <= chosen["y"] <= samples["y"] + samples["height"] - chosen["height"]
    assert not page.locator(".whose").first.is_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator(".whose").all_inner_texts()[::3] == [policy.label for policy in policies]
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_on_paper_the_chosen_problem_is_whole_and_alone(small: Path, report: Path, open_page: Open):
    page = open_page(small, "problem=p-better", height=300).page
    page.wait_for_selector(".side")
    page.emulate_media(media="print")
    height = page.locator(".sides").evaluate("sides => sides.getBoundingClientRect().bottom")
    assert page.evaluate("document.documentElement.scrollHeight") + 1 > height > 300
    assert not [what for what in (".finder", ".bar", ".tools") if page.locator(what).is_visible()]
    page.set_viewport_size({"width": 760, "height": 300})  # about a sheet of A4
    assert page.evaluate("document.documentElement.scrollWidth") == 760
    page = open_page(report).page
    page.emulate_media(media="print")
    adjust = "dot => [getComputedStyle(dot).printColorAdjust, getComputedStyle(dot.closest('.panel')).overflowX]"
    assert page.locator(".track .dot").first.evaluate(adjust) == ["exact", "visible"]


def test_writing_from_right_to_left_keeps_json_and_names_in_their_order_and_is_found(tmp_path: Path, open_page: Open):
    policies = small_policies(tmp_path)[:2]
    for policy in policies:
        episode = small_episode(policy.name, "p-same", 0, True)
        call = {"name": "بحث", "arguments": {"المدينة": "القاهرة"}}
        episode.turns[0] = Turn(text="بحث القاهرة", calls=[call], replies=['{"الحالة": "مؤكد", "cost": 120}'])
        episode.turns[1] = call_turn("read", "تم الحجز B41.")
        write_jsonl(policy.trajectories, [episode.to_row()])
    tab = open_page(build_browser(tmp_path / "report", policies, title="").absolute(), "problem=p-same")
    page = tab.page
    page.wait_for_selector(".side")
    directions = (
        page.locator(".side")
        .first.locator(".reply pre")
        .evaluate_all("texts => texts.map(text => getComputedStyle(text).direction)")
    )
    assert directions == ["ltr", "rtl"]
    assert page.locator(".call").first.locator("bdi").all_inner_texts() == ["بحث", "المدينة", '"القاهرة"']
    page.fill("#q", "القاهرة")
    page.wait_for_function(IS_SEARCHED, arg="القاهرة")
    assert listed(page) == ["p-same"]
    assert loaded(tab, "words-") == ["words-u0627.js"]
