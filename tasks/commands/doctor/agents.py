"""The check of an agent that drives itself: one is started, and asks a scripted policy until it ends."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, failed, passed, warned


def agent_plays(context: DoctorContext) -> Finding:
    """The shortest reference, by the agent itself."""
    if not context.environment.is_driven_by_agent():
        return passed("none: our own loop asks the policy")
    reference = min(context.references, key=lambda reference: len(reference.texts))
    played = context.play_by_agent(reference)
    told = f"{reference.problem.id}: it ended in {played.outcome}"
    if played.fault is not None:
        return failed(
            f"{told}: {played.fault}",
            "Training would drop every such episode. tasks/environments/agent/README.md says what it is started with.",
        )
    found = f"{told} after {len(played.turns)} turns, in {len(played.sequences)} sequences"
    if not played.is_success and played.limit is not None:
        return warned(
            f"{found}, by the budget {played.limit}",
            "It may not end by itself: an agent is over when its program or function ends.",
        )
    return passed(found)
