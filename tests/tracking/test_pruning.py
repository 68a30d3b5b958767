"""Which registered weights nothing needs, and what is left of a version that lost them."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tasks.__main__ import app
from tasks.commands.lineage import lineage
from tasks.commands.rollback import rollback
from tasks.core.settings import Paths
from tasks.core.urls import S3Url, parse_url
from tasks.storage.client import Store, connect
from tasks.storage.folders import put_folder
from tasks.storage.mirror import RESULTS
from tasks.tracking import pruning
from tasks.tracking.history import read_history
from tasks.tracking.journal import read_journal
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
    assert unneeded(registry) == []
    row = lineage(f"models:/{MODEL}/1", None)
    assert row["params"] is not None
    assert row["history"][-1]["event"] == "pruning"
    with pytest.raises(ValueError, match=r"version 1 lost its weights to `python -m tasks prune`.*--verify"):
        rollback(to=1, reason="it was better")
    rollback(reason="c books twice")
    assert state(registry) == (2, None)


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
