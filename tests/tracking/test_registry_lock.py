"""The line before the registry: one at a time, in the order they came, however many come and whoever dies in it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from tasks.tracking import registry_lock as locks
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import LOCK, RegistryLock, hold_lock
from tests.tracking.candidates import MODEL

ELSEWHERE = {"host": "elsewhere", "installation": "another", "boot": "b", "namespace": "n", "pid": 1, "started": 0.0}


class Tags:
    """What MLflow's client does with a registered model's tags, in memory."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}

    def get_registered_model(self, name: str) -> Any:
        return SimpleNamespace(tags=dict(self.tags))

    def set_registered_model_tag(self, name: str, key: str, value: str) -> None:
        self.tags[key] = value

    def delete_registered_model_tag(self, name: str, key: str) -> None:
        self.tags.pop(key, None)


class Clock:
    """Time passes where somebody sleeps; `on_sleep` is what happens meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep: Callable[[], None] = lambda: None
        self.start = time.time()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.start + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(locks, "time", clock)
    return clock


def other(clock: Clock, *, place: int, holds: bool, age: float = 0) -> str:
    return json.dumps({**ELSEWHERE, "at": clock.time() - age, "place": place, "holds": holds})


@pytest.mark.slow
def test_ten_at_once_all_get_through_in_the_order_they_came(registry: Registry):
    registry.make_model()
    order: list[int] = []
    inside: list[int] = []

    def promote(number: int) -> None:
        with hold_lock(registry.client, MODEL) as lock:
            inside.append(number)
            lock.check()
            order.append(number)
            assert inside == [number]
            inside.clear()

    with hold_lock(registry.client, MODEL):
        threads = [threading.Thread(target=promote, args=(number,)) for number in range(10)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda number=number: num_locks(registry) == number + 2)
    for thread in threads:
        thread.join(300)
    assert order == list(range(10))
    assert num_locks(registry) == 0


def wait_for(happened: Any) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_locks(registry: Registry) -> int:
    return sum(key.startswith(LOCK) for key in registry.model_tags())


@pytest.mark.slow
def test_patience_is_for_a_line_that_does_not_move(clock: Clock):
    """Ten before it hold the registry 50 s each: longer than anybody waits for one, and everybody has a turn."""
    client = Tags()
    line = [f"{LOCK}{number}" for number in range(10)]
    for place, key in enumerate(line):
        client.tags[key] = other(clock, place=place + 1, holds=place == 0)

    def move_on() -> None:
        while line and clock.now > 50 * (11 - len(line)):
            del client.tags[line.pop(0)]
        for place, key in enumerate(line):
            client.tags[key] = other(clock, place=place + 1, holds=place == 0)

    clock.on_sleep = move_on
    with hold_lock(client, MODEL) as lock:
        lock.check()
        assert 500 < clock.now < 520
    assert client.tags == {}


@pytest.mark.slow
def test_a_line_that_does_not_move_is_told_with_who_is_first_and_how_many_wait(clock: Clock):
    client = Tags()

    def refresh() -> None:
        client.tags[f"{LOCK}a"] = other(clock, place=1, holds=True)
        client.tags[f"{LOCK}b"] = other(clock, place=2, holds=False)

    refresh()
    clock.on_sleep = refresh
    with (
        pytest.raises(ValueError, match=r"process 1 on elsewhere.*1 more wait before this one.*counts as dead"),
        hold_lock(client, MODEL),
    ):
        pass
    assert locks.WAIT_SECONDS < clock.now < locks.WAIT_SECONDS + 5
    assert sorted(client.tags) == [f"{LOCK}a", f"{LOCK}b"]


def test_one_that_was_killed_in_the_line_on_another_machine_is_passed_over(clock: Clock):
    client = Tags()
    client.tags[f"{LOCK}a"] = other(clock, place=1, holds=False)
    with hold_lock(client, MODEL):
        assert locks.SILENT_SECONDS <= clock.now < locks.SILENT_SECONDS + 5


def test_one_that_held_and_fell_silent_is_not_passed_over_before_it_counts_as_dead(clock: Clock):
    client = Tags()
    client.tags[f"{LOCK}a"] = other(clock, place=1, holds=True)
    with pytest.raises(ValueError, match="has locked the registry"), hold_lock(client, MODEL):
        pass
    clock.now += locks.STALE_SECONDS
    with hold_lock(client, MODEL):
        assert f"{LOCK}a" not in client.tags


def test_of_two_that_say_at_once_that_they_hold_it_neither_does_before_one_takes_it_back(clock: Clock):
    """The other wrote at the same moment: this one waits, and holds it only once the other has gone."""
    client, seen = Tags(), []

    def other_goes() -> None:
        seen.append([json.loads(text)["holds"] for key, text in client.tags.items() if key != f"{LOCK}0"])
        if len(seen) == 3:
            del client.tags[f"{LOCK}0"]

    write = RegistryLock.write

    def at_once(lock: RegistryLock, *, holds: bool) -> None:
        write(lock, holds=holds)
        if not seen:
            client.tags.setdefault(f"{LOCK}0", other(clock, place=1, holds=True))

    clock.on_sleep = other_goes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegistryLock, "write", at_once)
        with hold_lock(client, MODEL) as lock:
            lock.check()
    assert seen == [[False], [False], [False]]


EDITED = ["", "{", "[]", "3", "null", "{}", '{"at": "x"}', '{"at": NaN}', '{"at": 1e300}', '{"at": 1e999, "place": 1}']


@pytest.mark.parametrize("text", EDITED)
def test_a_lock_that_somebody_edited_or_made_up_is_taken_away(clock: Clock, text: str):
    client = Tags()
    client.tags[f"{LOCK}a"] = text
    with hold_lock(client, MODEL) as lock:
        lock.check()
        assert [key for key in client.tags if key.startswith(LOCK)] == [lock.key]
        assert clock.now == 0


def test_whoever_holds_a_lock_that_was_edited_or_deleted_writes_nothing_more(clock: Clock):
    for damage in ("{}", None):
        client = Tags()
        with hold_lock(client, MODEL) as lock:
            lock.check()
            client.tags = {} if damage is None else {lock.key: damage}
            with pytest.raises(ValueError, match="moves nothing more"):
                lock.check()


def test_a_lock_that_could_not_be_deleted_delays_nobody(monkeypatch: pytest.MonkeyPatch):
    """As where the database is busy just then: its own process ignores it at once, and deletes it soon."""
    monkeypatch.setattr(locks, "RELEASE_SECONDS", 0.01)
    client, is_busy = Tags(), threading.Event()
    delete = client.delete_registered_model_tag

    def delete_unless_busy(name: str, key: str) -> None:
        if is_busy.is_set():
            raise MlflowException("database is locked")
        delete(name, key)

    monkeypatch.setattr(client, "delete_registered_model_tag", delete_unless_busy)
    with hold_lock(client, MODEL):
        is_busy.set()
    (left,) = client.tags
    other = Tags()  # whose deletions succeed, on the same tags
    other.tags = client.tags
    with hold_lock(other, MODEL) as lock:
        lock.check()
        assert list(client.tags) == [lock.key]
    client.tags[left] = "{}"
    is_busy.clear()
    deadline = time.monotonic() + 10
    while client.tags and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.tags == {}


def test_one_that_waits_and_was_taken_for_dead_stands_in_the_line_again(clock: Clock):
    client = Tags()
    client.tags[f"{LOCK}a"] = other(clock, place=1, holds=True)
    steps = iter(range(100))

    def happen() -> None:
        step = next(steps)
        if step == 2:
            client.tags = {f"{LOCK}a": client.tags[f"{LOCK}a"]}
        if step == 5:
            assert len(client.tags) == 2
            del client.tags[f"{LOCK}a"]

    clock.on_sleep = happen
    with hold_lock(client, MODEL) as lock:
        lock.check()
