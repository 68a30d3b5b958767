"""A small world whose every part a test can exchange, as a server may between two runs: tools, replies, versions, data.

Its one problem asks for a price without naming a currency, looks at the shelf, orders what is sold out and then what is
not, and asks the time, which is never the same twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tasks.core.records import Problem
from tasks.core.settings import Paths, Settings
from tasks.drift.pin import make_pin, play_probes, write_pin
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Tool, Verdict
from tasks.tools.layer import BoundTool, ToolLayer
from tasks.tools.settings import ToolSettings
from tests.worlds import QUICK, add_environment, environment_settings

Arguments = Mapping[str, Any]
Handler = Callable[["ShopEpisode", Arguments], Any]
PRICES = {"bolt": 5, "nut": 3}
SETTINGS = environment_settings("shop")

PRODUCT = {"type": "string", "minLength": 2, "description": "What it is called."}
TOOLS = (
    Tool(
        "get_cost",
        "Cost of a product.",
        {
            "type": "object",
            "properties": {
                "product": PRODUCT,
                "currency": {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"},
                "amount": {"type": "integer", "minimum": 1, "maximum": 100},
            },
            "required": ["product"],
            "additionalProperties": False,
        },
        read_only=True,
        output_schema={"type": "object", "properties": {"cost": {"type": "integer"}}},
    ),
    Tool("list_stock", "What is on the shelf.", {"type": "object", "properties": {}}, read_only=True),
    Tool("order", "Order a product.", {"type": "object", "properties": {"product": PRODUCT}}),
    Tool("tell_time", "The time now.", {"type": "object", "properties": {}}, read_only=True),
)
_ticks = itertools.count()


def get_cost(episode: ShopEpisode, arguments: Arguments) -> Any:
    currency = arguments.get("currency", "EUR")
    net = PRICES[arguments["product"]] * {"EUR": 1, "USD": 2}[currency]
    return {"status": "ok", "cost": net + 1, "parts": {"net": net, "tax": 1}}


def list_stock(episode: ShopEpisode, arguments: Arguments) -> Any:
    return {"products": [{"name": "bolt", "left": 7}, {"name": "nut", "left": 0}]}


def order(episode: ShopEpisode, arguments: Arguments) -> Any:
    if arguments["product"] == "nut":
        return {"status": "sold_out", "product": "nut"}
    episode.ordered.append(arguments["product"])
    return {"status": "ok", "product": arguments["product"]}


def tell_time(episode: ShopEpisode, arguments: Arguments) -> Any:
    return {"ticks": next(_ticks), "luck": random.random(), "zone": "UTC"}


HANDLERS: dict[str, Handler] = {
    "get_cost": get_cost,
    "list_stock": list_stock,
    "order": order,
    "tell_time": tell_time,
}


class ShopEpisode(ToolEpisode):
    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.ordered: list[str] = []

    def verdict(self, final_message: str | None) -> Verdict:
        checks = {"ordered": self.ordered == ["bolt"], "answer": final_message == "It costs 6."}
        return Verdict(all(checks.values()), checks)


class Shop(ToolEnvironment):
    name = "shop"
    episode_class = ShopEpisode
    seed_scheme = "1"
    data = PRICES
    packages = ("pydantic",)
    offered: ClassVar[tuple[Tool, ...]] = TOOLS
    handlers: ClassVar[dict[str, Handler]] = HANDLERS

    def __init__(self, limits: ToolSettings = QUICK, settings: Settings | None = None):
        self.limits, self.settings = limits, settings
        self.layer = ToolLayer([BoundTool(tool, self.handlers[tool.name], "memory") for tool in self.offered], limits)


PROBLEM = Problem.model_validate(
    {
        "id": "shop-1",
        "category": "order",
        "level": 1,
        "requests": ["What is a bolt? Order a nut or else a bolt."],
        "world": {},
        "reference": [
            {
                "calls": [
                    {"name": "get_cost", "arguments": {"product": "bolt"}},
                    {"name": "list_stock", "arguments": {}},
                    {"name": "order", "arguments": {"product": "nut"}},
                    {"name": "order", "arguments": {"product": "bolt"}},
                    {"name": "tell_time", "arguments": {}},
                ],
                "answer": "It costs 6.",
            }
        ],
        "split_group": "g",
    }
)


def open_shop(folder: Path, patch: pytest.MonkeyPatch) -> Paths:
    """The shop in the catalog, curated in `folder`: its pin lies there."""
    add_environment(patch, "shop", Shop)
    paths = Paths(folder)
    pin_shop(paths)
    return paths


def pin_shop(paths: Paths) -> None:
    plays = [play_probes(SETTINGS, [PROBLEM]) for _ in range(2)]
    write_pin(paths.stage("curate"), make_pin(Shop(), [PROBLEM], plays))
