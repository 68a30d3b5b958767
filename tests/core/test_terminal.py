"""Foreign text at a terminal is seen and does nothing: escapes, brackets, marks that turn the direction of writing."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.table import Table
from rich.text import Text

from tasks.core import progress
from tasks.core.console import SafeConsole
from tasks.core.progress import progress_bar
from tasks.core.terminal import tell, warn
from tasks.core.text import counted, one_line, printable, visible
from tests.conftest import ROOT

HOSTILE = "a[/bold]b :smile: \x1b[31mred\x07\x9b2J \u202egnp.exe\u202c [link=http://x]l[/link]\r\x00"
SEEN = r"a[/bold]b :smile: \x1b[31mred\x07\x9b2J \u202egnp.exe\u202c [link=http://x]l[/link]\x0d\x00".replace(
    r"\x9b", r"\u009b"
)


def shown(what: object) -> str:
    """What a colour terminal 200 wide is sent."""
    out = io.StringIO()
    SafeConsole(file=out, width=200, force_terminal=True, color_system="standard").print(what)
    return out.getvalue()


def test_what_acts_is_shown_and_what_is_meant_stays() -> None:
    assert printable(HOSTILE + "\n") == SEEN + r"\x0a"
    assert visible("two\n\tlines, ü, 漢, 🙂 \x1b") == "two\n\tlines, ü, 漢, 🙂 \\x1b"


@pytest.mark.parametrize("kind", [str, Text], ids=["string", "Text"])
def test_neither_a_line_nor_a_cell_nor_a_heading_can_act(kind: type) -> None:
    table = Table(box=None)
    table.add_column(kind(HOSTILE))
    table.add_row(kind(HOSTILE), style="bold")
    lines = shown(kind(HOSTILE)) + shown(table)
    assert lines.count(SEEN if kind is str else SEEN[: SEEN.index(r"\x07")]) == 3  # Text itself drops some
    assert not set(lines.replace("\x1b[1m", "").replace("\x1b[0m", "")) & set("\x1b\x07\x9b\u202e\r\0")


def test_colours_of_ours_still_reach_the_terminal() -> None:
    assert "\x1b[1;32mgood\x1b[0m" in shown(Text("good", "bold green"))


def test_lines_bars_logs_and_tracebacks_show_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    tell(HOSTILE)
    warn(HOSTILE)
    with progress_bar(HOSTILE, total=1) as bar:
        bar.advance(HOSTILE)
    written = capsys.readouterr()
    assert written.out == SEEN + "\n"
    assert not set(written.out + written.err) & set("\x1b\x07\x9b\u202e\r\0")
    program = (
        "import logging, warnings; from tasks.pipeline.cli_errors import one_line_errors\n"
        "with one_line_errors(debug=True):\n"
        f"    logging.getLogger('a library').warning('said %s', {HOSTILE!r})\n"
        f"    try: raise KeyError({HOSTILE!r} + 'postgresql://me:hunter2@db/x')\n"
        "    except KeyError: logging.getLogger('a library').exception('it failed', stack_info=True)\n"
        f"    try: raise OSError({HOSTILE!r})\n"
        "    except OSError as error: logging.getLogger('a library').error('no trace', exc_info=error)\n"
        f"    raise RuntimeError({HOSTILE!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"said {SEEN}\n" in done.stderr
    assert f"RuntimeError: {SEEN}\n" in done.stderr
    assert f"OSError: {SEEN}\n" in done.stderr and "KeyError: " in done.stderr
    assert "hunter2" not in done.stderr and not set(done.stderr) & set("\x1b\x07\x9b\u202e\r\0")


def test_a_log_gets_a_line_a_minute_and_fewer_as_the_hours_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with progress_bar("train", total=2000, done=10) as bar:
        for minute in range(1, 1001):
            now = 60.0 * minute
            bar.advance("success 0.40  kl 0.001")
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines[0] == "train: 11 of 2,000 after 60 s, about 33.1 h left; success 0.40 kl 0.001"
    after = [line.split(" after ")[1].split(",")[0] for line in lines[:14]]
    assert after == ["60 s", *(f"{minutes} min" for minutes in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17))]
    assert len(lines) == 54  # 16.7 hours
    assert "1010/2000" in last


def test_a_line_has_no_more_characters_than_its_limit_and_says_that_it_was_cut() -> None:
    assert [one_line(text, 5) for text in ("abcde", "abcdef", "a\n\tb", "\x1bab", "")] == [
        "abcde", "abcd…", "a b", "\\x1b…", "",
    ]  # fmt: skip


def test_one_of_a_kind_is_named_in_the_singular() -> None:
    assert [counted(number, "snapshot") for number in (0, 1, 2, 1200)] == [
        "0 snapshots", "1 snapshot", "2 snapshots", "1,200 snapshots",
    ]  # fmt: skip
    assert [counted(number, "entry", "entries") for number in (1, 3)] == ["1 entry", "3 entries"]
