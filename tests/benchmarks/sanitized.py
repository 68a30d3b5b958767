"""A plugin of pytest: what is compiled from here on watches its own memory and arithmetic (ASan, UBSan)."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.models.native import compiled

FOLDER = "TURNWISE_SANITIZED"  # a variable: where the libraries go


def pytest_configure() -> None:
    compiled.CACHE = Path(os.environ[FOLDER])
    compiled.FLAGS = (*compiled.FLAGS, "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")  # type: ignore[assignment]
