"""The tool cache: what it serves is what the tools would have answered, and in `strict` there are no tools at all."""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import date
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, EnvironmentFault, Episode, ToolReply, Verdict, block_until
from tasks.tools.cache.environment import CachedEnvironment, environment_key
from tasks.tools.cache.store import Entry, StoredEnvironment, StoredReply, ToolStore, read_frozen, write_frozen
from tasks.tools.pool.messages import Frames, answer_row, frame, read_answer
from tasks.tools.settings import CacheSettings, ToolSettings
from tests import tiny
from tests.conftest import ROOT
from tests.worlds import QUICK, cache_settings

pytestmark = pytest.mark.slow

PROBLEM = tiny.problems(1)[0].model_copy(update={"world": {"content": 0}})
OTHER = PROBLEM.model_copy(update={"world": {"content": 1}})
SEEN: list[str] = []  # the calls that reached the tools
CALLS: list[str | None] = ["put", "put", "double", None, "take", "look", "take", "take"]


class BoxEpisode(ToolEpisode):
    """A box: what `take` answers depends on every `put` and `take` before it; `double` on its argument alone."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        SEEN.append("start")
        self.content = problem.world["content"]

    @tool("Put one in.")
    def put(self) -> dict[str, int]:
        return self._moved("put", 1)

    @tool("Take one out.")
    def take(self) -> dict[str, int]:
        return self._moved("take", -1)

    @tool("How many there are.", read_only=True)
    def look(self) -> dict[str, int]:
        return self._moved("look", 0)

    @tool("Twice a number.", stateless=True)
    def double(self, number: int = 3) -> str:
        SEEN.append("double")
        return str(2 * number)

    def _moved(self, name: str, change: int) -> dict[str, int]:
        SEEN.append(name)
        self.content += change
        return {"content": self.content}

    def verdict(self, final_message: str | None) -> Verdict:
        SEEN.append("verdict")
        return Verdict(self.content == 0, {"said": final_message == "done", "empty": self.content == 0})


class SlowBoxEpisode(BoxEpisode):
    """The same box, whose tools answer on the event loop."""

    @tool("Put one in.")
    async def put(self) -> dict[str, int]:  # type: ignore[override]
        await asyncio.sleep(0)
        return self._moved("put", 1)

    @tool("Take one out.")
    async def take(self) -> dict[str, int]:  # type: ignore[override]
        await asyncio.sleep(0)
        return self._moved("take", -1)


class Box(ToolEnvironment):
    """The world of the box."""

    name, episode_class = "box", BoxEpisode

    def vocabulary(self) -> list[str]:
        return ["put", "take"]


class SlowBox(Box):
    """The world of the slow box."""

    episode_class = SlowBoxEpisode


class Gone(ToolEnvironment):
    """A world that is not there."""

    name, episode_class = "box", BoxEpisode

    def __init__(self, *given: Any) -> None:
        raise AssertionError("the world was made")


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


both = pytest.mark.parametrize("world", [Box, SlowBox])


def cached(
    folder: Path,
    mode: str,
    world: type[ToolEnvironment] = Box,
    *,
    frozen: Path | None = None,
    limits: ToolSettings = QUICK,
) -> CachedEnvironment:
    cache = cache_settings(mode, folder, frozen)
    return CachedEnvironment("box", world, lambda: world(limits), settings=None, limits=limits, cache=cache)


def made(episode: Episode, call: str | None) -> ToolReply:
    return block_until(episode.malformed_call() if call is None else episode.call(call, {}))


def play(environment: Any, calls: Sequence[str | None] = CALLS, problem: Problem = PROBLEM) -> Any:
    """The replies and the verdict of one episode."""
    episode = environment.start(problem)
    replies = [made(episode, call) for call in calls]
    verdict = block_until(episode.verdict("done"))
    episode.close()
    return replies, verdict


@both
def test_what_was_recorded_is_replayed_with_no_world_behind_it(tmp_path: Path, world: type[ToolEnvironment]):
    live = cached(tmp_path, "record", world)
    recorded = play(live)
    assert recorded == play(world())
    SEEN.clear()

    strict = cached(tmp_path, "strict", Gone)

    assert play(strict) == recorded
    assert SEEN == []
    assert (strict.tools, strict.describe(), strict.fingerprint()) == (live.tools, live.describe(), live.fingerprint())
    assert list(play(strict)[1].checks) == ["said", "empty"]  # in the world's own order


def test_a_hit_answers_at_once_even_where_the_tool_is_slow(tmp_path: Path):
    play(cached(tmp_path, "record", SlowBox))
    episode = cached(tmp_path, "replay", SlowBox).start(PROBLEM)
    assert isinstance(episode.call("put", {}), ToolReply)
    answer = episode.call("take", {})
    assert isinstance(answer, Future)
    assert answer.result().valid  # a call still under way would be seen by the next test
    episode.close()


@pytest.mark.parametrize("miss", [None, "take"])
def test_a_miss_whose_earlier_calls_wait_is_a_future_that_others_need_not_wait_for(tmp_path: Path, miss: str | None):
    play(cached(tmp_path, "record", SlowBox), ["put"])
    episode = cached(tmp_path, "replay", SlowBox).start(PROBLEM)
    assert isinstance(episode.call("put", {}), ToolReply)
    answer = episode.malformed_call() if miss is None else episode.call(miss, {})
    assert isinstance(answer, Future)
    assert answer.result().valid is (miss is not None)
    episode.close()


def test_recording_asks_the_tools_every_time_and_replaying_only_once(tmp_path: Path):
    environment = cached(tmp_path, "record")
    play(environment), play(environment)
    assert SEEN == ["start", "put", "put", "double", "take", "look", "take", "take", "verdict"] * 2
    assert environment.counts() == {"tool_cache_hits": 0, "tool_cache_misses": 18, "tool_cache_changes": 0}
    SEEN.clear()

    environment = cached(tmp_path, "replay")
    play(environment)
    assert SEEN == []
    assert environment.counts() == {"tool_cache_hits": 9, "tool_cache_misses": 0, "tool_cache_changes": 0}


def test_one_answer_of_a_stateless_tool_serves_every_episode_and_that_of_another_only_its_own_history(tmp_path: Path):
    play(cached(tmp_path, "record"), ["double", "put"])
    SEEN.clear()
    environment = cached(tmp_path, "replay")
    for history, problem in ((["put"], PROBLEM), ([None], PROBLEM), ([], OTHER)):
        play(environment, [*history, "double"], problem)
    assert SEEN.count("double") == 0
    assert SEEN.count("put") == 1  # after nothing: recorded after `double` only


def test_another_problem_another_message_and_another_world_are_misses(tmp_path: Path):
    class NewBox(Box):
        version = "2"

    play(cached(tmp_path, "record"), ["put"])
    for problem, message, world, num_misses in (
        (PROBLEM, "done", Box, 0),
        (PROBLEM, "over", Box, 1),
        (PROBLEM, None, Box, 1),
        (OTHER, "done", Box, 2),
        (PROBLEM, "done", NewBox, 2),
    ):
        environment = cached(tmp_path, "replay", world)
        episode = environment.start(problem)
        made(episode, "put")
        block_until(episode.verdict(message))
        assert environment.counts()["tool_cache_misses"] == num_misses


class Corpus(Settings):
    operational: ClassVar[set[str]] = {"max_servers"}

    prices: dict[str, str]
    max_servers: int = 1


class ShopEpisode(ToolEpisode):
    """A shop whose prices come from its settings."""

    def __init__(self, problem: Problem, prices: dict[str, str]):
        super().__init__(problem)
        self.prices = prices

    @tool("A price.", stateless=True)
    def price(self, room: str = "attic") -> str:
        return self.prices[room]

    @tool("A price again.")
    def ask(self) -> str:
        return self.prices["attic"]

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(final_message == self.prices["attic"])


class Shop(ToolEnvironment):
    name, episode_class, settings_class = "shop", ShopEpisode, Corpus

    def make_episode(self, problem: Problem) -> ShopEpisode:
        return ShopEpisode(problem, self.settings.prices)  # type: ignore[union-attr]

    def describe(self) -> dict[str, Any]:
        """Without the settings, as of an MCP server."""
        return {key: value for key, value in super().describe().items() if key != "settings"}


class RewordedShop(Shop):
    """The same, but for a tool that another description is given."""

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        return {**described, "tools": {**described["tools"], "ask": {"description": "What a room costs."}}}


class CellarEpisode(ShopEpisode):
    @tool("A price.", stateless=True)
    def price(self, room: str = "cellar") -> str:
        return self.prices[room]


class CellarShop(Shop):
    """The same, but for the schema of its stateless tool."""

    def make_episode(self, problem: Problem) -> ShopEpisode:
        return CellarEpisode(problem, self.settings.prices)  # type: ignore[union-attr]

    episode_class = CellarEpisode


def asked(
    folder: Path, settings: Corpus, name: str = "shop", shop: type[Shop] = Shop, problem: Problem = PROBLEM
) -> tuple[list[str], int]:
    """What the two tools of a replayed shop say, and how many of the answers came from the store."""
    environment = CachedEnvironment(
        name,
        shop,
        lambda: shop(QUICK, settings),
        settings=settings,
        limits=QUICK,
        cache=cache_settings("replay", folder),
    )
    episode = environment.start(problem)
    texts = [made(episode, call).text for call in ("price", "ask")]
    episode.close()
    environment.close()
    return texts, environment.num_hits


def test_an_answer_is_served_only_to_the_environment_that_gave_it(tmp_path: Path):
    """The store has the answers for 10; 99 are other settings, and an environment of another name is another one."""
    old, new = Corpus(prices={"attic": "10"}), Corpus(prices={"attic": "99"})
    assert asked(tmp_path, old) == (["10", "10"], 0)
    assert asked(tmp_path, new) == (["99", "99"], 0)
    assert asked(tmp_path, old, name="other shop") == (["10", "10"], 0)
    assert asked(tmp_path, old) == (["10", "10"], 2)


def test_a_stateless_answer_outlives_a_change_of_other_tools_and_of_how_many_servers_run(tmp_path: Path):
    old = Corpus(prices={"attic": "10"})
    asked(tmp_path, old)
    assert asked(tmp_path, old.model_copy(update={"max_servers": 8})) == (["10", "10"], 2)
    assert asked(tmp_path, old, shop=RewordedShop) == (["10", "10"], 1)


def test_a_stateless_answer_ends_with_the_schema_of_its_own_tool(tmp_path: Path):
    """Without an argument it prices the attic in one and the cellar in the other."""
    prices = Corpus(prices={"attic": "10", "cellar": "20"})
    assert asked(tmp_path, prices) == (["10", "10"], 0)
    assert asked(tmp_path, prices, shop=CellarShop) == (["20", "10"], 0)


@pytest.mark.parametrize("changed", [{"category": "another"}, {"level": 7}, {"requests": ["Another."]}])
def test_a_problem_that_a_tool_may_read_otherwise_is_another_one(tmp_path: Path, changed: dict[str, Any]):
    """The stateless tool does not see it, so one of the two answers is the store's."""
    settings = Corpus(prices={"attic": "10"})
    asked(tmp_path, settings)
    assert asked(tmp_path, settings, problem=PROBLEM.model_copy(update=changed)) == (["10", "10"], 1)


