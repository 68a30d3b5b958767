"""drift-check on episodes that are given: what it records, and what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.commands import drift_check as module
from tasks.core.files import write_text
from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths, load, read_params
from tasks.tracking import aliases
from tasks.tracking.measurements import read_checks
from tasks.tracking.versions import Version
from tests.conftest import ROOT
from tests.simulations.episodes import episodes
from tests.sums import problem
from tests.tracking.project import SETTINGS, enter_project_again

MODEL = "travel-desk-agent"


def played(share: float, *, category: str = "all", num: int = 400) -> list[Trajectory]:
    """Problems of a split group each, of which the first `share` are solved."""
    success = {f"{category}-{number}": [number < num * share] for number in range(num)}
    return episodes(success, {name: name for name in success}, category=category)


def select(**sizes: int) -> list[Problem]:
    """So many problems of each category."""
    return [
        problem(f"{category}-{number}", category=category) for category, num in sizes.items() for number in range(num)
    ]


@pytest.fixture
def champion(used_folder: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A champion that was promoted with 90%, and succeeds today as `today` says."""
    enter_project_again(used_folder, empty_database, monkeypatch)
    Path("params.yaml").write_bytes((ROOT / "infra" / "profiles" / "demo.yaml").read_bytes())
    given: dict[str, Any] = {"today": 0.9, "version": Version(MODEL, 4, "w", {})}
    monkeypatch.setattr(aliases, "current_champion", lambda registry: given["version"])
    monkeypatch.setattr(module, "promoted_episodes", lambda registry, version: played(0.9))
    write_text(Paths("artifacts").split("select"), "")
    monkeypatch.setattr(module, "read_split", lambda paths, name: select(all=400))
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
    assert module.describe(row).endswith("; `python -m flows run` retrains")
    assert "rolling back does not help" in module.describe({**row, "environment": ["a new tool"]})
    assert "rolling back" not in module.describe(row)


def test_without_a_champion_the_environment_alone_is_checked(champion: dict[str, Any]):
    champion["version"] = None
    row = check()
    assert "no champion" in module.describe(row)
    assert read_checks(SETTINGS, MODEL) == []
    assert "changed since curation: a new tool" in module.describe({**row, "environment": ["a new tool"]})


def test_a_folder_where_nothing_was_curated_is_not_said_to_be_as_curated(champion: dict[str, Any]):
    champion["version"] = None
    with pytest.raises(ValueError, match=r"environment\.json: does not exist.*tasks curate"):
        module.drift_check()
    assert not Path("artifacts/drift_check").exists()


# ---- what is compared


def test_a_new_category_is_not_compared_and_is_told(champion: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Solved at 90% as before, beside 200 problems of a category that came since, of which none would be."""
    monkeypatch.setattr(module, "read_split", lambda paths, name: select(all=400, new=200))
    chosen: list[Problem] = []

    def play(settings: Any, paths: Any, registry: Any, version: Any, problems: list[Problem], number: int) -> Any:
        chosen.extend(problems)
        return played(0.9)

    monkeypatch.setattr(module, "play_champion", play)
    row = check()
    assert {problem.category for problem in chosen} == {"all"}
    assert (row["fell"], row["not_compared"]) == (False, ["new"])
    assert module.describe(row).endswith("; new since then and not compared: new")


def test_each_category_has_the_smaller_of_its_shares_on_both_sides():
    """Then 3 of 4 problems were easy, now 1 of 4 is: of both a quarter is kept, and of the hard ones a quarter."""
    then = [*played(0.9, category="easy", num=300), *played(0.5, category="hard", num=100)]
    problems, promoted = module.of_one_mix(select(easy=50, hard=150), then)
    assert Counter(problem.category for problem in problems) == {"easy": 50, "hard": 50}
    assert Counter(episode.category for episode in promoted) == {"easy": 100, "hard": 100}
    assert [problem.id for problem in problems if problem.category == "hard"] == [f"hard-{n}" for n in range(50)]


def test_one_mix_on_both_sides_leaves_nothing_out():
    problems, then = select(easy=7, hard=3), [*played(1, category="easy", num=14), *played(1, category="hard", num=6)]
    assert module.of_one_mix(problems, then) == (problems, then)


def test_data_without_a_category_of_the_promotion_cannot_be_compared_and_the_environments_drift_is_still_told():
    assert module.of_one_mix(select(new=3), played(1)) == ([], [])
    row = {"environment": ["tool search: gone"], "champion": None, "fell": False, "not_compared": ["new"]}
    assert module.describe(row).endswith("the champion was promoted with no category of select: new")


def test_a_category_too_rare_for_one_side_is_left_out_of_both():
    """Of 4 problems then an eighth is half a one: a and b leave both sides, c has all that is left."""
    then = [item for name, num in (("a", 1), ("b", 1), ("c", 6)) for item in played(1, category=name, num=num)]
    problems, promoted = module.of_one_mix(select(a=1, b=2, c=1), then)
    assert {problem.category for problem in problems} == {item.category for item in promoted} == {"c"}
