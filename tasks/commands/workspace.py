"""`python -m tasks workspace new DIR`: a folder for one more agent of this installation.

It has links to the code, so that an update reaches every workspace, and its own params.yaml, DVC cache and results. To
repeat it is safe: links and dvc.yaml become those of this installation, DVC's configuration and all results stay.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from tasks.commands.outputs import refuse_to_replace
from tasks.commands.profile import PROFILES, WHOLE, merge, read_profiles, write_params
from tasks.core.files import atomic_file, write_text
from tasks.core.settings import PARAMS_FILE, parse_params
from tasks.core.surroundings import check_path
from tasks.core.workspace import CODE, GRAPH, LINKED
from tasks.pipeline.order import check_params

CURRENT = (GRAPH, ".dvcignore")  # as this installation has them
FIRST = (".dvc/config", ".dvc/.gitignore")  # copied once: remotes are written into the first
LOCAL_CONFIG = Path(".dvc/config.local")
WITHOUT_GIT = "[core]\n    no_scm = true\n"


def new(folder: Path, profiles: Sequence[str], model: str | None) -> Iterator[str]:
    """Make or renew the workspace; yields what to print. `model`: the name of the agent's model and experiment."""
    folder = folder.absolute()
    _refuse_place(folder)
    text = _params_text(profiles, model)
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKED:
        _link(folder / name, CODE / name)
    _copy_files(folder)
    names = [*(profiles or [WHOLE]), *([f"model {model}"] if model else [])]
    if _needs_params(folder / PARAMS_FILE, text, is_asked=bool(profiles or model)):
        with chdir(folder):
            yield write_params(text, f"the profile {' with '.join(names)}", PROFILES)[0]
    yield from _mistakes(folder)
    shown = shlex.quote(str(folder))
    yield f"{folder} is a workspace: python -m tasks --workspace {shown} …, or in that folder without the option"


def _refuse_place(folder: Path) -> None:
    check_path(folder)
    if folder.resolve().is_relative_to(CODE):
        raise ValueError(
            f"{folder} is inside the code ({CODE}), where its results would count as changes of the code. Choose a "
            f"folder beside it."
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, so it cannot be a workspace. Choose another folder.")
    if own := next((name for name in LINKED if (folder / name).exists() and not (folder / name).is_symlink()), None):
        raise ValueError(
            f"{folder} has a {own} of its own, which a link to this installation's code would replace. Choose another "
            f"folder; a copy of the code is a workspace already, in which commands run without --workspace."
        )
    refuse_to_replace(
        folder / GRAPH, kind="the graph of a workspace", is_own=_is_graph, remedy="Choose another folder."
    )


def _is_graph(file: Path) -> bool:
    return file.is_file() and "python -m tasks" in file.read_text(encoding="utf-8", errors="replace")


def _params_text(profiles: Sequence[str], model: str | None) -> str:
    """All of params.yaml, refused where it is invalid before anything is made."""
    text = read_profiles(profiles or [WHOLE], CODE / PROFILES)
    if model is not None:
        name = json.dumps(model, ensure_ascii=False)
        overlay = f"promote:\n  model_name: {name}\ntracking:\n  experiment: {name}\n"
        text = merge(text, overlay, source=Path("--model"))
    check_params(parse_params(text, PARAMS_FILE))
    return text


def _mistakes(folder: Path) -> Iterator[str]:
    """Of params that were kept and are of an earlier version: no stage would begin with them."""
    with chdir(folder):
        try:
            check_params()
        except ValueError as error:
            yield f"its params.yaml has to be corrected before a stage can run: {str(error).splitlines()[0]}"


def _needs_params(file: Path, text: str, *, is_asked: bool) -> bool:
    """Equal ones are left alone, since a run may be using the file."""
    return not file.exists() or (is_asked and file.read_text(encoding="utf-8") != text)


def _link(link: Path, target: Path) -> None:
    """Replaced in one step: a run in another container may be reading through it."""
    if link.is_symlink() and link.readlink() == target:
        return
    partial = link.with_name(f".{link.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)


def _copy_files(folder: Path) -> None:
    (folder / LOCAL_CONFIG).parent.mkdir(exist_ok=True)
    for name in CURRENT + FIRST:
        if name in CURRENT or not (folder / name).exists():
            if (folder / name).is_symlink():  # to the code's own, which is not to be written
                (folder / name).unlink()
            with atomic_file(folder / name) as partial:
                shutil.copyfile(CODE / name, partial)
    if not (folder / LOCAL_CONFIG).exists() and not (folder / ".git").exists():
        write_text(folder / LOCAL_CONFIG, WITHOUT_GIT)
