"""The progress chart is drawn from the stage files, in every shape a run can have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.settings import Paths
from tasks.report.chart import draw_progress, progress_chart
from tasks.report.chart_levels import lanes
from tasks.report.chart_panels import ends, highest_shown, rolling_median, round_up
from tasks.report.drawing import DARK, LIGHT, LIGHT_NARROW, Style, apart, drawing, spread
from tasks.report.results import optimizer_steps, read_results, read_training
from tests.measurement.synthetic import add_frontier, set_champion, write_artifacts

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


def png_size(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def drawn(paths: Paths, style: Style = LIGHT) -> Figure:
    with drawing(paths):
        return draw_progress(read_results(paths), style)


def words(figure: Any) -> set[str]:
    """Every text of the figure, its legend's and axes' included."""
    from matplotlib.text import Text

    return {item.get_text() for item in figure.findobj(Text)} - {""}


def levels(axes: Any) -> dict[str, float]:
    """The rate by colour of every level: lines of two points at one height that start at step 0."""
    found = {}
    for line in axes.get_lines():
        (xs, ys) = (list(values) for values in line.get_data())
        if len(xs) == 2 and xs[0] == 0 and ys[0] == ys[1]:
            found[str(line.get_color())] = float(ys[0])
    return found


def with_color(axes: Any, color: str, *, least: int = 2) -> list[tuple[list[float], list[float]]]:
    """The points of each line of that colour, of `least` points or more."""
    lines = [line for line in axes.get_lines() if line.get_color() == color]
    points = [tuple([float(value) for value in values] for values in line.get_data()) for line in lines]
    return [(xs, ys) for xs, ys in points if len(xs) >= least]


def change_training(paths: Paths, change: Callable[[Row], Row]) -> None:
    write_jsonl(paths.stage("train") / "metrics.jsonl", [change(row) for row in read_training(paths)])


def drop(paths: Paths, *names: str) -> None:
    file = paths.stage("evaluate") / "evaluation.json"
    write_json(file, {**read_json(file), "racing": {"rounds": [], "dropped": {name: {} for name in names}}})


def test_the_chart_is_a_png_9_inches_wide_at_200_dots_with_four_panels_on_training_below(small_run: Paths):
    out = small_run.artifacts / "progress.png"
    assert progress_chart(small_run, out) == out
    width, height = png_size(out)
    assert width == 1800 and height > 1500
    main, *below = drawn(small_run).axes
    assert len(below) == 4
    assert {axes.get_xlim() for axes in below} == {main.get_xlim()}


@pytest.mark.parametrize("style", [DARK, LIGHT_NARROW], ids=["dark", "narrow"])
def test_the_report_has_renderings_for_dark_and_narrow_screens(small_run: Paths, style: Style):
    out = progress_chart(small_run, small_run.artifacts / "variant.png", style=style)
    assert png_size(out)[0] == round(200 * style.width)


def test_snapshots_lie_at_their_optimizer_steps_with_their_rates_and_intervals(small_run: Paths):
    """Two steps an iteration: iteration-0010 lies at 20."""
    select = read_results(small_run).evaluation["select"]
    main = drawn(small_run).axes[0]
    [(xs, rates)] = with_color(main, LIGHT.curve)
    assert xs == [20, 40, 60, 80, 100, 120, 140, 160]
    assert rates == [select[name]["success_rate"] for name in sorted(select)]
    shapes: list[Any] = [item.get_paths()[0].vertices for item in main.collections]
    [band] = [vertices for vertices in shapes if len(vertices) > 8]
    heights = {round(float(y), 6) for _, y in band}
    assert {round(select[name][end], 6) for name in select for end in ("ci_low", "ci_high")} <= heights
    assert "optimizer steps (160 in 80 iterations)" in words(main.figure)


def test_an_iteration_without_signal_takes_no_step_and_the_axis_knows(tmp_path: Path):
    """Every second iteration takes its two steps: 20 iterations are 20 steps, iteration-0010 lies at 10."""
    paths = write_artifacts(tmp_path, num_snapshots=2, problems_per_type=1)
    change_training(paths, lambda row: {**row, "optimizer_steps": row["iteration"] // 2 * 2})
    main = drawn(paths).axes[0]
    assert with_color(main, LIGHT.curve)[0][0] == [10, 20]
    assert "optimizer steps (20 in 20 iterations)" in words(main.figure)


def test_a_lost_iteration_is_a_gap_in_the_line_of_the_batches_and_no_fall_to_zero(tmp_path: Path):
    paths = write_artifacts(tmp_path, num_snapshots=2, problems_per_type=1)
    of_episodes = {"success_rate", "mean_reward", "entropy", "mean_sampled_tokens", "informative_group_share"}
    change_training(
        paths, lambda row: {key: row[key] for key in row if row["iteration"] != 7 or key not in of_episodes}
    )
    lines: list[Any] = [line.get_ydata() for line in drawn(paths).axes[0].get_lines()]
    rates = next(line for line in lines if len(line) == 20)
    assert [number for number, rate in enumerate(rates, start=1) if math.isnan(rate)] == [7]


def test_where_steps_are_not_known_the_axis_counts_iterations():
    rows = [{"iteration": 1, "optimizer_steps": 2}, {"iteration": 2, "optimizer_steps": 4}]
    assert optimizer_steps(rows, ["iteration-0001", "iteration-0002"]) == {1: 2, 2: 4}
    assert optimizer_steps(rows, ["iteration-0003"]) is None
    assert optimizer_steps([{"iteration": 1}], ["iteration-0001"]) is None
    assert optimizer_steps([], ["iteration-0001"]) is None


def test_one_snapshot_and_no_training_metrics_are_enough(tmp_path: Path):
    paths = write_artifacts(tmp_path, num_snapshots=1, problems_per_type=1, promoted=None)
    (paths.stage("train") / "metrics.jsonl").unlink()
    figure = drawn(paths)
    assert len(figure.axes) == 1
    assert "iteration" in words(figure) and "training batches" not in words(figure)
    assert png_size(progress_chart(paths, tmp_path / "progress.png"))[0] == 1800


def test_a_chart_before_evaluation_says_which_stage_to_run_and_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Run `dvc repro` first.*`python -m tasks evaluate` alone"):
        progress_chart(Paths(tmp_path), tmp_path / "progress.png")
    assert list(tmp_path.iterdir()) == []


def test_base_and_warm_start_are_dashed_levels_and_nobody_else_unless_measured(small_run: Paths):
    test = read_results(small_run).test
    expected = {LIGHT.base: test["base"]["success_rate"], LIGHT.warm_start: test["warm_start"]["success_rate"]}
    figure = drawn(small_run)
    assert levels(figure.axes[0]) == expected
    assert not any("champion" in text or "rontier" in text for text in words(figure))


def test_the_champion_that_reigned_adds_a_level_with_its_version(small_run: Paths):
    set_champion(small_run, 0.913)
    figure = drawn(small_run)
    assert levels(figure.axes[0])[LIGHT.champion] == 0.913
    assert {"91.3% champion v3", "89.3–93.3"} <= words(figure)


def test_a_champion_with_the_challengers_own_weights_adds_none(small_run: Paths):
    """Promoting the champion again compares nothing."""
    set_champion(small_run, 0.9)
    file = small_run.stage("promote") / "decision.json"
    write_json(file, {**read_json(file), "comparison": None})
    assert LIGHT.champion not in levels(drawn(small_run).axes[0])


@pytest.mark.parametrize("rate", [0.03, 0.96])
def test_a_frontier_model_adds_a_level_and_is_named_in_the_sentence(small_run: Paths, rate: float):
    add_frontier(small_run, rate, model="lab/cheap$model$x")
    figure = drawn(small_run)
    assert levels(figure.axes[0])[LIGHT.frontier] == rate
    assert f"{rate:.1%} frontier" in words(figure)
    assert any("Frontier: cheap$model$x." in text for text in words(figure))


def test_snapshots_dropped_by_racing_are_lighter_and_the_legend_says_so(small_run: Paths):
    drop(small_run, "iteration-0010", "iteration-0020", "iteration-0040")
    figure = drawn(small_run)
    main = figure.axes[0]
    assert [xs for xs, _ in with_color(main, LIGHT.curve, least=1)] == [[60], [100, 120, 140, 160]]
    [(light, _)] = with_color(main, LIGHT.light_curve)
    assert light == [20, 40, 60, 80, 100, 120, 140, 160]
    assert "dropped early, on fewer problems" in words(figure)


def test_without_racing_nothing_is_light(small_run: Paths):
    figure = drawn(small_run)
    assert with_color(figure.axes[0], LIGHT.light_curve) == []
    assert not any("dropped" in text for text in words(figure))


def test_panels_show_length_entropy_kl_and_signal_against_the_same_steps(small_run: Paths):
    rows = read_training(small_run)
    figure = drawn(small_run)
    for axes, key in zip(
        figure.axes[1:], ("mean_sampled_tokens", "entropy", "kl", "informative_group_share"), strict=True
    ):
        xs, values = next(points for points in with_color(axes, LIGHT.muted) if len(points[0]) == len(rows))
        assert xs == [row["optimizer_steps"] for row in rows]
        assert values == [row[key] for row in rows]
    assert {"completion length", "entropy", "KL from reference", "groups with signal"} <= words(figure)
    assert "Training: each iteration, and the median of the last 8" in words(figure)


def test_an_environment_called_as_a_metric_is_shows_its_own_success(small_run: Paths):
    change_training(small_run, lambda row: {**row, "success_by_environment": {"entropy": 0.75, "bfcl": 0.25}})
    *_, bfcl, entropy = drawn(small_run).axes
    for axes, rate in ((bfcl, 0.25), (entropy, 0.75)):
        assert {value for _, values in with_color(axes, LIGHT.muted) if len(values) == 80 for value in values} == {rate}


def test_kl_of_zero_throughout_is_said_and_a_metric_nobody_kept_has_no_panel(small_run: Paths):
    change_training(small_run, lambda row: {**{k: v for k, v in row.items() if k != "entropy"}, "kl": 0.0})
    figure = drawn(small_run)
    assert len(figure.axes) == 4
    assert "0 throughout" in words(figure) and "entropy" not in words(figure)


def test_iterations_that_took_no_step_have_no_kl_and_leave_a_gap(small_run: Paths):
    change_training(small_run, lambda row: {**row, "kl": None if row["iteration"] in (3, 4) else 0.02})
    axes = drawn(small_run).axes[3]
    values = next(ys for xs, ys in with_color(axes, LIGHT.muted) if len(xs) == 80)
    assert [number for number, value in enumerate(values, 1) if value != value] == [3, 4]


def test_a_spike_is_cut_off_at_the_edge_and_its_height_written_there(small_run: Paths):
    change_training(small_run, lambda row: {**row, "kl": 7.5 if row["iteration"] == 30 else 0.01})
    axes = drawn(small_run).axes[3]
    assert axes.get_ylim()[1] == pytest.approx(0.0104)
    assert "7.5" in {text.get_text() for text in axes.texts}
    assert [xs for xs, _ in with_color(axes, LIGHT.curve, least=1)][-1] == [60]


def test_where_the_sentinel_rolled_back_a_line_runs_through_every_panel(small_run: Paths):
    change_training(
        small_run, lambda row: row | ({"alarm": "kl", "rolled_back_to": 20} if row["iteration"] == 25 else {})
    )
    figure = drawn(small_run)
    assert all(any(xs == [50, 50] for xs, _ in with_color(axes, LIGHT.muted)) for axes in figure.axes)
    assert "rolled back" in words(figure)


@pytest.mark.parametrize("style", [LIGHT, LIGHT_NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("num_snapshots", [1, 64])
def test_no_words_overlap_or_leave_the_picture_however_close_the_results(
    tmp_path: Path, style: Style, num_snapshots: int
):
    paths = write_artifacts(tmp_path, num_snapshots=num_snapshots, problems_per_type=1)
    add_frontier(paths, read_results(paths).test["best"]["success_rate"], model="lab/a-model-with-a-name-that-is-long")
    set_champion(paths, read_results(paths).test["best"]["success_rate"] - 0.01, version=1234)
    drop(paths, *[f"iteration-{10 * number:04d}" for number in range(2, num_snapshots // 2)])
    figure = drawn(paths, style)
    boxes = {text: box for text, box in _boxes(figure).items() if box.width > 0}
    dots = 200
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.x1 <= style.width * dots, text
        assert box.y0 >= 0 and box.y1 <= figure.get_figheight() * dots, text
    clashes = [(a, b) for a in boxes for b in boxes if a < b and boxes[a].overlaps(boxes[b])]
    assert clashes == []


def _boxes(figure: Figure) -> dict[tuple[str, int], Any]:
    """Where each text lies, in dots; axis labels are placed by drawing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [item for item in figure.findobj(Text) if item.get_text() and item.get_visible()]
    return {(item.get_text(), number): item.get_window_extent() for number, item in enumerate(texts)}


