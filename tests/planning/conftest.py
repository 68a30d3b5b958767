"""Plans are of what a test says, and not of results or models in the folder that the tests are run in."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(tmp_path_factory.mktemp("empty")))
