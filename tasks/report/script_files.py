"""Data as script files, since a page opened from disk may fetch nothing.

Each file is one line, `turnwise.receive("name","digest",…)`. Every string in it is made visible, and nothing in it can
end a script or open markup. The index lists the digest of every other file, and the page that of the index: they are
part of each address, and a page left open notices when the report is built again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tasks.core.files import file_hash, write_text
from tasks.core.json_text import json_line, json_row
from tasks.core.pages import HIDDEN_IN_JSON, page_text

CHUNK_CHARACTERS = 250_000  # read and shown in a few hundredths of a second
DIGEST_CHARACTERS = 12  # hexadecimal
IN_SCRIPTS = {"<": r"\u003c", ">": r"\u003e", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def script_json(value: Any) -> str:
    """`value` as JSON for a script: every string visible, nothing that ends a script or opens markup."""
    text = _dump(value)  # most chunks need no change, and checking is cheaper than rewriting
    if HIDDEN_IN_JSON.search(text):
        text = _dump(_visible_throughout(value))
    for character, escape in IN_SCRIPTS.items():
        text = text.replace(character, escape)
    return text


def address_of(file: Path) -> str:
    """How a page names a file beside it: with a digest, since web servers let browsers keep what has the same address.
    On disk, what follows the `?` is ignored.
    """
    return f"{file.name}?{file_hash(file)[:DIGEST_CHARACTERS]}"


def digest_of(text: str) -> str:
    """Short, and the same wherever the text is."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


class ScriptFolder:
    """Writes scripts into a folder; `digests` has the digest of each one's value, by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.digests: dict[str, str] = {}

    def write(self, name: str, json_text: str) -> None:
        """Write the script that gives the page a value under `name`; `json_text` is from `script_json`."""
        digest = digest_of(json_text)
        self.digests[name] = digest
        write_text(self.folder / f"{name}.js", f'turnwise.receive("{name}","{digest}",{json_text});\n')


class ChunkWriter:
    """Writes numbered chunks `<kind>-0000.js`, each a list of consecutive items, as the items come."""

    def __init__(self, scripts: ScriptFolder, kind: str):
        self.scripts, self.kind = scripts, kind
        self.starts: list[int] = []  # the number of each chunk's first item
        self._items: list[str] = []
        self._num_characters = self._num_items = 0

    def add(self, item: Any) -> None:
        self._items.append(script_json(item))
        self._num_characters += len(self._items[-1])
        self._num_items += 1
        if self._num_characters >= CHUNK_CHARACTERS:
            self.close()

    def close(self) -> None:
        if self._items:
            self.starts.append(self._num_items - len(self._items))
            self.scripts.write(f"{self.kind}-{len(self.starts) - 1:04d}", f"[{','.join(self._items)}]")
            self._items, self._num_characters = [], 0


def _dump(value: Any) -> str:
    try:
        return json_row(value).decode()
    except ValueError:  # half a surrogate pair, which is made visible next, or NaN
        return json_line(value)


def _visible_throughout(value: Any) -> Any:
    if isinstance(value, str):
        return page_text(value)
    if isinstance(value, (list, tuple)):
        return [_visible_throughout(item) for item in value]
    if isinstance(value, dict):  # its keys are ours
        return {key: _visible_throughout(item) for key, item in value.items()}
    return value
