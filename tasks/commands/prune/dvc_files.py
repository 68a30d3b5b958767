"""DVC's own small files, of which git has many versions: dvc.lock names results, and *.dvc what `dvc add` follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.commands.reproduction import ask_git
from tasks.core.provenance import LOCK_FILE

NO_BLOB = "0" * 40  # in `git log --raw`, for a file that was added or removed


def lock_texts() -> Iterator[str]:
    """Every dvc.lock: here, and of HEAD, each branch, tag, experiment and stash. Those of older commits are left out:
    where results are committed, nothing would ever be old.
    """
    if LOCK_FILE.exists():
        yield LOCK_FILE.read_text(encoding="utf-8")
    if _is_in_git():
        tips = {*_git("rev-list", "--no-walk", "--all").split(), *_git("stash", "list", "--format=%H").split()}
        entries = (_git("ls-tree", tip, "--", f"./{LOCK_FILE}") for tip in sorted(tips))
        yield from _texts(entry.split()[2] for entry in entries if entry)


def followed_texts() -> Iterator[str]:
    """Every *.dvc: here, and of any commit that git still has, of branches that were deleted and stashes too. What a
    person added is nowhere else.
    """
    for file in Path().rglob("*.dvc"):
        if file.is_file() and ".venv" not in file.parts:
            yield file.read_text(encoding="utf-8")
    if _is_in_git():
        whole = ("--all", "--reflog", "--full-history", "-m")  # also what a merge left out
        history = _git("log", *whole, "--raw", "--no-abbrev", "--format=", "--", "*.dvc")
        yield from _texts(blob for line in history.splitlines() for blob in line.split()[2:4] if blob != NO_BLOB)


def _texts(blobs: Iterable[str]) -> Iterator[str]:
    for blob in sorted(set(blobs)):
        yield _git("cat-file", "blob", blob)


def _is_in_git() -> bool:
    here = Path().resolve()
    return any((folder / ".git").exists() for folder in (here, *here.parents))


def _git(*arguments: str) -> str:
    said = ask_git(*arguments)
    if said is None:
        raise ValueError(
            f"`git {' '.join(arguments)}` failed, so it is not known what branches and stashes need, and nothing was "
            f"removed. Put that right and run again."
        )
    return said