@pytest.mark.parametrize(
    ("reward", "labels"),
    [
        (lambda rate: rate / 2, ["0", "1"]),  # success, dashed beside it, ends at 1
        (lambda rate: 4 * rate - 6, ["", "−5", "1"]),
        (lambda rate: -4 + 6 * rate, ["0", "−2", "2"]),
        (lambda rate: 1e8 * (rate - 2), ["0", "−2e+08"]),
        (lambda rate: 1e-9 * (rate - 1), ["0", "1"]),
    ],
    ids=["positive", "negative", "mixed", "huge", "tiny"],
)
@pytest.mark.parametrize("style", [LIGHT, LIGHT_NARROW], ids=["wide", "narrow"])
def test_the_panel_of_the_reward_has_a_scale_whatever_its_sign(
    small_run: Paths, style: Style, reward: Callable[[float], float], labels: list[str]
):
    """Success is from 0.3 to 0.95 or so."""
    change_training(small_run, lambda row: {**row, "mean_reward": reward(row["success_rate"])})
    figure = drawn(small_run, style)
    panel = figure.axes[1]
    assert [text.get_text() for text in panel.get_yticklabels()] == labels
    values = [reward(row["success_rate"]) for row in read_training(small_run)]
    low, top = panel.get_ylim()
    assert low < min(values) and max(values) < top
    boxes = {text: box for text, box in _boxes(figure).items() if box.width > 0}
    assert min(box.x0 for box in boxes.values()) >= 0
    assert [(a, b) for a in boxes for b in boxes if a < b and boxes[a].overlaps(boxes[b])] == []


