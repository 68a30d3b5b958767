"""Unpacks the episodes of a registered version up to a limit: 2 MB of gzip may hold 2 GB, which would fill the disk."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

CHUNK_BYTES = 1 << 20
ALWAYS_BYTES = 1 << 30  # a file this long is unpacked, however well it packs
MOST_FOR_A_BYTE = 100  # episodes pack to about a tenth


def unpack(packed: Path, target: Path) -> Path:
    """`target` with the content of a gzip file. ValueError for another file, and for more than episodes would be."""
    most = max(ALWAYS_BYTES, MOST_FOR_A_BYTE * packed.stat().st_size)
    written = 0
    try:
        with gzip.open(packed) as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                written += len(chunk)
                if written > most:
                    raise ValueError(
                        f"{packed.name}: unpacks to more than {most:,} bytes, so it was made to fill a disk and is no "
                        f"file of episodes. Restore the registry's files from a backup."
                    )
                sink.write(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{packed.name}: is no whole gzip file ({error}), so it contains no episodes. Restore the registry's files "
            f"from a backup."
        ) from None
    return target
