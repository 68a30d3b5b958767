"""What to do where `model.path` names no model: no stage downloads one."""

from __future__ import annotations

import re

from tasks.core.urls import local_path
from tasks.models.embedded import is_embedded

MODELS_FOLDER = "models"  # for downloaded models; git ignores it
# `Qwen/Qwen2.5-1.5B-Instruct`, or the address of its page.
HUB_NAME = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<owner>[\w-][\w.-]*)/(?P<name>[\w-][\w.-]*)/?"
)


def check_model_path(path: str) -> None:
    """ValueError with the way to get the model where `model.path` does not exist, or is none: no stage downloads."""
    place = local_path(path)
    if is_embedded(path) or (place / "config.json").exists():
        return
    if place.exists():
        raise ValueError(
            f"model.path = {path!r} is not a folder with a config.json, so nothing can be trained. "
            f"Point it to a Hugging Face model folder, or to tasks/models/embedded.py for the tiny one."
        )
    if place.expanduser().exists():
        raise ValueError(
            f"model.path = {path!r} does not exist: `~` is not expanded there. Set model.path: {place.expanduser()}"
        )
    found = HUB_NAME.fullmatch(path)
    if found is None or found["owner"] == MODELS_FOLDER:
        raise ValueError(
            f"model.path = {path!r} does not exist, so the pipeline has nothing to work on. Correct the path: a "
            f"Hugging Face model folder, or tasks/models/embedded.py. A model of the hub gets there by "
            f"`.venv/bin/hf download OWNER/NAME --local-dir {path}`."
        )
    folder = f"{MODELS_FOLDER}/{found['name']}"
    raise ValueError(
        f"model.path = {path!r} does not exist here; it looks like a name on the Hugging Face hub, and no stage "
        f"downloads a model, so that a run always trains what is on disk. Run `.venv/bin/hf download "
        f"{found['owner']}/{found['name']} --local-dir {folder}`, then set model.path: {folder}"
    )
