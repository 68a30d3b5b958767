"""The whole flow with a LoRA adapter and everything that saves memory switched on, all from params."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.models import is_adapter, load_model, weights_hash
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("lora") / "project")
    project.set_params(
        {
            "train.lora": {"rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"},
            "train.gradient_checkpointing": True,
            "train.autocast": "bfloat16",
            "train.mismatch_correction": "token_truncate",
            "train.micro_batch_tokens": 1024,
            "train.num_iterations": 8,
        }
    )
    project.flow()
    return project


def test_a_snapshot_is_the_adapter_alone(project: Project) -> None:
    for snapshot in sorted((project.artifacts / "train" / "snapshots").iterdir()):
        assert is_adapter(snapshot)
        assert [item.name for item in snapshot.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_the_champion_is_a_whole_model_without_a_trace_of_the_adapter(project: Project) -> None:
    decision = project.decision()
    assert decision["verdict"] in ("promote", "hold", "reject")
    folder = project.artifacts / "promote" / "merged"
    assert not is_adapter(folder)
    assert weights_hash(folder) == decision["challenger"]["weights"]
    assert not [name for name, _ in load_model(folder, num_threads=1).named_parameters() if "lora" in name]


def test_the_base_under_the_adapter_is_checked(project: Project, tmp_path: Path) -> None:
    """Another warm start under the same adapter would be another model."""
    snapshot = sorted((project.artifacts / "train" / "snapshots").iterdir())[-1]
    base = project.folder / "artifacts" / "warm_start" / "model" / "model.safetensors"
    content = base.read_bytes()
    base.write_bytes(content[:-4] + b"\x00\x00\x00\x01")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project.folder)
            with pytest.raises(ValueError, match="its weights changed since"):
                weights_hash(snapshot)
    finally:
        base.write_bytes(content)
