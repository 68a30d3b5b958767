"""Every click one can make in MLflow's pages on versions, aliases, tags and the journal's run, and what our verbs do.

After each, `promote`, `rollback`, `lineage` and `fetch` do what the journal says or refuse in one line; none ends in a
traceback, takes a challenger for a first champion, or takes another model for the champion. What is refused names a way
on, and each way that is named leads on.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.fetch import fetch
from tasks.commands.lineage import lineage, print_lineage
from tasks.commands.registry import adopt, release, restore, show
from tasks.commands.rollback import rollback
from tasks.core.console import SafeConsole
from tasks.tracking.aliases import LAST_EVENT, TRANSITION
from tasks.tracking.journal import POINTER, newest_run, read_journal
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import LOCK
from tasks.tracking.versions import FILES_TAG
from tests.tracking.candidates import MODEL, promote, wait, write_project
from tests.tracking.conftest import forget_journals
from tests.tracking.project import DATABASE, SETTINGS, backup

pytestmark = pytest.mark.slow
CHAMPION = f"models:/{MODEL}@champion"
OTHER_TAGS = ["files_hash", "files_bytes", "environment_fields", "environment_drift", "git_commit", "seed", "snapshot"]
Click = Callable[[Any], Any]  # with MLflow's client


def set_tag(number: int, tag: str, text: str | None) -> Click:
    if text is None:
        return lambda client: client.delete_model_version_tag(MODEL, str(number), tag)
    return lambda client: client.set_model_version_tag(MODEL, str(number), tag, text)


def set_tags(number: int, tags: list[str], text: str | None) -> Click:
    return lambda client: [set_tag(number, tag, text)(client) for tag in tags]


def set_model_tag(tag: str, text: str | None) -> Click:
    if text is None:
        return lambda client: client.delete_registered_model_tag(MODEL, tag)
    return lambda client: client.set_registered_model_tag(MODEL, tag, text)


def set_alias(alias: str, number: int | None) -> Click:
    if number is None:
        return lambda client: client.delete_registered_model_alias(MODEL, alias)
    return lambda client: client.set_registered_model_alias(MODEL, alias, str(number))


def delete(*numbers: int) -> Click:
    return lambda client: [client.delete_model_version(MODEL, str(number)) for number in numbers]


def on_journal(click: Callable[[Any, str], Any]) -> Click:
    return lambda client: click(client, newest_run(Registry(SETTINGS, MODEL)).info.run_id)


def rewrite_journal(client: Any) -> None:
    for file in Path("artifacts/mlflow/artifacts").rglob("journal-*.jsonl"):
        file.write_bytes(file.read_bytes().replace(b'"champion": 2', b'"champion": 1'))


def both(*clicks: Click) -> Click:
    return lambda client: [click(client) for click in clicks]


# The champion is version 2, before it 1 was, and 3 waits for approval. Clicks on unlike things are made together.
HARMLESS: dict[str, Click] = {
    "descriptions, tags and an alias of their own": lambda client: [
        client.update_model_version(MODEL, "2", "better"),
        client.update_registered_model(MODEL, "ours"),
        set_tag(2, "owner", "me")(client),
        set_model_tag("owner", "me")(client),
        set_alias("staging", 1)(client),
        set_tag(2, LAST_EVENT, "x")(client),
        set_tag(1, LAST_EVENT, None)(client),
    ],
    "a lock and a transition made up": both(set_model_tag(f"{LOCK}mine", "x"), set_model_tag(TRANSITION, "{")),
    "the journal's tag deleted, its run renamed": both(
        set_model_tag(POINTER, None), on_journal(lambda client, run: client.update_run(run, name="x"))
    ),
    "the journal's tag edited": set_model_tag(POINTER, "x"),
    "the journal's run deleted": on_journal(lambda client, run: client.delete_run(run)),
    "a tag of the journal's run deleted": on_journal(lambda client, run: client.delete_tag(run, POINTER)),
    "a tag of the journal's run edited": on_journal(lambda client, run: client.set_tag(run, POINTER, "{}")),
    "previous and challenger removed": both(set_alias("previous", None), set_alias("challenger", None)),
    "previous and challenger moved": both(set_alias("previous", 3), set_alias("challenger", 1)),
    "the version before deleted": delete(1),
    "the challenger deleted": delete(3),
    **{
        f"version {number}: its tags {'deleted' if text is None else f'are {text!r}'}": set_tags(
            number, [FILES_TAG, *OTHER_TAGS], text
        )
        for number in (1, 2)
        for text in (None, "x", "[1]")
    },
    "version 1: weights_hash deleted": set_tag(1, "weights_hash", None),
    "version 1: weights_hash edited": set_tag(1, "weights_hash", "x"),
}
TOLD: dict[str, Click] = {
    "champion removed": set_alias("champion", None),
    "champion moved back": set_alias("champion", 1),
    "champion moved to the challenger": set_alias("champion", 3),
    "weights_hash deleted": set_tag(2, "weights_hash", None),
    "weights_hash edited": set_tag(2, "weights_hash", "x"),
    "the champion deleted": delete(2),
    "the champion and the one before deleted": delete(1, 2),
    "every version deleted": delete(1, 2, 3),
    "the model deleted": lambda client: client.delete_registered_model(MODEL),
    "the model deleted and made anew": lambda client: [
        client.delete_registered_model(MODEL),
        client.create_registered_model(MODEL),
    ],
    "the model renamed": lambda client: client.rename_registered_model(MODEL, f"{MODEL}-2"),
    "the journal's file altered": rewrite_journal,
    "both tags of the journal deleted": lambda client: [
        on_journal(lambda client, run: client.set_tag(run, POINTER, "x"))(client),
        client.set_registered_model_tag(MODEL, POINTER, "x"),
    ],
}


@pytest.fixture(scope="module")
def promoted(shared_folder: Path) -> Iterator[Path]:
    """A registry with a champion, one before it and a challenger; a copy of its database and files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shared_folder)
        write_project()
        promote("a")
        promote("b")
        registry = Registry(SETTINGS, MODEL)
        wait("c", registry)
        copy = shared_folder / "copy"
        shutil.copytree("artifacts/mlflow/artifacts", copy / "artifacts")
        backup(DATABASE, copy / "mlflow.db")
        yield copy
        undo(copy)
        registry.client.delete_registered_model(MODEL)
        forget_journals(registry)


