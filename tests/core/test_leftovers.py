"""What a killed stage left half-written goes when the next stage starts, whichever stage that is; a file has one writer
at a time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tasks.core.settings import read_params
from tasks.core.targets import only_writer
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


def test_a_second_writer_waits_for_the_first_and_no_lock_lies_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file, entered = tmp_path / "new" / "rows.jsonl", threading.Event()

    def wait() -> None:
        with only_writer(file):
            entered.set()

    with only_writer(file):
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        time.sleep(0.2)
        assert not entered.is_set()
        with only_writer(tmp_path / "another.jsonl"):
            assert [item.name for item in tmp_path.iterdir()] == [".cache"]
    for thread in waiting:
        thread.join(timeout=10)
    assert entered.is_set()
