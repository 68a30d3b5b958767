"""Model folders by path: what names no folder here gets the command that fetches it, in one line."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.models.missing import check_model_path


def refusal(path: str) -> str:
    with pytest.raises(ValueError) as error:
        check_model_path(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "path",
    ["Qwen/Qwen2.5-1.5B-Instruct", "https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct/"],
)
def test_a_hub_name_gets_the_command_that_fetches_it_and_the_setting_that_follows(path: str) -> None:
    said = refusal(path)
    command = ".venv/bin/hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir models/Qwen2.5-1.5B-Instruct"
    assert f"`{command}`" in said
    assert said.endswith("then set model.path: models/Qwen2.5-1.5B-Instruct")


@pytest.mark.slow
def test_the_command_has_the_form_that_todays_hub_client_takes() -> None:
    """Its own help names the arguments; nothing is fetched."""
    program, *arguments = shlex.split(refusal("Qwen/Qwen3-0.6B").split("`")[1])
    assert program == ".venv/bin/hf"
    client = Path(sys.executable).parent / "hf"
    help_text = subprocess.run([client, arguments[0], "--help"], capture_output=True, text=True, timeout=120).stdout
    assert "REPO_ID" in help_text and arguments[2] in help_text


@pytest.mark.parametrize("path", ["models/Qwen2.5-7B-Instruct", "../mine", "no/such/model", "/no/such"])
def test_any_other_path_that_is_not_there_is_told_as_a_path(path: str) -> None:
    said = refusal(path)
    assert f"model.path = {path!r} does not exist" in said
    assert f"hf download OWNER/NAME --local-dir {path}" in said


def test_a_home_folders_sign_is_not_expanded_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert refusal("~/model").endswith(f"Set model.path: {tmp_path / 'model'}")
    check_model_path(str(tmp_path / "model"))


def test_a_folder_or_a_file_that_is_no_model_is_refused_before_any_stage(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for path in (tmp_path, tmp_path / "weights.bin"):
        assert f"model.path = {str(path)!r} is not a folder with a config.json" in refusal(str(path))
    check_model_path("tasks/models/embedded.py")
