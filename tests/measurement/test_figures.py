"""The progress chart is drawn from the stage files, in every shape a run can have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.measurement.figures import DARK, LIGHT_NARROW, Style, progress_chart, spread
from tasks.settings import Paths
from tests.measurement.synthetic import add_frontier, write_artifacts


def png_size(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_the_chart_is_a_png_of_9_by_5_inches_at_200_dots(finished_run: Paths):
    out = finished_run.artifacts / "progress.png"
    assert progress_chart(finished_run, out) == out
    assert png_size(out) == (1800, 1000)


@pytest.mark.parametrize("style", [DARK, LIGHT_NARROW], ids=["dark", "narrow"])
def test_the_report_has_renderings_for_dark_and_narrow_screens(finished_run: Paths, style: Style):
    out = progress_chart(finished_run, finished_run.artifacts / "variant.png", style=style)
    assert png_size(out) == (round(200 * style.width), round(200 * style.height))


def test_one_snapshot_and_no_training_metrics_are_enough(tmp_path: Path):
    paths = write_artifacts(tmp_path, num_snapshots=1, problems_per_type=1, promoted=None)
    (paths.stage("train") / "metrics.jsonl").unlink()
    assert png_size(progress_chart(paths, tmp_path / "progress.png")) == (1800, 1000)


def test_a_chart_before_evaluation_says_which_stage_to_run_and_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="Run `python -m tasks evaluate` first"):
        progress_chart(Paths(tmp_path), tmp_path / "progress.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rate", [0.03, 0.96])
def test_a_frontier_model_adds_a_line_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float):
    """Dashed like the other levels, named without its owner; a dollar in the name starts no formula."""
    from matplotlib.axes import Axes

    drawn: list[tuple[float, str]] = []
    named: list[str] = []
    line, annotate = Axes.axhline, Axes.annotate

    def spied_line(axes: Axes, y: float, **how: Any) -> Any:
        drawn.append((y, how["color"]))
        return line(axes, y, **how)

    def spied_name(axes: Axes, text: str, *where: Any, **how: Any) -> Any:
        named.append(text)
        return annotate(axes, text, *where, **how)

    monkeypatch.setattr(Axes, "axhline", spied_line)
    monkeypatch.setattr(Axes, "annotate", spied_name)
    paths = write_artifacts(tmp_path, problems_per_type=1)
    progress_chart(paths, tmp_path / "without.png")
    assert len(drawn) == 2 and not any("frontier" in name for name in named)
    drawn.clear()
    add_frontier(paths, rate, model="lab/cheap$model$x")
    progress_chart(paths, tmp_path / "with.png")
    assert (rate, Style().frontier) in drawn and len(drawn) == 3
    assert {"cheap$model$x", f"{rate:.1%} frontier"} <= set(named)


def test_names_of_levels_that_lie_close_are_moved_apart_upwards():
    assert spread([0.0, 0.5, 0.55], gap=0.1) == [0.0, 0.5, 0.6]
    assert spread([0.9, 0.1, 0.9], gap=0.1) == [0.9, 0.1, 1.0]


def test_measurement_imports_nothing_heavy_until_it_draws():
    code = (
        "import sys, tasks.measurement.report.build, tasks.measurement.statistics; "
        "print({'matplotlib', 'numpy', 'scipy', 'jinja2', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_matplotlib_keeps_its_font_list_inside_the_artifacts(tmp_path: Path):
    paths = write_artifacts(tmp_path / "artifacts", num_snapshots=1, problems_per_type=1)
    code = (
        "import sys; from pathlib import Path; from tasks.settings import Paths; "
        "from tasks.measurement.figures import progress_chart; "
        "progress_chart(Paths(sys.argv[1]), Path(sys.argv[1]) / 'progress.png')"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code, str(paths.artifacts)], check=True, env=environment)
    assert list(home.iterdir()) == []
