"""What bfcl reads from the package bfcl-eval: problems, tool docs and tool classes.

It imports only modules without side effects. A ground truth is Python text: it is parsed as literals, never evaluated.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from tasks.core.records import ToolCall
from tasks.tools.base import Tool

CLASSES = (
    "GorillaFileSystem", "MathAPI", "MessageAPI", "TwitterAPI", "TicketAPI", "TradingBot", "TravelAPI",
    "VehicleControlAPI",
)  # fmt: skip
WITHOUT_STATE = "MathAPI"
# Tools without effect, and all of MathAPI. Not the car's thermometer and speedometer: they draw a random number.
READ_ONLY = {
    "GorillaFileSystem": "pwd ls cat find wc sort grep du tail diff",
    "MessageAPI": "list_users get_user_id message_get_login_status view_messages_sent search_messages "
    "get_message_stats",
    "TwitterAPI": "posting_get_login_status list_all_following get_tweet get_user_tweets search_tweets "
    "get_tweet_comments get_user_stats",
    "TicketAPI": "get_ticket ticket_get_login_status get_user_tickets",
    "TradingBot": "get_current_time get_symbol_by_name get_stock_info get_order_details get_account_info "
    "trading_get_login_status get_watchlist get_order_history get_transaction_history get_available_stocks "
    "filter_stocks_by_price notify_price_change",
    "TravelAPI": "travel_get_login_status get_budget_fiscal_year get_flight_cost retrieve_invoice get_booking_history "
    "list_all_airports compute_exchange_rate verify_traveler_information get_nearest_airport_by_city "
    "get_all_credit_cards",
    "VehicleControlAPI": "get_outside_temperature_from_weather_com displayCarStatus display_log "
    "estimate_drive_feasibility_by_mileage liter_to_gallon gallon_to_liter estimate_distance "
    "get_zipcode_based_on_city check_tire_pressure find_nearest_tire_shop",
}
JSON_SCHEMA_TYPES = {"dict": "object", "float": "number"}

Row = dict[str, Any]


def data_folder() -> Traversable:
    """The package's data; ValueError if it is not installed."""
    if importlib.util.find_spec("bfcl_eval") is None:
        raise ValueError(
            "environment.name is bfcl, and the package bfcl-eval is not installed, so there are neither problems nor "
            "tools. Run `make setup-demo`, or `.venv/bin/pip install --no-deps bfcl-eval==2026.3.23 mpmath`."
        )
    return files("bfcl_eval") / "data"


@cache
def read_rows(category: str) -> tuple[tuple[Row, list[list[str]]], ...]:
    """(problem, ground truth: per turn, calls as text) for each problem of a category."""
    problems, answers = _json_lines(_problem_file(category)), _json_lines(_answer_file(category))
    truths = {answer["id"]: answer["ground_truth"] for answer in answers}
    return tuple((problem, truths[problem["id"]]) for problem in problems)


@cache
def tools_of_class(name: str) -> tuple[Tool, ...]:
    return tuple(_tool(doc, name) for doc in _json_lines(_doc_file(name)))


@cache
def tool_class(name: str) -> type[Any]:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    return getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)


@cache
def owners() -> Mapping[str, str]:
    """Tool name → class name; no two classes share a tool name."""
    return {tool.name: name for name in CLASSES for tool in tools_of_class(name)}


@cache
def signature(tool: str) -> inspect.Signature:
    return inspect.signature(getattr(tool_class(owners()[tool]), tool))


def read_call(text: str) -> ToolCall:
    """A call of a ground truth: `sort('a.txt')` → sort, {"file_name": "a.txt"}.

    Positional arguments take the names of the method's signature: one doc lists its properties in another order.
    """
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), text
    names = list(signature(call.func.id).parameters)[1:]
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=False)}
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ToolCall(name=call.func.id, arguments=arguments)


def announcement(tools: list[Tool]) -> str:
    """The user message that shows tools withheld so far, in the package's words."""
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as MESSAGE

    return MESSAGE.format(functions="\n".join(json.dumps(tool.schema()) for tool in tools))


@cache
def data_hashes(categories: tuple[str, ...]) -> Mapping[str, str]:
    """SHA-256 of each file with problems, ground truths or tool docs."""
    read = [_doc_file(name) for name in CLASSES]
    read += [file for category in categories for file in (_problem_file(category), _answer_file(category))]
    return {file: hashlib.sha256((data_folder() / file).read_bytes()).hexdigest() for file in read}


def _problem_file(category: str) -> str:
    return f"BFCL_v4_{category}.json"


def _answer_file(category: str) -> str:
    return f"possible_answer/{_problem_file(category)}"


def _doc_file(class_name: str) -> str:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    return f"multi_turn_func_doc/{MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]}"


def _json_lines(file: str) -> list[Row]:
    return [json.loads(line) for line in (data_folder() / file).read_text(encoding="utf-8").splitlines()]


def _tool(doc: Row, class_name: str) -> Tool:
    """No tool is `stateless`, not even in MathAPI: its replies are judged, so a cache may not answer instead."""
    is_read_only = class_name == WITHOUT_STATE or doc["name"] in READ_ONLY[class_name].split()
    return Tool(doc["name"], doc["description"], _json_schema(doc["parameters"]), read_only=is_read_only)


def _json_schema(described: Row) -> Row:
    """Replace the package's type names: dict is object, float is number."""
    schema = {**described, "type": JSON_SCHEMA_TYPES.get(described["type"], described["type"])}
    if "properties" in described:
        schema["properties"] = {name: _json_schema(item) for name, item in described["properties"].items()}
    if "items" in described:
        schema["items"] = _json_schema(described["items"])
    return schema
