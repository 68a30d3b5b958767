"""A fork server runs a command as a new process would, ends with whoever asked, and refuses what it would change."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.core.fork_request import HEADER_BYTES, IS_FORK, REFUSED, STREAMS, differs
from tasks.core.forked import VARIABLE
from tests.conftest import ROOT

RECIPE = "def load(command):\n    import decimal, tasks.core.text\n    yield\n    return command[0] != 'unsuited'\n"
# Tells what it is, then does what its argument says.
SHOW = """
import json, os, signal, subprocess, sys, time
def end(number, _):
    os.write(1, f"cleaned up{os.linesep}".encode())  # the print below may be at work
    raise SystemExit(7)
signal.signal(signal.SIGTERM, end)
print(json.dumps({
    "is_fork": os.environ.get("TURNWISE_FORK") == str(os.getpid()), "pid": os.getpid(), "arguments": sys.argv[1:],
    "folder": os.getcwd(), "spoken": os.environ.get("SPOKEN"), "session": os.getsid(0) == os.getpid(),
    "loaded": "decimal" in sys.modules, "ours": [name for name in sys.modules if name.startswith("tasks")],
    "name": __name__, "path": sys.path[0], "hash": os.environ.get("PYTHONHASHSEED"), "input": sys.stdin.read(),
    "ignores_hangup": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "umask": os.umask(0o77),
}), flush=True)
print("to standard error", file=sys.stderr)
match sys.argv[1:]:
    case ["status", number]: sys.exit(int(number))
    case ["signal", number]: os.kill(os.getpid(), int(number))
    case ["fails"]: raise KeyError("a key")
    case ["wait"]: time.sleep(60)
    case ["leaves"]: print(subprocess.Popen(["sleep", "60"]).pid)
"""


# A server that is slow to look after its forks while a library is loaded, as on a busy machine. Tells how many looks
# there were at once, and whether the lock on imports was left held, which every fork would have for good.
BUSY = """
import _imp, importlib, json, socket, sys, time
from tasks.core import fork_server
told = {"looks": 0, "at_once": 0, "most_at_once": 0}
class Busy(fork_server.Server):
    def _attend(self, seconds):
        told["looks"] += 1
        told["at_once"] += 1
        told["most_at_once"] = max(told["most_at_once"], told["at_once"])
        end = time.monotonic() + 2.5 * fork_server.LOOK_SECONDS
        while time.monotonic() < end:
            pass
        super()._attend(seconds)
        told["at_once"] -= 1
class Recipe:
    def load(self, command):
        end = time.monotonic() + 2
        while time.monotonic() < end:
            sys.modules.pop("colorsys", None)
            importlib.import_module("colorsys")
        yield
        return True
