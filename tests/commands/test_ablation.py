"""The ablation's numbers can be checked by hand, its table fits a terminal, and its figure has every shape of a run."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.commands.ablate.figure import ablation_figure, mean_curve, smoothed
from tasks.commands.ablate.table import (
    WARM_START,
    VariantRun,
    caveats,
    compare_variants,
    markdown,
    points,
    print_ablation,
)
from tasks.commands.ablate.variants import Variant
from tasks.core.console import SafeConsole
from tasks.core.settings import Paths, load, read_params
from tasks.report.drawing import apart
from tasks.stages.train.settings import TrainSections
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.report.test_figures import png_size

NAMES = ("base", "kl_0", "kl_0.04", "fixed_reference", "shaped_reward", "overlong_kept", "kl_0_overlong_kept")
SETTINGS = load(TrainSections, read_params(ROOT / "params.yaml"))
Runs = tuple[str, list[VariantRun]]  # a variant's name and its runs
REASON = "completions grew 2.1 times within 20 iterations. | Read the kept trajectories."


def one_run(
    solved: int, *, seed: int = 11, length: int = 4, stopped_at: int | None = None, snapshot: str = "iteration-0004"
) -> VariantRun:
    """A run whose last snapshot solves the first `solved` of four problems."""
    rows = [
        {"iteration": n, "success_rate": solved / 4 * n / length, "mean_sampled_tokens": 50.0 + n}
        for n in range(1, (stopped_at or length) + 1)
    ]
    alarm = {"iteration": stopped_at, "signal": "completion_length", "reason": REASON} if stopped_at else None
    played = [trajectory(f"p{number}", number < solved) for number in range(4)]
    return VariantRun(seed, rows, alarm, snapshot, played)


def variant(name: str, *runs: VariantRun) -> Runs:
    return name, list(runs)


def results_of(*variants: Runs, num_iterations: int = 4) -> dict[str, Any]:
    train = SETTINGS.train.model_copy(update={"num_iterations": num_iterations})
    settings = SETTINGS.model_copy(update={"train": train})
    changes = ["train.kl_weight: 0.001 → 0.0"]
    runs = {Variant(name, settings, [] if name == "base" else changes): mine for name, mine in variants}
    return compare_variants(runs, confidence=0.95)


def training_of(*variants: Runs) -> dict[str, list[list[dict[str, Any]]]]:
    return {name: [run.training for run in runs] for name, runs in variants}


ALL = [variant(name, one_run(number % 5, stopped_at=3 if number == 6 else None)) for number, name in enumerate(NAMES)]


def printed(results: dict[str, Any], *, width: int = 80) -> str:
    stream = io.StringIO()
    print_ablation(results, {"table": Path("artifacts/ablation/table.md")}, SafeConsole(file=stream, width=width))
    return stream.getvalue()


def test_success_is_pooled_over_seeds_and_the_difference_is_paired_by_problem():
    base, kl_0 = results_of(
        variant("base", one_run(4), one_run(2, seed=12)), variant("kl_0", one_run(1), one_run(1, seed=12))
    )["variants"]
    assert (base["result"]["success_rate"], kl_0["result"]["success_rate"]) == (0.75, 0.25)
    assert [run["success_rate"] for run in base["runs"]] == [1.0, 0.5]
    assert (kl_0["difference"]["difference"], kl_0["difference"]["num_problems"]) == (-0.5, 4)
    assert base["difference"] is None


def test_a_difference_is_taken_on_the_seeds_both_have():
    """Seed 11: 4 of 4 against 1 of 4. The base's bad seed 12 has no counterpart and must not flatter the variant."""
    _, kl_0 = results_of(variant("base", one_run(4), one_run(0, seed=12)), variant("kl_0", one_run(1)))["variants"]
    assert kl_0["difference"]["difference"] == -0.75
    _, kl_0 = results_of(variant("base", one_run(4)), variant("kl_0", one_run(1, seed=12)))["variants"]
    assert kl_0["difference"] is None


def test_differences_are_told_in_points_with_a_real_minus():
    assert points({"difference": -0.0451, "ci_low": -0.074, "ci_high": 0.0172}) == "−4.5 (−7.4, +1.7)"
    assert points({"difference": 0.0001, "ci_low": -0.0002, "ci_high": 0.01}) == "0.0 (0.0, +1.0)"
    assert points(None) == "–"


