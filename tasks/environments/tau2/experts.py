"""The expert of a warm start looks before it acts: the actions alone would teach a guess of faults nobody can see."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tasks.core.records import Demonstration, Problem, ToolCall
from tasks.core.tool_calls import call_text
from tasks.environments.tau2.problems import ANSWER
from tasks.tools.authoring import ToolEnvironment
from tasks.tools.base import block_until

LOOKS: Mapping[str, Sequence[str]] = {  # the tools without arguments that show an issue's faults
    "service_issue": ("check_network_status", "check_sim_status", "check_apn_settings"),
    "mobile_data_issue": (
        "check_network_status", "check_data_restriction_status", "check_network_mode_preference", "check_vpn_status",
    ),
    "mms_issue": (
        "check_network_status", "check_sim_status", "check_network_mode_preference", "check_apn_settings",
        "check_wifi_calling_status",
    ),
}  # fmt: skip
LINE, CUSTOMER = "L1002", "C1001"  # of John Smith, whose line every ticket is about
LOOKS_AT_APPS = ToolCall(name="check_app_permissions", arguments={"app_name": "messaging"})
LOOKS_AT_USAGE = ToolCall(name="get_data_usage", arguments={"customer_id": CUSTOMER, "line_id": LINE})
LOOKS_AT_LINE = ToolCall(name="get_details_by_id", arguments={"id": LINE})
PHONE = "555-123-2002"


def looks(problem: Problem) -> list[ToolCall]:
    """What an expert reads first: the customer, the line, and what of the phone the issue is about. Nothing where the
    category is a row's own: the reference alone shows what to do.
    """
    if problem.category not in LOOKS:
        return []
    calls = [ToolCall(name="get_customer_by_phone", arguments={"phone_number": PHONE}), LOOKS_AT_LINE]
    calls += [ToolCall(name=name, arguments={}) for name in LOOKS[problem.category]]
    if problem.category == "service_issue":
        return [*calls, ToolCall(name="get_bills_for_customer", arguments={"customer_id": CUSTOMER})]
    return [*calls, LOOKS_AT_USAGE, *([LOOKS_AT_APPS] if problem.category == "mms_issue" else [])]


def demonstrate(environment: ToolEnvironment, problem: Problem, rng: random.Random) -> Demonstration | None:
    """The looks in an order of its own, then the expert's actions; None where a call fails."""
    found = looks(problem)
    identify, others = found[:1], found[1:]
    calls = [*identify, *rng.sample(others, len(others)), *problem.reference[0].calls]
    episode = environment.start(problem)
    replies = [block_until(episode.call(call.name, call.arguments)) for call in calls]
    is_success = all(reply.valid for reply in replies) and episode.verdict(ANSWER).success
    episode.close()
    if not is_success:
        return None
    return Demonstration(
        problem_id=problem.id,
        request=problem.requests[0],
        assistant_texts=[*(call_text(call) for call in calls), ANSWER],
        replies=[*([reply.text] for reply in replies), []],
    )