told["suits"] = Busy(socket.socket(), Recipe(), [])._load(["show"])
print(json.dumps({**told, "is_held": _imp.lock_held()}))
"""
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Bench:
    """A folder with a server, its recipe and the module that it runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "recipe.py").write_text(RECIPE)
        for name in ("show", "unsuited"):
            (folder / f"{name}.py").write_text(SHOW)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNWISE_")}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), VARIABLE: str(folder / "s")}
        self.askers: list[subprocess.Popen[str]] = []
        self.server: subprocess.Popen[str] | None = None

    def load_by(self, *steps: str, before: str = "") -> None:
        """Another recipe: what it does as it is imported, and the lines of `load` before its one step."""
        body = "".join(f"    {step}\n" for step in steps)
        (self.folder / "recipe.py").write_text(f"{before}\ndef load(command):\n{body}    yield\n    return True\n")

    def serve(self, log: int | None = None) -> subprocess.Popen[str]:
        written = (self.folder / "log").open("w")
        with written, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.environment[VARIABLE])
            listener.listen()
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tasks.core.fork_server", str(listener.fileno()), "recipe", "show soon"],
                pass_fds=[listener.fileno()], cwd=self.folder, env={**self.environment, "PYTHONHASHSEED": "0"},
                stdout=written if log is None else log, text=True,
            )  # fmt: skip
        return self.server

    def told(self) -> list[str]:
        """The lines of the server's log, without the numbers of processes."""
        return [line.rstrip("0123456789 ") for line in (self.folder / "log").read_text().splitlines()]

    def ask(self, *command: str, **changed: Any) -> subprocess.Popen[str]:
        options: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL, **changed}
        asker = subprocess.Popen(
            [sys.executable, "-m", "tasks.core.forked", *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        self.askers.append(asker)
        return asker

    def run(self, *command: str, **changed: Any) -> tuple[int, dict[str, Any], str]:
        """Status, what it told, and the rest of what it wrote."""
        asker = self.ask(*command, **changed)
        output, errors = asker.communicate(timeout=60)
        first, _, rest = output.partition("\n")
        return asker.returncode, json.loads(first), rest + errors

    def start(self, *command: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """One that is at work, and what it told."""
        asker = self.ask(*command)
        assert asker.stdout is not None
        return asker, json.loads(asker.stdout.readline())

    def close(self) -> None:
        for process in (*self.askers, *([self.server] if self.server else [])):
            process.kill()
            process.communicate()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path)) as made:
        yield made


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_fork_is_what_a_new_process_would_be_with_the_libraries_loaded(bench: Bench):
    bench.serve()
    folder = bench.folder / "elsewhere"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW.replace("to standard error", "the source of this folder"))
    status, told, rest = bench.run(
        "show", "a b", "--c", cwd=folder, env={**bench.environment, "TURNWISE_SPOKEN": "x", "DVC_STAGE": "train"}
    )
    assert status == 0
    assert rest == "the source of this folder\n"
    assert told["is_fork"] and told["loaded"] and told["session"] and told["ours"] == []
    assert (told["arguments"], told["folder"], told["path"]) == (["a b", "--c"], str(folder), str(folder))
    assert (told["name"], told["hash"], told["input"]) == ("__main__", "0", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "end"),
    [
        (["status", "3"], 3, ""),
        (["signal", "9"], -9, ""),
        (["signal", "11"], -11, ""),
        (["fails"], 1, "KeyError: 'a key'"),
    ],
)
def test_the_asker_ends_as_its_fork_did(bench: Bench, command: list[str], status: int, end: str):
    bench.serve()
    ended, told, rest = bench.run("show", *command)
    assert told["is_fork"]
    assert ended == status
    assert end in rest


def test_what_the_asker_is_told_to_do_its_fork_does(bench: Bench):
    bench.serve()
    asker, told = bench.start("show", "wait")
    asker.terminate()
    output, _ = asker.communicate(timeout=20)
    assert (output, asker.returncode) == ("cleaned up\n", 7)
    assert is_gone(told["pid"])


