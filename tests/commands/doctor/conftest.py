"""The project the doctor looks at, made once; a test that spoils it gets a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasks.commands.doctor import context, scoring
from tasks.core.settings import Paths, load
from tasks.stages.curate import stage as curate
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.validation import Validation
from tests import tiny
from tests.commands.doctor.project import params
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifacts folder after curate and assess, with a model whose weights are one matrix of zeros."""
    paths = Paths(tmp_path_factory.mktemp("doctor") / "artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curate, "validate", lambda *_: Validation([], {}))
        patch.chdir(ROOT)
        curate.run(load(CurateSections, params()), paths)
    base = paths.base_model
    tiny.tokenizer().save_pretrained(base)
    config = {**params()["model"]["embedded"], "model_type": "qwen3", "vocab_size": 700}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1000, 400], "data_offsets": [0, 1_600_000]}}).encode()
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1_600_000))
    return paths.artifacts


@pytest.fixture
def artifacts(curated: Path, tmp_path: Path) -> Path:
    """The same as a copy that a test may spoil."""
    return Path(shutil.copytree(curated, tmp_path / "artifacts"))


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are played for 1 to 3 s, in which a busy machine may not come to the one that tells."""
    monkeypatch.setattr(context, "PLAY_SECONDS", 600.0)
    monkeypatch.setattr(context, "REPEAT_SECONDS", 600.0)
    monkeypatch.setattr(scoring, "IDLE_SECONDS", 600.0)
