"""tau2's retail and airline: the user speaks first, after the policy; every expert wins; verdicts are the package's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.endpoint.episode import play_endpoint
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import find_environment_class, load_bare_environment, load_environment
from tasks.environments.tau2 import database
from tasks.environments.tau2.desk import REFUSAL, Desk
from tasks.environments.tau2.desk_problems import problems
from tasks.environments.tau2.package import data_file, read_tasks
from tasks.environments.tau2.settings import Domain, Tau2Settings
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.stages.curate.splitting import SPLITS, side_of
from tasks.stages.warm_start.rows import demonstration_row
from tasks.tools.base import Environment, Verdict, block_until
from tasks.tools.replay import demonstrate_reference
from tasks.tools.user.environment import UserEnvironment
from tests import tiny
from tests.engines.endpoint.chat_endpoint import KEY, VARIABLE, Answer, ChatEndpoint, completion, settings
from tests.environments.tau2_package import desk_verdict
from tests.tools.user.test_model import user
from tests.tools.user.test_script import script
from tests.worlds import QUICK, environment_settings, member

pytestmark = pytest.mark.slow

DOMAINS: tuple[Domain, ...] = ("retail", "airline")
WORLDS = {domain: Desk(QUICK, Tau2Settings(domain=domain, problems="base")) for domain in DOMAINS}
EXCHANGE = problems("retail")["0"]  # of a keyboard and a thermostat, by Yusuf Rossi
SUITCASES = problems("airline")["3"]  # no call: the agent must say 4


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def judged(domain: Domain, problem: Problem, calls: Sequence[ToolCall], said: Sequence[str]) -> Verdict:
    """`said` after all calls: each message but the last is answered by the user."""
    episode = WORLDS[domain].start(problem)
    for item in calls:
        block_until(episode.call(item.name, item.arguments))
    for message in said[:-1]:
        episode.end_turn(message)
    return episode.verdict(said[-1])


def solution(problem: Problem) -> list[str]:
    (turn,) = problem.reference
    return [*(call_text(item) for item in turn.calls), turn.answer]


def conversation(chat: ChatFormat, world: Environment, problem: Problem, texts: Sequence[str]) -> Trajectory:
    """As a rollout plays it: the policy writes `texts`, whatever it hears."""
    engine = ScriptedEngine([[chat.encode(text) for text in texts]], end_of_turn=chat.end_of_turn)
    roomy = {"max_turns": 60, "max_tokens_per_turn": 5_000, "max_tokens_per_episode": 200_000}
    kind = EngineEpisodes(engine, chat, tiny.ROOMY.model_copy(update=roomy))
    collector = Collector(kind, world, max_concurrent_episodes=1, seed=0, stage="test")
    return collector.collect([EpisodeKey(problem, 0, 0)])[0]


# The contract


@pytest.mark.parametrize(("domain", "num_problems"), [("retail", 114), ("airline", 50)])
def test_the_expert_and_a_scripted_user_solve_every_problem(
    chat: ChatFormat, domain: Domain, num_problems: int
) -> None:
    world = UserEnvironment(WORLDS[domain], script("at_once"))
    found = problems(domain).values()
    outcomes = [conversation(chat, world, problem, solution(problem)).outcome for problem in found]
    assert len(found) == num_problems and outcomes == ["success"] * num_problems


@pytest.mark.parametrize(("domain", "num_solved"), [("retail", 7), ("airline", 19)])
def test_a_refusal_without_a_call_solves_what_the_package_says(domain: Domain, num_solved: int) -> None:
    """In these the expert changes nothing (or the package refuses his change), and there is nothing to tell."""
    found = {problem.id for problem in problems(domain).values() if judged(domain, problem, [], [REFUSAL]).success}
    assert len(found) == num_solved
    tasks = {task["id"]: task for task in read_tasks(domain)}
    assert desk_verdict(domain, tasks[min(found)], [], [REFUSAL])


@pytest.mark.parametrize(("domain", "num_compared"), [("retail", 3), ("airline", 1)])
def test_verdicts_are_those_of_the_packages_own_scorer(domain: Domain, num_compared: int) -> None:
    """Each as the expert plays it, with the last change left out, and without what is to be told; all of them in
    `make bench`.
    """
    tasks = {task["id"]: task for task in read_tasks(domain)}
    several = [problem for problem in problems(domain).values() if problem.world["communicate"]]
    agreed = []
    for problem in random.Random(3).sample(several, num_compared):
        (turn,) = problem.reference
        variants = ((turn.calls, turn.answer), (turn.calls[:-1], turn.answer), (turn.calls, REFUSAL))
        for calls, answer in variants:
            ours = judged(domain, problem, calls, ["One moment.", answer]).success
            assert ours == desk_verdict(domain, tasks[problem.id], calls, ["One moment.", answer]), problem.id
            agreed.append(ours)
    assert 0 < sum(agreed) < len(agreed)


# Conversations


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], tuple[ChatEndpoint, str]]]:
    """An OpenAI-compatible endpoint on loopback that plays the user with the messages it is given."""
    monkeypatch.setenv(VARIABLE, KEY)
    endpoint = ChatEndpoint({})
    with endpoint.serving() as url:

        def serve(said: list[str]) -> tuple[ChatEndpoint, str]:
            def say(number: int) -> Answer:
                turn = sum(message["role"] == "assistant" for message in endpoint.asked[number]["messages"])
                return 200, completion(said[turn])

            endpoint.misbehave = say
            return endpoint, url

        yield serve


def test_a_demonstration_is_the_tokens_of_its_episode_with_the_policy_before_them(chat: ChatFormat) -> None:
    world = WORLDS["retail"]
    shown = demonstrate_reference(world, EXCHANGE)
    assert shown is not None
    row = demonstration_row(shown, chat, [], rules=world.rules_for(EXCHANGE))
    played = conversation(chat, world, EXCHANGE, solution(EXCHANGE))
    (tokens,) = played.sequences
    assert (row.token_ids[: len(tokens.token_ids)], row.sampled_mask) == (tokens.token_ids, tokens.sampled_mask)


def test_an_agent_behind_an_endpoint_reads_the_policy_as_its_system_message(
    served: Callable[[list[str]], tuple[ChatEndpoint, str]],
) -> None:
    endpoint, url = served(solution(EXCHANGE))
    with closing(Endpoint(settings(url))) as model:
        (played,) = play_endpoint(model, WORLDS["retail"], [EXCHANGE], max_turns=9, seed=0, label="test")
    assert played.outcome == "success"
    opening = endpoint.asked[0]["messages"]
    assert [message["role"] for message in opening] == ["system", "user"]
    assert opening[0]["content"] == WORLDS["retail"].rules_for(EXCHANGE)


@pytest.mark.parametrize("farewell", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_the_user_opens_after_the_policy_and_ends_the_conversation(
    chat: ChatFormat, served: Callable[[list[str]], tuple[ChatEndpoint, str]], farewell: str
) -> None:
    _, url = served(["Hi, an exchange please.", "It is Yusuf Rossi, 19122.", f"Thanks! {farewell}"])
    *calls, answer = solution(EXCHANGE)
    with closing(UserEnvironment(WORLDS["retail"], user(url, "at_once", instructions=None))) as world:
        played = conversation(chat, world, EXCHANGE, ["Who are you?", *calls, answer, "Never said."])
    assert played.outcome == "success" and played.turns[-1].text == answer
    assert played.request == "Hi, an exchange please."
    assert [turn.follow_up for turn in played.turns if turn.follow_up] == ["It is Yusuf Rossi, 19122."]
    opening = chat.decode(played.sequences[0].token_ids[: played.sequences[0].sampled_mask.index(True)])
    policy = data_file("retail", "policy.txt").read_text(encoding="utf-8").strip()
    assert opening.index("<|im_start|>system\n") < opening.index(policy) < opening.index("<|im_start|>user\nHi, an")
    assert "clicky" not in opening and "keyboard" not in opening  # what the user alone knows


def test_the_model_that_plays_the_user_reads_what_the_package_tells_it(
    chat: ChatFormat, served: Callable[[list[str]], tuple[ChatEndpoint, str]]
) -> None:
    endpoint, url = served(["How many suitcases?", "###STOP###"])
    with closing(UserEnvironment(WORLDS["airline"], user(url, "at_once", instructions=None))) as world:
        played = conversation(chat, world, SUITCASES, ["You may take 4."])
    system = endpoint.asked[0]["messages"][0]["content"]
    assert system.startswith("# User Simulation Guidelines\n") and system.endswith("\n</scenario>\n")
    assert "###OUT-OF-SCOPE###" in system and "Your confirmation number is JMO1MG." in system
    assert played.checks == {"database": True, "communicated": True}


def test_a_user_endpoint_that_fails_is_an_environment_error(
    chat: ChatFormat, served: Callable[[list[str]], tuple[ChatEndpoint, str]]
) -> None:
    """Also after the agent has solved the problem: no message of the user, no verdict."""
    endpoint, url = served(["Hi."])
    heard = endpoint.misbehave

    def fail_later(number: int) -> Answer | None:
        return heard(number) if len(endpoint.asked[number]["messages"]) == 2 else (503, {"error": {"message": "busy"}})

    endpoint.misbehave = fail_later
    with closing(UserEnvironment(WORLDS["retail"], user(url, "at_once", instructions=None))) as world:
        played = conversation(chat, world, EXCHANGE, solution(EXCHANGE))
    assert (played.outcome, played.checks) == ("environment_error", {})
    assert played.fault is not None and played.fault.startswith("user: ")


def test_what_is_said_counts_wherever_it_is_said_and_commas_do_not() -> None:
    problem = problems("airline")["7"]  # its agent must say 1628
    (turn,) = problem.reference
    assert problem.world["communicate"] == ["1628"]
    assert judged("airline", problem, turn.calls, ["It is $1,628.", "Goodbye."]).success
    verdict = judged("airline", problem, turn.calls, ["It is much.", "Goodbye."])
    assert verdict.checks == {"database": True, "communicated": False}
    assert verdict.details == {"differing_records": [], "missing_info": ["1628"]}


def test_a_record_that_differs_is_named() -> None:
    verdict = judged("retail", EXCHANGE, [], [REFUSAL])
    assert verdict.details["differing_records"] == ["orders/#W2378156"]


# Episodes


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_episode_changes_what_others_see(domain: Domain) -> None:
    """Every solution of the domain, played on one process' shared records."""
    before = {name: _hashes(table) for name, table in database._shared(domain).items()}
    for problem in problems(domain).values():
        judged(domain, problem, problem.reference[0].calls, [REFUSAL])
    assert {name: _hashes(table) for name, table in database._shared(domain).items()} == before
    assert (
        WORLDS[domain]
        .start(EXCHANGE if domain == "retail" else SUITCASES)
        .database.differences(database.Database(domain))
        == []
    )


