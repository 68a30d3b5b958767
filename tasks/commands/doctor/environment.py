"""Checks of the environment: every tool answers, episodes can be repeated, and they share no state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tasks.commands.doctor.arguments import make_up_arguments
from tasks.commands.doctor.context import DoctorContext, PlayedReference
from tasks.commands.doctor.findings import Finding, Skipped, failed, list_some, passed, warned
from tasks.core.records import Problem, Trajectory
from tasks.core.text import counted, one_line
from tasks.drift.pin import description_changes
from tasks.stages.curate.failures import MEANT, is_alike
from tasks.tools.base import EnvironmentFault, Tool, block_until
from tasks.tools.layer import OURS
from tasks.tools.mcp_content import OF_HIDDEN_ERRORS, hides_error
from tasks.tools.schemas import ArgumentSchema

OF_CHANCE = (
    "Derive all randomness from `problem.world` or the episode's stream, never from the clock or a global generator "
    "(see base.Environment.start)."
)
HIGH_DROPPED_SHARE = 0.2  # from here on the remaining episodes are hardly a fair sample


def environment_starts(context: DoctorContext) -> Finding:
    """It is made and names its tools, and the problems were curated for it: what fails here is none of the model's."""
    names = [tool.name for tool in context.environment.tools]
    if found := description_changes(context.environment, context.paths):
        return failed(
            f"what was curated is of another environment: {list_some(found)}",
            "Run `python -m tasks curate`; until then the problems of before would be judged.",
        )
    return passed(f"{context.environment.name}, {len(names):,} tools")


def tools_answer(context: DoctorContext) -> Finding:
    """Every tool, called as its schema allows: by a reference where one uses it, else with made-up arguments."""
    tools = context.environment.tools
    refusals, meant = refusals_of_references(context), tools_of_solutions(context)
    faults = [reference.trajectory.fault or "" for reference in context.played_references]
    always = {tool: refused for tool, refused in refusals.items() if all(refused)}
    refusing = [refused[0] for tool, refused in always.items() if tool not in meant or is_alike(refused)]
    hiding = [said for tool, refused in refusals.items() for said in dict.fromkeys(refused) if hides_error(tool, said)]
    silent, tried, left_out = list[str](), list[str](), list[str]()
    for tool in tools:
        if tool.name in refusals:
            continue
        fault = next((fault for fault in faults if fault.startswith(f"{tool.name}: ")), "")
        problem, arguments = first_with(context, tool), make_up_arguments(tool.parameters)
        if not fault and problem and may_be_tried(context, tool) and ArgumentSchema(tool).is_valid(arguments):
            fault = try_tool(context, problem, tool, arguments)
        elif not fault:
            left_out.append(tool.name)
            continue
        if fault:
            silent.append(fault)
        else:
            tried.append(tool.name)
    if silent:
        return failed(
            f"{len(silent)} of {len(tools)} do not answer: {list_some(silent)}",
            "Call the tool by hand with the same arguments; a server may be down, or a handler may crash.",
        )
    if refusing or hiding or left_out:
        return doubt(len(tools), refusing, hiding, left_out)
    known = f"{len(tools) - len(tried)} of {len(tools)} when called by references"
    return passed(f"{known}, {len(tried)} with made-up arguments ({list_some(tried)})" if tried else known)


def refusals_of_references(context: DoctorContext) -> dict[str, list[str]]:
    """For each tool that references call, what it said to each call that it refused, else an empty text."""
    refusals = defaultdict[str, list[str]](list)
    for reference in context.played_references:
        for turn in reference.trajectory.turns:
            for call, reply, error in zip(turn.calls, turn.replies, turn.errors, strict=False):
                is_refusal = error is not None and error not in (MEANT if reference.trajectory.is_success else OURS)
                refusals[call["name"]].append(f"{call['name']}: {one_line(reply)}" if is_refusal else "")
    return refusals


def tools_of_solutions(context: DoctorContext) -> set[str]:
    """Whose refusals may be meant, where they differ: a reference that succeeds shows how an agent gets over them."""
    solved = [reference for reference in context.played_references if reference.trajectory.is_success]
    return {call["name"] for reference in solved for turn in reference.trajectory.turns for call in turn.calls}


def doubt(num_tools: int, refusing: list[str], hiding: list[str], left_out: list[str]) -> Finding:
    """Tools that refused every call of references (in the same words, where these succeed), as a server without its
    back end does; tools whose refusals say nothing; and tools that could not be called.
    """
    found, remedies = [f"{num_tools - len(refusing) - len(left_out)} of {num_tools} answer"], list[str]()
    if refusing:
        found.append(f"refused every call: {list_some(refusing)}")
        remedies.append(
            "Read what the tool says: a server that lacks its data or a key answers so, and the model learns nothing "
            "from it."
        )
    if hiding:
        found += [f"refused without a reason: {list_some(hiding)}"] if set(hiding) - set(refusing) else []
        remedies.append(OF_HIDDEN_ERRORS)
    if left_out:
        found.append(f"not called, as in no reference: {list_some(left_out)}")
        remedies.append(
            "No problem shows the tool, no arguments could be made up from its schema, or a made-up call could change "
            "what is never reset. Write a problem whose reference uses it, or leave it out (as by "
            "environment.settings.allowed_tools)."
        )
    return warned("; ".join(found), " ".join(remedies))


