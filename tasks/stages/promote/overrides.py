"""What a person may decide about a promotion: to force one whatever the policy says, or to approve or withdraw the
decision that waits.

Each needs a reason, which is kept in the journal, and in decision.json and its page. A forced promotion does not reach
past what protects the record itself: altered weights and a world other than the measured one are refused before an
override is looked at. Left out: what an approval depends on (`approvals.py`), and who may give an override, which is
whoever can run the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.tracking.journal import MAX_REASON

VERBS = {"force": "Forced", "approve": "Approved", "withdraw": "Withdrawn"}


@dataclass(frozen=True, slots=True)
class ManualOverride:
    """`force`: promote whatever the checks say. `approve` and `withdraw`: how the decision that waits ends.

    `by` is who gives it, where that is not simply the user of this machine.
    """

    kind: Literal["force", "approve", "withdraw"]
    reason: str
    by: str | None = None

    @property
    def sentence(self) -> str:
        return f"{VERBS[self.kind]} by {self.by or 'an operator'}: {self.reason}"


def read_override(
    *, force: bool, approve: bool, withdraw: bool = False, reason: str | None, by: str | None = None
) -> ManualOverride | None:
    """The override of a command line, None where there is none; ValueError in one line for one that is not whole."""
    kinds: dict[Literal["force", "approve", "withdraw"], bool]
    kinds = {"force": force, "approve": approve, "withdraw": withdraw}
    given = [kind for kind, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(f'--{kind}' for kind in given)} were given together: --force overrules the policy, "
            f"--approve completes what it allowed, --withdraw takes that back. Give one of them."
        )
    if by is not None and given not in (["approve"], ["withdraw"]):
        raise ValueError("--by was given, but it says who approves or withdraws. Add --approve or --withdraw.")
    if not given:
        if reason is not None:
            raise ValueError("--reason was given, but nothing that needs one. Add --force, --approve or --withdraw.")
        return None
    (name,) = given
    text = " ".join((reason or "").split())
    if not text:
        raise ValueError(
            f"--{name} needs a reason, or nobody could say later why this model went into production. "
            f'Give one: python -m tasks promote --{name} --reason "…"'
        )
    if len(text) > MAX_REASON or not text.isprintable():
        raise ValueError(
            f"--reason has {len(text):,} characters or some that cannot be printed, and it is to be shown in MLflow. "
            f"Give at most {MAX_REASON:,} printable ones."
        )
    return ManualOverride(name, text, by)