def _hashes(table: Mapping[str, object]) -> int:
    return hash(tuple(repr(record) for record in table.values()))


def test_what_is_marked_read_only_changes_nothing() -> None:
    given = {
        "order_id": "#W2378156", "user_id": "yusuf_rossi_9620", "product_id": "1656367028", "first_name": "Yusuf",
        "last_name": "Rossi", "zip": "19122", "email": "yusuf.rossi7301@example.com", "expression": "2 + 2",
    }  # fmt: skip
    read_only = [tool for tool in WORLDS["retail"].tools if tool.read_only]
    assert len(read_only) == 7 and len(WORLDS["retail"].tools) == 15
    episode = WORLDS["retail"].start(EXCHANGE)
    for tool in read_only:
        assert block_until(episode.call(tool.name, {name: given[name] for name in tool.parameters["properties"]})).valid
    assert episode.database.differences(database.Database("retail")) == []


def test_a_wrong_call_is_answered_in_the_packages_words() -> None:
    episode = WORLDS["retail"].start(EXCHANGE)
    order = block_until(episode.call("get_order_details", {"order_id": "#W1"}))
    assert (order.error, "Order not found" in order.text) == ("not_found", True)
    letters = block_until(episode.call("calculate", {"expression": "__import__('os')"}))
    assert (letters.error, "Invalid characters" in letters.text) == ("conflict", True)
    assert block_until(episode.call("calculate", {"expression": "(2 + 3) * 4"})).text == "20.0"
    assert block_until(episode.call("transfer_to_human_agents", {"summary": "?"})).text == "Transfer successful"
    private = [block_until(episode.call(name, {})).error for name in ("_get_order", "initialize", "db")]
    assert private == ["unknown_tool"] * 3
    flight = {"flight_number": "HAT001"}  # no date, which the package's class asks for
    update = {"reservation_id": "JMO1MG", "cabin": "economy", "flights": [flight], "payment_id": "x"}
    assert block_until(WORLDS["airline"].start(SUITCASES).call("update_reservation_flights", update)).error


