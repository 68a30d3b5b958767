"""One chat format for all models of one tokenizer and template, so that prompts are written once for all snapshots.

Every model of a race meets the same problems, and writing a prompt (template and tokenizer) costs as much as a step of
a small model. A format's own refusals name the first of its folders.
"""

from __future__ import annotations

import json
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.chat.format import ChatFormat, load_chat
from tasks.core.files import content_hash, json_hash
from tasks.models.files import TRAINED_ON, is_of_the_model
from tasks.models.folders import generation_end_ids, resolve_model
from tasks.models.template import pointed_template

MAX_CHATS = 4
MAX_PROMPTS = 2048  # of a format; 4 bytes a token
_CHATS: dict[str, ChatFormat] = {}  # of this process, by `chat_hash`, the oldest first


class SharedChat(ChatFormat):
    """Keeps the prompts that it wrote last."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._kept_prompt = lru_cache(maxsize=MAX_PROMPTS)(self._write_prompt)

    def prompt_ids(self, request: str, tools: list[dict[str, Any]], rules: str = "") -> list[int]:
        described = "" if self.template.tools_are_learnt or not tools else json.dumps(tools)
        return self._kept_prompt(request, described, rules).tolist()

    def _write_prompt(self, request: str, described: str, rules: str) -> array[int]:
        """`described`: the tools as JSON."""
        return array("i", super().prompt_ids(request, json.loads(described) if described else [], rules))


def shared_chat(folder: Path) -> ChatFormat:
    """`load_chat`, or the format that it gave for another model with these files."""
    key = chat_hash(folder)
    if key not in _CHATS:
        if len(_CHATS) == MAX_CHATS:
            del _CHATS[next(iter(_CHATS))]
        _CHATS[key] = load_chat(folder, SharedChat)
    return _CHATS[key]


def chat_hash(folder: Path) -> str:
    """SHA-256 over all that a chat format is made from: every file of a model but its weights and what it was trained
    on, the ids that end a text, and what a pointer adds to the template.
    """
    template, ends, resolved = pointed_template(folder), generation_end_ids(folder), resolve_model(folder)
    files = content_hash(
        resolved,
        ignore=lambda file: (
            not is_of_the_model(file, resolved) or file.suffix == ".safetensors" or file.name == TRAINED_ON
        ),
    )
    return json_hash([files, ends, template.model_dump()])