@both
def test_a_miss_in_mid_episode_first_makes_the_earlier_calls_on_a_fresh_back_end(
    tmp_path: Path, world: type[ToolEnvironment]
):
    play(cached(tmp_path, "record", world), ["put", "double", None, "put"])
    SEEN.clear()

    replies, verdict = play(cached(tmp_path, "replay", world), ["put", "double", None, "put", "take"])

    assert SEEN == ["start", "put", "put", "take", "verdict"]  # `double` changes nothing, and is not asked again
    assert [reply.text for reply in replies[-2:]] == ['{"content": 2}', '{"content": 1}']
    assert verdict == Verdict(False, {"said": True, "empty": False})


@both
def test_a_malformed_call_may_be_the_miss(tmp_path: Path, world: type[ToolEnvironment]):
    play(cached(tmp_path, "record", world), ["put", "put"])
    replies, _ = play(cached(tmp_path, "replay", world), ["put", None, "take"])
    assert [reply.valid for reply in replies] == [True, False, True]
    assert replies[2].text == '{"content": 0}'


@both
@given(
    recorded=st.lists(st.lists(st.sampled_from(["put", "take", "look", "double", None]), max_size=5), max_size=3),
    played=st.lists(st.lists(st.sampled_from(["put", "take", "look", "double", None]), max_size=6), max_size=3),
)
def test_whatever_part_was_recorded_an_episode_gets_what_the_live_world_gives(
    tmp_path_factory: pytest.TempPathFactory,
    world: type[ToolEnvironment],
    recorded: list[list[str | None]],
    played: list[list[str | None]],
):
    folder = tmp_path_factory.mktemp("cache")
    for calls in recorded:
        play(cached(folder, "record", world), calls)
    environment = cached(folder, "replay", world)
    assert [play(environment, calls) for calls in played] == [play(world(), calls) for calls in played]
    assert environment.counts()["tool_cache_changes"] == 0