def test_the_terminal_table_fits_80_columns_and_keeps_every_variant_on_one_line():
    lines = printed(results_of(*ALL)).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert [line[:19].strip() for line in lines[2:9]] == list(NAMES)


def test_an_alarm_is_told_with_its_iteration_and_reason():
    text = " ".join(printed(results_of(*ALL)).split())
    assert "kl_0_overlong_kept, seed 11: stopped at iteration 3: completions grew 2.1 times" in text
    assert "Measured: iteration-0004." in text
    seeds = variant("kl_0", one_run(1), one_run(1, seed=12, stopped_at=2), one_run(1, seed=13))
    assert "| 1 of 3 |" in markdown(results_of(seeds))


def test_a_roll_back_is_told_although_the_run_went_on():
    run = one_run(2)
    run.training[2]["rolled_back_to"] = 1
    results = results_of(variant("base", run))
    assert results["variants"][0]["runs"][0]["rolled_back_at"] == [3]
    assert "base, seed 11: rolled back at iteration 3." in " ".join(printed(results).split())
    assert "| rolled back at iteration 3. |" in markdown(results)


def test_what_the_intervals_do_not_say_is_said():
    one, *_, six = caveats(results_of(*ALL))
    assert "--seeds 3" in one
    assert "the 6 differences are joint (each at 99.17%)" in six  # 1 − 0.05 / 6
    seeds = results_of(variant("base", one_run(4), one_run(4, seed=12)), variant("kl_0", one_run(1)))
    assert len(caveats(seeds)) == 1 and "Seeds are pooled" in caveats(seeds)[0]
    alone = results_of(variant("kl_0", one_run(1)))
    assert "--only base" in caveats(alone)[-1]


def test_a_change_that_never_came_into_play_is_told():
    same = results_of(variant("base", one_run(4)), variant("overlong_kept", one_run(4)), variant("kl_0", one_run(3)))
    assert [item["same_as"] for item in same["variants"]] == [None, "base", None]
    assert "overlong_kept trained like base, with exactly the same numbers: the change had no effect." in caveats(same)
    other_seed = results_of(variant("base", one_run(4)), variant("overlong_kept", one_run(4, seed=12)))
    assert other_seed["variants"][1]["same_as"] is None


def test_the_markdown_table_has_a_line_a_variant_and_a_line_a_run():
    text = markdown(results_of(*ALL))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (2 + len(ALL))
    assert "| kl_0 | train.kl_weight: 0.001 → 0.0 | 25.0% |" in text
    assert "iterations. \\| Read" in text  # a bar in a reason does not end its cell


def test_a_variant_that_was_never_trained_is_named_as_the_warm_start_and_has_no_difference():
    """Both sides need a trained seed among those they share: the base has seeds 11 and 12."""
    base = variant("base", one_run(4), one_run(4, seed=12))
    early = [one_run(1, seed=seed, stopped_at=2, snapshot=WARM_START) for seed in (11, 12)]
    cases = {
        "kl_0 (warm start)": (early, False),
        "kl_0 (warm start in 1 of 2 seeds)": ([early[0], one_run(1, seed=12)], True),
        "kl_0 (warm start in 1 of 3 seeds)": ([*early[:1], one_run(1, seed=13), one_run(1, seed=14)], False),
        "kl_0": ([one_run(1), one_run(1, seed=12)], True),
    }
    for name, (runs, is_compared) in cases.items():
        results = results_of(base, variant("kl_0", *runs))
        assert (results["variants"][1]["difference"] is not None) == is_compared
        assert f"| {name} | train" in markdown(results)
        told = [line for line in caveats(results) if "untrained" in line]
        assert told == [f"{name}: stopped before the first snapshot, so the untrained model was measured."] * (
            name != "kl_0"
        )
        assert name in " ".join(printed(results, width=120).split())
    of_warm_start = results_of(variant("base", early[0]), variant("kl_0", one_run(4)))
    assert of_warm_start["variants"][1]["difference"] is None


def test_the_adjusted_p_is_beside_its_difference():
    """All four problems lost is p = 2/2⁴ = 0.125 alone, and twice that as the smaller of two."""
    results = results_of(variant("base", one_run(4)), variant("kl_0", one_run(0)), variant("kl_0.04", one_run(4)))
    _, kl_0, same = results["variants"]
    assert (kl_0["difference"]["p_value"], kl_0["difference"]["p_adjusted"]) == (0.125, 0.25)
    for text, bar in ((markdown(results), " | "), (printed(results), " ")):
        rows = [" ".join(line.split()) for line in text.splitlines()]
        assert any("p, " in row and "Holm" in row for row in rows)
        assert any(f"{points(kl_0['difference'])}{bar}0.25" in row for row in rows)
        assert any(f"{points(same['difference'])}{bar}1" in row for row in rows)


