"""The check of an agent that drives itself: one is started, and asks a scripted policy until it ends."""

from __future__ import annotations

from dataclasses import replace

from tasks.commands.doctor.context import DoctorContext, PlayedReference
from tasks.commands.doctor.findings import Finding, failed, passed, warned
from tasks.core.text import counted
from tasks.environments.agent.settings import AgentSettings

NONSENSE = "zzz"


def agent_plays(context: DoctorContext) -> Finding:
    """The shortest reference of each number of requests by the agent itself, and an answer of nonsense."""
    if not context.environment.is_driven_by_agent():
        return passed("none: our own loop asks the policy")
    shortest: dict[int, PlayedReference] = {}
    for reference in sorted(context.references, key=lambda reference: len(reference.texts)):
        shortest.setdefault(len(reference.problem.requests), reference)
    findings = [_of_reference(context, shortest[number]) for number in sorted(shortest)]
    found = next((finding for finding in findings if finding.result != "pass"), None)
    return found or _of_nonsense(context, shortest[min(shortest)], "; ".join(finding.text for finding in findings))


def _of_reference(context: DoctorContext, reference: PlayedReference) -> Finding:
    played = context.play_by_agent(reference)
    told = f"{reference.problem.id}: it ended in {played.outcome}"
    if played.fault is not None:
        return failed(
            f"{told}: {played.fault}",
            "Training would drop every such episode. tasks/environments/agent/README.md says what it is started with.",
        )
    found = f"{told} after {counted(len(played.turns), 'turn')}, in {counted(len(played.sequences), 'sequence')}"
    if not played.is_success and played.limit is not None:
        return warned(
            f"{found}, by the budget {played.limit}",
            "It may not end by itself: an agent is over when its program or function ends.",
        )
    if not played.is_success and is_judged_by_agent(context):
        return warned(
            f"{found}: its verdict refuses the reference's own answer",
            "Fine where the agent has to call its tools first, which no reference can; else correct the verdict, or "
            "no episode will ever succeed.",
        )
    edits = sorted({sequence.begun for sequence in played.sequences if sequence.begun})
    no_such = f", begun anew by {', '.join(edits)}: no demonstration has such a turn" if edits else ""
    return passed(f"{found}{no_such}")


def _of_nonsense(context: DoctorContext, reference: PlayedReference, found: str) -> Finding:
    """A model that has learnt nothing writes such texts: neither agent nor verdict may break down over them."""
    played = context.play_by_agent(replace(reference, texts=[NONSENSE]))
    if played.fault is not None:
        return failed(
            f"{reference.problem.id}, answered with nonsense: {played.fault}",
            "A model that has learnt nothing answers so, and every such episode would be dropped: an agent ends, and a "
            "verdict says false, whatever the model writes.",
        )
    if played.is_success:
        return warned(
            f"{reference.problem.id} succeeds with the answer {NONSENSE!r}",
            "Fine where nothing has to be done for it; else the verdict is too weak, or always true.",
        )
    return passed(f"{found}; an answer of nonsense fails")


def is_judged_by_agent(context: DoctorContext) -> bool:
    """Without a world, the verdict is about what the agent itself has done."""
    settings = context.settings.environment.settings
    return isinstance(settings, AgentSettings) and settings.world is None
