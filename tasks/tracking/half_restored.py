"""A note that a restore is at work: a database and a folder of files cannot be replaced in one step, and a registry
that has neither looks like one that nobody has used, in which the next challenger would be champion at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.core.files import write_text

NOTE = ".restore.unfinished"  # beside the database; the command that finishes it


@contextmanager
def unfinished(database: Path, command: str) -> Iterator[None]:
    """While the block replaces the registry, and after it if it does not end."""
    note = database.parent / NOTE
    write_text(note, command)
    yield
    note.unlink()


def refuse_half_restored(database: Path) -> None:
    note = database.parent / NOTE
    if note.exists():
        raise ValueError(
            f"{database}: a restore was stopped half-way, so the registry is not whole and who is champion is unknown. "
            f"Finish it: {note.read_text(encoding='utf-8')}."
        )
