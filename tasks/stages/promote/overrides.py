"""A person's part in a promotion: force one, or approve or withdraw the one that waits, each with a reason.

`--force` overrules the checks, never what protects the record: altered weights or another environment are still
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.tracking.journal import MAX_REASON

ANSWER_HOURS = "TURNWISE_ANSWER_HOURS"  # a flow's, for promote: for so long it waits for a person's answer
Kind = Literal["force", "approve", "withdraw"]
VERBS = {"force": "Forced", "approve": "Approved", "withdraw": "Withdrawn"}


@dataclass(frozen=True, slots=True)
class ManualOverride:
    """`force`: promote anyway. `approve`, `withdraw`: end the decision that waits. `by`: who, if not the machine's
    user.
    """

    kind: Kind
    reason: str
    by: str | None = None

    @property
    def sentence(self) -> str:
        return f"{VERBS[self.kind]} by {self.by or 'an operator'}: {self.reason}"


def read_override(
    *, force: bool, approve: bool, withdraw: bool = False, reason: str | None, by: str | None = None
) -> ManualOverride | None:
    """The override on a command line, None where there is none. ValueError where it is incomplete."""
    kinds: dict[Kind, bool] = {"force": force, "approve": approve, "withdraw": withdraw}
    given = [kind for kind, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(f'--{kind}' for kind in given)} were given together: --force overrules the policy, "
            f"--approve completes a promotion that waits, --withdraw takes it back. Give one of them."
        )
    if by is not None and given not in (["approve"], ["withdraw"]):
        raise ValueError(
            "--by names who approves or withdraws, and neither was asked for. Add --approve or --withdraw."
        )
    if not given:
        if reason is not None:
            raise ValueError(
                "--reason was given without an action that needs one. Add --force, --approve or --withdraw."
            )
        return None
    (name,) = given
    text = " ".join((reason or "").split())
    if not text:
        raise ValueError(
            f"--{name} needs a reason: the record must explain why this model went into production. "
            f'Give one: python -m tasks promote --{name} --reason "…"'
        )
    if len(text) > MAX_REASON or not text.isprintable():
        raise ValueError(
            f"--reason has {len(text):,} characters or some that cannot be printed, and MLflow must show it. "
            f"Give at most {MAX_REASON:,} printable ones."
        )
    return ManualOverride(name, text, by)
