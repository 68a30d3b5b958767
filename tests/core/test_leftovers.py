"""What a killed stage left half-written goes when the next stage starts, whichever stage that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.settings import read_params
from tasks.pipeline import order


@pytest.mark.parametrize(
    "left", [".validation.31396.partial", ".train.7.replaced", "provenance/.curate.json.9.partial"]
)
def test_every_stage_removes_what_any_killed_stage_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    class Stage:
        SETTINGS = order.CommonSections

        @staticmethod
        def run(settings: object, paths: object) -> None:
            pass

    params = read_params()
    params["paths"]["artifacts"] = str(tmp_path)
    monkeypatch.setattr(order, "read_params", lambda: params)
    monkeypatch.setattr(order, "check_params", lambda params: None)
    monkeypatch.setattr(order, "stage_module", lambda name: Stage)
    leftover = tmp_path / left
    if leftover.suffix == ".partial" and ".json" in left:
        leftover.parent.mkdir()
        leftover.write_text("{", encoding="utf-8")
    else:
        leftover.mkdir()
    finished = tmp_path / "curate"
    finished.mkdir()
    order.run_stage("nothing")
    assert not leftover.exists()
    assert finished.exists()