def undo(copy: Path) -> None:
    backup(copy / "mlflow.db", DATABASE)
    shutil.rmtree("artifacts/mlflow/artifacts")
    shutil.copytree(copy / "artifacts", "artifacts/mlflow/artifacts")


@pytest.fixture
def clicking(promoted: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Click], None]:
    """The registry as it was promoted, with one click made."""
    monkeypatch.chdir(promoted.parent)
    write_project()

    def make(click: Click) -> None:
        undo(promoted)
        click(Registry(SETTINGS, MODEL).client)

    return make


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives; of a refusal its message, which is one line. Anything else it raises fails the test."""
    try:
        return call()
    except ValueError as error:
        message = str(error)
        assert "\n" not in message and "Traceback" not in message
        return message


def last_promotion() -> dict[str, Any]:
    return read_journal(Registry(SETTINGS, MODEL)).of("promotion")[-1].body


def check_readers(tmp_path: Path) -> None:
    row = outcome(lambda: lineage(CHAMPION))
    assert isinstance(row, str) or row["version"] == 2
    waiting = outcome(lambda: lineage(f"models:/{MODEL}/3"))
    for shown in (row, waiting):
        if not isinstance(shown, str):
            print_lineage(shown, SafeConsole(file=io.StringIO()))
    outcome(lambda: fetch(CHAMPION, tmp_path / "fetched"))
    if (tmp_path / "fetched").exists():
        assert (tmp_path / "fetched" / "model.safetensors").read_bytes() == b"b"
    outcome(lambda: list(show()))


def check_rollback() -> str:
    told = outcome(lambda: rollback(reason="x"))
    champion = Registry(SETTINGS, MODEL).champion()
    if f"{MODEL} version 1 is champion;" in told:
        assert champion is not None and champion.version == 1
    return str(told)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_click_that_leaves_the_champion_changes_nobodys_verdict(
    name: str, clicking: Callable[[Click], None], tmp_path: Path
):
    clicking(HARMLESS[name])
    check_readers(tmp_path)
    told = check_rollback()
    assert "is champion;" in told or "version 1" in name or name == "the version before deleted", told
    clicking(HARMLESS[name])
    assert promote("d").version == 4
    assert last_promotion()["instead_of"] == 2
    registry = Registry(SETTINGS, MODEL)
    assert (registry.all_aliases() or {})["champion"] == 4


@pytest.mark.parametrize("name", TOLD)
def test_a_click_that_takes_the_champion_away_is_told_and_each_way_named_leads_on(
    name: str, clicking: Callable[[Click], None], tmp_path: Path
):
    clicking(TOLD[name])
    check_readers(tmp_path)
    told = outcome(lambda: promote("d"))
    assert isinstance(told, str), told
    rolled_back = check_rollback()
    ways = {"restore": "registry restore" in told, "adopt": "registry adopt" in told, "rollback": "rollback" in told}
    assert any(ways.values()), told
    if ways["rollback"]:
        assert "version 1 is champion" in rolled_back
    if ways["restore"]:
        clicking(TOLD[name])
        assert "Put back" in restore()
        assert (Registry(SETTINGS, MODEL).all_aliases() or {}) == {"champion": 2, "previous": 1, "challenger": 3}
        assert promote("d").version == 4
        assert last_promotion()["instead_of"] == 2
    if ways["adopt"]:
        clicking(TOLD[name])
        adopt(reason="as it is")
        entry = read_journal(Registry(SETTINGS, MODEL)).of("adoption")[-1]
        assert entry.body["reason"] == "as it is" and "@" in entry.by
        check_readers_after_adoption(entry.body["champion"])
        assert not any(line.startswith("differs") for line in show())
        assert "nothing to adopt" in outcome(lambda: adopt(reason="x"))
        promote("d")
        assert last_promotion()["instead_of"] == entry.body["champion"]


def check_readers_after_adoption(champion: int | None) -> None:
    row = outcome(lambda: lineage(CHAMPION))
    assert isinstance(row, str) if champion is None else row["version"] == champion


def test_a_version_made_by_hand_is_not_offered_for_adoption_which_would_refuse_it(clicking: Callable[[Click], None]):
    def click(client: Any) -> None:
        made = client.create_model_version(MODEL, client.get_model_version(MODEL, "1").source)
        client.set_registered_model_alias(MODEL, "champion", made.version)

    clicking(click)
    told = outcome(lambda: promote("d"))
    assert "registry restore" in told and "registry adopt" not in told
    with pytest.raises(ValueError, match="no tag weights_hash"):
        adopt(reason="x")


def test_a_renamed_model_can_be_given_its_name_back_whatever_was_run_meanwhile(clicking: Callable[[Click], None]):
    clicking(TOLD["the model renamed"])
    for verb in (restore, lambda: release(reason="x"), lambda: rollback(reason="x"), lambda: promote("d")):
        assert "give it its name back" in outcome(verb)
    registry = Registry(SETTINGS, MODEL)
    assert registry.all_aliases() is None
    registry.client.rename_registered_model(f"{MODEL}-2", MODEL)
    assert promote("d").version == 4


def test_nothing_is_adopted_or_restored_where_all_is_as_recorded(clicking: Callable[[Click], None]):
    clicking(lambda client: None)
    with pytest.raises(ValueError, match="nothing to adopt"):
        adopt(reason="x")
    assert "nothing was changed" in restore()
    assert [entry.kind for entry in read_journal(Registry(SETTINGS, MODEL)).entries] == [
        "promotion",
        "promotion",
        "waiting",
    ]
    assert not any(line.startswith("differs") for line in show())


def test_a_champion_made_by_a_click_before_the_first_promotion_is_not_taken_at_its_word(
    clicking: Callable[[Click], None],
):
    """A version that waits for the very first approval, and somebody gives it the alias."""

    def click(client: Any) -> None:
        client.delete_registered_model(MODEL)
        forget_journals(Registry(SETTINGS, MODEL))
        wait("c", Registry(SETTINGS, MODEL))
        client.set_registered_model_alias(MODEL, "champion", "1")

    clicking(click)
    assert "registry adopt" in outcome(lambda: promote("d"))
    assert "registry adopt" in outcome(lambda: lineage(CHAMPION))
    restore()
    assert promote("d").version == 2
    assert last_promotion()["instead_of"] is None


def test_restoring_puts_back_the_tags_that_verify_a_version(clicking: Callable[[Click], None]):
    registry = Registry(SETTINGS, MODEL)
    clicking(lambda client: None)
    before = registry.version(1)
    assert before is not None
    for tag, text in ((FILES_TAG, "{"), ("files_bytes", "many"), ("files_hash", None), ("weights_hash", "x")):
        set_tag(1, tag, text)(registry.client)
    assert "Put it back: python -m tasks registry restore" in outcome(lambda: lineage(f"models:/{MODEL}/1"))
    assert "weights_hash" in restore()
    after = registry.version(1)
    assert after is not None and after.tags == before.tags
    assert json.loads(after.tags[FILES_TAG])