def test_names_of_levels_that_lie_close_are_moved_apart_upwards():
    assert spread([0.0, 0.5, 0.55], gap=0.1) == [0.0, 0.5, 0.6]
    assert spread([0.9, 0.1, 0.9], gap=0.1) == [0.9, 0.1, 1.0]


def test_names_near_the_top_are_moved_down():
    assert apart([0.99, 0.98, 0.0], gap=0.1) == pytest.approx([1.0, 0.9, 0.0])


def test_whiskers_that_would_hide_one_another_stand_side_by_side():
    assert lanes([(0.9, 1.0), (0.0, 0.1), (0.95, 0.97), (0.05, 0.5), (0.2, 0.3)]) == [0, 0, 1, 1, 0]


def test_the_strong_line_is_the_median_of_the_last_values_once_half_of_them_are_there():
    medians = rolling_median([5.0, 1.0, 3.0, float("nan"), 9.0], window=3)
    assert medians[0] != medians[0]
    assert medians[1:] == [3.0, 3.0, 2.0, 6.0]


def test_a_panel_ends_at_a_round_number_and_leaves_out_lone_spikes_only():
    assert [round_up(value) for value in (0, 83, 0.126, 100, 0.0009)] == [1, 85, 0.15, 100, 0.0009]
    assert [ends(-0.126, 0.3), ends(-83, -2), ends(0.2, 0.3)] == [(-0.2, 0.3), (-90, 0), (0, 0.3)]
    assert highest_shown([1.0] * 99 + [9.0]) == 1.0
    assert highest_shown([1.0] * 99 + [1.9]) == 1.9
    assert highest_shown([1.0] * 9 + [9.0]) == 9.0
