"""drift-check on episodes that are given: what it records, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.commands import drift_check as module
from tasks.core.records import Trajectory
from tasks.core.settings import Paths, load, read_params
from tasks.tracking import aliases
from tasks.tracking.measurements import read_checks
from tasks.tracking.versions import Version
from tests.conftest import ROOT
from tests.simulations.episodes import episodes
from tests.tracking.project import SETTINGS, enter_project_again

MODEL = "travel-desk-agent"


def played(share: float) -> list[Trajectory]:
    """400 problems, a split group each, of which the first `share` are solved."""
    success = {f"p{number}": [number < 400 * share] for number in range(400)}
    return episodes(success, {problem: problem for problem in success})


@pytest.fixture
def champion(used_folder: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A champion that was promoted with 90%, and succeeds today as `today` says."""
    enter_project_again(used_folder, empty_database, monkeypatch)
    Path("params.yaml").write_bytes((ROOT / "infra" / "profiles" / "demo.yaml").read_bytes())
    given: dict[str, Any] = {"today": 0.9, "version": Version(MODEL, 4, "w", {})}
    monkeypatch.setattr(aliases, "current_champion", lambda registry: given["version"])
    monkeypatch.setattr(module, "promoted_episodes", lambda registry, version: played(0.9))
    monkeypatch.setattr(module, "play_champion", lambda *args, **kwargs: played(given["today"]))
    return given


def check() -> dict[str, Any]:
    settings = load(module.DriftCheckSections, read_params())
    return {"environment": [], "champion": None, "fell": False, **module.check_champion(settings, Paths("artifacts"))}


@pytest.mark.slow
def test_a_champion_as_good_as_it_was_shows_no_fall_and_the_check_is_in_mlflow(champion: dict[str, Any]):
    row = check()
    assert (row["fell"], row["champion"], row["number"]) == (False, 4, 1)
    assert row["success_rate"] == row["promoted"]["success_rate"] == 0.9
    (kept,) = read_checks(SETTINGS, MODEL)
    assert kept == {name: row[name] for name in kept}
    assert {"at", "alpha", "fell", "champion", "promoted", "mlflow_run_id"} <= kept.keys()
    assert "version 4 shows no fall: 90.0%" in module.describe(row)


@pytest.mark.slow
def test_a_fall_is_told_with_its_least_size_and_the_next_check_has_its_own_share(champion: dict[str, Any]):
    check()
    champion["today"] = 0.7
    row = check()
    assert (row["fell"], row["number"]) == (True, 2)
    assert -0.2 < row["most_change"] < 0
    assert row["alpha"] == pytest.approx(0.1 / 365)
    assert f"fell by at least {-100 * row['most_change']:.1f} points" in module.describe(row)


def test_without_a_champion_the_environment_alone_is_checked(champion: dict[str, Any]):
    champion["version"] = None
    row = check()
    assert "no champion" in module.describe(row)
    assert read_checks(SETTINGS, MODEL) == []
    assert "changed since curation: a new tool" in module.describe({**row, "environment": ["a new tool"]})
