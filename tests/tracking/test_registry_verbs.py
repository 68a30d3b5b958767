"""`rollback`, `lineage` and `fetch`: what they do, what they refuse, and a registry from before lineage was kept."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.fetch import fetch
from tasks.commands.lineage import as_json, lineage, print_lineage
from tasks.commands.registry import adopt, release, restore, show
from tasks.commands.rollback import rollback
from tasks.core.console import SafeConsole
from tasks.tracking import journal
from tasks.tracking.aliases import lock_registry, record
from tasks.tracking.history import events_of, read_history, rollback_note
from tasks.tracking.journal import new_entry
from tasks.tracking.model_uri import find_version
from tasks.tracking.registry import Registry
from tasks.tracking.versions import LINEAGE_FILES, TRAJECTORIES_FILE
from tests.tracking.candidates import MODEL, candidate, promote, state, wait
from tests.tracking.project import DATABASE

pytestmark = pytest.mark.slow
CHAMPION = f"models:/{MODEL}@champion"


def stored(name: str) -> list[Path]:
    return sorted(Path("artifacts/mlflow/artifacts").rglob(name))


def test_rollback_goes_back_along_the_champions_and_never_to_one_it_rolled_back(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    assert rollback(reason="it books twice") == (
        f"{MODEL} version 2 is champion; version 3 is rolled back, and previous is version 1."
    )
    assert state(registry) == (2, 1)
    assert rollback(reason="this too").endswith("no earlier champion is left.")
    assert state(registry) == (1, None)
    told = r'no champion before this one.*were rolled back.*champions: version 2, 3\..*rollback --to 3 --reason "…"'
    with pytest.raises(ValueError, match=told):
        rollback(reason="and again")
    rollback(to=3, reason="it was the network")
    assert state(registry) == (3, 1)
    assert f"{MODEL} version 1 is champion; version 3 is rolled back" in rollback(reason="it was not")


def test_rollback_goes_back_as_far_as_asked_and_what_it_went_over_is_not_promoted_again(registry: Registry):
    for name in ("a", "b", "c", "d"):
        promote(name)
    registry.client.delete_model_version(MODEL, "3")
    with pytest.raises(ValueError, match="only 2 champions are before this one"):
        rollback(back=3, reason="x")
    rollback(back=2, reason="both book twice")
    assert state(registry) == (1, None)
    for name in ("b", "d"):
        assert "both book twice" in str(rollback_note(read_history(registry), registry, candidate(name).weights))


@pytest.mark.parametrize(("tag", "is_done"), [("note", True), ("weights_hash", False)])
def test_a_note_written_while_files_are_verified_is_no_other_version(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tag: str, is_done: bool
):
    for name in ("a", "b"):
        promote(name)
    monkeypatch.setattr(
        Registry, "verify", lambda self, version: registry.client.set_model_version_tag(MODEL, "1", tag, "x")
    )
    if is_done:
        assert "version 1 is champion" in rollback(reason="it books twice")
    else:
        with pytest.raises(ValueError, match=r"weights_hash.*edited"):
            rollback(reason="it books twice")


def test_a_challenger_that_was_decided_against_what_is_rolled_back_waits_no_more(registry: Registry):
    for name in ("a", "b"):
        promote(name)
    waiting = wait("c", registry)
    rollback(reason="it books twice")
    assert state(registry) == (1, None) and registry.at("challenger") is None
    told = [event for event in events_of(registry, waiting) if event["event"] == "withdrawal"]
    assert "decided against version 2, and now version 1 is champion" in told[0]["reason"]


def test_what_was_rolled_back_for_a_defect_never_returns_by_a_rollback(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    rollback(reason="leaks names", defect=True)
    promote("d")
    with pytest.raises(ValueError, match=r"version 3 was rolled back for a defect .*leaks names.*promote --force"):
        rollback(to=3, reason="it was fast")
    rollback(reason="worse")
    assert state(registry) == (2, 1)
    registry.client.set_registered_model_alias(MODEL, "champion", "3")
    with pytest.raises(ValueError, match=r"version 3 was rolled back for a defect .*leaks names.*registry restore"):
        adopt(reason="as it is")
    restore()
    promote("c")  # by a person's order
    promote("e")
    rollback(reason="worse")
    assert state(registry) == (3, 2)


def test_promotions_are_held_until_somebody_releases_them(registry: Registry):
    promote("a")
    promote("b")
    assert "registry release" in rollback(reason="an incident", hold=True)
    with pytest.raises(ValueError, match=r"held since .*an incident.*registry release"):
        promote("c")
    assert state(registry) == (1, None)
    assert registry.numbers() == [1, 2]
    assert "held: since" in "\n".join(show())
    assert "possible again" in release(reason="found it")
    with pytest.raises(ValueError, match="not held"):
        release(reason="again")
    promote("c")
    assert state(registry) == (3, 1)


@pytest.mark.parametrize("verb", [lambda: release(reason="x"), restore], ids=["release", "restore"])
def test_no_verb_makes_a_model_of_a_name_that_is_not_there(registry: Registry, verb: Callable[[], str]):
    with pytest.raises(ValueError, match=rf"{MODEL}: there is no registered model of this name.*promote\.model_name"):
        verb()
    assert registry.all_aliases() is None


def test_of_two_rollbacks_at_once_one_wins(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c"):
        promote(name)
    verify = Registry.verify

    def meanwhile(self: Registry, version: Any) -> None:
        monkeypatch.setattr(Registry, "verify", verify)
        rollback(reason="the other was quicker")
        verify(self, version)

    monkeypatch.setattr(Registry, "verify", meanwhile)
    with pytest.raises(ValueError, match=r"another version became champion.*tasks rollback"):
        rollback(reason="mine")
    assert state(registry) == (2, 1)


@pytest.mark.parametrize("reason", ["", "  ", "x" * 1001, "\x1b[2J"])
def test_a_rollback_without_a_reason_is_refused(registry: Registry, reason: str):
    promote("a")
    with pytest.raises(ValueError, match="rollback needs a reason"):
        rollback(reason=reason)


def test_a_rollback_is_written_down_with_both_versions(registry: Registry):
    promote("a")
    promote("b")
    rollback(reason="it books twice")
    for number in (1, 2):
        version = registry.version(number)
        assert version is not None
        event = events_of(registry, version)[-1]
        assert (event["event"], event["champion"], event["instead_of"]) == ("rollback", 1, 2)
        assert event["reason"] == "it books twice"
        assert "@" in event["by"] and event["at"].endswith("Z")


def test_rollback_goes_to_any_version_that_was_champion(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    rollback(to=1, reason="x")
    assert state(registry) == (1, None)


def test_what_cannot_be_champion_again_is_refused_in_one_line_and_nothing_moves(registry: Registry):
    with pytest.raises(ValueError, match=r"nothing to roll back to: .* has no version"):
        rollback(reason="x")
    promote("a")
    with pytest.raises(ValueError, match=r"no champion before this one.*has version 1 \(champion is 1\)"):
        rollback(reason="x")
    promote("b")
    with pytest.raises(ValueError, match="version 2 is champion already"):
        rollback(to=2, reason="x")
    with pytest.raises(ValueError, match=r"there is no version 9\. Past champions: version 1\. .*rollback --to 1"):
        rollback(to=9, reason="x")
    wait("c", registry)
    with pytest.raises(ValueError, match="version 3 was never champion"):
        rollback(to=3, reason="x")
    for file in stored("model.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="version 1 cannot become champion: its weights are gone") as caught:
        rollback(reason="x")
    assert "\n" not in str(caught.value)
    assert state(registry) == (2, 1)


EDITS: dict[str, str | None] = {
    "folder_hash": "0" * 64,
    "files_bytes": "7",
    "lineage_files": "{}",
    "weights_hash": None,
}


@pytest.mark.parametrize("tag", EDITS)
def test_a_tag_that_verifies_files_and_was_edited_is_told_everywhere_with_the_one_remedy(
    registry: Registry, tmp_path: Path, tag: str
):
    promote("a")
    promote("b")
    for version in ("1", "2"):
        registry.client.delete_model_version_tag(MODEL, version, tag)
        if EDITS[tag] is not None:
            registry.client.set_model_version_tag(MODEL, version, tag, EDITS[tag])
    named = f"version {{}}.*{tag}.*python -m tasks registry restore"
    differing = [line for line in show() if line.startswith("differs")]
    assert len(differing) == 2 and all(tag in line and "registry restore" in line for line in differing)
    for number in (1, 2):
        with pytest.raises(ValueError, match=named.format(number)):
            fetch(f"models:/{MODEL}/{number}", tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    with pytest.raises(ValueError, match=r"registry restore"):
        rollback(reason="x")
    assert any(tag in sentence for sentence in lineage(f"models:/{MODEL}/1")["altered"])
    told = restore()
    assert told.count(f"version 1: tag {tag}") == told.count(f"version 2: tag {tag}") == 1
    fetch(CHAMPION, tmp_path / "fetched")
    assert (tmp_path / "fetched/lineage/decision.json").exists()
    assert "version 1 is champion" in rollback(reason="x")


@pytest.mark.parametrize("text", ["gpt-5, prompt 3", "[1]", "2"])
def test_a_judge_that_somebody_edited_is_told_beside_the_rest_of_the_lineage(registry: Registry, text: str):
    promote("a")
    registry.client.set_model_version_tag(MODEL, "1", "judge", text)
    row = lineage(CHAMPION)
    print_lineage(row, SafeConsole(file=io.StringIO()))
    assert row["judge"] is None and any("tag judge was edited" in sentence for sentence in row["altered"])


def test_what_cannot_be_served_is_not_adopted(registry: Registry):
    promote("a")
    promote("b")
    with lock_registry(registry) as lock:
        record(registry, lock, [new_entry("pruning", {"versions": [1]})])
    registry.client.set_registered_model_alias(MODEL, "champion", "1")
    with pytest.raises(ValueError, match=r"lost its weights to `python -m tasks prune`.*registry restore"):
        adopt(reason="a it is")
    assert "pruning by" in list(show())[-1] and "version 1" in list(show())[-1]
    restore()
    wait("c", registry)
    assert any("waiting by" in line and "version 3" in line for line in show())
    for file in stored("model.safetensors"):
        file.unlink()
    registry.client.set_registered_model_alias(MODEL, "champion", "3")
    with pytest.raises(ValueError, match=r"version 3 cannot become champion: its weights are gone.*registry restore"):
        adopt(reason="c it is")
    assert read_history(registry).champion == 2


@pytest.mark.parametrize("is_old", [False, True])
def test_the_lineage_shows_the_decision_that_made_the_champion_and_none_that_never_took_effect(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, is_old: bool
):
    if is_old:  # an entry that does not name its decision
        monkeypatch.setattr(journal.Entry, "without_tags", lambda entry: {**entry.body, "decided_at": None})
    promote("a", reasons=["It is the first."])
    promote("b")
    wait("a", registry)  # the same weights again: nobody approves that
    rollback(reason="b books twice")
    decision = lineage(CHAMPION)["decision"]
    assert (decision["decision"], decision["reasons"]) == ("promote", ["It is the first."])
    if not is_old:
        monkeypatch.setattr("tasks.tracking.aliases.make_champion", lambda *args, **kwargs: None)
        promote("a", reasons=["Registered, and killed before the journal had it."])
        assert lineage(CHAMPION)["decision"]["reasons"] == ["It is the first."]


def test_where_numbers_began_again_a_version_has_no_history_of_its_namesake(registry: Registry):
    promote("a")
    promote("b")
    rollback(reason="b books twice", defect=True)
    registry.client.delete_registered_model(MODEL)
    adopt(reason="deleted by mistake")
    promote("x")
    promote("y")
    assert [event["event"] for event in lineage(f"models:/{MODEL}/2")["history"]] == ["promotion"]
    assert [event["event"] for event in lineage(f"models:/{MODEL}/1")["history"]] == ["promotion", "promotion"]
    assert not read_history(registry).defects


def test_a_number_of_champions_back_is_never_counted_over_a_pruned_one(registry: Registry):
    for name in "abcd":
        promote(name)
    with lock_registry(registry) as lock:
        record(registry, lock, [new_entry("pruning", {"versions": [2]})])
    with pytest.raises(ValueError, match=r"version 2, .*tasks prune.*rollback --to 1"):
        rollback(back=2, reason="two back")
    assert state(registry) == (4, 3)
    assert "version 3 is champion" in rollback(reason="one back")
    told = rollback(reason="to `previous`, as its alias says")
    assert "version 1 is champion" in told and "Version 2 was passed over" in told


def test_a_logged_model_deleted_on_mlflows_page_closes_no_rollback(registry: Registry):
    first = promote("a")
    promote("b")
    registry.client.delete_logged_model(first.model_id)
    assert "version 1 is champion" in rollback(reason="b books twice")


def test_a_challenger_that_waits_for_approval_is_there_to_fetch_and_then_promoted_without_a_second_version(
    registry: Registry, tmp_path: Path
):
    promote("a")
    wait("b", registry)
    assert state(registry) == (1, None)
    fetch(f"models:/{MODEL}@challenger", tmp_path / "b")
    assert promote("b").version == 2
    assert state(registry) == (2, 1)
    assert registry.at("challenger") is None


def test_a_deleted_champion_is_replaced_by_the_one_before(registry: Registry):
    promote("a")
    promote("b")
    registry.client.delete_model_version(MODEL, "2")
    assert "version 1 is champion; version 2 is rolled back" in rollback(reason="x")
    assert state(registry) == (1, None)


def test_a_version_has_everything_it_came_from_beside_its_weights(registry: Registry, tmp_path: Path):
    promote("a")
    fetch(CHAMPION, tmp_path / "a")
    kept = {file.name for file in (tmp_path / "a" / "lineage").iterdir()}
    assert kept == set(LINEAGE_FILES) - {"dvc.lock"}  # this project has none
    assert (tmp_path / "a" / "lineage" / "params.yaml").read_bytes() == Path("params.yaml").read_bytes()
    version = registry.champion()
    assert version is not None
    packed = registry.read_lineage(version, TRAJECTORIES_FILE, Path.read_bytes)
    assert packed is not None and json.loads(gzip.decompress(packed)) == {"played_by": "a"}
    assert registry.read_lineage(version, "dvc.lock", Path.read_bytes) is None


def printed(row: dict[str, Any]) -> str:
    console = SafeConsole(width=200, record=True, file=io.StringIO())
    print_lineage(row, console)
    return console.export_text()


def test_the_lineage_tells_data_code_settings_results_and_why(registry: Registry):
    promote("a")
    row = lineage(CHAMPION)
    assert (row["version"], row["aliases"], row["snapshot"]) == (1, ["champion"], "iteration-a")
    assert row["data"] == {"test.jsonl": "aa"}
    assert row["environment"]["environment_fingerprint"] == "f00d"
    assert row["seeds"] == {"seed": 7, "curate.split_seed": 1}
    assert row["results"]["test.success_rate"] == "0.95"
    assert row["params"]["promote"]["minimum_success"] == 0.6
    assert row["decision"]["reasons"] == ["It is better."]
    assert row["missing"] == ["lineage/dvc.lock"]
    assert json.loads(as_json(row)) == row
    text = printed(row)
    for word in (f"{MODEL} version 1 (champion)", "It is better.", "git commit", "dvc repro", "the first"):
        assert word in text


def test_weights_registered_again_keep_the_lineage_they_had(registry: Registry, tmp_path: Path):
    """a, b, then a twice: in another commit, and with other settings."""
    promote("a")
    registry.client.set_model_version_tag(MODEL, "1", "git_commit", "first")
    first = {file.name: file.read_bytes() for file in _fetched(registry, tmp_path / "1")}
    promote("b")
    with Path("params.yaml").open("a", encoding="utf-8") as stream:
        stream.write("more: 1\n")
    promote("a")
    promote("b")
    promote("a")
    row = lineage(f"models:/{MODEL}/1")
    assert [item["folder"] for item in row["earlier"]] == ["lineage/2", "lineage"]
    assert row["earlier"][1]["git_commit"] == "first" != row["code"]["git_commit"]
    assert row["params"]["more"] == 1
    assert f"cp models/{MODEL}-1/lineage/3/params.yaml params.yaml" in row["reproduce"]["commands"]
    assert row["missing"] == ["lineage/dvc.lock"] and row["altered"] == []
    assert "folder lineage, snapshot iteration-a, git commit first" in printed(row)
    now = {file.name: file.read_bytes() for file in _fetched(registry, tmp_path / "2") if file.is_file()}
    assert now == first
    last = registry.version(1)
    assert last is not None
    before, then = registry.earlier(last)
    assert {len(version.lineage_files) for version in (before, last)} == {len(then.lineage_files) + 1}
    assert registry.read_lineage(then, "params.yaml", Path.read_bytes) == first["params.yaml"]


def _fetched(registry: Registry, folder: Path) -> list[Path]:
    """What lies in lineage/ of version 1."""
    fetch(f"models:/{MODEL}/1", folder)
    return sorted((folder / "lineage").iterdir())


def test_the_command_that_makes_it_again_is_honest_about_a_tree_that_was_changed(registry: Registry):
    promote("a")
    tags = {"git_commit": "c0de" * 10, "git_dirty": "true", "environment_drift": "train: data: d1 → d2"}
    for name, value in tags.items():
        registry.client.set_model_version_tag(MODEL, "1", name, value)
    told = lineage(CHAMPION)["reproduce"]
    assert told["commands"] == [
        f"python -m tasks fetch models:/{MODEL}/1 models/{MODEL}-1 --registry sqlite:///{Path(DATABASE).absolute()}",
        f"git checkout --quiet {'c0de' * 10}",
        f"cp models/{MODEL}-1/lineage/params.yaml params.yaml",
        "TURNWISE_ACCEPT_DRIFT=1 dvc repro train",
    ]
    assert "The working tree was changed after commit c0dec0dec0de" in " ".join(told["notes"])
    registry.client.set_model_version_tag(MODEL, "1", "git_dirty", "false")
    assert "working tree" not in " ".join(lineage(CHAMPION)["reproduce"]["notes"])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.safetensors", "weights"),
        ("config.json", "files"),
        ("onnx/model.json", "files"),
        ("onnx/added.json", "files"),
        ("lineage/params.yaml", ""),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_files_altered_added_or_gone_in_the_store_are_never_fetched(
    registry: Registry, tmp_path: Path, name: str, what: str, is_gone: bool
):
    folder = candidate("a").folder
    (folder / "onnx").mkdir(exist_ok=True)
    (folder / "onnx" / "model.json").write_text("{}", encoding="utf-8")
    promote("a", folder=folder)
    for place in stored("onnx"):
        (place.parent / name).write_bytes(b"B")
        if is_gone:
            (place.parent / name).unlink()
    if is_gone and "added" in name:
        fetch(CHAMPION, tmp_path / "a")
        return
    with pytest.raises(
        ValueError, match=rf"version 1: its ((stored {what}|lineage/).*not (those|the one)|weights are gone)"
    ):
        fetch(CHAMPION, tmp_path / "a")
    assert not list(tmp_path.glob("*a*partial")) and not (tmp_path / "a").exists()


def test_what_a_killed_call_left_beside_the_lineage_is_not_fetched(registry: Registry, tmp_path: Path):
    promote("a")
    for place in stored("lineage"):
        (place / "9").mkdir()
        (place / "9" / "decision.json").touch()
    fetch(CHAMPION, tmp_path / "a")
    assert {file.name for file in (tmp_path / "a" / "lineage").iterdir() if file.is_file()} <= set(LINEAGE_FILES)
    assert not list((tmp_path / "a" / "lineage").rglob("9/*"))


def test_lineage_altered_in_the_store_is_told_and_not_shown(registry: Registry):
    promote("a")
    for file in stored("decision.json"):
        file.write_text('{"reasons": ["Because."]}', encoding="utf-8")
    row = lineage(CHAMPION)
    assert row["decision"] is None
    assert "lineage/decision.json is gone or not the one that was registered" in row["altered"][0]


def test_fetch_overwrites_nothing(registry: Registry, tmp_path: Path):
    promote("a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ValueError, match="full: is not an empty folder"):
        fetch(CHAMPION, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    weights = candidate("a").weights[:12]
    assert fetch(CHAMPION, tmp_path / "empty") == (
        f"{CHAMPION} is version 1, weights {weights} as registered: {tmp_path / 'empty'}"
    )


def test_a_version_somebody_else_registered_is_fetched_and_said_to_be_unverified(registry: Registry, tmp_path: Path):
    ours = promote("a")
    registry.client.create_model_version(MODEL, f"models:/{ours.model_id}", model_id=ours.model_id)
    told = fetch(f"models:/{MODEL}/2", tmp_path / "a")
    assert "it has no hash of its weights, so they cannot be verified" in told


@pytest.mark.parametrize("uri", ["travel", "models:/a", "models:/a/b", "models:/../x", "runs:/1/a"])
def test_what_names_no_version_is_refused(registry: Registry, uri: str):
    with pytest.raises(ValueError, match="does not name a model version"):
        find_version(uri)


def test_a_version_that_is_not_there_is_refused_with_those_that_are(registry: Registry):
    with pytest.raises(ValueError, match="has no version of nobody"):
        find_version("models:/nobody@champion")
    promote("a")
    with pytest.raises(ValueError, match=r"there is no such version. .*has version 1 \(champion is 1\)"):
        find_version(f"models:/{MODEL}/2")


def test_a_fetched_champion_plays_the_same_tokens_as_the_snapshot_that_was_evaluated(
    registry: Registry, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    from tasks.rollouts.collect import EpisodeKey
    from tests.tiny import collector, model_folder, problems

    snapshot = model_folder(tmp_path / "snapshot")
    promote("tiny", folder=snapshot)
    fetch(CHAMPION, tmp_path / "fetched")

    def tokens(folder: Path) -> list[list[int]]:
        keys = [EpisodeKey(problem, 0, sample) for problem in problems(4) for sample in range(2)]
        return [item.sequences[0].token_ids for item in collector(folder).collect(keys)]

    assert tokens(tmp_path / "fetched") == tokens(snapshot)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "fetched").num_parameters() > 0
