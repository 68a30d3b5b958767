"""The progress chart as a file: words stay words, the same bytes each time, nothing of a model's name is markup."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tasks.core.settings import Paths
from tasks.report.chart import progress_chart
from tests.measurement.synthetic import add_frontier, set_champion, write_artifacts

pytestmark = pytest.mark.slow
HOSTILE = 'lab/<script>$x$&"\x00\u202e'
SVG = "{http://www.w3.org/2000/svg}"


def test_an_svg_has_words_as_words_and_says_what_it_shows(small_run: Paths):
    set_champion(small_run, 0.913)
    file = progress_chart(small_run, small_run.artifacts / "progress.svg")
    root = ElementTree.parse(file).getroot()
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    named = {item.get("id"): item.text or "" for item in root}
    title, description = (named[name] for name in str(root.get("aria-labelledby")).split())
    assert title == "Success on held-out problems"
    assert "champion v3 91.3% (89.3–93.3)" in description and "iteration-00" in description
    texts = {item.text for item in root.iter(f"{SVG}text")}
    assert {"91.3% champion v3", "completion length", "100%"} <= texts


def test_an_svg_is_the_same_bytes_each_time_and_names_no_date_and_no_place_to_fetch(small_run: Paths):
    files = [progress_chart(small_run, small_run.artifacts / f"{name}.svg") for name in "ab"]
    text = files[0].read_text(encoding="utf-8")
    assert files[1].read_text(encoding="utf-8") == text
    assert "<!DOCTYPE" not in text and "<metadata" not in text and "202" not in text.partition("<desc")[0]
    assert text.count("http") == text.count("http://www.w3.org/")


def test_a_png_is_the_same_bytes_each_time(small_run: Paths):
    files = [progress_chart(small_run, small_run.artifacts / f"{name}.png") for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_models_name_is_neither_markup_nor_a_formula_and_never_breaks_the_file(small_run: Paths):
    add_frontier(small_run, model=HOSTILE)
    progress_chart(small_run, small_run.artifacts / "progress.png")
    file = progress_chart(small_run, small_run.artifacts / "progress.svg")
    root = ElementTree.parse(file).getroot()
    shown = "".join(item.text or "" for item in root.iter(f"{SVG}text"))
    assert 'Frontier: <script>$x$&"\\x00\\u202e.' in shown
    assert {item.tag for item in root.iter()} <= {f"{SVG}{tag}" for tag in TAGS}
    assert "script>" not in file.read_text(encoding="utf-8").replace("&lt;script&gt;", "")


TAGS = ("svg", "title", "desc", "defs", "style", "g", "path", "text", "use", "clipPath", "rect")


def test_measurement_imports_nothing_heavy_until_it_draws():
    code = (
        "import sys, tasks.report.build, tasks.measurement.statistics; "
        "print({'matplotlib', 'numpy', 'scipy', 'jinja2', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_matplotlib_keeps_its_font_list_inside_the_artifacts(tmp_path: Path):
    paths = write_artifacts(tmp_path / "artifacts", num_snapshots=1, problems_per_type=1)
    code = (
        "import sys; from pathlib import Path; from tasks.core.settings import Paths; "
        "from tasks.report.chart import progress_chart; "
        "progress_chart(Paths(sys.argv[1]), Path(sys.argv[1]) / 'progress.png')"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code, str(paths.artifacts)], check=True, env=environment)
    assert list(home.iterdir()) == []
