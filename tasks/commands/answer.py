"""A person's answer to the decision that waits, by `promote --approve`, `--withdraw` or a flow's page, or nobody's. The
report of that decision, which said that it waits, is built again.
"""

from __future__ import annotations

from typing import Any

from tasks.core.settings import load_paths, read_params
from tasks.core.text import one_line
from tasks.core.workspace import as_shell_sees
from tasks.stages.promote.approvals import approve, record_ending, withdraw
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.journal import Entry
from tasks.tracking.versions import DECISION_FILE


def carry_out(override: ManualOverride, *, decided_at: str | None = None) -> list[str]:
    """The lines to print. Errors are those of `approve` and `withdraw`; a report that cannot be built is a line."""
    do = approve if override.kind == "approve" else withdraw
    return [*do(override, decided_at=decided_at), *_renew_report(read_params())]


def write_ending(ending: Entry) -> list[str]:
    """Into the records of this folder: how a decision ended that was not answered here. The lines to print."""
    params = read_params()
    return [*record_ending(params, ending), *_renew_report(params)]


def _renew_report(params: dict[str, Any]) -> list[str]:
    """Nothing where the report shows the decision as it is."""
    if "paths" not in params:
        return []
    paths = load_paths(params)
    shown, decided = paths.artifacts / "report" / DECISION_FILE, paths.stage("promote") / DECISION_FILE
    if not (shown.exists() and decided.exists()) or shown.read_bytes() == decided.read_bytes():
        return []
    from tasks.commands.report import build_report

    try:
        build_report(params)
    except Exception as error:
        return [
            f"warning: {as_shell_sees(shown.parent)} still says that this decision waits, since it could not be "
            f"built again: {one_line(str(error))} Then run `python -m tasks report`."
        ]
    return []
