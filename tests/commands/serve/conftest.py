"""A project with an MLflow, in which models with true weights are promoted and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.models.settings import on_cpu
from tasks.pipeline.settings import ServeSettings
from tasks.rollouts.settings import EngineSettings, PlaySettings
from tests import tiny
from tests.tracking.candidates import write_project
from tests.tracking.project import enter_project

PLAY = PlaySettings(
    engine=EngineSettings(name="transformers", max_concurrent_episodes=8, probe_tolerance="auto", settings=None),
    sampling=tiny.SAMPLING,
    seed=5,
    samples_per_problem=1,
    compute=on_cpu(1),
)
SETTINGS = ServeSettings.model_validate(
    {
        "port": 0,
        "key_variable": None,
        "webhook_secret_variable": None,
        "poll_seconds": 60.0,
        "max_waiting": 100,
        "record": {"redact": [r"\b[\w.]{1,64}@[\w.]+"], "max_file_mib": 1},
    }
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny.model_folder(folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    enter_project(tmp_path, empty_database, monkeypatch)
    write_project()
    return tmp_path