def test_a_curve_is_smoothed_over_the_iterations_before():
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smoothed([1.0, 3.0], 5) == [1.0, 2.0]
    assert smoothed([1.0, None, 5.0, None, None], 2) == [1.0, 1.0, 5.0, 5.0, 5.0]  # lost their episodes


def test_a_first_iteration_that_lost_its_episodes_is_a_gap_and_no_success_of_zero():
    lost, *found = smoothed([None, 0.9, None], 1)
    assert math.isnan(lost) and found == [0.9, 0.9]
    none, first, both = mean_curve([[math.nan, math.nan, 1.0], [math.nan, 2.0, 3.0]])
    assert math.isnan(none) and (first, both) == (2.0, 2.0)


def test_the_mean_over_seeds_ends_where_the_first_of_them_was_stopped():
    assert mean_curve([[1.0, 2.0, 3.0], [3.0, 4.0]]) == [2.0, 3.0]


def test_names_that_would_overlap_are_moved_apart_both_ways():
    assert apart([0.5, 0.5], gap=0.2) == pytest.approx([0.4, 0.6])
    assert apart([1.0, 0.95], gap=0.2) == pytest.approx([1.0, 0.8])
    assert apart([0.0, 0.0, 0.7], gap=0.2) == pytest.approx([0.0, 0.2, 0.7])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_names_never_overlap_keep_their_order_and_stay_in_the_panel(heights: list[float]):
    placed = apart(heights, gap=0.1)
    order = sorted(range(len(heights)), key=lambda index: (heights[index], index))
    steps = [placed[above] - placed[below] for below, above in itertools.pairwise(order)]
    assert all(step >= 0.1 - 1e-9 for step in steps)
    assert min(placed) >= -1e-9 and max(placed) <= 1 + 1e-9


@pytest.mark.slow
def test_the_figure_grows_by_a_row_a_variant_and_a_line_a_note(tmp_path: Path):
    one, two = ALL[:1], ALL[:2]
    sizes = [
        png_size(ablation_figure(results_of(*some), training_of(*some), Paths(tmp_path), tmp_path / "ablation.png"))
        for some in (one, two, ALL)
    ]
    notes = [len(caveats(results_of(*some))) for some in (one, two, ALL)]
    assert notes == [1, 1, 3]
    assert sizes == [(2300, 200 * 7 + 34 * lines + 68 * rows) for rows, lines in zip((1, 2, 7), notes, strict=True)]


@pytest.mark.slow
def test_equal_results_are_equal_bytes(tmp_path: Path):
    files = [ablation_figure(results_of(*ALL), training_of(*ALL), Paths(tmp_path), tmp_path / name) for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_run_of_one_iteration_with_seeds_of_unequal_length_can_be_drawn(tmp_path: Path):
    seeds = [variant("base", one_run(0, length=1)), variant("kl_0", one_run(4), one_run(1, seed=12, stopped_at=1))]
    out = ablation_figure(
        results_of(*seeds, num_iterations=1), training_of(*seeds), Paths(tmp_path), tmp_path / "a.png"
    )
    assert png_size(out)[0] == 2300


@pytest.mark.slow
def test_a_panel_begins_at_the_lowest_value_that_was_measured_and_a_run_without_any_has_no_line(tmp_path: Path):
    """60% and more after a first iteration that lost its episodes; `kl_0` lost all of them and was never trained."""
    drawn: list[Any] = []
    base, other = one_run(4), one_run(4, snapshot=WARM_START)
    base.training[:] = [{"iteration": 1}, *({"iteration": n, "success_rate": 0.64} for n in (2, 3, 4))]
    other.training[:] = [{"iteration": n} for n in (1, 2, 3, 4)]
    both = [variant("base", base), variant("kl_0", other)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.commands.ablate.figure.save_png", lambda figure, out: drawn.extend(figure.axes))
        ablation_figure(results_of(*both), training_of(*both), Paths(tmp_path), tmp_path / "a.png")
    assert drawn[0].get_ylim()[0] == pytest.approx(0.6, abs=0.02)
    names = {text.get_text() for text in drawn[0].texts}
    assert "base" in names and "kl_0" not in names
    assert "warm start" in {text.get_text() for text in drawn[2].texts}
