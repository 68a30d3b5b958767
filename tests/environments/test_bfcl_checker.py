"""bfcl: every ground truth scores 1, and every other answer what the package's own checker says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tasks.core.records import Problem, ToolCall
from tasks.core.tool_calls import call_text, parse_calls
from tasks.environments.bfcl.environment import EMPTY, RESPONSE, STATE
from tasks.environments.bfcl.package import read_call, tools_of_class
from tasks.environments.bfcl.problems import problems
from tasks.environments.bfcl.settings import BFCL_CATEGORIES, BFCLCategory
from tasks.tools.base import Verdict
from tests.environments.bfcl_mutations import (
    LEFT_BEHIND,
    PRISTINE,
    Case,
    artefacts,
    corpus,
    package_replies,
    package_verdict,
)
from tests.environments.bfcl_play import BASE, LONG, WORLD, call, ours, play, solution, with_class
from tests.worlds import answer_calls


@pytest.mark.slow
@pytest.mark.parametrize("in_steps", [True, False], ids=["one call a step", "all calls at once"])
@pytest.mark.parametrize("turns", ["first", "all"])
def test_every_ground_truth_scores_1(turns: Any, in_steps: bool) -> None:
    solved = 0
    for problem in problems(BASE, turns):
        episode = WORLD.start(problem)
        for number, calls in enumerate(solution(problem)):
            if number:
                episode.end_turn("Done.")
            texts = [call_text(call) for call in calls]
            for message in texts if in_steps else ["\n".join(texts)]:
                list(answer_calls(episode, parse_calls(message)))
        solved += episode.verdict("Done.").success
    assert solved == 200


@pytest.mark.slow
@pytest.mark.parametrize("category", BFCL_CATEGORIES)
def test_whole_conversations_of_every_category_score_1_and_get_the_packages_replies(category: BFCLCategory) -> None:
    for problem in problems(category, "all"):
        episode, verdict = play(problem, solution(problem))
        assert verdict == Verdict(True, {"answered": True, "state": True, "response": True}, {"error_type": None})
        replies = package_replies(Case(problem, "", solution(problem), in_steps=False))
        assert episode.responses == [text for texts in replies for text in texts]
    assert len(problems(category, "all")) == 200


def test_positional_arguments_follow_the_signature_and_not_the_order_of_the_doc() -> None:
    bought = read_call("purchase_insurance('token', 'basic', 'b1', 10.5, 'c1')")
    assert bought.arguments["booking_id"] == "b1" and bought.arguments["insurance_cost"] == 10.5
    doc = next(tool for tool in tools_of_class("TravelAPI") if tool.name == "purchase_insurance")
    assert list(doc.parameters["properties"])[2] == "insurance_cost"
    assert read_call("lockDoors(unlock=False, door=['driver'])") == call("lockDoors", unlock=False, door=["driver"])


def test_a_ground_truth_that_is_no_literal_is_refused() -> None:
    for text in ("cd(open('x'))", "cd(folder=__import__('os'))", "cd(folder=f'{1}')"):
        with pytest.raises(ValueError):
            read_call(text)


def disagreements(cases: Iterable[Case]) -> tuple[list[Any], Counter[str]]:
    """What the package judges otherwise; and how many cases its two artefacts touch, and in how many they decide.

    A case they touch is also judged with the parentheses of its texts hidden from them: there it must agree.
    """
    wrong: list[Any] = []
    counts: Counter[str] = Counter()
    for case in cases:
        verdict, found = ours(case), artefacts(case)
        counts["cases"] += 1
        counts.update(found)
        package = package_verdict(case, escaped=bool(found))
        counts[str(package[1])] += 1
        if verdict != package:
            wrong.append((case, verdict, package))
        if found and package_verdict(case) != verdict:
            counts["decided by an artefact"] += 1
    return wrong, counts


@pytest.mark.slow
def test_near_misses_are_judged_as_the_package_judges_them() -> None:
    for category in BFCL_CATEGORIES:
        wrong, counts = disagreements(corpus(category, "all", per_problem=2))
        assert not wrong
        assert counts["cases"] == 400 and min(counts[str(type)] for type in (None, EMPTY, STATE, RESPONSE)) > 20
    wrong, _ = disagreements(corpus(BASE, "first", per_problem=3))
    assert not wrong


@pytest.mark.bench  # a proof of a minute, to be repeated where checker or package changed
@pytest.mark.parametrize(
    ("category", "turns", "per_problem"),
    [
        (BASE, "first", 40),
        (BASE, "all", 40),
        ("multi_turn_miss_func", "all", 10),
        ("multi_turn_miss_param", "all", 10),
        (LONG, "first", 10),
        (LONG, "all", 10),
    ],
)
def test_thousands_of_near_misses_are_judged_as_the_package_judges_them(
    category: BFCLCategory, turns: Any, per_problem: int
) -> None:
    wrong, counts = disagreements(corpus(category, turns, per_problem=per_problem))
    assert not wrong
    assert counts["cases"] == 200 * per_problem
    assert min(counts[str(type)] for type in (None, EMPTY, STATE, RESPONSE)) > counts["cases"] / 20
    assert counts["decided by an artefact"] == 0  # the texts they touch are wrong either way


@pytest.mark.slow
def test_no_ground_truth_holds_a_text_that_an_artefact_of_the_package_would_change() -> None:
    everything = [problem for category in BFCL_CATEGORIES for problem in problems(category, "all")]
    assert len(everything) == 800
    assert not [problem.id for problem in everything if artefacts(Case(problem, "", [], in_steps=False))]


def with_truth(problem: Problem, *calls: ToolCall) -> Problem:
    """A problem of one request with another ground truth."""
    turn = problem.reference[0].model_copy(update={"calls": list(calls)})
    return problem.model_copy(update={"reference": [turn], "requests": problem.requests[:1]})


def test_white_space_before_a_parenthesis_counts_here_and_not_in_the_package() -> None:
    file = call("touch", file_name="x.txt")
    problem = with_truth(with_class("GorillaFileSystem"), file, call("echo", file_name="x.txt", content="a (b)"))
    answer = [[file, call("echo", file_name="x.txt", content="a(b)")]]
    truth = [["touch(file_name='x.txt')", "echo(file_name='x.txt', content='a (b)')"]]

    assert artefacts(Case(problem, "", answer, in_steps=False)) == {"space before a parenthesis"}
    assert ours(Case(problem, "", answer, in_steps=False)) == (False, "instance_state_mismatch")
    assert package_verdict(Case(problem, "", answer, in_steps=False), truth=truth) == (True, None)


def test_a_tool_name_before_a_parenthesis_is_text_here_and_not_in_the_package() -> None:
    calls = [call("touch", file_name="x.txt"), call("echo", file_name="x.txt", content="sort(b)")]
    problem = with_truth(with_class("GorillaFileSystem"), *calls)
    truth = [["touch(file_name='x.txt')", "echo(file_name='x.txt', content='sort(b)')"]]

    assert artefacts(Case(problem, "", [calls], in_steps=False)) == {"tool name before a parenthesis"}
    assert ours(Case(problem, "", [calls], in_steps=False)) == (True, None)
    assert package_verdict(Case(problem, "", [calls], in_steps=False), truth=truth)[1] == "instance_state_mismatch"


def test_what_the_package_shares_between_both_sides_stays_shared_and_no_other_episode_sees_it() -> None:
    """The mutable default of post_tweet, and the cards and bookings that every long conversation has."""
    tweeting = with_class("TwitterAPI")
    number = tweeting.world["initial_config"]["TwitterAPI"]["tweet_counter"]
    calls = [call("post_tweet", content="x"), call("mention", tweet_id=number, mentioned_usernames=["@a"])]
    login = call(
        "authenticate_twitter",
        **{key: tweeting.world["initial_config"]["TwitterAPI"][key] for key in ("username", "password")},
    )
    problem, answer = with_truth(tweeting, login, *calls), [[login, *calls]]
    truth = [[f"{item.name}({', '.join(f'{k}={v!r}' for k, v in item.arguments.items())})" for item in answer[0]]]

    # The ground truth's tweet begins with the mention the model's made: a perfect answer is wrong, in both.
    for _ in range(2):
        assert ours(Case(problem, "", answer, in_steps=False)) == (False, "execution_response_mismatch")
    assert package_verdict(Case(problem, "", answer, in_steps=False), truth=truth)[1] == "execution_response_mismatch"

    travelling = next(problem for problem in problems(LONG, "first") if problem.id == "multi_turn_long_context_150")
    card, booking = next(iter(PRISTINE[0])), next(iter(PRISTINE[1]))
    insurance = call(
        "purchase_insurance",
        access_token=travelling.world["initial_config"]["TravelAPI"].get("access_token"),
        insurance_type="basic",
        booking_id=booking,
        insurance_cost=1,
        card_id=card,
    )
    extra = Case(travelling, "", [[insurance, *solution(travelling)[0]]], in_steps=False)
    assert ours(extra) == package_verdict(extra) == (True, None)
    assert PRISTINE == LEFT_BEHIND
    assert WORLD.start(travelling).model.instances["TravelAPI"].credit_card_list[card] == PRISTINE[0][card]