@both
def test_a_tool_that_changed_underneath_is_a_fault_and_not_a_mixture_of_two_worlds(
    tmp_path: Path, world: type[ToolEnvironment], monkeypatch: pytest.MonkeyPatch
):
    play(cached(tmp_path, "record", world), ["put"])
    monkeypatch.setattr(BoxEpisode, "_moved", lambda self, name, change: {"contents": 7})
    environment = cached(tmp_path, "replay", world)
    episode = environment.start(PROBLEM)
    assert made(episode, "put").text == '{"content": 1}'
    with pytest.raises(
        EnvironmentFault, match=r"put: unavailable: the cache no longer matches the tools.*record again"
    ):
        made(episode, "take")


@both
def test_a_fault_is_never_stored(tmp_path: Path, world: type[ToolEnvironment], monkeypatch: pytest.MonkeyPatch):
    def fails(self: BoxEpisode, name: str, change: int) -> dict[str, int]:
        raise EnvironmentFault("down", tool=name)

    with monkeypatch.context() as patch:
        patch.setattr(BoxEpisode, "_moved", fails)
        episode = cached(tmp_path, "record", world).start(PROBLEM)
        with pytest.raises(EnvironmentFault, match="put: unavailable: down"):
            made(episode, "put")
    with pytest.raises(ValueError, match="never recorded"):
        made(cached(tmp_path, "strict").start(PROBLEM), "put")
    assert made(cached(tmp_path, "replay").start(PROBLEM), "put").text == '{"content": 1}'


