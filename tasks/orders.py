"""What a person may decide about a promotion: to approve one that waits, or to force one whatever the policy says.

Both need a reason, which goes into decision.json, its page and the version's tags. Neither reaches past what protects
the record itself: altered weights and a world other than the measured one are refused before an order is looked at.
An approval is of one decision, so it holds only while all that decision rested on is as it was. Left out: who may give
an order, which is whoever can run the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_REASON = 1000  # characters; it becomes a tag of the registered version
RESTS_ON = {
    "challenger": "the challenger",
    "test": "the test problems",
    "environment": "the environment",
    "champion": "the champion",
    "policy": "the policy in params.yaml",
}


@dataclass(frozen=True, slots=True)
class Order:
    """`force`: promote whatever the checks say. `approve`: complete the decision that waits."""

    kind: Literal["force", "approve"]
    reason: str

    @property
    def sentence(self) -> str:
        return f"{'Forced by an operator' if self.kind == 'force' else 'Approved'}: {self.reason}"


def read_order(*, force: bool, approve: bool, reason: str | None) -> Order | None:
    """The order of a command line, None where there is none; ValueError in one line for one that is not whole."""
    if force and approve:
        raise ValueError(
            "--force and --approve were both given: one overrules the policy, the other completes what it allowed. "
            "Give one of them."
        )
    if not (force or approve):
        if reason is not None:
            raise ValueError("--reason was given, but nothing that needs one. Add --force or --approve.")
        return None
    name = "force" if force else "approve"
    text = " ".join((reason or "").split())
    if not text:
        raise ValueError(
            f"--{name} needs a reason, or nobody could say later why this model went into production. "
            f'Give one: python -m tasks promote --{name} --reason "…"'
        )
    if len(text) > MAX_REASON or not text.isprintable():
        raise ValueError(
            f"--reason has {len(text):,} characters or some that cannot be printed, and it is to be a tag of the "
            f"registered version. Give at most {MAX_REASON:,} printable ones."
        )
    return Order("force" if force else "approve", text)


def refuse_unless_waiting(decision: Mapping[str, Any] | None, rests_on: Mapping[str, Any]) -> Mapping[str, Any]:
    """What decision.json holds; ValueError unless it waits for approval and rests on what is there today."""
    if decision is None or decision.get("approval") != "waiting":
        found = "there is none" if decision is None else f"the last one is: {decision['verdict']}"
        raise ValueError(
            f"--approve completes a decision that waits for approval, and {found}. Run `python -m tasks promote` "
            f"first; with promote.approval: true it waits where the policy would promote."
        )
    before = decision["rests_on"]
    changed = [words for name, words in RESTS_ON.items() if before.get(name) != rests_on[name]]
    if changed:
        raise ValueError(
            f"--approve: since the decision that waits, {' and '.join(changed)} changed, so what was to be approved no "
            f"longer holds. Run `python -m tasks promote` for a new decision."
        )
    return decision
