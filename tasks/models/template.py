"""What a model's chat template is called with, and how that travels: in the tokenizer's file, or in a pointer.

`tokenizer_config.json` is saved, linked and fetched with every copy of the model and is part of its hash, so what
trained a model is also what measures and serves it. A pointer to a user's folder, which is never written, states it
itself.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.files import link_or_copy, read_json, write_json
from tasks.models.files import ADAPTER_BASE, GET_ANOTHER, POINTER, only_the_model
from tasks.models.settings import PLAIN_TEMPLATE, TemplateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "template_settings"  # a key of that file, and of a pointer


def state_template(tokenizer: PreTrainedTokenizerBase, template: TemplateSettings) -> None:
    """Note in the tokenizer what its chat template is called with; it saves that with its other settings."""
    found = template.over(template_of(tokenizer))
    if found != PLAIN_TEMPLATE:
        tokenizer.init_kwargs[TEMPLATE] = found.model_dump()


def template_of(tokenizer: PreTrainedTokenizerBase) -> TemplateSettings:
    """What its chat template is called with. ValueError where its file states what these settings are not."""
    stated = tokenizer.init_kwargs.get(TEMPLATE)
    return PLAIN_TEMPLATE if stated is None else TemplateSettings(**stated)


def pointed_template(folder: Path) -> TemplateSettings:
    """What the pointers from `folder` to its weights say of the chat template; it hashes nothing. ValueError where they
    lead back to where they came from.
    """
    _refuse_a_circle(folder)
    found = PLAIN_TEMPLATE
    while (folder / POINTER).exists():
        pointer = read_json(folder / POINTER)
        if TEMPLATE in pointer:
            found = found.over(TemplateSettings(**pointer[TEMPLATE]))
        folder = Path(pointer["path"])
    return found


def _refuse_a_circle(folder: Path) -> None:
    """ValueError where the pointers from `folder`, and to the bases of adapters, would be followed for ever."""
    seen: set[Path] = set()
    while names := [name for name in (POINTER, ADAPTER_BASE) if (folder / name).exists()]:
        seen.add(folder.resolve())
        folder, before = Path(read_json(folder / names[0])["path"]), folder
        if folder.resolve() in seen:
            raise ValueError(
                f"{before}: its {names[0]} leads back to {folder}, so there are no weights behind it. {GET_ANOTHER}"
            )


def copy_stating(model: Path, folder: Path, template: TemplateSettings) -> None:
    """The files of a model in the new `folder`, linked where possible, with the template's settings among them."""
    with only_the_model(model) as files:
        shutil.copytree(
            files,
            folder,
            copy_function=lambda source, copy: link_or_copy(os.path.realpath(source), copy),
            dirs_exist_ok=True,
        )
    file = folder / TOKENIZER_CONFIG
    stated = dict(read_json(file)) if file.exists() else {}
    file.unlink(missing_ok=True)  # it may be a link to the model's own
    write_json(file, {**stated, TEMPLATE: template.model_dump()})
