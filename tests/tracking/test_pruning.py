"""Which registered weights nothing needs, and what is left of a version that lost them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from typer.testing import CliRunner

from tasks.__main__ import app
from tasks.commands.lineage import lineage
from tasks.commands.prune.dvc_cache import DvcCache, OldResults
from tasks.commands.prune.prune import _find_old_results, _lineage_locks
from tasks.commands.registry import adopt
from tasks.commands.rollback import rollback
from tasks.core.settings import Paths
from tasks.core.urls import S3Url, parse_url
from tasks.storage.client import Store, connect
from tasks.storage.folders import put_folder
from tasks.storage.mirror import RESULTS
from tasks.tracking import pruning
from tasks.tracking.history import read_history
from tasks.tracking.journal import read_journal
from tasks.tracking.model_files import store_folder
from tasks.tracking.pruning import find_unneeded, needed_versions, remove_unneeded
from tasks.tracking.registry import Registry
from tasks.tracking.versions import Version
from tests.profiles import profile_params
from tests.services.servers import ObjectStore
from tests.storage.places import SETTINGS
from tests.storage.test_folders import made
from tests.tracking.candidates import MODEL, promote, state, wait, write_project
from tests.tracking.project import SETTINGS as TRACKING

pytestmark = pytest.mark.slow
LOCK = "schema: '2.0'\nstages: {}\n"


@pytest.fixture(autouse=True)
def no_other_names(registry: Registry) -> Iterator[None]:
    """The tests share one MLflow, in which a version of another name keeps the files that it has."""
    yield
    for model in registry.client.search_registered_models():
        if model.name != MODEL:
            registry.client.delete_registered_model(model.name)


def unneeded(registry: Registry, keep: int = 1) -> list[int | None]:
    return [item.version for item in sorted(find_unneeded(registry, keep=keep), key=lambda item: item.version or 0)]


def ids(registry: Registry) -> set[str]:
    return {item.model_id for item in find_unneeded(registry, keep=1)}


def first(registry: Registry) -> Version:
    version = registry.version(1)
    assert version is not None
    return version


def prune_all(registry: Registry, keep: int = 1) -> None:
    for item in find_unneeded(registry, keep=keep):
        remove_unneeded(registry, item.model_id, keep=keep)


def test_the_champion_the_way_back_the_waiting_and_the_newest_keep_their_weights(registry: Registry):
    for name in ("a", "b", "c", "d"):
        promote(name)
    wait("e", registry)
    assert unneeded(registry, keep=1) == [1, 2]
    assert unneeded(registry, keep=2) == [1]
    assert unneeded(registry, keep=3) == []
    why = needed_versions(registry, read_journal(registry), registry.versions(), keep=1)
    assert (why[3], why[4], why[5]) == ("alias previous", "champion by the journal", "challenger that waits")


def test_what_is_asked_of_mlflow_does_not_grow_with_the_versions(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c"):
        promote(name)
    monkeypatch.setattr(registry.client, "get_model_version", None)  # asked once for each of them
    assert unneeded(registry, keep=1) == [1]


def test_a_version_without_weights_keeps_its_lineage_and_no_rollback_leads_to_it(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    prune_all(registry)
    assert "weights are gone" in str(registry.missing_files(first(registry)))
    with pytest.raises(ValueError, match=rf"weights are gone.*pruned.*lineage models:/{MODEL}/1 --verify"):
        registry.verify(first(registry))
    assert unneeded(registry) == []
    row = lineage(f"models:/{MODEL}/1", None)
    assert row["params"] is not None
    assert row["history"][-1]["event"] == "pruning"
    with pytest.raises(ValueError, match=r"version 1 lost its weights to `python -m tasks prune`.*--verify"):
        rollback(to=1, reason="it was better")
    rollback(reason="c books twice")
    assert state(registry) == (2, None)


def test_weights_that_the_store_keeps_are_told_and_listed_again(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    """As S3 does with a key that may not delete: no error of MLflow's."""
    for name in ("a", "b", "c"):
        promote(name)
    monkeypatch.setattr(LocalArtifactRepository, "delete_artifacts", lambda *_: None)
    with pytest.raises(ValueError, match=r"model\.safetensors, could not be removed"):
        prune_all(registry)
    assert unneeded(registry) == [1]


