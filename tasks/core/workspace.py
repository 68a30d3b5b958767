"""A workspace: the folder of one agent, with its own params.yaml, results and DVC cache, and links to the code.

Everything works in the current folder. `--workspace DIR`, or the variable, makes another folder the current one before
a command does anything. Several workspaces share one installation; only an MLflow that they all name is shared beyond.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

VARIABLE = "TURNWISE_WORKSPACE"
ENTERED = "TURNWISE_ENTERED"  # that the shell is in another folder; for children too
DVC_VARIABLE = "DVC_STAGE"  # DVC sets it for a stage's command, which belongs to the folder that DVC works in
CODE = Path(__file__).resolve().parents[2]  # of this installation
LINKED = ("tasks", "flows", "infra")  # of the code; dvc.yaml's deps, Prefect's entrypoints and profiles are in them
GRAPH = "dvc.yaml"
SITE_CACHE = Path(".dvc/site-cache")  # DVC's notes of file hashes
NEEDED = ("params.yaml", GRAPH, ".dvc", LINKED[0])


def enter_workspace(folder: Path | None) -> None:
    """Make the workspace the current folder: `folder`, or else the variable's. ValueError for one that is none.

    The variable is dropped then, since a child may work elsewhere, as in the copy that `dvc exp run --temp` makes.
    """
    stated = os.environ.pop(VARIABLE, "")
    if folder is None and (not stated or DVC_VARIABLE in os.environ):
        return
    chosen = (folder or Path(stated)).absolute()
    refuse_no_workspace(chosen)
    os.environ[ENTERED] = "1"
    os.chdir(chosen)
    os.environ["PWD"] = str(chosen)


def as_shell_sees(path: Path) -> str:
    """A place as it is to be printed: whole where a workspace was entered, so that the shell, which is in another
    folder, finds it, and so does the next command with that workspace.
    """
    return str(path.absolute() if ENTERED in os.environ else path)


def refuse_no_workspace(folder: Path) -> None:
    command = f"python -m tasks workspace new {shlex.quote(str(folder))}"
    missing = [name for name in NEEDED if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder} is no workspace (it has no {', '.join(missing)}), so nothing was run. Correct --workspace or "
            f"{VARIABLE}, or make one: {command}"
        )
    theirs = (folder / LINKED[0]).resolve().parent
    if theirs != CODE:
        raise ValueError(
            f"{folder} works with the code of {theirs}, and this is that of {CODE}, so nothing was run. Run the "
            f"command in {theirs}, or link the workspace to this code: {command}"
        )


def dvc_variables() -> dict[str, str]:
    """DVC's notes belong to the workspace; without this they are in a folder of the machine."""
    return {"DVC_SITE_CACHE_DIR": str(SITE_CACHE.absolute())}


def folder_of_code() -> Path:
    """Of the stages that run here, whose commit is on record: in a workspace it is where the links lead."""
    linked = Path(LINKED[0])
    return linked.resolve().parent if linked.is_symlink() else Path.cwd()
