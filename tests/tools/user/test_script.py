"""A request told at once, in parts, or on request: every part once and in order, and at once is what it always was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.base import Environment, ToldRequests
from tasks.tools.user.environment import UserEnvironment
from tasks.tools.user.settings import Reveal, UserSettings
from tests import tiny
from tests.rollouts.test_requests import NOTE, PROBLEM, Notebook
from tests.worlds import QUICK, environment_settings

PARTS = ["I need a note", "for Ada", "today."]
WHOLE = PROBLEM.model_copy(
    update={
        "requests": [" ".join(PARTS)],
        "reference": PROBLEM.reference[:1],
        "world": {"user": {"goal": "a note", "shards": PARTS}},
    }
)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def script(reveal: Reveal) -> UserSettings:
    return UserSettings(played_by="script", reveal=reveal, model=None)


def play(chat: ChatFormat, environment: Environment, texts: list[str], problem: Problem = WHOLE) -> Trajectory:
    engine = ScriptedEngine([[chat.encode(text) for text in texts]], end_of_turn=chat.end_of_turn)
    sampling = tiny.ROOMY.model_copy(update={"max_tokens_per_turn": 90, "max_tokens_per_episode": 900})
    kind = EngineEpisodes(engine, chat, sampling)
    collector = Collector(kind, environment, max_concurrent_episodes=1, seed=0, stage="test")
    return collector.collect([EpisodeKey(problem, 0, 0)])[0]


class Rambler(ToldRequests):
    """Its first message alone fills an episode's tokens."""

    def open(self) -> str:
        return "I need a note, " * 400


def test_a_user_whose_opening_leaves_no_room_is_an_environment_error(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notebook, "start_user", lambda self, problem, stream="": Rambler(problem.requests))
    played = play(chat, Notebook(QUICK), ["Noted."])
    assert (played.outcome, played.turns, played.sequences) == ("environment_error", [], [])
    assert played.fault == "user: unavailable: its first message leaves no room for the agent"


def told(played: Trajectory) -> list[str]:
    return [played.request, *(turn.follow_up for turn in played.turns if turn.follow_up is not None)]


@given(
    requests=st.lists(st.text(min_size=1), min_size=1, max_size=6),
    messages=st.lists(st.text(), min_size=6, max_size=6),
    on_request=st.booleans(),
)
def test_every_part_is_told_once_and_in_order(requests: list[str], messages: list[str], on_request: bool) -> None:
    user = ToldRequests(requests, on_request=on_request)
    heard: list[str | None] = [user.open()]
    for message in messages:
        heard.append(user.answer(message))
        if heard[-1] is None:
            break
    assert heard[:-1] == requests[: len(heard) - 1] and heard[-1] is None
    asked = next((i for i, message in enumerate(messages) if "?" not in message), len(messages)) if on_request else 6
    assert len(heard) - 1 == min(len(requests), asked + 1)


def test_a_request_in_parts_goes_on_after_each_message_without_a_call(chat: ChatFormat) -> None:
    world = UserEnvironment(Notebook(QUICK), script("sharded"))
    played = play(chat, world, ["What else?", NOTE, "Noted.", "All noted."])
    assert told(played) == PARTS and len(played.turns) == 4
    assert [turn.follow_up for turn in played.turns] == ["for Ada", None, "today.", None]
    assert played.details["messages"] == ["What else?", "Noted.", "All noted."]


def test_on_request_a_part_is_told_to_a_question_alone(chat: ChatFormat) -> None:
    world = UserEnvironment(Notebook(QUICK), script("on_request"))
    assert told(play(chat, world, ["For whom?", NOTE, "When?", "Noted."])) == PARTS
    assert told(play(chat, world, ["For whom?", NOTE, "Noted."])) == PARTS[:2]


@pytest.mark.parametrize("problem", [WHOLE, PROBLEM])
def test_at_once_is_what_it_is_without_a_user(chat: ChatFormat, problem: Problem) -> None:
    texts = [NOTE, "Noted.", NOTE, "Noted.", NOTE, "Noted."]
    bare = play(chat, Notebook(QUICK), texts, problem)
    with_user = play(chat, UserEnvironment(Notebook(QUICK), script("at_once")), texts, problem)
    without = {"environment_fingerprint": ""}
    assert {**with_user.to_row(), **without} == {**bare.to_row(), **without}
    assert with_user.environment_fingerprint != bare.environment_fingerprint


def test_a_problem_without_parts_is_told_at_once(chat: ChatFormat) -> None:
    world = UserEnvironment(Notebook(QUICK), script("sharded"))
    assert told(play(chat, world, [NOTE, "One.", NOTE, "Two.", NOTE, "Three."], PROBLEM)) == PROBLEM.requests


def test_the_parts_of_travel_desk_are_its_request() -> None:
    desk, seen = TravelDesk(), set()
    for problem in desk.generate(seed=5, num_problems=300, max_level=4):
        parts = desk.shards(problem)
        assert " ".join(parts) == problem.requests[0]
        seen.add((problem.world["kind"], len(parts)))
    assert seen == {("cancel", 2), ("quote", 3), ("book", 3), ("change", 4)}


@pytest.mark.parametrize("reveal", ["sharded", "on_request"])
def test_bfcl_that_judges_after_each_message_takes_no_request_in_parts(reveal: Reveal) -> None:
    assert environment_settings("bfcl", user=script("at_once")).user == script("at_once")
    with pytest.raises(ValueError, match=rf"user\.reveal: {reveal} .*bfcl.* Set user\.reveal to at_once"):
        environment_settings("bfcl", user=script(reveal))


def test_a_goal_of_another_form_names_its_row() -> None:
    bad = WHOLE.model_copy(update={"world": {"user": {"shards": "I need a note"}}})
    with pytest.raises(ValueError, match=r"problem 'n': world\.user\.shards"):
        UserEnvironment(Notebook(QUICK), script("sharded")).start_user(bad)
