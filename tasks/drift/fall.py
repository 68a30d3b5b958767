"""A fall of the champion that the pin and its probes do not show: the world changed where nobody looks.

What was measured before does not compare with today's, so the fall is part of the measurement key: promote then plays
the champion anew instead of taking its success from before. artifacts/fall.json is there from the first run that
answers a fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.files import read_json, write_json
from tasks.core.settings import Paths

FILE = "fall.json"


def note_fall(paths: Paths, check: Mapping[str, Any]) -> None:
    """`check` is the row of the drift check that found it."""
    told = {name: check[name] for name in ("mlflow_run_id", "at", "champion")}
    write_json(paths.artifacts / FILE, told)


def last_fall(paths: Paths) -> str | None:
    """What names the last fall that was answered here; None where there was none."""
    file = paths.artifacts / FILE
    return str(read_json(file)["mlflow_run_id"]) if file.exists() else None
