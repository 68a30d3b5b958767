"""How often a test set has decided already: a tag of the registered model for each decision taken on it.

A set that has decided often enough is no longer fresh: whoever keeps what did well on it, and trains on, fits these
very problems in the end, and among many equal challengers one looks better by luck. The count stands in the registry,
where promotions take effect: a new artifacts folder, or another machine, that promotes into the same model must not
start from 0, and what deletes the registry deletes the champion that the count protects. The same decision taken again
(same episodes, same rival, same policy) looks at nothing new and counts once. Left out: when many is too many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.storage import json_hash
from tasks.tracking.connection import mlflow_errors

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry

PREFIX = "decided_on_test"  # .<hash of the test set>.<hash of what was compared>


@dataclass(frozen=True, slots=True)
class Wear:
    """The decisions taken on a test set, the oldest first, with this one; `is_new` where it was not taken before."""

    decisions: list[dict[str, Any]]
    is_new: bool


def record_decision(registry: Registry, *, test: str, looked_at: Any, note: Mapping[str, Any]) -> Wear:
    """Count a decision on the test set of hash `test`; equal `looked_at` are one decision. `note` is kept with it."""
    key = f"{PREFIX}.{test[:32]}.{json_hash(looked_at)[:32]}"
    registry.make_model()
    tags = registry.model_tags()
    is_new = key not in tags
    if is_new:
        tags[key] = json.dumps(dict(note), ensure_ascii=False)
        with mlflow_errors(registry.settings):
            registry.client.set_registered_model_tag(registry.model, key, tags[key])
    decisions = [json.loads(text) for name, text in tags.items() if name.startswith(f"{PREFIX}.{test[:32]}.")]
    return Wear(sorted(decisions, key=lambda decision: str(decision.get("decided_at"))), is_new)
