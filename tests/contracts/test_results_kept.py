"""No test may change the results of the checkout it runs in: they may be a user's."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FIGURES, RESULTS, ROOT, keep_results

CHANGES: dict[str, Callable[[Path], object]] = {
    "removed with all in it": shutil.rmtree,
    "removed with all in it, errors ignored": lambda path: shutil.rmtree(path, ignore_errors=True),
    "removed": os.remove,
    "written": lambda path: path.write_text(""),
    "made": os.mkdir,
    "moved away": lambda path: os.rename(path, path.parent.parent / "elsewhere"),
    "moved here": lambda path: os.rename(ROOT / "nothing", path),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_test_that_would_change_results_fails(change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for path in (RESULTS / "not-there", Path("artifacts/not-there")):
        with pytest.raises(RuntimeError, match="would change the results of this checkout"):
            change(path)


def test_a_benchmark_may_write_its_figures_where_no_result_of_a_run_is():
    keep_results("os.mkdir", (RESULTS, 0o777, -1))
    for event, further in (("os.mkdir", (0o777, -1)), ("open", ("w", os.O_WRONLY)), ("os.remove", (-1,))):
        keep_results(event, (FIGURES / "storage.json", *further))
    keep_results("os.rename", (FIGURES / "storage.json.part", FIGURES / "storage.json", -1, -1))
    with pytest.raises(RuntimeError, match="would change the results of this checkout"):
        keep_results("os.rename", (FIGURES / "storage.json", RESULTS / "summary.json", -1, -1))


def test_results_are_read_and_others_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    place = Path("artifacts/train")
    place.mkdir(parents=True)
    shutil.rmtree("artifacts")
    with pytest.raises(FileNotFoundError):
        (RESULTS / "not-there").read_text(encoding="utf-8")