def test_tools_are_described_as_the_package_describes_them() -> None:
    exchange = next(tool for tool in WORLDS["retail"].tools if tool.name == "exchange_delivered_order_items")
    assert exchange.description.startswith("Exchange items in a delivered order to new items of the same product type.")
    assert exchange.parameters["properties"]["new_item_ids"]["description"] == (
        "The item ids to be exchanged for, each such as '1008292230'. There could be duplicate items in the list. Each "
        "new item id should match the item id in the same position and be of the same product."
    )


# Splits and settings


@pytest.mark.parametrize(
    ("domain", "num_customers", "sizes"), [("retail", 53, (44, 31, 22, 30)), ("airline", 34, (23, 17, 6, 8))]
)
def test_no_customer_is_on_two_sides_of_our_splits_as_some_are_of_the_official(
    domain: Domain, num_customers: int, sizes: tuple[int, int, int, int]
) -> None:
    groups = {problem.split_group for problem in problems(domain).values()}
    assert len(groups) == num_customers and all(len(name.split()) == 2 for name in groups)
    assert {side_of(name, seed=seed, train_share=0.5) for seed in range(3) for name in groups} == set(SPLITS)
    train, test = (
        [problems(domain)[id].split_group for id in sorted(half)] for half in WORLDS[domain].published_halves()
    )
    shared = set(train) & set(test)
    assert (len(set(train)), len(set(test)), len(shared), sum(name in shared for name in test)) == sizes


def test_a_conversation_without_a_user_is_refused_and_references_need_none() -> None:
    retail = {"domain": "retail", "problems": "base"}
    with pytest.raises(ValueError, match=r"environment\.user is null.*tau2.*Fill in environment\.user"):
        environment_settings("tau2", settings=retail)
    with pytest.raises(ValueError, match=r"environment\.user is null.*tau2"):
        environment_settings("mixture", settings={"members": [member("travel_desk"), member("tau2", retail)]})
    section = environment_settings("tau2", settings=retail, user=script("at_once"))
    assert find_environment_class(section) is Desk
    assert isinstance(load_environment(section), UserEnvironment)
    assert block_until(load_bare_environment(section).start(EXCHANGE).verdict(REFUSAL)).checks["communicated"]


def test_a_row_that_is_not_the_packages_is_refused_in_one_line() -> None:
    for world in ({}, {**EXCHANGE.world, "actions": [{"name": "no_such_tool", "arguments": {}}]}):
        with pytest.raises(ValueError, match="cannot set it up"):
            WORLDS["retail"].start(EXCHANGE.model_copy(update={"id": "mine", "world": world}))
