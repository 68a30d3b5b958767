"""The variants of an ablation: overlays over params.yaml, one per key of infra/ablation.yaml, and `base` itself."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.commands.profile import difference, merge_values
from tasks.core.settings import PARAMS_FILE, load, read_params
from tasks.stages.train.settings import TrainSections

VARIANTS_FILE = Path("infra/ablation.yaml")
BASE = "base"


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    name: str
    settings: TrainSections
    changes: list[str]


def read_variants(params: dict[str, Any], only: Sequence[str], file: Path = VARIANTS_FILE) -> list[Variant]:
    """The variants in `only` (none: all), the base first. ValueError for an unknown name and for an overlay without
    effect.
    """
    overlays: dict[str, dict[str, Any]] = {BASE: {}, **read_params(file)}
    for name in only:
        if name not in overlays:
            close = difflib.get_close_matches(name, overlays, n=2, cutoff=0.5)
            hint = f"Did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"{name!r} is not a variant, so nothing was run. {hint}Variants: {', '.join(overlays)}.")
    asked = {name: overlay for name, overlay in overlays.items() if not only or name in only}
    return [read_variant(name, overlay, params, file) for name, overlay in asked.items()]


def read_variant(name: str, overlay: dict[str, Any], params: dict[str, Any], file: Path) -> Variant:
    source = Path(f"{file}, variant {name}")
    known = TrainSections.model_fields
    if not isinstance(overlay, dict) or not set(overlay) <= set(known):
        raise ValueError(
            f"{source}: changes something that training does not read, so it would train the base again. Change "
            f"values of: {', '.join(known)}."
        )
    merged = merge_values(params, overlay)
    changes = [line.strip() for line in difference(_spell(params), _spell(merged))]
    if overlay and not changes:
        raise ValueError(
            f"{source}: {PARAMS_FILE} already has these values ({json.dumps(overlay)}), so it would train the base "
            f"again. Leave it out with --only, or go back to the default values."
        )
    return Variant(name, load(TrainSections, merged, source=source), changes)


def _spell(value: Any) -> Any:
    """As params.yaml writes it: `null`, `true`."""
    return {key: _spell(item) for key, item in value.items()} if isinstance(value, dict) else json.dumps(value)