def test_retries_are_counted_and_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoxEpisode, "_moved", lambda self, name, change: ToolReply("ok", num_retries=2))
    assert [reply.num_retries for reply in play(cached(tmp_path, "record"), ["put"])[0]] == [2]
    replies, _ = play(cached(tmp_path, "replay"), ["put", "take"])
    assert [reply.num_retries for reply in replies] == [0, 4]  # two to catch up, two of its own


def test_answers_that_differ_under_one_key_are_counted_and_the_newest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tool that tells the time: no replay of it can be byte for byte, and the count says so."""
    clock = iter(range(10))
    monkeypatch.setattr(BoxEpisode, "_moved", lambda self, name, change: {"time": next(clock)})
    environment = cached(tmp_path, "record")
    play(environment, ["look"]), play(environment, ["look"])
    assert environment.counts()["tool_cache_changes"] == 1
    assert environment.changed == ["look"]
    assert play(cached(tmp_path, "strict"), ["look"])[0] == [ToolReply('{"time": 1}')]


@pytest.mark.parametrize(
    ("calls", "what"),
    [(["take"], "call 1 (take)"), (["put", None], "call 2 (a malformed call)"), (["put"], "call 1 (the verdict)")],
)
def test_a_miss_in_strict_stops_the_run_and_says_what_to_do(tmp_path: Path, calls: list[str | None], what: str):
    episode = cached(tmp_path, "record").start(PROBLEM)
    made(episode, "put")
    strict = cached(tmp_path, "strict")
    with pytest.raises(ValueError) as raised:
        play(strict, calls)
    message = str(raised.value)
    assert message.startswith(f"problem {PROBLEM.id!r}, {what}: was never recorded in {tmp_path}")
    assert "Set mode: replay to let the tools answer, or record the run again." in message


def test_strict_needs_a_recording_of_the_environment_and_makes_no_folder_to_look_for_one(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no recording of the environment 'box'.*Run with mode: record first"):
        cached(tmp_path / "none", "strict")
    assert not (tmp_path / "none").exists()


def test_strict_makes_the_world_only_for_what_the_world_alone_can_do(tmp_path: Path):
    play(cached(tmp_path, "record"))
    assert cached(tmp_path, "strict", Gone).vocabulary() == []
    strict = cached(tmp_path, "strict", Box)
    assert strict.vocabulary() == ["put", "take"]
    assert play(strict)[1] == Verdict(False, {"said": True, "empty": False})
    assert SEEN.count("start") == 1


@pytest.mark.parametrize("name", ["mcp", "openenv"])
def test_strict_starts_a_server_only_for_its_problems(tmp_path: Path, name: str):
    found = importlib.import_module(f"tasks.environments.{name}.environment").ENVIRONMENT
    recorded = StoredEnvironment(description={"server": name}, tools=[], starts_afresh=False, is_live=True)
    ToolStore(tmp_path).put(environment_key(name, None, QUICK), Entry(environment=recorded))
    cache = cache_settings("strict", tmp_path)
    strict = CachedEnvironment(name, found, lambda: Gone(), settings=None, limits=QUICK, cache=cache)

    methods = {method for method in vars(Environment) if not method.startswith("_")}
    for method in methods - {"generate", "count_source", "published_halves", "close"}:
        if getattr(found, method) is not getattr(Environment, method) and callable(answer := getattr(strict, method)):
            answer(*[PROBLEM] * ("problem" in signature(answer).parameters))
    assert (strict.starts_afresh(), strict.is_live(), strict.cheaper_starts()) == (False, True, "")


def other(value: Any) -> Any:
    """Another value; a text for a text and for null."""
    return {int: 77, float: 77.0, list: ["x"], dict: {"A": "B"}}.get(type(value), "x")


@pytest.mark.parametrize(
    ("name", "unnamed"),
    [
        ("mcp", {"max_servers", "start_timeout_seconds"}),
        ("openenv", {"max_servers", "max_sessions", "max_restarts", "start_timeout_seconds"}),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_each_server_has_a_recording_of_its_own_however_it_is_run(name: str, unnamed: set[str]):
    settings = importlib.import_module(f"tests.environments.{name}_server").environment_settings().settings

    def key(**changed: Any) -> str:
        return environment_key(name, settings.model_copy(update=changed), QUICK)

    assert {field for field, value in settings if key(**{field: other(value)}) == key()} == unnamed


def test_of_the_limits_the_one_that_cuts_replies_is_in_the_key():
    """The others decide which calls are made, and what is a fault."""
    changed = {field: QUICK.model_copy(update={field: other(value)}) for field, value in QUICK}
    keys = {field: environment_key("box", None, limits) for field, limits in changed.items()}
    assert [field for field in keys if keys[field] != environment_key("box", None, QUICK)] == ["max_reply_characters"]


def test_a_reply_that_was_cut_is_not_served_where_the_limit_is_another(tmp_path: Path):
    """Both tools answer more than 300 characters; one of them is stateless."""
    long = PROBLEM.model_copy(update={"world": {"content": 10**300}})
    for limit in (100, 200):
        limits = QUICK.model_copy(update={"max_reply_characters": limit})
        episode = cached(tmp_path, "replay", limits=limits).start(long)
        for name, arguments in (("look", {}), ("double", {"number": 10**300}), ("put", {})):
            assert block_until(episode.call(name, arguments)).text.index("\n[cut here: ") == limit


def test_arguments_that_no_file_can_hold_are_answered_all_the_same(tmp_path: Path):
    values: list[Any] = [float("nan"), "\ud800", [[{}]]]
    for mode in ("record", "replay"):
        episode = cached(tmp_path, mode).start(PROBLEM)
        for value in values:
            assert block_until(episode.call("double", {"number": value})).error == "invalid_arguments"


@pytest.mark.parametrize(("word", "mode"), [("off", "off"), ("strict", "strict"), ("'off'", "off")])
def test_the_word_off_of_yaml_is_a_mode(word: str, mode: str):
    values = yaml.safe_load(f"mode: {word}\nfolder: a\nfrozen: null")
    assert CacheSettings.model_validate(values).mode == mode


def test_a_mode_that_does_not_exist_is_refused():
    for mode in ("on", True, None):
        with pytest.raises(ValueError, match="mode"):
            CacheSettings.model_validate({"mode": mode, "folder": "a", "frozen": None})


class JudgedBoxEpisode(BoxEpisode):
    """A box whose verdict has whatever details it is given."""

    details: Any = None

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(True, {"b": True, "a": False}, self.details)


class JudgedBox(Box):
    """The world of the judged box."""

    episode_class = JudgedBoxEpisode


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ({"b": [1, None], "a": "x"}, '{"b":[1,null],"a":"x"}'),
        ({1: (1, 2), None: {3}}, '{"1":[1,2],"None":[3]}'),
        ({"a": float("nan")}, '{"a":NaN}'),
        ({"on": date(2026, 11, 28)}, '{"on":"2026-11-28"}'),
    ],
)
def test_a_verdicts_details_are_the_same_json_from_the_tools_a_worker_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, details: Any, text: str
):
    monkeypatch.setattr(JudgedBoxEpisode, "details", details)
    bare = play(JudgedBox(), [])[1]
    (sent,) = Frames().take(frame(answer_row(bare)))
    verdicts = [bare, read_answer(sent, "verdict")]
    for mode in ("record", "record", "replay"):
        environment = cached(tmp_path, mode, JudgedBox)
        verdicts.append(play(environment, [])[1])
        assert environment.counts()["tool_cache_changes"] == 0
    assert [to_json(verdict.details).decode() for verdict in verdicts] == [text] * 5
    assert [list(verdict.checks) for verdict in verdicts] == [["b", "a"]] * 5


def test_details_that_are_no_json_are_refused_with_what_they_contain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(JudgedBoxEpisode, "details", {"box": Box()})
    with pytest.raises(ValueError, match=r"^details of a verdict .* no JSON: .*test_cache\.Box.*make them text"):
        play(cached(tmp_path, "record", JudgedBox), [])
    with pytest.raises(ValueError, match=r"no JSON: .*test_cache\.Box"):
        answer_row(Verdict(True, details={"box": Box()}))


# The frozen file.


def entries_of(folder: Path) -> dict[str, Entry]:
    store = ToolStore(folder)
    entries = dict(store.entries())
    store.close()
    return entries


def test_the_same_recordings_freeze_to_the_same_bytes_whatever_their_order(tmp_path: Path):
    for name, order in (("a", (PROBLEM, OTHER)), ("b", (OTHER, PROBLEM))):
        for problem in order:
            play(cached(tmp_path / name, "record"), problem=problem)
        write_frozen(tmp_path / f"{name}.jsonl", entries_of(tmp_path / name))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert read_frozen(tmp_path / "a.jsonl") == entries_of(tmp_path / "b")


def test_strict_rests_on_the_frozen_file_alone_and_replay_on_the_store_as_well(tmp_path: Path):
    play(cached(tmp_path / "store", "record"), ["put"])
    write_frozen(frozen := tmp_path / "frozen.jsonl", entries_of(tmp_path / "store"))
    play(cached(tmp_path / "store", "record"), ["take"])
    SEEN.clear()

    play(cached(tmp_path / "store", "replay", frozen=frozen), ["take"])
    play(cached(tmp_path / "elsewhere", "strict", Gone, frozen=frozen), ["put"])
    assert SEEN == []
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ValueError, match=r"\(take\): was never recorded in .*frozen\.jsonl"):
        play(cached(tmp_path / "store", "strict", Gone, frozen=frozen), ["take"])


KEY = "a" * 64
REPLY = {"text": "ok", "valid": True, "error": None}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected one JSON object"),
        (json.dumps({"reply": REPLY}), "`key` is not a SHA-256"),
        (json.dumps({"key": "../../x", "reply": REPLY}), "`key` is not a SHA-256"),
        (json.dumps({"key": KEY}), "exactly one of reply, verdict and environment"),
        (json.dumps({"key": KEY, "reply": REPLY, "verdict": {"success": True, "checks": {}}}), "exactly one of"),
        (json.dumps({"key": KEY, "reply": {**REPLY, "valid": "yes"}}), "reply.valid: Input should be a valid boolean"),
        (json.dumps({"key": KEY, "reply": {**REPLY, "error": "odd"}}), "reply.error: Input should be"),
        (json.dumps({"key": KEY, "answer": REPLY}), "answer: Extra inputs"),
        (json.dumps({"key": "b" * 64, "reply": REPLY}), "the key bbbbbbbbbbbb… was given before"),
    ],
)
def test_a_line_that_is_no_entry_is_refused_with_its_number(tmp_path: Path, line: str, why: str):
    file = tmp_path / "frozen.jsonl"
    file.write_text(json.dumps({"key": "b" * 64, "reply": REPLY}) + f"\n\n{line}\n")
    with pytest.raises(ValueError) as raised:
        read_frozen(file)
    assert f"{file}, line 3: " in str(raised.value)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_frozen_file_that_is_not_there_is_refused_with_the_ways_to_get_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"frozen = '.*no\.jsonl' is not a file.*`dvc pull`"):
        cached(tmp_path, "strict", frozen=tmp_path / "no.jsonl")


# The store.


def test_an_entry_of_any_size_and_text_comes_back_as_it_was(tmp_path: Path):
    store = ToolStore(tmp_path)
    for number, text in enumerate(["", "é😀\x00", "\ud800", "x" * 5_000_000]):
        entry = Entry(reply=StoredReply(text=text, valid=True, error=None))
        assert not store.put(f"{number:064x}", entry)
        assert store.get(f"{number:064x}") == entry
    assert sorted(file.name for file in tmp_path.iterdir())[0] == "cache.db"
    assert not list(tmp_path.rglob("*.val"))


WRITER = """
import sys
from pathlib import Path
from tasks.tools.cache.store import Entry, StoredEnvironment, StoredReply, ToolStore
store, who = ToolStore(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(400):
    owner = who if number % 2 else 9
    entry = Entry(reply=StoredReply(text=f"{owner} {number}", valid=True, error=None))
    store.put(f"{owner * 1000 + number:064x}", entry)
"""


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(who)], cwd=ROOT, **pipes) for who in (1, 2)]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes_that_record_at_once_lose_nothing(tmp_path: Path, writers: list[subprocess.Popen[str]]):
    """Each writes 200 entries of its own, and 200 that both write."""
    for process in writers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in writers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=300) for process in writers] == [0, 0]

    texts = {entry.reply.text for entry in entries_of(tmp_path).values() if entry.reply}
    assert texts == {f"{owner} {n}" for n in range(400) for owner in ((1, 2) if n % 2 else (9,))}


class Exploit:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return SEEN.append, ("code ran",)


@pytest.mark.parametrize("place", ["value", "key"])
def test_a_row_that_says_it_is_a_pickle_is_refused_and_not_run(tmp_path: Path, place: str):
    ToolStore(tmp_path).put(KEY, Entry.model_validate({"reply": REPLY}))
    bad = pickle.dumps(Exploit())
    with sqlite3.connect(tmp_path / "cache.db") as connection:
        if place == "value":
            connection.execute("UPDATE Cache SET mode = 4, value = ?", (bad,))
        else:
            connection.execute("UPDATE Cache SET raw = 0, key = ?", (bad,))
    store = ToolStore(tmp_path)
    with pytest.raises(ValueError, match="contains data that the tool cache did not write"):
        list(store.entries()) if place == "key" else store.get(KEY)
    assert SEEN == []


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path):
    (tmp_path / "cache.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(ValueError, match=r"`mv .*` and record again"):
        ToolStore(tmp_path)
