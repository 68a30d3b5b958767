"""A decision: the verdict with its checks and reasons, as decision.json holds it and a terminal shows it.

decision.json is the record: every number and every sentence, also when the answer is no. Who decides is `promote.py`,
what a person may add `orders.py`, and what happens in the registry `crown.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.measurement.promotion_policy import WAYS, Check, Verdict, verdict_of
from tasks.orders import Order
from tasks.pinning import Checked, accepted_changes
from tasks.settings import Paths
from tasks.storage import read_json, write_json

if TYPE_CHECKING:
    from tasks.promote import Challenger, PromoteOptions
    from tasks.tracking.registry import Version

Approval = Literal["not_needed", "waiting", "given"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to happen, and why.

    `verdict` is what happens: only `promote` moves the champion. `approval: waiting` is a `hold` whose challenger is
    registered under the alias `challenger`. `order` is the person's who forced or approved it. `comparison` is the
    paired difference it rests on, None where none was needed; `differing_fields` are those in which the champion's
    environment was another than the challenger's. `rests_on` is what an approval must find unchanged.
    """

    verdict: Verdict
    reasons: list[str]
    comparison: dict[str, Any] | None = None
    differing_fields: Sequence[str] = ()
    checks: Sequence[Check] = ()
    approval: Approval = "not_needed"
    order: Order | None = None
    detectable: dict[str, Any] | None = None
    test_set: dict[str, Any] | None = None
    warnings: Sequence[str] = ()
    rests_on: Mapping[str, Any] | None = None

    @property
    def policy_verdict(self) -> Verdict:
        """What the checks say, before anybody's order or missing approval."""
        return verdict_of(self.checks) if self.checks else self.verdict
