"""The tools, described by the package's docstrings; of a solo agent the company's, the phone's and `done`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, create_model

from tasks.environments.tau2.package import load_module
from tasks.environments.tau2.world import CLASSES, Side
from tasks.tools.base import Tool

NAMES: Mapping[Side, tuple[str, ...]] = {
    "assistant": (
        "get_customer_by_phone", "get_customer_by_id", "get_customer_by_name", "get_details_by_id", "suspend_line",
        "resume_line", "get_bills_for_customer", "send_payment_request", "get_data_usage", "enable_roaming",
        "disable_roaming", "transfer_to_human_agents", "refuel_data",
    ),
    "user": (
        "check_status_bar", "check_network_status", "check_network_mode_preference", "set_network_mode_preference",
        "run_speed_test", "toggle_airplane_mode", "check_sim_status", "reseat_sim_card", "toggle_data",
        "toggle_roaming", "check_data_restriction_status", "toggle_data_saver_mode", "check_apn_settings",
        "set_apn_settings", "reset_apn_settings", "check_wifi_status", "toggle_wifi", "check_wifi_calling_status",
        "toggle_wifi_calling", "check_vpn_status", "connect_vpn", "disconnect_vpn", "check_installed_apps",
        "check_app_status", "check_app_permissions", "grant_app_permission", "can_send_mms", "reboot_device",
        "check_payment_request", "make_payment",
    ),
}  # fmt: skip
READS = ("get_", "check_", "can_", "run_speed_test", "find_", "list_", "search_", "calculate")
DONE = Tool(
    "done",
    "Call this function when you are done with the task.",
    {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    idempotent=True,
)


@cache
def side_of() -> Mapping[str, Side]:
    return {name: side for side, names in NAMES.items() for name in names}


@cache
def all_tools() -> tuple[Tool, ...]:
    return (*(_tool(side, name) for side, names in NAMES.items() for name in names), DONE)


def _tool(side: Side, name: str) -> Tool:
    return tool_of(name, vars(getattr(load_module(f"telecom.{CLASSES[side]}"), CLASSES[side]))[name])


def tool_of(name: str, method: Callable[..., Any]) -> Tool:
    """A tool from its function; `self` is no argument."""
    description, arguments = read_docstring(inspect.getdoc(method) or "")
    return Tool(name, description, _parameters(method, arguments), read_only=name.startswith(READS))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, text per argument) of a docstring with Args, Returns and Raises."""
    parts = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described = r"^([ ]+)(\w+)(?: \([^)]*\))?: (.+(?:\n\1[ ]+.+)*)$"  # the lines that go on are indented further
    found = re.findall(described, sections.get("Args", ""), flags=re.MULTILINE)
    return parts[0].strip(), {name: " ".join(text.split()) for _, name, text in found}


def _parameters(method: Any, described: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of a method's arguments, without `self`; no others are accepted."""
    hints = get_type_hints(method)
    fields: dict[str, Any] = {}
    for item in (item for item in inspect.signature(method).parameters.values() if item.name != "self"):
        default = ... if item.default is item.empty else item.default
        fields[item.name] = (hints[item.name], Field(default, description=described.get(item.name)))
    schema = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields).model_json_schema()
    return {"required": [], **_without_titles(schema)}


def _without_titles(schema: Any) -> Any:
    """Without the names that pydantic repeats: the model reads them as tokens."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(item) for key, item in schema.items() if not (key == "title" and type(item) is str)}
