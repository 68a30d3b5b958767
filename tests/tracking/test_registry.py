"""The registry: one version a snapshot, a champion that loads as it is, and killed calls that the next one finishes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import Paths
from tasks.models.files import files_hash
from tasks.models.folders import weights_hash
from tasks.tracking.aliases import lock_registry, make_champion
from tasks.tracking.registry import Registry
from tasks.tracking.versions import Version
from tests.tracking.project import SETTINGS


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@pytest.fixture
def registry(project: Paths) -> Registry:
    return Registry(SETTINGS, "travel-desk-agent")


@pytest.fixture
def snapshot(project: Paths) -> Path:
    folder = Path("artifacts/train/snapshots/iteration-0010")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def register(registry: Registry, snapshot: Path) -> Any:
    registry.make_model()
    named: dict[str, Any] = {
        "weights": weights_hash(snapshot),
        "folder_hash": files_hash(snapshot),
        "tags": {"seed": "7"},
    }
    return registry.register(snapshot, **named, run_id=None, check=lambda: None)


def promote(registry: Registry, version: Version) -> None:
    with lock_registry(registry) as lock:
        make_champion(registry, lock, version, {"event": "promotion"})


def versions(registry: Registry) -> list[int]:
    return sorted(int(item.version) for item in registry.client.search_model_versions("name = 'travel-desk-agent'"))


def kill_in(monkeypatch: pytest.MonkeyPatch, registry: Registry, method: str) -> None:
    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    monkeypatch.setattr(registry.client, method, killed)


def test_there_is_no_champion_before_the_first_promotion(registry: Registry):
    assert registry.champion() is None


@pytest.mark.slow
def test_a_champion_downloads_with_its_files_at_the_root(registry: Registry, snapshot: Path, tmp_path: Path):
    promote(registry, register(registry, snapshot))
    champion = registry.champion()
    assert champion is not None
    assert (champion.version, champion.weights, champion.tags["seed"]) == (1, weights_hash(snapshot), "7")
    folder = registry.fetch(champion, tmp_path / "out")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
def test_mlflows_own_client_finds_the_champion_by_its_alias(registry: Registry, snapshot: Path, tmp_path: Path):
    import mlflow

    promote(registry, register(registry, snapshot))
    folder = Path(
        mlflow.artifacts.download_artifacts("models:/travel-desk-agent@champion", dst_path=str(tmp_path / "x"))
    )
    assert (folder / "config.json").exists()


@pytest.mark.slow
def test_transformers_loads_a_downloaded_champion_as_it_is(registry: Registry, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny import model_folder

    source = model_folder(tmp_path / "model")
    promote(registry, register(registry, source))
    champion = registry.champion()
    assert champion is not None
    loaded = AutoModelForCausalLM.from_pretrained(registry.fetch(champion, tmp_path / "out"))
    original = AutoModelForCausalLM.from_pretrained(source)
    assert all(torch.equal(left, right) for left, right in zip(loaded.parameters(), original.parameters(), strict=True))


@pytest.mark.slow
def test_the_same_model_is_never_two_versions_and_another_configuration_is_another_model(
    registry: Registry, snapshot: Path
):
    first, second = register(registry, snapshot), register(registry, snapshot)
    assert first.version == second.version == 1
    (snapshot / "config.json").write_text('{"rms_norm_eps": 0.1}', encoding="utf-8")
    assert register(registry, snapshot).version == 2
    assert versions(registry) == [1, 2]
    assert [version.version for version in registry.with_weights(weights_hash(snapshot))] == [1, 2]


def test_folders_of_the_model_are_registered_and_what_only_lies_beside_it_is_not(
    registry: Registry, snapshot: Path, tmp_path: Path
):
    """`hf download` leaves .cache there, and a fetched version its lineage; the hash is of what is registered."""
    for name in ("onnx/model.json", ".cache/huggingface/x.metadata", "lineage/decision.json"):
        (snapshot / name).parent.mkdir(parents=True)
        (snapshot / name).write_text(name, encoding="utf-8")
    fetched = registry.fetch(register(registry, snapshot), tmp_path / "out")
    there = {file.relative_to(fetched).as_posix() for file in fetched.rglob("*") if file.is_file()}
    assert there == {"config.json", "model.safetensors", "onnx/model.json"}


def test_a_store_that_keeps_other_bytes_than_it_was_given_registers_nothing(
    registry: Registry, snapshot: Path, monkeypatch: pytest.MonkeyPatch
):
    upload = registry.client.log_model_artifacts

    def altered(model_id: str, folder: str) -> None:
        upload(model_id, folder)
        place = Path(registry.client.get_logged_model(model_id).artifact_location)
        (place / "config.json").write_text("{ }", encoding="utf-8")

    with monkeypatch.context() as patch:
        patch.setattr(registry.client, "log_model_artifacts", altered)
        with pytest.raises(ValueError, match=r"contains other files than .*Nothing was registered"):
            register(registry, snapshot)
    assert versions(registry) == []
    assert register(registry, snapshot).version == 1


@pytest.mark.slow
def test_other_weights_are_another_version_and_the_old_one_stays(registry: Registry, snapshot: Path):
    promote(registry, register(registry, snapshot))
    (snapshot / "model.safetensors").write_bytes(b"new")
    promote(registry, register(registry, snapshot))
    champion = registry.champion()
    assert champion is not None
    assert (champion.version, champion.weights) == (2, weights_hash(snapshot))
    assert versions(registry) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["log_model_artifacts", "finalize_logged_model", "create_model_version"])
def test_a_registration_killed_in_any_step_is_finished_by_the_next(
    registry: Registry, snapshot: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    with monkeypatch.context() as patch:
        kill_in(patch, registry, step)
        with pytest.raises(Killed):
            register(registry, snapshot)
    assert versions(registry) == []
    promote(registry, register(registry, snapshot))
    assert versions(registry) == [1]
    assert len(registry.client.search_logged_models([registry.experiment_id])) == 1


def test_files_half_uploaded_by_a_killed_call_are_uploaded_again(
    registry: Registry, snapshot: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def half(model_id: str, folder: str) -> None:
        target = Path(registry.client.get_logged_model(model_id).artifact_location)
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(b"wei")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(registry.client, "log_model_artifacts", half)
        with pytest.raises(Killed):
            register(registry, snapshot)
    folder = registry.fetch(register(registry, snapshot), tmp_path / "out")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
def test_a_version_whose_alias_was_never_set_becomes_champion_without_a_second_version(
    registry: Registry, snapshot: Path
):
    register(registry, snapshot)  # killed here, before make_champion
    assert registry.champion() is None
    promote(registry, register(registry, snapshot))
    champion = registry.champion()
    assert champion is not None
    assert champion.version == 1


def test_a_champion_whose_files_are_gone_is_a_clear_error(registry: Registry, snapshot: Path, tmp_path: Path):
    version = register(registry, snapshot)
    shutil.rmtree("artifacts/mlflow/artifacts")
    with pytest.raises(ValueError, match=r"version 1 is registered, but its files cannot be fetched.*Restore"):
        registry.fetch(version, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_version_names_the_flow_that_made_it_as_its_run(registry: Registry, snapshot: Path):
    parent = registry.client.create_run(registry.experiment_id).info.run_id
    child = registry.client.create_run(registry.experiment_id, tags={"mlflow.parentRunId": parent}).info.run_id
    registry.make_model()
    named: dict[str, Any] = {"weights": "c0ffee", "folder_hash": files_hash(snapshot), "tags": {}}
    version = registry.register(snapshot, **named, run_id=child, check=lambda: None)
    assert registry.client.get_model_version("travel-desk-agent", str(version.version)).run_id == parent
