"""Aliases: a promotion killed before any of its writes is finished or forgotten, and of two at once one wins."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from tasks.commands.registry import adopt
from tasks.tracking import aliases, model_uri
from tasks.tracking import registry_lock as locks
from tasks.tracking.aliases import LAST_EVENT, TRANSITION, current_champion, lock_registry, open_registry
from tasks.tracking.history import events_of, first_promotion_note, read_history, rollback_note
from tasks.tracking.model_uri import what_there_is
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import LOCK, hold_lock
from tests.tracking.candidates import MODEL, candidate, drill, fork_server, promote, state, two_at_once
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow
WAIT_SECONDS = 60.0
FOREIGN = {"host": "elsewhere", "machine": "another", "pid": 1, "started": 0.0, "place": 0, "holds": True}


def leftovers(registry: Registry) -> list[str]:
    return [name for name in registry.model_tags() if name.startswith(LOCK) or name == TRANSITION]


def test_the_champion_before_is_kept_as_previous_and_the_challenger_is_nobody(registry: Registry):
    assert [promote(name).version for name in ("a", "b", "c")] == [1, 2, 3]
    assert state(registry) == (3, 2)
    assert registry.at("challenger") is None
    assert leftovers(registry) == []


def test_a_version_tells_when_it_came_and_when_it_went(registry: Registry):
    promote("a")
    promote("b")
    version = registry.version(1)
    assert version is not None
    events = events_of(registry, version)
    assert [(event["champion"], event["instead_of"]) for event in events] == [(1, None), (2, 1)]
    assert events[0]["reason"] == "It is better."
    assert "promotion by" in version.tags[LAST_EVENT] and "version 2, instead of 1" in version.tags[LAST_EVENT]


def test_another_promotion_is_waited_for_and_is_never_taken_for_a_click(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    """Whoever opened the registry before reads it while the aliases move, and while a whole promotion comes between its
    two reads.
    """
    promote("a")
    promote("b")
    reached, may_go_on, align = Event(), Event(), aliases.align

    def wait_then_align(*given: Any) -> None:
        reached.set()
        assert may_go_on.wait(WAIT_SECONDS)
        align(*given)

    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr(aliases, "align", wait_then_align)
        promotion = threads.submit(promote, "c")
        assert reached.wait(WAIT_SECONDS)
        found = threads.submit(current_champion, registry)
        time.sleep(0.2)
        assert not found.done()
        may_go_on.set()
        assert promotion.result().version == getattr(found.result(), "version", None) == 3

    read, others = aliases.read_history, ["d"]

    def read_late(registry: Registry) -> Any:
        history = read(registry)
        if others:
            promote(others.pop())
        return history

    monkeypatch.setattr(aliases, "read_history", read_late)
    assert getattr(current_champion(registry), "version", None) == 4


def test_what_a_look_costs_does_not_grow_with_the_versions_and_all_pages_are_read(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "b", "c"):
        promote(name)
    search = registry.client.search_model_versions
    monkeypatch.setattr(registry.client, "search_model_versions", partial(search, max_results=2))
    assert registry.numbers() == [1, 2, 3]
    monkeypatch.delattr(registry.client, "search_model_versions")
    monkeypatch.setattr(registry.client, "search_model_versions", None)  # reads every version and all of its tags
    assert getattr(current_champion(registry), "version", None) == 3


def test_a_message_names_the_newest_of_many_versions(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c"):
        promote(name)
    assert what_there_is(registry) == f"{MODEL} has version 1, 2, 3 (champion is 3; previous is 2)."
    monkeypatch.setattr(model_uri, "MOST_LISTED", 2)
    assert what_there_is(registry) == f"{MODEL} has 3 versions, the newest 2, 3 (champion is 3; previous is 2)."


@pytest.mark.parametrize(
    ("kill_before", "left", "then"),
    [
        ("the transition", (1, None), (1, None)),
        ("the journal", (1, None), (1, None)),
        ("the entry", (1, None), (1, None)),
        ("its copy", (1, None), (2, 1)),
        ("the note", (1, None), (2, 1)),
        ("the alias previous", (1, None), (2, 1)),
        ("the alias champion", (1, 1), (2, 1)),
        ("the end", (2, 1), (2, 1)),
    ],
)
def test_a_promotion_killed_on_the_way_is_nothing_or_is_completed_by_whoever_comes_next(
    registry: Registry, kill_before: str, left: tuple[int, int | None], then: tuple[int, int | None]
):
    """`left` is what MLflow shows after kill -9, `then` what the next call of ours makes of it: never nobody."""
    promote("a")
    context = fork_server()
    told = context.SimpleQueue()
    arguments = (str(Path.cwd()), "b", SETTINGS, kill_before, None, None, told)
    process = context.Process(target=drill, args=arguments)
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert state(registry) == left
    assert state(open_registry(SETTINGS, MODEL)) == then
    assert TRANSITION not in registry.model_tags()
    assert promote("b").version == 2
    assert state(registry) == (2, 1)
    assert registry.numbers() == [1, 2]


def test_whoever_holds_the_registry_reads_record_and_aliases_at_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    promote("a")
    with lock_registry(registry):
        names, read = iter([MODEL]), registry.client.get_registered_model
        with monkeypatch.context() as patch:
            patch.setattr(registry.client, "get_registered_model", lambda name: read(next(names)))  # a second one fails
            assert aliases.read_settled(registry)[1] == {"champion": 1}


def test_of_two_promotions_at_once_one_wins_and_the_other_is_refused_in_one_line(registry: Registry, tmp_path: Path):
    promote("a")
    assert sorted(two_at_once(SETTINGS, tmp_path)) == [
        ("promoted", 2),
        (
            "refused",
            f"{MODEL}: version 2 is champion while this decision was made against version 1, so it says nothing about "
            f"today's champion. Nothing was moved; run `python -m tasks promote` again.",
        ),
    ]
    assert state(registry) == (2, 1)
    assert registry.numbers() == [1, 2]
    assert leftovers(registry) == []


def test_the_same_weights_promoted_again_after_another_are_the_old_version(registry: Registry):
    for name in ("a", "b", "a"):
        promote(name)
    assert state(registry) == (1, 2)
    assert registry.numbers() == [1, 2]


@pytest.mark.parametrize("marker", ["the aliases are being set", "", "{"])
def test_aliases_that_a_killed_call_left_behind_follow_the_journal(registry: Registry, marker: str):
    promote("a")
    promote("b")
    registry.client.set_registered_model_tag(MODEL, TRANSITION, marker)
    registry.client.set_registered_model_alias(MODEL, "champion", "1")
    assert state(open_registry(SETTINGS, MODEL)) == (2, 1)
    assert TRANSITION not in registry.model_tags()


def test_a_deleted_champion_is_no_first_promotion_whose_hurdles_are_lower(registry: Registry):
    promote("a")
    promote("b")
    registry.client.delete_model_version(MODEL, "2")
    with pytest.raises(ValueError, match=r"version 2 was deleted.*version 1.*tasks rollback.*registry adopt") as caught:
        current_champion(registry)
    assert "\n" not in str(caught.value)


def test_after_the_only_champion_was_deleted_a_person_says_that_the_next_is_a_first_one(registry: Registry):
    promote("a")
    registry.client.delete_model_version(MODEL, "1")
    with pytest.raises(ValueError, match=r"version 1 was deleted.*No champion before it is left.*registry adopt"):
        promote("b")
    adopt(reason="cleaned up")
    told = first_promotion_note(read_history(registry))
    assert told is not None and "version 1" in told and "cleaned up" in told and "first promotion" in told
    version = promote("a")
    assert version.version == 2
    assert [event["event"] for event in events_of(registry, version)] == ["promotion"]
    assert first_promotion_note(read_history(registry)) is None
    assert registry.missing_files(registry.version(2)) is None  # type: ignore[arg-type]


def test_files_that_vanished_from_the_store_are_uploaded_again_by_the_next_promotion_of_these_weights(
    registry: Registry,
):
    promote("a")
    promote("b")
    for file in Path("artifacts/mlflow").rglob("model.safetensors"):
        file.unlink()
    assert registry.missing_files(registry.version(1)) == "its weights are gone"  # type: ignore[arg-type]
    promote("a")
    assert state(registry) == (1, 2)
    assert registry.missing_files(registry.version(1)) is None  # type: ignore[arg-type]


def test_a_lock_of_a_dead_process_of_this_machine_is_taken_away_at_once(registry: Registry):
    registry.make_model()
    own = locks._signed(time.time())
    dead = {**own, "started": own["started"] - 60}  # the same number, another process
    registry.client.set_registered_model_tag(MODEL, f"{LOCK}dead", json.dumps(dead))
    with lock_registry(registry):
        assert len(leftovers(registry)) == 1
    assert leftovers(registry) == []


def test_a_clock_that_jumps_makes_no_living_promotion_a_dead_one(monkeypatch: pytest.MonkeyPatch):
    own = locks._signed(time.time())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)  # by the time of day, which was put right
    assert not locks._is_dead(own)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_an_hour_in_a_promotion_stops_neither_it_alone_nor_lets_two_write(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, jump: float
):
    registry.make_model()
    before = time.time
    with hold_lock(registry.client, MODEL) as lock:
        monkeypatch.setattr(time, "time", lambda: before() + jump)
        lock.check()
        with hold_lock(registry.client, MODEL) as second:  # it takes the first for dead, which then writes nothing
            second.check()
            with pytest.raises(ValueError, match="moves nothing more"):
                lock.check()
    assert leftovers(registry) == []
    assert promote("a").version == 1


@pytest.mark.parametrize(("age", "is_taken"), [(locks.STALE_SECONDS + 1, True), (locks.STALE_SECONDS - 60, False)])
def test_a_lock_of_another_machine_is_taken_away_when_it_is_old(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, age: float, is_taken: bool
):
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.1)
    registry.make_model()
    foreign = json.dumps({**FOREIGN, "at": time.time() - age})
    registry.client.set_registered_model_tag(MODEL, f"{LOCK}foreign", foreign)
    if is_taken:
        assert promote("a").version == 1
    else:
        with pytest.raises(ValueError, match=r"another promotion \(process 1 on elsewhere, begun .*counts as dead"):
            promote("a")
        assert registry.champion() is None
        assert leftovers(registry) == [f"{LOCK}foreign"]


def test_a_process_whose_lock_was_taken_away_writes_nothing_more(registry: Registry, monkeypatch):
    registry.make_model()
    with hold_lock(registry.client, MODEL) as lock:
        lock.check()
        with monkeypatch.context() as patch:
            patch.setattr(locks, "HOLD_SECONDS", -1.0)
            with pytest.raises(ValueError, match="moves nothing more"):
                lock.check()
        registry.client.delete_registered_model_tag(MODEL, lock.key)
        with pytest.raises(ValueError, match="moves nothing more"):
            lock.check()


def test_nothing_is_registered_without_the_lock(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    """Neither a version, nor lineage or tags of one that is there."""
    promote("a")
    promote("b")
    before, files = registry.version(1), sorted(Path("artifacts/mlflow/artifacts").rglob("lineage/*"))

    def check(lock: locks.RegistryLock) -> None:
        raise ValueError("moves nothing more")

    monkeypatch.setattr(locks.RegistryLock, "check", check)
    for name in ("a", "c"):
        with pytest.raises(ValueError, match="moves nothing more"):
            promote(name)
    assert registry.version(1) == before and registry.numbers() == [1, 2]
    assert sorted(Path("artifacts/mlflow/artifacts").rglob("lineage/*")) == files


def test_what_was_rolled_back_says_so_until_it_is_promoted_again(registry: Registry):
    from tasks.commands.rollback import rollback

    promote("a")
    promote("b")
    weights = candidate("b").weights
    assert rollback_note(read_history(registry), registry, weights) is None
    rollback(to=None, reason="it books twice")
    told = rollback_note(read_history(registry), registry, weights)
    assert told is not None and told.startswith("Version 2 has the same weights") and "it books twice" in told
    promote("b")
    assert rollback_note(read_history(registry), registry, weights) is None
