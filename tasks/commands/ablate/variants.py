"""The variants of an ablation: what each changes of params.yaml, and in which words that is told.

The names are the command line's and the folders'. Left out: running them (`ablate.py`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.commands.ablate.results import BASE
from tasks.commands.profile import difference
from tasks.core.settings import PARAMS_FILE, load
from tasks.stages.train.settings import TrainSections

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train: its name on the command line and in folders, its label for people, what it changes."""

    name: str
    label: str
    changes: Changes


NO_REFERENCE: dict[str, Any] = {"kl_weight": 0.0, "reference_interval": None}
# What published runs of multi-turn tool use found to decide between stable and collapsed: Bespoke Labs, "Improving
# multi-turn tool use with reinforcement learning" (2025-04). Its stable recipe is the default, and so the base.
VARIANTS = (
    Variant(BASE, "base", {}),
    Variant("kl_0", "KL 0", {"train": NO_REFERENCE}),
    Variant("kl_0.04", "KL 0.04", {"train": {"kl_weight": 0.04}}),
    Variant("fixed_reference", "reference fixed", {"train": {"kl_weight": 0.001, "reference_interval": None}}),
    Variant("shaped_reward", "reward with parts", {"reward": {"format_weight": 0.2, "execution_weight": 0.2}}),
    Variant("overlong_kept", "overlong kept", {"train": {"filter_overlong": False}}),
    Variant("kl_0_overlong_kept", "KL 0, overlong kept", {"train": {**NO_REFERENCE, "filter_overlong": False}}),
)


def check_names(names: Sequence[str]) -> None:
    known = [variant.name for variant in VARIANTS]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            hint = f"Did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"{name!r} is not a variant, so nothing was run. {hint}Variants: {', '.join(known)}.")


def with_changes(params: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of the params with some values of some sections replaced."""
    return params | {section: {**params[section], **values} for section, values in changes.items()}


def settings_of(variant: Variant, params: dict[str, Any], seed: int) -> TrainSections:
    source = Path(f"{PARAMS_FILE} with variant {variant.name}")
    return load(TrainSections, with_changes(params, variant.changes) | {"seed": seed}, source=source)


def changes_of(variant: Variant, params: dict[str, Any]) -> list[str]:
    """One line a value that differs from the base's: `train.kl_weight: 0.001 → 0.04`; ValueError where none does."""
    before = {section: params[section] for section in variant.changes}
    changes = [line.strip() for line in difference(_spelt(before), _spelt(with_changes(before, variant.changes)))]
    if variant.changes and not changes:
        raise ValueError(
            f"variant {variant.name}: {PARAMS_FILE} says the same already ({json.dumps(variant.changes)}), so it would "
            f"train the base once more. Leave it out with --only, or go back to the default values."
        )
    return changes


def _spelt(value: Any) -> Any:
    """Every value as params.yaml spells it: `null`, `true`."""
    return {key: _spelt(item) for key, item in value.items()} if isinstance(value, dict) else json.dumps(value)


def about(params: dict[str, Any]) -> str:
    """The base in a few words, as its settings are."""
    train, reward = params["train"], params["reward"]
    kl = f"KL {train['kl_weight']:g}" if train["kl_weight"] else "KL 0 (no reference)"
    interval, mix = train["reference_interval"], train["reference_mix"]
    moved = "replaced" if mix == 1 else f"mixed with the policy by {mix:g}"
    reference = f"reference {moved} every {interval} iterations" if interval else "reference never replaced"
    parts = [f"{name} {weight:g}" for name in ("format", "execution") if (weight := reward[f"{name}_weight"])]
    return ", ".join(
        [
            kl,
            *([reference] if train["kl_weight"] else []),
            f"correctness with parts for {' and '.join(parts)}" if parts else "correctness alone",
            f"overlong episodes {'filtered' if train['filter_overlong'] else 'kept'}",
        ]
    )
