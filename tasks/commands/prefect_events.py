"""What a command outside any flow tells Prefect, so that automations react to it: a promotion or rollback by hand."""

from __future__ import annotations

import os
import subprocess
import sys

from tasks.core.terminal import warn
from tasks.pipeline.run_lock import FLOW_VARIABLE

EVENT_SECONDS = 60.0  # to emit it, of which Prefect's import takes most


def tell_prefect(event: str, model: str, version: int, told: str) -> None:
    """Emit `turnwise.EVENT` where a server of Prefect is named; what happened stays either way. In a flow's child
    nothing is emitted: the flow does so itself.
    """
    if not _is_heard():
        return
    command = [sys.executable, "-m", "flows.events", event, model, str(version), told]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=EVENT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        warn("warning: Prefect's server (PREFECT_API_URL) was not told, so no automation reacts to this.")


def tell_promotion() -> None:
    """After `promote` or `promote --force`; nothing where it made no champion."""
    from tasks.core.files import read_json
    from tasks.core.settings import load_paths, read_params
    from tasks.stages.promote.record import OUTCOME_FILE

    if not _is_heard():
        return
    outcome = read_json(load_paths(read_params()).stage("promote") / OUTCOME_FILE)
    if outcome["decision"] == "promote":
        model, version = outcome["registered_model"], outcome["registered_version"]
        tell_prefect("promoted", model, version, f"promoted: version {version} ({outcome['snapshot']}), by hand")


def tell_approval(told: str) -> None:
    """After `promote --approve`, in any folder that names the registry."""
    from tasks.core.settings import load, read_params
    from tasks.stages.promote.approvals import ApprovalSections
    from tasks.tracking.aliases import current_champion, open_registry

    if not _is_heard():
        return
    settings = load(ApprovalSections, read_params())
    registry = open_registry(settings.tracking, settings.promote.model_name)
    if champion := current_champion(registry):
        tell_prefect("promoted", registry.model, champion.version, told)


def _is_heard() -> bool:
    return bool(os.environ.get("PREFECT_API_URL")) and FLOW_VARIABLE not in os.environ
