"""decision.html: whatever the answer, every reason and number is on the page, and nothing on it is more than text."""

from __future__ import annotations

import html
import re
from io import StringIO
from pathlib import Path

import pytest

from tasks.core.console import SafeConsole
from tasks.stages.promote.page import render_decision
from tasks.stages.promote.record import headline, print_decision
from tests.measurement.decisions import HOSTILE_REASON, ROWS


def page_of(name: str) -> str:
    return render_decision(ROWS[name], headline(ROWS[name]))


def printed(name: str) -> str:
    stream = StringIO()
    print_decision(ROWS[name], Path("artifacts/promote/decision.html"), SafeConsole(file=stream, width=100))
    return stream.getvalue()


def text_of(page: str) -> str:
    """What a reader sees, on one line."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", "", re.sub(r"</t[dh]>", " ", body))
    return " ".join(html.unescape(body).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("promote", "iteration-0010 became champion: travel-desk-agent, version 4"),
        ("hold", "iteration-0010 is not promoted; version 3 stays champion"),
        ("reject", "iteration-0010 is not promoted; version 3 stays champion"),
        ("forced", "iteration-0010 became champion: travel-desk-agent, version 4 (forced)"),
        ("waiting", "iteration-0010 waits for approval; version 3 stays champion"),
        ("already champion", "iteration-0010 is already champion: version 3 holds the same weights"),
    ],
)
def test_page_and_terminal_open_with_what_became_of_the_challenger(name: str, told: str):
    assert f"<h1>{told}</h1>" in page_of(name)
    assert printed(name).splitlines()[0] == f"{ROWS[name]['decision']}: {told}"
    assert printed(name).rstrip().endswith("Every number and reason: artifacts/promote/decision.html")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_reason_is_on_the_page_and_at_the_terminal(name: str):
    page, terminal = text_of(page_of(name)), " ".join(printed(name).split())
    for reason in ROWS[name]["reasons"]:
        assert " ".join(reason.split()) in page
        assert reason.rstrip(".") in terminal


def test_the_title_names_the_model_which_tells_the_tabs_of_two_agents_apart():
    assert "<title>travel-desk-agent, reject: iteration-0010 ·" in page_of("reject")


def test_every_number_of_the_comparison_is_on_the_page():
    row, page = ROWS["reject"], text_of(page_of("reject"))
    comparison = row["comparison"]
    for number in (comparison["difference"], comparison["ci_low"], comparison["ci_high"]):
        assert f"{100 * number:+.1f}" in page
    categories = next(check for check in row["checks"] if check["name"] == "categories")["numbers"]["by_category"]
    for item in categories.values():
        assert f"{100 * item['ci_low']:+.1f} to {100 * item['ci_high']:+.1f}" in page
    assert "its problems were looked at 3 times" in page
    assert "Over 91.0%, a gain of 12.0 points is found with a chance of 80% on these 97 groups" in page
    assert "promote.or_cheaper.max_success_loss 0.02" in page
    assert "Warning. This test set is worn." in page


@pytest.mark.parametrize("name", ["promote", "hold", "reject"])
def test_differences_of_success_are_in_points_and_only_relative_changes_in_percent(name: str):
    """Only the two checks of cost have a `-10.0%`: in front of the losses of success, which are points."""
    page, signed = text_of(page_of(name)), r"[+-][\d.]+%"
    for check in ROWS[name]["checks"]:
        sentence = " ".join(check["sentence"].split())
        if re.search(signed, sentence):
            assert check["name"] in ("cheaper", "cost")
            assert not re.search(signed, sentence.partition(" of success ")[2])
            page = page.replace(sentence, "")
    assert not re.search(signed, page)
    assert "difference in points" in page and "more than 5.0 points" in page and "less than 2.0 points" in page


def test_the_names_of_categories_have_room_on_a_wide_screen_and_give_way_on_a_narrow_one():
    """At 1280 px 13rem, two lines for the longest name of travel_desk; up to 860 px 4.5rem, as in every table."""
    assert '<th scope="col" style="min-width: clamp(4.5rem, 40vw - 17rem, 13rem)">category</th>' in page_of("reject")


def test_of_two_ways_the_one_that_was_not_needed_is_no_failure():
    assert "(not needed)" in text_of(page_of("promote"))
    assert "✗" not in printed("promote")
    assert printed("hold").count("✗") == 3  # neither way, and a category that may never fall is not shown to hold


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_page_is_one_file_without_script_or_network(name: str):
    page = page_of(name)
    assert "<script" not in page and "<img" not in page
    links = re.findall(r"""(?:src|href)=["'](?!data:)([^"']*)""", page)
    assert links == ["../report/index.html"]  # a way back, which loads nothing
    assert "default-src 'none'" in page


def test_what_an_operator_or_a_data_set_wrote_is_text():
    page = page_of("forced")
    assert HOSTILE_REASON in text_of(page)
    assert "<h1>owned" not in page
