"""Profiles: whole sets of values under infra/profiles/. `params.yaml` is always the whole truth; a profile replaces
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.core.files import write_text
from tasks.core.settings import PARAMS_FILE, load_paths, read_params
from tasks.pipeline.order import check_params
from tasks.pipeline.run_lock import only_run

PROFILES = Path("infra/profiles")


def apply_profile(name: str) -> list[str]:
    """Check the profile, make it `params.yaml` as it stands (comments too), and return the difference in lines.

    ValueError for an unknown or invalid profile, or while a run is using the present values.
    """
    file = _file(name)
    params = read_params(file)
    check_params(params, source=file)
    with only_run(load_paths(params).artifacts):
        changed = _changed(params)
        write_text(PARAMS_FILE, file.read_text(encoding="utf-8"))
    return [f"{PARAMS_FILE} is now {file}", *changed]


def _changed(params: dict[str, Any]) -> list[str]:
    """The difference to today's params.yaml; of one that is refused nothing is shown, since it may hold a secret."""
    if not PARAMS_FILE.exists():
        return difference({}, params)
    before = read_params()
    try:
        check_params(before)
    except ValueError:
        return [f"  the {PARAMS_FILE} before it would have been refused, so it is not compared"]
    return difference(before, params) or ["no value changed"]


def _file(name: str) -> Path:
    files = {path.stem: path for path in PROFILES.glob("*.yaml")}
    if name not in files:
        raise ValueError(
            f"{name!r} is not a profile, so {PARAMS_FILE} stays as it is. Profiles are the files of {PROFILES}: "
            f"{', '.join(sorted(files)) or 'there is none; run from the project root'}."
        )
    return files[name]


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line a value that differs: `train.num_iterations: 80 → 4`."""
    old, new = dict(_values(before)), dict(_values(after))
    changed = [key for key in {**old, **new} if old.get(key, "absent") != new.get(key, "absent")]
    return [f"  {key}: {old.get(key, 'absent')} → {new.get(key, 'absent')}" for key in changed]


def _values(params: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
