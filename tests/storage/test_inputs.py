"""What params.yaml names of S3 is checked before anything runs, and a command's argument may be a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import load, read_params
from tasks.core.urls import parse_url
from tasks.storage.inputs import check_storage, copy_argument, copy_inputs, share_endpoint
from tasks.storage.settings import StorageSections
from tasks.tools.settings import CacheSettings
from tests.conftest import ROOT
from tests.services.servers import ObjectStore
from tests.storage.places import Place


def params(**changed: Any) -> dict[str, Any]:
    """params.yaml with other values, by `section__key`."""
    found = read_params(ROOT / "params.yaml")
    found["storage"] |= {"max_attempts": 1, "connect_timeout_seconds": 3.0, "read_timeout_seconds": 3.0}
    for key, value in changed.items():
        section, _, name = key.partition("__")
        found[section][name] = value
    return found


def test_without_anything_on_s3_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    check_storage(params())


@pytest.mark.parametrize("remote", ["/mnt/results", "s3://b", "s3://bucket/../up", f"s3://bucket/a#sha256={'0' * 64}"])
def test_a_remote_that_is_no_folder_of_a_bucket_is_refused(remote: str):
    with pytest.raises(ValueError, match=r"paths\.remote"):
        load(StorageSections, params(paths__remote=remote))


def test_artifacts_on_s3_are_refused_with_the_key_that_takes_a_bucket():
    with pytest.raises(ValueError, match=r"paths\.remote"):
        load(StorageSections, params(paths__artifacts="s3://bucket/artifacts"))


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("~/results", f"{Path.home()}/results"),
        (".", "contains the project"),
        ("..", "contains the project"),
        ("/", "contains the project"),
        ("tasks", "own folder tasks"),
        ("infra/results/../results", "own folder infra"),
        (".git/results", "own folder .git"),
    ],
)
def test_artifacts_in_a_folder_of_the_project_or_of_nobody_are_refused(
    folder: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"paths\.artifacts") as caught:
        load(StorageSections, params(paths__artifacts=folder))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_workspaces_link_to_the_code_is_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tasks").symlink_to(ROOT / "tasks")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="own folder tasks"):
        load(StorageSections, params(paths__artifacts="tasks/results"))


@pytest.mark.parametrize("folder", ["artifacts", "artifacts/", "runs/tasks", "../results", "/mnt/results", "a~b"])
def test_artifacts_in_any_other_folder_are_taken(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    load(StorageSections, params(paths__artifacts=folder))


def test_an_endpoint_with_a_password_is_refused():
    with pytest.raises(ValueError) as caught:
        load(StorageSections, params(storage__endpoint_url="http://user:hunter22@127.0.0.1:9000"))
    assert "hunter22" not in str(caught.value)


def test_a_frozen_cache_on_s3_states_its_hash_so_that_dvc_sees_it_change():
    cache = {"mode": "strict", "folder": "artifacts/.tool_cache"}
    with pytest.raises(ValueError, match="sha256"):
        CacheSettings.model_validate({**cache, "frozen": "s3://bucket/cache.jsonl"})
    CacheSettings.model_validate({**cache, "frozen": f"s3://bucket/cache.jsonl#sha256={'0' * 64}"})


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket/../a", "s3://UPPER/a", "s3://bucket/a#md5=1"])
def test_a_url_that_could_leave_its_folder_or_means_nothing_is_refused(url: str):
    with pytest.raises(ValueError, match="s3://"):
        parse_url(url)


def test_without_boto3_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.storage.client.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="make setup-services"):
        check_storage(params(paths__remote="s3://bucket/agent"))


def test_the_endpoint_of_params_is_shared_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://one:1")
    share_endpoint(params(storage__endpoint_url="http://two:2"))
    assert os.environ["AWS_ENDPOINT_URL_S3"] == "http://one:1"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    share_endpoint(params(storage__endpoint_url="http://two:2"))
    assert os.environ.pop("AWS_ENDPOINT_URL_S3") == "http://two:2"


@pytest.mark.slow
def test_what_is_right_passes_and_what_is_wrong_is_one_line_with_its_key(
    place: Place, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    place.put("problems.jsonl", b"{}\n")
    good = params(paths__remote=place.url("agent"), curate__source=place.url("problems.jsonl"))
    check_storage(good)
    for key, value in (
        ("curate__source", place.url("nothing.jsonl")),
        ("model__path", place.url("no-model")),
        ("paths__remote", f"s3://{object_store.strangers_bucket}/agent"),
        ("tracking__artifact_location", f"s3://{object_store.strangers_bucket}/mlflow"),
        ("tracking__artifact_location", "s3://no-such-bucket/mlflow"),
    ):
        with pytest.raises(ValueError, match=key.replace("__", r"\.")) as caught:
            check_storage(params(**{"paths__remote": place.url("agent"), key: value}))
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-0123456789")
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY") as caught:
        check_storage(good)
    assert "wrong-secret" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"curate\.source.*could not be reached"):
        check_storage(good)


@pytest.mark.slow
def test_inputs_and_arguments_are_copied(place: Place):
    place.put("problems.jsonl", b"{}\n")
    Path("params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    copy = copy_argument(place.url("problems.jsonl"))
    assert copy.read_bytes() == b"{}\n"
    copy.unlink()
    copy_inputs(params(curate__source=place.url("problems.jsonl")))
    assert copy.read_bytes() == b"{}\n"
    assert copy_argument("calls.jsonl") == Path("calls.jsonl")