def first_with(context: DoctorContext, tool: Tool) -> Problem | None:
    return next((item for item in context.problems["train"] if tool in context.environment.tools_for(item)), None)


def may_be_tried(context: DoctorContext, tool: Tool) -> bool:
    """Whether a made-up call can do no lasting harm: it changes nothing, or every episode starts fresh."""
    return tool.read_only or context.environment.starts_afresh()


def try_tool(context: DoctorContext, problem: Problem, tool: Tool, arguments: dict[str, Any]) -> str:
    """The fault of one call, empty if it was answered. That made-up things are not found or refused is an answer."""
    episode = context.environment.start(problem, stream="doctor")
    try:
        reply = block_until(episode.call(tool.name, arguments))
    except EnvironmentFault as fault:
        return str(fault)
    finally:
        episode.close()
    return f"{tool.name}: it is listed, but unknown when called" if reply.error == "unknown_tool" else ""


def same_seed(context: DoctorContext) -> Finding:
    """The same problem played twice with the same seed, one at a time: equal replies, equal verdict."""
    verdicts = _differences(context, other_verdict)
    if verdicts:
        return failed(
            f"{len(verdicts)} of {len(context.alone)} episodes end differently the second time: "
            f"{list_some(verdicts, most=1)}",
            f"A model cannot learn from a verdict that changes by chance. {OF_CHANCE}",
        )
    replies = _differences(context, other_replies)
    if not replies:
        return passed(f"{counted(len(context.alone), 'episode')}: no difference when played twice")
    found = f"in {len(replies)} of {len(context.alone)} episodes tools answer differently the second time: "
    found += list_some(replies, most=1)
    if not context.environment.is_live():
        return failed(found, f"A run could not be repeated. {OF_CHANCE}")
    return warned(
        found,
        "With such answers a run cannot be repeated. Reset the server between episodes (environment.settings.reset). "
        "Replies that always change, such as the time, can be recorded (environment.cache.mode).",
    )


def separate_episodes(context: DoctorContext) -> Finding:
    """The same episodes side by side, two of each, compared with one played alone."""
    pairs = [(reference, pair) for reference, pair in context.alone if not other_verdict(*pair)]
    if not pairs:
        raise Skipped("same seed")
    together = context.play([(reference.problem, reference.texts) for reference, _ in pairs for _ in range(2)])
    touched = []
    for number, (reference, (one, other)) in enumerate(pairs):
        for crowded in together[2 * number : 2 * number + 2]:
            # Where replies differ even alone (the time, say), only the verdict is compared.
            fault = other_verdict(one, crowded) or (not other_replies(one, other) and other_replies(one, crowded))
            if fault:
                touched.append(f"{reference.problem.id}: {fault}")
    if touched:
        return failed(
            f"{len(touched)} of {len(together)} episodes differ when others run beside them: "
            f"{list_some(touched, most=1)}",
            "Keep all state in the Episode, none in the Environment, a class or a module. An MCP server that serves "
            "several episodes needs environment.settings.reset: process.",
        )
    return passed(f"{len(together)} side by side play as they do alone")


def lost_episodes(context: DoctorContext) -> Finding:
    """How many episodes fail by the environment's fault, and whether training would continue."""
    limits, played = context.settings.environment.tools, context.played_references
    faults = Counter(reference.trajectory.fault for reference in played if reference.trajectory.fault is not None)
    share = faults.total() / max(1, len(played))
    if share:
        most = one_line(faults.most_common(1)[0][0])
        # Training starts an episode again `max_attempts` times before it is dropped.
        stops = share**limits.max_attempts > limits.max_dropped_share
        return (failed if stops else warned)(
            f"{faults.total():,} of {len(played):,} met a fault, mostly {most}",
            "Repair what the fault names: training drops such episodes and learns only from the others.",
        )
    if limits.max_dropped_share > HIGH_DROPPED_SHARE:
        return warned(
            f"none of {len(played):,}, but up to {limits.max_dropped_share:.0%} may be before a run stops",
            "The remaining episodes would be the easy ones, which meet no fault. Set "
            "environment.tools.max_dropped_share "
            "to 0.05 or so.",
        )
    return passed(f"none of {len(played):,}; a run stops above {limits.max_dropped_share:.0%}")


def _differences(context: DoctorContext, compare: Callable[[Trajectory, Trajectory], str]) -> list[str]:
    pairs: list[tuple[PlayedReference, list[Trajectory]]] = context.alone
    return [f"{reference.problem.id}: {fault}" for reference, pair in pairs if (fault := compare(*pair))]


def other_replies(one: Trajectory, other: Trajectory) -> str:
    for number, (turn, same) in enumerate(zip(one.turns, other.turns, strict=False), start=1):
        if turn.replies != same.replies:
            return f"at turn {number} the tool says {one_line(' '.join(turn.replies))}, then {' '.join(same.replies)}"
    return ""


def other_verdict(one: Trajectory, other: Trajectory) -> str:
    if (one.outcome, one.checks, one.fault) == (other.outcome, other.checks, other.fault):
        return ""
    ends = [f"{played.outcome} {played.fault or played.checks}" for played in (one, other)]
    return f"it ends in {ends[0]}, then in {ends[1]}"
