"""The journal: every entry once, whatever a kill cut short, and two tags of which one may be lost."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from tasks.commands.registry import adopt, show
from tasks.commands.rollback import rollback
from tasks.core.passing_faults import PassingFault
from tasks.tracking.aliases import lock_registry
from tasks.tracking.history import read_history
from tasks.tracking.journal import (
    OWNER,
    POINTER,
    LostJournal,
    append,
    append_all,
    begin_again,
    mend,
    new_entry,
    read_journal,
)
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import hold_lock
from tests.tracking.candidates import MODEL, promote
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow

WRITES = ("create_run", "set_terminated", "log_text", "set_tag", "set_registered_model_tag")


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def add(registry: Registry, *numbers: int) -> None:
    registry.make_model()
    with lock_registry(registry) as lock:
        for number in numbers:
            append(registry, lock, "decision", {"number": number}, id=str(number))


def numbers(registry: Registry) -> list[int]:
    return [entry.body["number"] for entry in read_journal(registry).entries]


def journal_runs(registry: Registry) -> list[Any]:
    return list(registry.client.search_runs([registry.experiment_id], f"tags.`{OWNER}` = '{MODEL}'"))


def tag_of_model(registry: Registry) -> Any:
    return json.loads(registry.model_tags()[POINTER])


def test_what_is_appended_is_read_back_in_order_with_who_and_when(registry: Registry):
    assert read_journal(registry).entries == []
    registry.make_model()
    with lock_registry(registry) as lock:
        first = append(registry, lock, "promotion", {"champion": 1, "reason": "ä\u2028b", "by": ("x",)})
        append(registry, lock, "hold", {"reason": "incident"})
    journal = read_journal(registry)
    assert journal.entries[0] == first
    assert [entry.kind for entry in journal.entries] == ["promotion", "hold"]
    assert journal.of("promotion")[0].body == {"champion": 1, "reason": "ä\u2028b", "by": ["x"]}
    assert "@" in first.by and first.at.endswith("Z")
    assert journal.faults == []


def test_an_entry_of_the_same_id_is_appended_once(registry: Registry):
    add(registry, 1, 2, 1)
    add(registry, 2)
    assert numbers(registry) == [1, 2]


def test_whoever_holds_the_registry_reads_it_once_and_anybody_else_each_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    add(registry, 1)
    other, reads = Registry(registry.settings, MODEL), Counter[str]()
    for name, of in (("holder", registry), ("other", other)):
        read = of.model_tags
        monkeypatch.setattr(of, "model_tags", lambda read=read, name=name: [reads.update([name]), read()][1])
    with lock_registry(registry) as lock:
        for number in (2, 3):
            append(registry, lock, "decision", {"number": number}, id=str(number))
            assert numbers(registry) == numbers(other) == [1, 2, 3][:number]
    assert reads == {"holder": 1, "other": 2}
    add(other, 4)
    assert numbers(registry) == [1, 2, 3, 4]
    assert reads["holder"] == 2


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_an_append_killed_before_any_of_its_writes_is_nothing_or_whole_and_the_next_one_completes_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, num_before: int
):
    add(registry, *range(num_before))
    before, num_kills = list(range(num_before)), 0
    while True:
        with lock_registry(registry) as lock, monkeypatch.context() as patch:
            calls = iter(range(100))

            def until_killed(method: Any, calls: Any = calls, last: int = num_kills) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    if next(calls) == last:
                        raise Killed
                    return method(*args, **kwargs)

                return call

            for name in WRITES:
                patch.setattr(registry.client, name, until_killed(getattr(registry.client, name)))
            try:
                append(registry, lock, "decision", {"number": 100 + num_kills}, id=f"kill {num_kills}")
                break
            except Killed:
                pass
        after = numbers(registry)
        assert after in (before, [*before, 100 + num_kills])
        before, num_kills = after, num_kills + 1
    assert num_kills >= 3  # the file and both tags
    assert numbers(registry) == [*before, 100 + num_kills]
    assert len(journal_runs(registry)) == 1
    assert json.loads(journal_runs(registry)[0].data.tags[POINTER]) == tag_of_model(registry)


@pytest.mark.parametrize("damage", [None, "", "{", "[1]", '{"run": "x"}', "null", "12"])
@pytest.mark.parametrize("whose", ["model", "run"])
def test_a_tag_that_somebody_deleted_or_edited_is_put_right_from_the_other(
    registry: Registry, damage: str | None, whose: str
):
    add(registry, 1, 2)
    run, client = journal_runs(registry)[0].info.run_id, registry.client
    if whose == "model":
        client.delete_registered_model_tag(MODEL, POINTER)
        if damage is not None:
            client.set_registered_model_tag(MODEL, POINTER, damage)
    else:
        client.delete_tag(run, POINTER)
        if damage is not None:
            client.set_tag(run, POINTER, damage)
    assert numbers(registry) == [1, 2]
    with lock_registry(registry) as lock:
        mend(registry, lock)
        assert mend(registry, lock) == []
    assert tag_of_model(registry)["run"] == run
    add(registry, 3)
    assert numbers(registry) == [1, 2, 3]
    assert len(journal_runs(registry)) == 1


def test_a_run_deleted_in_mlflows_page_is_read_and_comes_back_with_the_next_entry(registry: Registry):
    add(registry, 1)
    registry.client.delete_run(journal_runs(registry)[0].info.run_id)
    assert numbers(registry) == [1]
    add(registry, 2)
    assert numbers(registry) == [1, 2]
    assert len(journal_runs(registry)) == 1


def test_an_altered_or_lost_file_is_one_line_with_the_way_on_and_a_new_journal_may_begin(registry: Registry):
    add(registry, 1)
    (file,) = Path("artifacts/mlflow/artifacts").rglob("journal-*.jsonl")
    content = file.read_bytes()
    for damage in (content.replace(b"1", b"2"), b"", None):
        file.write_bytes(damage) if damage is not None else file.unlink()
        with pytest.raises(ValueError, match=r"journal .*altered.*registry adopt") as caught:
            read_journal(Registry(SETTINGS, MODEL))
        assert "\n" not in str(caught.value)
    registry.journal = None
    with hold_lock(registry.client, MODEL) as lock:
        begin_again(registry, lock, [])
    assert numbers(registry) == []
    add(registry, 5)
    assert numbers(registry) == [5]


def journal_file(registry: Registry) -> Path:
    """The file in use."""
    (file,) = Path("artifacts/mlflow/artifacts").rglob(tag_of_model(registry)["file"])
    return file


def test_a_file_cut_short_is_told_and_a_person_goes_on_from_the_one_before(registry: Registry):
    promote("a")
    defective = promote("b")
    rollback(reason="b books twice", defect=True)
    promote("c")  # 4 entries: only the last one is not in the file before
    journal_file(registry).write_bytes(b"")
    for verb in (lambda: read_journal(Registry(SETTINGS, MODEL)), lambda: list(show())):
        with pytest.raises(ValueError, match=r"after its first 3 entries.*registry adopt"):
            verb()
    assert "first 3 entries of the earlier journal count on; the last 1 could not" in adopt(reason="a power cut")
    history = read_history(Registry(SETTINGS, MODEL))
    assert (history.champion, history.before, list(history.defects)) == (3, [1], [defective.version])
    assert read_journal(Registry(SETTINGS, MODEL)).entries[-1].body["lost_entries"] == 1


def test_of_a_database_that_is_an_older_copy_the_entries_it_names_are_verified_in_a_later_file(registry: Registry):
    add(registry, 1, 2)
    older = registry.model_tags()[POINTER]
    add(registry, 3)
    add(registry, 4)  # writes over the file of the older copy
    registry.client.set_tag(tag_of_model(registry)["run"], POINTER, older)
    registry.client.set_registered_model_tag(MODEL, POINTER, older)
    with pytest.raises(LostJournal, match="after its first 2 entries") as caught:
        read_journal(Registry(SETTINGS, MODEL))
    assert [entry.body["number"] for entry in caught.value.entries] == [1, 2]
    assert caught.value.num_lost == 0


def test_a_pointer_without_the_hash_of_the_file_before_is_read_and_nothing_unverified_is_offered(registry: Registry):
    add(registry, 1)
    add(registry, 2)
    old = json.dumps({name: value for name, value in tag_of_model(registry).items() if name != "sha256_before"})
    registry.client.set_tag(tag_of_model(registry)["run"], POINTER, old)
    registry.client.set_registered_model_tag(MODEL, POINTER, old)
    assert numbers(Registry(SETTINGS, MODEL)) == [1, 2]
    journal_file(registry).write_bytes(b"")
    with pytest.raises(LostJournal) as caught:
        read_journal(Registry(SETTINGS, MODEL))
    assert caught.value.entries == []


def test_the_file_is_on_the_disk_before_a_tag_names_it(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []

    def noting(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            steps.append(step)
            return call(*args)

        return noted

    monkeypatch.setattr(os, "fsync", noting("sync", os.fsync))
    monkeypatch.setattr(registry.client, "set_tag", noting("tag", registry.client.set_tag))
    add(registry, 1)
    assert steps[-3:] == ["sync", "sync", "tag"]  # the file and its folder


def test_a_store_that_fails_for_a_moment_has_lost_no_journal(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    add(registry, 1)

    def fail(**kwargs: Any) -> str:
        raise MlflowException("API request failed with error code 503")

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.artifacts.download_artifacts", fail)
        with pytest.raises(PassingFault, match="internal error"):
            adopt(reason="x")
    assert numbers(registry) == [1]


def test_a_killed_write_of_two_entries_is_no_edited_tag(registry: Registry):
    add(registry, 1)
    before = registry.model_tags()[POINTER]
    with lock_registry(registry) as lock:
        append_all(registry, lock, [new_entry("decision", {"number": number}) for number in (2, 3)])
        registry.client.set_registered_model_tag(MODEL, POINTER, before)
    registry.journal = None
    assert numbers(registry) == [1, 2, 3] and read_journal(registry).faults == []


def test_a_journal_outlives_the_registered_model(registry: Registry):
    add(registry, 1)
    registry.client.delete_registered_model(MODEL)
    assert numbers(registry) == [1]
