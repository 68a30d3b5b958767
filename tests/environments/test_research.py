"""research: search, open, find and cited answers, over an invented world and over a corpus of one's own."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.core.tool_calls import parse_calls
from tasks.environments.catalog import load_environment
from tasks.environments.research.corpus import Document, make_corpus, read_corpus
from tasks.environments.research.environment import Research
from tasks.environments.research.episode import normalise
from tasks.environments.research.names import ENDINGS, ONSETS, draw_names
from tasks.environments.research.settings import MOST_CLUSTERS, GeneratedCorpus, ResearchSettings
from tasks.rewards.retrieval import ndcg, recall
from tasks.stages.curate.splitting import side_of
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import Verdict, block_until
from tasks.tools.user.environment import UserEnvironment
from tasks.tools.user.settings import UserModelSettings, UserSettings
from tests.readme import page_block
from tests.rewards.test_rewards import episode
from tests.worlds import OWN_SETTINGS, environment_settings

pytestmark = pytest.mark.slow  # bm25s is loaded

ROWS = [
    {"id": "d1", "title": "Oslo", "text": "Oslo is the capital of Norway. It has a harbour."},
    {"id": "d2", "title": "Bergen", "text": "Bergen has a harbour, and rain on most days of the year."},
    {"id": "../../etc/passwd", "title": "Harbours", "text": "A harbour shelters ships."},
]


def settings_with(**changed: Any) -> ResearchSettings:
    return ResearchSettings.model_validate({**OWN_SETTINGS["research"], **changed})


def world_over(rows: list[dict[str, str]], **changed: Any) -> Research:
    """A small corpus in place of the generated one."""
    made = Research(settings=settings_with(**changed))
    made.corpus = make_corpus([Document.model_validate(row) for row in rows])
    return made


def question(*requests: tuple[str, list[str], list[str]], id: str = "q") -> Problem:
    """A problem of (request, accepted answers, supporting documents) per user turn."""
    return Problem(
        id=id,
        category="mine",
        level=1,
        requests=[request for request, _, _ in requests],
        world={"questions": [{"answers": answers, "supporting": ids} for _, answers, ids in requests]},
        reference=[
            ReferenceTurn(
                calls=[
                    ToolCall(name="search", arguments={"query": request}),
                    ToolCall(name="answer", arguments={"text": answers[0], "citations": ids}),
                ],
                answer="Done.",
            )
            for request, answers, ids in requests
        ],
        split_group=id,
    )


NOBODY = UserModelSettings(
    url="http://127.0.0.1:9/v1", model="nobody", api_key_variable=None, instructions="You ask.", greeting="Hi!",
    temperature=0.0, max_output_tokens=20, max_messages=3, max_retries=0, timeout_seconds=1.0,
)  # fmt: skip
CAPITAL = question(("What is the capital of Norway?", ["Oslo"], ["d1"]))


def ask(episode: ToolEpisode, name: str, **arguments: Any) -> Any:
    return json.loads(block_until(episode.call(name, arguments)).text)


def judge(world: Research, problem: Problem, *calls: tuple[str, dict[str, Any]]) -> Verdict:
    episode = world.start(problem)
    for name, arguments in calls:
        episode.call(name, arguments)
    return episode.verdict("Done.")


def answer(text: str, *citations: int | str) -> tuple[str, dict[str, Any]]:
    return "answer", {"text": text, "citations": list(citations)}


SEARCH = ("search", {"query": "capital Norway harbour"})


def test_a_search_returns_the_best_matches_with_snippets_and_numbers() -> None:
    episode = world_over(ROWS).start(CAPITAL)
    assert ask(episode, "search", query="capital NORWAY")["results"] == [
        {"title": "Oslo", "document": 1, "snippet": "is the capital of"}
    ]
    assert ask(episode, "search", query="zebra")["results"] == []


def test_a_document_keeps_the_number_it_was_first_shown_with() -> None:
    """Harbours is the shortest, so it ranks first; Oslo is number 1 since the first search."""
    episode = world_over(ROWS).start(CAPITAL)
    ask(episode, "search", query="capital")
    found = ask(episode, "search", query="harbour")["results"]
    assert [(result["title"], result["document"]) for result in found] == [("Harbours", 2), ("Oslo", 1), ("Bergen", 3)]


def test_a_number_is_as_good_as_an_id_and_names_what_was_shown() -> None:
    episode = world_over(ROWS).start(CAPITAL)
    assert ask(episode, "open", document=1)["error"]["type"] == "not_found"
    ask(episode, "open", document="d2")
    ask(episode, "search", query="capital")
    assert (ask(episode, "open", document=1)["title"], ask(episode, "open", document=2)["title"]) == ("Bergen", "Oslo")
    assert ask(episode, "open", document=3)["error"]["type"] == "not_found"
    assert "no document has this number" in ask(episode, "open", document=3)["error"]["message"]
    assert ask(episode, "open", document="2")["error"]["type"] == "not_found"  # a text is an id
    assert "no document has this id" in ask(episode, "open", document="2")["error"]["message"]


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    rows = [{"id": f"d{number}", "title": "Same", "text": "words"} for number in range(30)]
    corpus = make_corpus([Document.model_validate(row) for row in rows])
    assert [found.id for found in corpus.search("same", num_results=4)] == ["d0", "d1", "d2", "d3"]


def test_a_corpus_without_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="no document has a word of two letters or more") as refusal:
        make_corpus([Document(id="d1", title="", text="a b ?")])
    assert "\n" not in str(refusal.value)


def test_a_document_is_read_in_pages_and_searched_for_passages() -> None:
    episode = world_over(ROWS, page_characters=10).start(CAPITAL)
    assert ask(episode, "open", document="d1") == {"title": "Oslo", "text": "Oslo is th", "next": 10}
    assert ask(episode, "open", document="d1", start=40) == {"title": "Oslo", "text": "harbour."}
    assert ask(episode, "find", document="d2", text="RAIN")["passages"] == ["and rain on most"]
    assert ask(episode, "find", document="d2", text="snow")["passages"] == []


def test_an_id_is_a_key_and_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s3cret")
    monkeypatch.chdir(tmp_path)
    episode = world_over(ROWS).start(CAPITAL)
    assert ask(episode, "open", document="secret")["error"]["type"] == "not_found"
    assert ask(episode, "open", document="../../etc/passwd")["text"] == "A harbour shelters ships."


@pytest.mark.parametrize(
    ("given", "answer_is_right", "evidence_holds"),
    [
        ([SEARCH, answer("the OSLO!", "d1")], True, True),
        ([SEARCH, answer("Bergen", "d1")], False, True),
        ([SEARCH, answer("Oslo")], True, False),  # no citation
        ([SEARCH, answer("Oslo", "d1", "d2")], True, False),  # one that does not support it
        ([answer("Oslo", "d1")], True, False),  # a document it never saw
        ([("search", {"query": "capital"}), answer("Oslo", 1)], True, True),
        ([("search", {"query": "capital"}), answer("Oslo", 1, 2)], True, False),  # a number that nothing has
        ([answer("Oslo", 1), ("search", {"query": "capital"})], True, False),  # or had when it was cited
        ([answer("Oslo", "d1"), SEARCH], True, False),  # an id is no better
        ([SEARCH, answer("Oslo", "d1"), answer("Bergen", "d1")], False, True),  # the last one counts
        ([SEARCH], False, False),
    ],
)
def test_success_is_the_right_answer_with_evidence_that_supports_it(
    given: list[tuple[str, dict[str, Any]]], answer_is_right: bool, evidence_holds: bool
) -> None:
    verdict = judge(world_over(ROWS), CAPITAL, *given)
    assert verdict.checks == {"answer": answer_is_right, "evidence": evidence_holds}
    assert verdict.success == (answer_is_right and evidence_holds)


def test_all_supporting_documents_must_be_cited_where_settings_say_so() -> None:
    problem = question(("Which towns have a harbour?", ["Oslo and Bergen"], ["d1", "d2"]))
    some = answer("Oslo and Bergen", "d1")
    every = answer("Oslo and Bergen", "d2", "d1")
    assert judge(world_over(ROWS), problem, SEARCH, some).success
    assert not judge(world_over(ROWS, citations="all"), problem, SEARCH, some).success
    assert judge(world_over(ROWS, citations="all"), problem, SEARCH, every).success


def test_the_verdict_leaves_what_was_retrieved_in_order_and_what_was_relevant() -> None:
    verdict = judge(world_over(ROWS), CAPITAL, ("open", {"document": "d2"}), SEARCH)
    assert verdict.details == {"retrieval": {"ranked": ["d2", "d1", "../../etc/passwd"], "relevant": ["d1"]}}


def test_the_rewards_parts_read_what_the_verdict_left() -> None:
    """Ranked second of three, one relevant: NDCG 1/log2(3) = 0.63, Recall@1 0, Recall@2 1."""
    details = judge(world_over(ROWS), CAPITAL, ("open", {"document": "d2"}), SEARCH).details
    left = replace(episode(), details=details)
    assert ndcg(left, 3) == pytest.approx(1 / log2(3))
    assert (recall(left, 1), recall(left, 2)) == (0, 1)


def test_each_request_has_its_own_budget_answer_and_judgement() -> None:
    problem = question(("Capital of Norway?", ["Oslo"], ["d1"]), ("Where does it rain?", ["Bergen"], ["d2"]))
    world = world_over(ROWS, max_searches=1)
    episode = world.start(problem)
    ask(episode, "search", query="capital")
    assert ask(episode, "search", query="capital")["error"]["type"] == "conflict"
    episode.call(*answer("Oslo", "d1"))
    assert not world.start(problem).verdict("Done.").success
    episode.end_turn("Done.")
    assert ask(episode, "search", query="rain")["results"] == [
        {"title": "Bergen", "document": 2, "snippet": "and rain on most"}
    ]  # d1 keeps its number
    assert not episode.verdict("Done.").success  # the second question has no answer
    episode.call(*answer("Bergen", "d2"))
    assert episode.verdict("Done.").success


def test_of_one_question_the_last_answer_counts_whatever_the_user_said_in_between() -> None:
    """The agent asks back, hears more, answers, and is thanked."""
    problem = CAPITAL.model_copy(update={"world": {**CAPITAL.world, "user": {"shards": ["A capital.", "Norway's."]}}})
    episode = world_over(ROWS).start(problem)
    episode.end_turn("Of which country?")
    ask(episode, "search", query="capital Norway")
    episode.call(*answer("Bergen", "d1"))
    episode.call(*answer("Oslo", "d1"))
    assert episode.verdict("Done.").success
    episode.end_turn("Done.")
    assert episode.verdict("You are welcome.").success
    episode.call(*answer("Bergen", "d1"))
    assert not episode.verdict("Bergen, then.").success


@pytest.mark.parametrize(
    ("user", "shards", "is_refused"),
    [
        (UserSettings(played_by="script", reveal="at_once", model=None), [], False),
        (UserSettings(played_by="script", reveal="sharded", model=None), [], False),  # no parts: told as they are
        (UserSettings(played_by="script", reveal="sharded", model=None), ["A capital.", "Norway's."], True),
        (UserSettings(played_by="endpoint", reveal="at_once", model=NOBODY), [], True),
    ],
)
def test_several_questions_are_refused_to_a_user_who_would_word_them_anew(
    user: UserSettings, shards: list[str], is_refused: bool
) -> None:
    """The second answer is judged against the second request, which such a user never makes."""
    problem = question(("Capital of Norway?", ["Oslo"], ["d1"]), ("Where does it rain?", ["Bergen"], ["d2"]))
    problem = problem.model_copy(update={"world": {**problem.world, "user": {"shards": shards}}})
    with closing(UserEnvironment(world_over(ROWS), user)) as world:
        world.start_user(CAPITAL)
        if not is_refused:
            assert world.start_user(problem).open() == "Capital of Norway?"
            return
        with pytest.raises(ValueError, match="problem 'q': each of its 2 requests is judged by itself") as refusal:
            world.start_user(problem)
        assert "\n" not in str(refusal.value)


@settings(max_examples=50, deadline=None)
@given(budget=st.integers(1, 60), moves=st.lists(st.sampled_from(["search", "open", "find"]), max_size=8))
def test_no_more_characters_are_read_than_the_budget_has(budget: int, moves: list[str]) -> None:
    episode = world_over(ROWS, max_characters=budget).start(CAPITAL)
    arguments = {
        "search": {"query": "harbour"},
        "open": {"document": "d1"},
        "find": {"document": "d1", "text": "o"},
    }
    read = 0
    for move in moves:
        reply = ask(episode, move, **arguments[move])
        snippets = [found.get("snippet", "") for found in reply.get("results", [])]
        read += sum(map(len, [reply.get("text", ""), *reply.get("passages", []), *snippets]))
    assert read <= budget


def test_answers_are_compared_without_case_punctuation_and_articles() -> None:
    assert normalise("The  Ａnswer, is: an Oslo!") == "answer is oslo"
    assert normalise("Oslo") != normalise("Oslow")


# The invented world.


GENERATED = Research(settings=settings_with(generated={"seed": 1, "num_clusters": 60}))
PROBLEMS = list(GENERATED.generate(seed=3, num_problems=300, max_level=4) or ())


def test_names_are_two_parts_and_there_are_enough_for_the_most_clusters() -> None:
    assert {len(onset) for onset in ONSETS} == {3}
    for kind in ENDINGS:
        names = draw_names(kind, 4 if kind == "person" else 2, random.Random(1))
        assert all(name[:3] in ONSETS and name[3:] in ENDINGS[kind].split() for name in names)
    world = Research(settings=settings_with(generated={"seed": 2, "num_clusters": MOST_CLUSTERS}))
    titles = [document.title for document in world.corpus.documents.values()]
    assert len(set(titles)) == len(titles) == 4 * MOST_CLUSTERS + MOST_CLUSTERS // 2


def test_the_same_seed_writes_the_same_world_and_questions_and_none_twice() -> None:
    again = Research(settings=settings_with(generated={"seed": 1, "num_clusters": 60}))
    assert again.fingerprint() == GENERATED.fingerprint()
    assert list(again.generate(seed=3, num_problems=300, max_level=4) or ()) == PROBLEMS
    assert len({(problem.requests[0], problem.category) for problem in PROBLEMS}) == 300
    assert set(Counter(problem.category for problem in PROBLEMS).values()) == {60}
    other = Research(settings=settings_with(generated={"seed": 2, "num_clusters": 60}))
    assert other.fingerprint() != GENERATED.fingerprint()


def test_a_level_is_the_number_of_documents_to_read_and_each_is_found_by_its_name() -> None:
    for problem in PROBLEMS:
        calls = problem.reference[0].calls
        assert problem.level == sum(call.name == "open" for call in calls)
        episode = GENERATED.start(problem)
        for search, look in zip(calls[:-1:2], calls[1:-1:2], strict=True):
            found = [result["title"] for result in ask(episode, "search", **search.arguments)["results"]]
            assert GENERATED.corpus.documents[look.arguments["document"]].title in found


def test_the_first_result_is_often_another_document() -> None:
    """Whoever always opens it would not get far."""
    is_first = [
        GENERATED.corpus.search(search.arguments["query"], num_results=3)[0].id == look.arguments["document"]
        for problem in PROBLEMS
        for search, look in zip(problem.reference[0].calls[:-1:2], problem.reference[0].calls[1:-1:2], strict=True)
    ]
    assert 0.2 < sum(is_first) / len(is_first) < 0.8


def test_questions_of_different_groups_share_no_entity_and_no_document() -> None:
    seen: dict[str, str] = {}
    for problem in PROBLEMS:
        calls = problem.reference[0].calls
        found = [call.arguments["query"] for call in calls if call.name == "search"]
        for entity in [*found, *problem.world["questions"][0]["supporting"], calls[-1].arguments["text"]]:
            assert seen.setdefault(entity, problem.split_group) == problem.split_group
    assert {side_of(group, seed=1, train_share=0.7) for group in seen.values()} == {"train", "select", "test"}


def test_the_expert_succeeds_with_and_without_a_detour() -> None:
    expert = GENERATED.expert()
    lengths = Counter[int]()
    for number, problem in enumerate(PROBLEMS):
        shown = expert(problem, random.Random(number))
        assert shown is not None
        calls = [call for text in shown.assistant_texts[:-1] for call in parse_calls(text) if call]
        lengths[len(calls) - len(problem.reference[0].calls)] += 1
        assert judge(GENERATED, problem, *[(call.name, call.arguments) for call in calls]).success
        opened = [call.arguments["document"] for call in calls if call.name == "open"]
        assert all(isinstance(document, int) for document in opened)
        assert calls[-1].arguments["citations"] == opened[-1:]  # where some are enough, the last alone
    assert set(lengths) == {0, 1} and lengths[1] < lengths[0]


# A corpus of one's own.


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("tasks/custom/corpus.jsonl")
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return file


def test_a_corpus_of_ones_own_is_searched_and_judged_the_same_way(own: Path) -> None:
    given = {**OWN_SETTINGS["research"], "corpus": str(own), "generated": None}
    world = load_environment(environment_settings("research", settings=given))
    episode = world.start(CAPITAL)
    for call in CAPITAL.reference[0].calls:
        block_until(episode.call(call.name, call.arguments))
    assert block_until(episode.verdict("Done.")).success
    assert world.generate(seed=1, num_problems=1, max_level=1) is None
    assert world.vocabulary() == []


def test_a_reference_of_ones_own_is_demonstrated_by_numbers(own: Path) -> None:
    world = Research(settings=settings_with(corpus=str(own), generated=None))
    shown = world.expert()(CAPITAL, random.Random(1))
    assert shown is not None
    assert parse_calls(shown.assistant_texts[1]) == [
        ToolCall(name="answer", arguments={"text": "Oslo", "citations": [1]})
    ]
    assert shown.assistant_texts[2:] == ["Done."]


def test_what_fails_names_what_was_not_shown_or_has_several_requests_is_not_demonstrated(own: Path) -> None:
    world = Research(settings=settings_with(corpus=str(own), generated=None))
    [turn] = CAPITAL.reference
    lost = turn.model_copy(update={"calls": [ToolCall(name="open", arguments={"document": "d9"}), *turn.calls]})
    unseen = turn.model_copy(update={"calls": [ToolCall(name="open", arguments={"document": "d1"}), *turn.calls[1:]]})
    twice = question(("Capital?", ["Oslo"], ["d1"]), ("Where does it rain?", ["Bergen"], ["d2"]))
    bad = [CAPITAL.model_copy(update={"reference": [reference]}) for reference in (lost, unseen)]
    for problem in (*bad, twice):
        assert world.expert()(problem, random.Random(1)) is None


def test_the_corpus_and_the_question_of_the_page_work_as_they_are_printed(own: Path) -> None:
    page = "tasks/environments/README.md"
    own.write_text(page_block(page, "json", '"title": "Oslo"'), encoding="utf-8")
    given = yaml.safe_load(page_block(page, "yaml", "corpus: tasks/custom/corpus.jsonl"))["environment"]
    problem = Problem.model_validate_json(page_block(page, "json", '"supporting"'))
    world = load_environment(environment_settings("research", settings=given["settings"]))
    episode = world.start(problem)
    for call in problem.reference[0].calls:
        assert block_until(episode.call(call.name, call.arguments)).valid
    assert block_until(episode.verdict("It is Oslo.")).success


def test_the_index_is_made_once_per_process_and_anew_when_the_file_has_changed(own: Path) -> None:
    first = read_corpus(own)
    assert read_corpus(own) is first
    own.write_text(json.dumps(ROWS[0]), encoding="utf-8")
    assert list(read_corpus(own).documents) == ["d1"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"id": "a", "title": "b"}', "line 1"),
        ('{"id": 7, "title": "b", "text": "c"}', "line 1"),
        ('{"id": "a", "title": "", "text": "c"}\n{"id": "a", "title": "", "text": "d"}', "line 2"),
        ("\n", "no document"),
    ],
)
def test_a_line_that_is_no_document_is_named(own: Path, text: str, named: str) -> None:
    own.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        read_corpus(own)


def test_a_corpus_outside_custom_or_beside_a_generated_one_is_refused() -> None:
    with pytest.raises(ValueError, match="tasks/custom"):
        settings_with(corpus="/etc/passwd", generated=None)
    with pytest.raises(ValueError, match="exactly one"):
        settings_with(corpus="tasks/custom/corpus.jsonl")
    with pytest.raises(ValueError, match="exactly one"):
        settings_with(generated=None)
    with pytest.raises(ValueError, match="is no file"):
        read_corpus(Path("tasks/custom/none.jsonl"))
    with pytest.raises(ValueError, match="research_demo"):
        Research()


@pytest.mark.parametrize(
    ("world", "named"),
    [
        ({}, "questions"),
        ({"questions": [{"answers": [], "supporting": ["d1"]}]}, "answers"),
        ({"questions": [{"answers": ["Oslo"], "supporting": ["d9"]}]}, "d9"),
        ({"questions": CAPITAL.world["questions"] * 2}, "2 entries"),
    ],
)
def test_a_problem_that_could_not_be_judged_is_refused_by_its_id(world: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"'q'.*{named}"):
        world_over(ROWS).start(CAPITAL.model_copy(update={"world": world}))


def test_more_clusters_than_there_are_names_for_are_refused() -> None:
    with pytest.raises(ValueError):
        GeneratedCorpus(seed=1, num_clusters=MOST_CLUSTERS + 1)
