"""infra/docker: a linted Dockerfile that code changes do not set up again, and entry points that show no secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tests.conftest import ROOT
from tests.contracts.test_layout import files_of_the_project

DOCKER = ROOT / "infra" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
PROGRAMS = Path(sys.executable).parent


def scripts() -> list[Path]:
    """Every shell script of the project, whatever its name."""
    files = [file for file in files_of_the_project() if file.suffix in (".sh", "")]
    return [
        file for file in files if file.suffix == ".sh" or (ROOT / file).read_bytes().startswith(b"#!/usr/bin/env bash")
    ]


def shellcheck(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / "shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAMS / "hadolint", "-"], input=text, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_shell_script_is_clean(tmp_path: Path):
    assert {Path(".ci/run"), Path("infra/docker/with_secrets.sh")} <= set(scripts())
    assert shellcheck(*scripts()).stdout == ""
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/usr/bin/env bash\nrm -rf $1/*\n", encoding="utf-8")
    assert "SC2086" in shellcheck(wrong).stdout


@pytest.mark.slow
def test_the_dockerfile_is_clean():
    assert hadolint(DOCKERFILE).stdout == ""
    assert re.search(r"^ARG PYTHON=python:3\.11\.\d+-\S+$", DOCKERFILE, re.MULTILINE)  # which hadolint does not read
    assert "DL3007" in hadolint(DOCKERFILE.replace("FROM ${PYTHON}", "FROM python:latest")).stdout
    assert "DL3002" in hadolint(DOCKERFILE + "USER root\n").stdout


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)
    return {
        name: f"FROM {base}\n{body}" for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def test_an_edit_of_the_code_installs_nothing_again():
    """The stages that install copy the locks and the one file that install.py reads, and the code comes after."""
    for name in ("locks", "packages-cpu", "packages-gpu", "packages-s3"):
        copied = re.findall(r"^COPY (\S+)", stages()[name], re.MULTILINE)
        assert set(copied) <= {"infra/locks", "tasks/core/surroundings.py"}
    for name in ("cpu", "gpu"):
        body = stages()[name]
        assert body.index("COPY --from=packages") < body.index("COPY . ")
        assert "RUN" not in body[body.index("COPY . ") :]
    install = (ROOT / "infra" / "locks" / "install.py").read_text(encoding="utf-8")
    assert install.count('ROOT / "tasks"') == install.count('ROOT / "tasks" / "core" / "surroundings.py"') == 1


@pytest.mark.parametrize("target", ["cpu", "gpu", "s3"])
def test_an_image_has_a_user_of_its_own_and_the_entry_point(target: str):
    body = stages()[target]
    assert body.startswith("FROM runtime\n")
    assert re.search(r"^USER (\d+):(\d+)$", body, re.MULTILINE)
    assert 'ENTRYPOINT ["bash", "/opt/with_secrets.sh"]' in stages()["runtime"]


def test_no_library_of_an_image_calls_home():
    stated = dict(re.findall(r"\b([A-Z_]+)=(\S+)", stages()["runtime"]))
    assert {name: stated.get(name) for name in TELEMETRY_OFF} == TELEMETRY_OFF


def with_secrets(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", DOCKER / "with_secrets.sh", *command],
        env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_secret_comes_from_its_file_to_the_command_alone(tmp_path: Path):
    secret = tmp_path / "word"
    secret.write_text("hunter2 $x 'q'\n", encoding="utf-8")
    done = with_secrets("sh", "-c", 'printf %s "$WORD"', WORD__FILE=str(secret))
    assert (done.stdout, done.stderr, done.returncode) == ("hunter2 $x 'q'", "", 0)
    assert "WORD__FILE" not in with_secrets("env", WORD__FILE=str(secret)).stdout


def test_without_its_secret_a_command_does_not_start(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.touch()
    full = tmp_path / "full"
    full.write_text("hunter2", encoding="utf-8")
    for variables in (
        {"WORD__FILE": str(tmp_path / "none")},
        {"WORD__FILE": str(empty)},
        {"WORD__FILE": str(full), "WORD": "hunter3"},
    ):
        done = with_secrets("echo", "started", **variables)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "WORD__FILE" in done.stderr and "hunter" not in done.stderr


def test_secrets_are_made_once_and_the_folder_is_the_owners(tmp_path: Path):
    folder = tmp_path / "secrets"
    for expected in ("made", ""):
        done = subprocess.run([DOCKER / "make_secrets.sh", folder], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(expected) and bool(done.stdout) == bool(expected)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = sorted(folder.iterdir())
    words = [file.read_text(encoding="utf-8").strip() for file in files]
    assert len(set(words)) == len(files) == 11
    assert not [file for file, word in zip(files, words, strict=True) if len(word) < 40]
    shown = done.stdout + done.stderr
    assert not [word for word in words if word in shown]