@pytest.mark.slow
def test_a_signal_that_the_asker_ignores_its_fork_ignores(bench: Bench):
    bench.serve()
    _, told, _ = bench.run("show", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert told["is_fork"] and told["ignores_hangup"]
    assert not bench.run("show")[1]["ignores_hangup"]


@pytest.mark.slow
def test_a_fork_ends_with_its_asker_and_with_its_server(bench: Bench):
    server = bench.serve()
    asker, told = bench.start("show", "wait")
    asker.kill()
    wait_for(lambda: is_gone(told["pid"]))
    asker, told = bench.start("show", "wait")
    server.kill()
    assert asker.wait(timeout=20) == -signal.SIGKILL
    wait_for(lambda: is_gone(told["pid"]))


@pytest.mark.slow
def test_what_a_fork_leaves_behind_ends_before_its_asker(bench: Bench):
    bench.serve()
    status, told, rest = bench.run("show", "leaves")
    assert status == 0 and told["is_fork"]
    assert is_gone(int(rest.splitlines()[0]))


@pytest.mark.slow
def test_a_server_that_is_told_to_end_ends_after_its_last_fork(bench: Bench):
    server = bench.serve()
    asker, _ = bench.start("show", "wait")
    server.terminate()
    time.sleep(0.3)
    assert server.poll() is None
    assert not bench.run("show")[1]["is_fork"]  # nothing new is begun
    asker.terminate()
    assert asker.wait(timeout=20) == 7
    assert server.wait(timeout=20) == 0


@pytest.mark.slow
def test_what_an_asker_is_told_its_fork_does_at_once_though_the_server_loads_a_library(bench: Bench):
    bench.load_by(
        "if command == ['show', 'slow']:",
        "    pathlib.Path('is_loading').touch()",
        "    time.sleep(60)",
        before="import pathlib, time",
    )
    server = bench.serve()
    told_to_end, killed, left = (bench.start("show", "wait") for _ in range(3))
    slow = bench.ask("show", "slow")
    wait_for((bench.folder / "is_loading").exists)
    told_to_end[0].terminate()
    assert told_to_end[0].communicate(timeout=20)[0] == "cleaned up\n"
    assert told_to_end[0].returncode == 7
    killed[0].kill()
    wait_for(lambda: not psutil.pid_exists(killed[1]["pid"]))
    server.terminate()
    time.sleep(0.3)
    assert server.poll() is None
    left[0].terminate()
    assert left[0].wait(timeout=20) == 7
    assert server.wait(timeout=20) == 0
    assert slow.wait(timeout=20) == 0  # in the usual way


@pytest.mark.slow
def test_who_asks_waits_for_one_library_of_those_that_are_loaded_ahead(bench: Bench):
    (bench.folder / "recipe.py").write_text(
        "import pathlib, time\n"
        "def load(command):\n"
        "    for number in range(100 if command == ['show', 'soon'] else 0):\n"
        "        pathlib.Path(f'library-{number}').touch()\n"
        "        time.sleep(0.3)\n"
        "        yield\n"
        "    return True\n"
    )
    bench.serve()
    wait_for((bench.folder / "library-1").exists)
    assert bench.run("show")[1]["is_fork"]
    assert not (bench.folder / "library-99").exists()
    wait_for((bench.folder / f"library-{len(list(bench.folder.glob('library-*')))}").exists)  # it goes on


@pytest.mark.slow
def test_an_asker_that_is_told_to_end_while_it_waits_for_a_library_ends_by_it(bench: Bench):
    """The fork begins at that moment: before it obeys as its command would, nobody is told that there is one."""
    of_some_milliseconds = "memory = bytearray(100 << 20)\nfor place in range(0, len(memory), 4096): memory[place] = 1"
    bench.load_by(
        "pathlib.Path('is_loading').touch()",
        "time.sleep(0.05)",
        before=f"import pathlib, time\n{of_some_milliseconds}",  # a fork
    )
    (bench.folder / "plain.py").write_text("import sys, time\ntime.sleep(0.3)\nsys.exit(3)\n")
    bench.serve()
    for number in range(15):
        asker = bench.ask("plain")
        wait_for((bench.folder / "is_loading").exists)
        time.sleep(0.004 * number)
        asker.terminate()
        assert asker.wait(timeout=20) == -signal.SIGTERM
        (bench.folder / "is_loading").unlink()


@pytest.mark.slow
def test_a_command_that_a_fork_ran_is_not_started_again_whatever_the_asker_is_told_late(bench: Bench):
    (bench.folder / "plain.py").write_text(
        "import sys, time\nopen('runs', 'a').write('x')\nprint('at work', flush=True)\ntime.sleep(0.5)\nsys.exit(3)\n"
    )
    bench.serve()
    asker = bench.ask("plain")
    assert asker.stdout is not None
    asker.stdout.readline()
    asker.send_signal(signal.SIGSTOP)  # as where the machine has no time for it
    time.sleep(1.5)
    asker.terminate()
    asker.send_signal(signal.SIGCONT)
    assert asker.wait(timeout=20) == 3
    killed = bench.ask("plain")
    assert killed.stdout is not None
    killed.stdout.readline()
    assert bench.server is not None
    killed.send_signal(signal.SIGSTOP)
    bench.server.kill()
    killed.terminate()
    killed.send_signal(signal.SIGCONT)
    assert killed.wait(timeout=20) == -signal.SIGKILL
    assert (bench.folder / "runs").read_text() == "xx"


@pytest.mark.slow
def test_a_fork_that_cannot_become_its_command_ends_and_the_command_starts_otherwise(bench: Bench):
    bench.load_by(
        "__main__.become = fail",
        before="import __main__\ndef fail(*_):\n    raise OSError(28, 'No space left on device')",
    )
    server = bench.serve()
    for _ in range(2):
        assert not bench.run("show")[1]["is_fork"]
    wait_for(lambda: psutil.Process(server.pid).children() == [])
    assert bench.told() == ["show: process", "show: process"]


@pytest.mark.slow
def test_a_zombie_that_nobody_waits_for_keeps_no_asker(bench: Bench):
    """As in a container whose first process waits for none; here the one that has the server as its child."""
    (bench.folder / "leaves.py").write_text("import subprocess\nsubprocess.Popen(['sleep', '0.2'])\n")
    adopting = (
        "import ctypes, subprocess, sys, time\n"
        f"ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0)\n"
        "server = subprocess.Popen(sys.argv[2:], pass_fds=[int(sys.argv[1])])\n"
        "time.sleep(60)\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(bench.environment[VARIABLE])
        listener.listen()
        number = str(listener.fileno())
        command = [sys.executable, "-m", "tasks.core.fork_server", number, "recipe"]
        bench.server = subprocess.Popen(
            [sys.executable, "-c", adopting, number, *command],
            pass_fds=[listener.fileno()], cwd=bench.folder, env={**bench.environment, "PYTHONHASHSEED": "0"}, text=True,
        )  # fmt: skip
    assert bench.ask("leaves").wait(timeout=20) == 0
    (left,) = (process for process in psutil.Process(bench.server.pid).children() if process.status() == "zombie")
    assert left.name() == "sleep"
    for process in psutil.Process(bench.server.pid).children():
        process.kill()


@pytest.mark.slow
def test_a_log_that_takes_no_line_ends_no_fork(bench: Bench):
    reader, writer = os.pipe()
    bench.serve(log=writer)
    os.close(writer)
    at_work, _ = bench.start("show", "wait")
    os.close(reader)
    assert bench.run("show")[1]["is_fork"]
    assert at_work.poll() is None
    at_work.terminate()
    assert at_work.wait(timeout=20) == 7


@pytest.mark.slow
def test_a_thread_of_a_library_is_seen_after_the_first_fork_too(bench: Bench):
    """OpenBLAS ends its own threads before a fork, and starts them again only where they are used."""
    bench.load_by(
        "import numpy, scipy.linalg",
        "if command[1:] == ['late']:",
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()",
        before="import threading",
    )
    bench.environment["OPENBLAS_NUM_THREADS"] = "2"
    bench.serve()
    assert [bench.run("show", *late)[1]["is_fork"] for late in ([], [], ["late"], [])] == [True, True, False, False]


@pytest.mark.slow
def test_looks_at_the_forks_follow_one_another_and_leave_no_import_half_done(bench: Bench):
    done = subprocess.run(
        [sys.executable, "-c", BUSY], cwd=bench.folder, env=bench.environment, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told.pop("looks") > 5
    assert told == {"at_once": 0, "most_at_once": 1, "suits": True, "is_held": False}


@pytest.mark.slow
def test_whom_no_fork_suits_starts_in_the_usual_way(bench: Bench):
    status, told, _ = bench.run("show", "status", "3")
    assert (status, told["is_fork"]) == (3, False)  # no server
    bench.serve()
    assert bench.run("show")[1]["is_fork"]
    assert not bench.run("unsuited")[1]["is_fork"]
    changed = {"HF_HOME": "/elsewhere", "OMP_NUM_THREADS": "7"}
    assert not bench.run("show", env={**bench.environment, **changed})[1]["is_fork"]
    assert bench.told() == [
        "show: process",
        "unsuited: refused: what is loaded does not suit it",
        "show: refused: another value of HF_HOME, OMP_NUM_THREADS",
    ]


@pytest.mark.slow
def test_a_server_with_a_thread_of_its_own_forks_nothing(bench: Bench):
    (bench.folder / "recipe.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + RECIPE
    )
    bench.serve()
    assert not bench.run("show")[1]["is_fork"]
    assert bench.told() == ["show: refused: a library has started a thread"]


def test_noise_on_the_socket_ends_nothing(bench: Bench):
    bench.serve()
    whole = {"command": ["show"], "environment": {}, "folder": "/", "umask": 0, "ignored": []}
    shapes = ([], 7, {}, {"command": ["show"]}, *({**whole, name: 7.5} for name in whole), {**whole, "command": []})
    texts = [b"nope", *(json.dumps(shape).encode() for shape in shapes)]
    requests = [len(text).to_bytes(HEADER_BYTES, "big") + text for text in texts]
    for noise in (b"", b"\0\0\0\0\0\0\0\4nope", b"\xff" * 8, *requests):
        for has_streams in (False, bool(noise)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(bench.environment[VARIABLE])
                socket.send_fds(connection, [noise], STREAMS) if has_streams else connection.sendall(noise)
    assert bench.run("show")[1]["is_fork"]


@pytest.mark.slow
def test_an_asker_whose_folder_is_gone_is_refused_and_ends_nothing(bench: Bench):
    bench.serve()
    gone = str(bench.folder / "gone")
    text = json.dumps(
        {"command": ["show"], "environment": bench.environment, "folder": gone, "umask": 0, "ignored": []}
    ).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(bench.environment[VARIABLE])
        socket.send_fds(connection, [len(text).to_bytes(HEADER_BYTES, "big") + text], STREAMS)
        assert connection.makefile("r").read() == f"{REFUSED}\n"
    assert bench.run("show")[1]["is_fork"]
    assert bench.told() == [f"show: refused: No such file or directory ({gone})", "show: process"]


@pytest.mark.slow
def test_a_fork_that_asks_does_not_fork_itself_again_and_what_it_starts_may_ask(bench: Bench):
    (bench.folder / "again.py").write_text(
        "import subprocess, sys\n"
        "from tasks.core.forked import run_forked\n"
        "run_forked(['again'])\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'tasks.core.forked', 'show', 'status', '4']).returncode)\n"
    )
    bench.serve()
    status, told, _ = bench.run("again")
    assert status == 4 and told["is_fork"]


@pytest.mark.slow
def test_what_a_library_does_at_an_exit_our_forks_do_too(bench: Bench):
    bench.load_by("atexit.register(print, 'a library at its exit')", before="import atexit")
    bench.serve()
    output, errors = bench.ask("tasks", "--help").communicate(timeout=60)
    assert "Usage:" in output and errors == ""
    assert "a library at its exit" in output


@pytest.mark.slow
def test_our_command_line_asks_a_server_and_imports_nothing_for_it_where_there_is_none(bench: Bench):
    bench.load_by("atexit.register(print, 'forked')", before="import atexit")
    bench.serve()
    command = [sys.executable, "-X", "importtime", "-m", "tasks", "--help"]
    for environment, is_forked in (
        (bench.environment, True),
        ({name: value for name, value in bench.environment.items() if name != VARIABLE}, False),
    ):
        done = subprocess.run(
            command, cwd=bench.folder, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert "Usage:" in done.stdout
        assert ("forked" in done.stdout, "tasks.core.forked" in done.stderr) == (is_forked, is_forked)


def test_only_what_no_library_reads_may_differ():
    ours = {"PATH": "/bin", "HF_HOME": "/h", "LANG": "C"}
    of_mlflow = {"MLFLOW_RUN_ID": "a", "_MLFLOW_TELEMETRY_SESSION_ID": "b"}
    free = {"PATH": "/usr/bin", IS_FORK: "1", "HOME": "/root", **of_mlflow}
    assert differs(ours, {**ours, **free}) == set()
    assert differs(ours, {"PATH": "/bin", "LANG": "de", "CUDA_VISIBLE_DEVICES": ""}) == {
        "HF_HOME", "LANG", "CUDA_VISIBLE_DEVICES"
    }  # fmt: skip