def test_the_same_model_promoted_again_has_its_weights_back(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    prune_all(registry)
    assert promote("a").version == 1
    assert registry.missing_files(first(registry)) is None
    assert read_history(registry).pruned == {}
    registry.verify(first(registry))


def test_an_alias_set_after_the_list_was_shown_keeps_the_weights(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    (listed,) = find_unneeded(registry, keep=1)
    registry.client.set_registered_model_alias(MODEL, "tuesday", "1")
    remove_unneeded(registry, listed.model_id, keep=1)
    assert registry.missing_files(first(registry)) is None


def test_an_upload_that_became_no_version_goes_after_a_day(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    promote("a")
    model = registry.client.create_logged_model(registry.experiment_id, MODEL)
    assert model.model_id not in ids(registry)
    monkeypatch.setattr(pruning, "ABANDONED_AFTER_DAYS", -1.0)
    assert model.model_id in ids(registry)
    prune_all(registry)
    assert ids(registry) == set()
    assert registry.missing_files(first(registry)) is None


def test_two_names_with_the_same_files_have_a_copy_each(registry: Registry):
    for name in ("a", "b", "c"):
        promote(name)
    assert promote("a", model="agent-two").model_id != first(registry).model_id
    prune_all(registry)
    two = Registry(TRACKING, "agent-two")
    two.verify(first(two))


def test_weights_that_a_version_of_another_name_has_too_stay(registry: Registry):
    """As copied by MLflow from a name to another, and as two names shared them before each had a copy."""
    for name in ("a", "b", "c", "d"):
        promote(name)
    client, one = registry.client, first(registry)
    client.create_registered_model("agent-three")
    client.create_model_version("agent-three", f"models:/{one.model_id}", tags=one.tags)
    client.copy_model_version(f"models:/{MODEL}/2", "desk-live")
    assert unneeded(registry) == []
    client.delete_model_version("desk-live", "1")
    assert unneeded(registry) == [2]


def test_a_copy_keeps_the_files_of_a_version_that_was_deleted(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pruning, "ABANDONED_AFTER_DAYS", -1.0)
    for name in ("a", "b", "c"):
        promote(name)
    model_id = first(registry).model_id
    registry.client.copy_model_version(f"models:/{MODEL}/1", "desk-kept")
    registry.client.delete_model_version(MODEL, "1")
    assert model_id not in ids(registry)


def test_a_model_that_was_renamed_keeps_its_champion_whoever_has_its_old_name(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pruning, "ABANDONED_AFTER_DAYS", -1.0)
    for name in ("a", "b", "c"):
        promote(name)
    registry.client.rename_registered_model(MODEL, "desk-renamed")
    registry.client.create_registered_model(MODEL)
    production = Registry(TRACKING, "desk-renamed")
    assert not ids(registry) & {version.model_id for version in production.versions()}
    assert unneeded(production) == [1]
    prune_all(production)
    assert read_history(production).pruned.keys() == {1}
    assert promote("a", model="desk-renamed").version == 1
    production.verify(first(production))


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_version_that_was_deleted_is_called_that_and_keeps_its_lineage(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, begun_anew: bool
):
    for name in ("a", "b", "c"):
        promote(name)
    model_id = first(registry).model_id
    registry.client.delete_model_version(MODEL, "1")
    if begun_anew:  # and its number came again
        monkeypatch.setattr(pruning, "ABANDONED_AFTER_DAYS", -1.0)
        registry.client.delete_registered_model(MODEL)
        adopt(reason="anew")
        promote("d")
        assert first(registry).model_id != model_id
    (item,) = (item for item in find_unneeded(registry, keep=5) if item.model_id == model_id)
    expected = f"a version ({model_id})" if begun_anew else "version 1"
    assert item.name == f"{expected}, which was deleted in MLflow"
    remove_unneeded(registry, model_id, keep=5)
    assert [file.path for file in registry.client.list_logged_model_artifacts(model_id, "lineage")]
    entry = read_journal(registry).entries[-1]
    assert (entry.kind, entry.body["files_of"]) == ("pruning", model_id)
    assert read_history(registry).pruned.keys() == (set() if begun_anew else {1})
    assert model_id not in {item.model_id for item in find_unneeded(registry, keep=5)}


def test_weights_that_another_machine_pruned_after_the_upload_are_uploaded_again(registry: Registry):
    """They are stored without the lock, then registered with it; a verified store is not downloaded twice."""
    for name in ("a", "b", "c"):
        promote(name)
    prune_all(registry)
    before = Registry.store

    def prune_after(self: Registry, *args: Any, **kwargs: Any) -> Any:
        stored = before(self, *args, **kwargs)
        if not self.is_locked:
            prune_all(Registry(TRACKING, MODEL))
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "store", prune_after)
        assert promote("a").version == 1
    registry.verify(first(registry))


def test_what_lineages_need_of_dvcs_cache_is_asked_of_every_name_that_was_trained_here(registry: Registry):
    for name, model in (("a", MODEL), ("b", "agent-two")):
        Path("dvc.lock").write_text(f"{LOCK}# {name}\n")
        promote(name, model=model)
    Path("dvc.lock").unlink()
    assert sorted(_lineage_locks(registry)) == [f"{LOCK}# a\n", f"{LOCK}# b\n"]


def test_a_version_whose_lineage_was_unlisted_in_mlflow_frees_nothing(registry: Registry):
    promote("a")
    registry.client.set_model_version_tag(MODEL, "1", "lineage_files", "{}")
    with pytest.raises(ValueError, match=r"not as recorded \(tag lineage_files\)"):
        list(_lineage_locks(registry))


def test_where_a_versions_lineage_is_gone_dvcs_cache_stays_and_that_is_said(
    registry: Registry, capsys: pytest.CaptureFixture[str]
):
    Path("dvc.lock").write_text(LOCK)
    promote("a")
    Path("dvc.lock").unlink()
    folder = store_folder(registry.client.get_logged_model(first(registry).model_id))
    assert folder is not None
    shutil.rmtree(folder)
    assert _find_old_results(DvcCache(Path(".dvc/cache")), 1, registry) == OldResults([], set())
    assert f"{MODEL} version 1" in capsys.readouterr().err


GRAPH = """
stages:
  train: {cmd: mkdir out; cp source.txt out/model.safetensors, deps: [source.txt], outs: [out]}
"""


def run_dvc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=True, capture_output=True)


def make_workspace(bucket: str, store: Store) -> S3Url:
    """Two runs of DVC, pushed to S3, and of each the results under paths.remote; three champions in the registry."""
    write_project()
    for name in ("a", "b", "c"):
        promote(name)
    remote = parse_url(f"s3://{bucket}/pruned-{uuid.uuid4().hex[:8]}")
    run_dvc("init", "--no-scm", "-q")
    run_dvc("remote", "add", "-q", "-d", "store", f"{remote}/dvc")
    Path("dvc.yaml").write_text(GRAPH, encoding="utf-8")
    for number in range(2):
        Path("source.txt").write_text(f"run {number}", encoding="utf-8")
        run_dvc("repro", "-q")
        run_dvc("push", "-q")
        put_folder(store, made(Path("r"), weights=b"%d" % number), remote / RESULTS / "train", keeps_versions=True)
        time.sleep(1.1)  # the server's times are in seconds
    params = profile_params("test")
    params["paths"]["remote"] = str(remote)
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return remote


def sizes(store: Store, url: S3Url) -> dict[str, int]:
    """The bytes under each part of the remote."""
    found = store.client.list_objects_v2(Bucket=url.bucket, Prefix=f"{url.key}/").get("Contents", [])
    counts: Counter[str] = Counter()
    for item in found:
        if not item["Key"].endswith(("json", ".dir")):
            counts[item["Key"].removeprefix(f"{url.key}/").split("/")[0]] += item["Size"]
    return dict(counts)


@pytest.mark.services
def test_the_command_shows_first_and_with_yes_frees_every_place_alike(
    project: Paths, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {**object_store.variables(), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    store = connect(SETTINGS)
    remote = make_workspace(object_store.bucket, store)
    registry = Registry(TRACKING, MODEL)
    before = sizes(store, remote)
    assert before == {"dvc": 10, "results": 2}  # "run 0" and "run 1"; a weight of one byte each

    shown = CliRunner().invoke(app, ["prune", "--keep", "1"])
    assert (shown.exit_code, "prune --yes" in shown.output) == (1, True), shown.output
    for what in ("version 1", "weights of older runs", "older results", "DVC's cache"):
        assert what in shown.output
    assert sizes(store, remote) == before and unneeded(registry) == [1]

    done = CliRunner().invoke(app, ["prune", "--keep", "1", "--yes"])
    assert done.exit_code == 0, done.output
    assert sizes(store, remote) == {"dvc": 5, "results": 1}
    assert unneeded(registry) == [] and registry.missing_files(first(registry)) is not None
    texts = {file.read_text() for file in Path(".dvc/cache/files/md5").glob("??/*") if file.suffix != ".dir"}
    assert texts == {"run 1"}
    again = CliRunner().invoke(app, ["prune", "--keep", "1"])
    assert (again.exit_code, "Nothing to remove" in again.output) == (0, True)
