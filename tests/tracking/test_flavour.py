"""What MLflow's own loader makes of a registered version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.models.files import files_hash
from tasks.tracking.connection import absolute_uri
from tasks.tracking.model_files import MLMODEL, TOKENIZER_FOLDER
from tasks.tracking.registry import Registry
from tests.tiny import model_folder
from tests.tracking.candidates import MODEL, promote
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow

LOAD = f"""
import mlflow
agent = mlflow.transformers.load_model("models:/{MODEL}@champion")
print(agent.task, len(agent("look", max_new_tokens=3, return_full_text=True)[0]["generated_text"]) > 0)
"""


def test_a_fresh_process_loads_the_champion_with_mlflow_and_generates(registry: Registry, tmp_path: Path):
    source = model_folder(tmp_path / "model")
    version = promote("a", folder=source)
    environment = {"MLFLOW_TRACKING_URI": absolute_uri(SETTINGS), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["text-generation", "True"]
    assert registry.missing_files(version) is None  # so a rollback to it goes on, whatever MLflow noted beside it
    fetched = registry.fetch_model(version, tmp_path / "fetched")
    assert files_hash(fetched) == files_hash(source) == version.identity
    assert sorted(file.name for file in fetched.iterdir()) == sorted(file.name for file in source.iterdir())


@pytest.mark.parametrize("file", [MLMODEL, f"{TOKENIZER_FOLDER}/tokenizer.json", f"{TOKENIZER_FOLDER}/more.json"])
def test_a_version_whose_flavour_was_altered_is_refused(registry: Registry, tmp_path: Path, file: str):
    version = promote("a", folder=model_folder(tmp_path / "model"))
    registry.verify(version)
    (stored,) = Path("artifacts/mlflow/artifacts").rglob(MLMODEL)
    (stored.parent / file).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"MLmodel and its components.*Restore"):
        registry.verify(version)
