"""A silent change of the environment between curation and a later stage: each kind is caught, and its place is named.

The world is a small shop (`shop.py`); a kind of change is what a server, a package or a data set may do overnight.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import Paths
from tasks.drift.pin import check_pin
from tasks.tools.base import Tool, Verdict
from tasks.tools.layer import ToolError
from tests.environments.shop import SETTINGS, TOOLS, Arguments, Shop, ShopEpisode, get_cost, open_shop, pin_shop

Change = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return open_shop(tmp_path, monkeypatch)


def with_tools(edit: Callable[[dict[str, Tool]], object]) -> Change:
    """The tools, copied and edited; a renamed or new tool answers as get_cost does."""

    def change(patch: pytest.MonkeyPatch) -> None:
        tools = {tool.name: tool for tool in TOOLS}
        edit(tools)
        patch.setattr(Shop, "offered", tuple(tools.values()))
        patch.setattr(Shop, "handlers", {name: Shop.handlers.get(name, get_cost) for name in tools})

    return change


def with_cost_tool(**changed: Any) -> Change:
    return with_tools(lambda tools: tools.update(get_cost=replace(tools["get_cost"], **changed)))


def with_schema(edit: Callable[[dict[str, Any]], object]) -> Change:
    """The arguments of get_cost, copied and edited."""
    schema = copy.deepcopy(dict(TOOLS[0].parameters))
    edit(schema)
    return with_cost_tool(parameters=schema)


def with_argument(name: str, **changed: Any) -> Change:
    return with_schema(lambda schema: schema["properties"][name].update(changed))


def with_reply(tool: str, edit: Callable[[Any], Any]) -> Change:
    """The tool answers with its reply edited in place, or with what `edit` returns."""

    def change(patch: pytest.MonkeyPatch) -> None:
        handler = Shop.handlers[tool]

        def answer(episode: ShopEpisode, arguments: Arguments) -> Any:
            reply = handler(episode, arguments)
            edited = edit(reply)
            return reply if edited is None else edited

        patch.setattr(Shop, "handlers", {**Shop.handlers, tool: answer})

    return change


def with_world(**changed: Any) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        for name, value in changed.items():
            patch.setattr(Shop, name, value)

    return change


def rename(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def rename_tool(tools: dict[str, Tool]) -> None:
    tools["get_price"] = replace(tools.pop("get_cost"), name="get_price")


def verdict_of(success: bool) -> Verdict:
    return Verdict(success, {"ordered": success, "answer": success})


def refuse_if(is_refused: bool) -> None:
    if is_refused:
        raise ToolError("conflict", "try later")


def refuse_politely(reply: Any) -> Any:
    """What was a status is now an error of the envelope."""
    if reply["status"] == "sold_out":
        raise ToolError("conflict", "sold out")


def upgrade_pydantic(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metadata, "version", lambda package: "99.0")


def default_to_dollars(patch: pytest.MonkeyPatch) -> None:
    """The schema still says EUR."""
    patch.setattr(
        Shop,
        "handlers",
        {**Shop.handlers, "get_cost": lambda episode, given: get_cost(episode, {"currency": "USD", **given})},
    )


ARGUMENTS = "tools.get_cost.parameters"
KINDS: dict[str, tuple[Change, str]] = {
    "tool renamed": (with_tools(rename_tool), "tools: get_cost is now called get_price"),
    "tool removed": (with_tools(lambda tools: tools.pop("order")), "tools: order is gone"),
    "tool added": (with_tools(lambda tools: tools.update(pay=Tool("pay", "Pay.", {}))), "tools: pay is new"),
    "tools in another order": (
        with_tools(lambda tools: tools.update(get_cost=tools.pop("get_cost"))),
        "tools: their order: get_cost, list_stock, order, tell_time → list_stock, order, tell_time, get_cost",
    ),
    "argument renamed": (
        with_schema(lambda schema: rename(schema["properties"], "currency", "money")),
        f"{ARGUMENTS}.properties: currency is now called money",
    ),
    "argument removed": (
        with_schema(lambda schema: schema["properties"].pop("amount")),
        f'{ARGUMENTS}.properties: amount {{"type": "integer", "minimum": 1, "maximum": 100}} is gone',
    ),
    "argument added": (
        with_schema(lambda schema: schema["properties"].update(color={"type": "string"})),
        f'{ARGUMENTS}.properties: color {{"type": "string"}} is new',
    ),
    "arguments in another order": (
        with_schema(lambda schema: rename(schema["properties"], "product", "product")),
        f"{ARGUMENTS}.properties: their order: product, currency, amount → currency, amount, product",
    ),
    "type of an argument": (
        with_argument("amount", type="number"), f'{ARGUMENTS}.properties.amount.type: "integer" → "number"'
    ),
    "enum of an argument": (
        with_argument("currency", enum=["EUR", "USD", "GBP"]),
        f'{ARGUMENTS}.properties.currency.enum: ["EUR", "USD"] → ["EUR", "USD", "GBP"]',
    ),
    "default of an argument": (
        with_argument("currency", default="USD"), f'{ARGUMENTS}.properties.currency.default: "EUR" → "USD"'
    ),
    "bound of an argument": (with_argument("amount", maximum=99), f"{ARGUMENTS}.properties.amount.maximum: 100 → 99"),
    "pattern of an argument": (
        with_argument("product", pattern="^[a-z]+$"), f'{ARGUMENTS}.properties.product: pattern "^[a-z]+$" is new'
    ),
    "description of an argument": (
        with_argument("product", description="Its number."),
        f'{ARGUMENTS}.properties.product.description: "What it is called." → "Its number."',
    ),
    "required arguments": (
        with_schema(lambda schema: schema.update(required=["product", "amount"])),
        f'{ARGUMENTS}.required: ["product"] → ["product", "amount"]',
    ),
    "additional arguments": (
        with_schema(lambda schema: schema.update(additionalProperties=True)),
        f"{ARGUMENTS}.additionalProperties: false → true",
    ),
    "description of a tool": (
        with_cost_tool(description="Price of a product."),
        'tools.get_cost.description: "Cost of a product." → "Price of a product."',
    ),
    "read_only": (with_cost_tool(read_only=False), "tools.get_cost.read_only: true → false"),
    "idempotent": (with_cost_tool(idempotent=True), "tools.get_cost.idempotent: false → true"),
    "stateless": (with_cost_tool(stateless=True), "tools.get_cost.stateless: false → true"),
    "output schema": (
        with_cost_tool(output_schema={"type": "object", "properties": {"price": {"type": "integer"}}}),
        "tools.get_cost.output_schema.properties: cost is now called price",
    ),
    "version of a tool": (with_cost_tool(version="2"), 'tools.get_cost.version: "1" → "2"'),
    "version of the world": (with_world(version="2"), 'environment.version: "1" → "2"'),
    "seed scheme": (with_world(seed_scheme="2"), 'environment.seed_scheme: "1" → "2"'),
    "data": (with_world(data={"bolt": 6}), "data: "),
    "version of a package": (upgrade_pydantic, f'packages.pydantic: "{metadata.version("pydantic")}" → "99.0"'),
    "reply field renamed": (
        with_reply("get_cost", lambda reply: rename(reply, "cost", "price")),
        "reply of get_cost: field cost is gone, price is new",
    ),
    "reply field added": (
        with_reply("get_cost", lambda reply: reply.update(note="sale")), "reply of get_cost: field note is new"
    ),
    "reply field removed": (
        with_reply("get_cost", lambda reply: reply.pop("parts") and None),
        "reply of get_cost: field parts.net, parts.tax are gone",
    ),
    "type of a reply field": (
        with_reply("get_cost", lambda reply: reply.update(cost="6")),
        "reply of get_cost: cost: type integer → string",
    ),
    "nested reply field renamed": (
        with_reply("get_cost", lambda reply: rename(reply["parts"], "tax", "vat")),
        "reply of get_cost: field parts.tax is gone, parts.vat is new",
    ),
    "field of a reply that is never the same twice renamed": (
        with_reply("tell_time", lambda reply: rename(reply, "ticks", "seconds")),
        "reply of tell_time: field ticks is gone, seconds is new",
    ),
    "what a default means": (default_to_dollars, "reply of get_cost: cost: 6 → 11"),
    "order of a list": (
        with_reply("list_stock", lambda reply: reply["products"].reverse()),
        'reply of list_stock: products[*].name: "bolt" → "nut" (and 1 more like it)',
    ),
    "order of reply fields": (
        with_reply("order", lambda reply: rename(reply, "status", "status")),
        "reply of order: its fields, their order: status, product → product, status (and 1 more like it)",
    ),
    "a reply that is no JSON any more": (
        with_reply("order", lambda reply: "ok"), "reply of order: field status, product are gone, (a bare text) is new"
    ),
    "a reply written otherwise": (
        with_reply("order", lambda reply: json.dumps(reply, indent=1)), "reply of order: written otherwise: "
    ),
    "an error answered differently": (
        with_reply("order", refuse_politely), "reply of order: the call is now turned down"
    ),
    "a call that no longer changes anything": (
        with_world(handlers={**Shop.handlers, "order": lambda episode, given: {"status": "ok", "product": "bolt"}}),
        "verdict on a reference solution: ordered: true → false",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_change_stops_the_stage_and_its_place_is_named(
    kind: str, paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    change, said = KINDS[kind]
    assert check_pin(SETTINGS, paths, stage="train").drift == []  # though the time is never the same twice
    change(monkeypatch)
    with pytest.raises(ValueError, match="the environment has changed since curation") as caught:
        check_pin(SETTINGS, paths, stage="train")
    lines = str(caught.value).splitlines()
    assert any(line.startswith(f"  {said}") for line in lines), lines


def test_there_are_more_than_twenty_kinds():
    assert len(KINDS) >= 20


def test_an_environment_that_did_not_change_passes_every_time(paths: Paths):
    checks = [check_pin(SETTINGS, paths, stage="train") for _ in range(5)]
    assert len({check.pin for check in checks}) == 1


def test_a_reply_that_was_the_same_twice_by_luck_raises_no_alarm(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    """Pinned as 6; today it is 7, then 8, then 9: a draw, and no other price."""
    draws = iter((7, 8, 9))
    with_reply("get_cost", lambda reply: reply.update(cost=next(draws)))(monkeypatch)
    assert check_pin(SETTINGS, paths, stage="train").drift == []


@pytest.mark.parametrize("refuses", [(True, False, False), (True, False, True), (True, True, False)])
def test_a_call_that_was_never_turned_down_and_now_is_at_times_is_a_drift(
    refuses: tuple[bool, ...], paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    plays = itertools.cycle(refuses)
    with_reply("get_cost", lambda reply: refuse_if(next(plays)))(monkeypatch)
    with pytest.raises(ValueError, match="reply of get_cost: the call is now turned down in some plays"):
        check_pin(SETTINGS, paths, stage="train")


def test_a_verdict_that_was_always_the_same_and_now_varies_is_a_drift(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    verdicts = itertools.cycle((False, True, True))
    monkeypatch.setattr(ShopEpisode, "verdict", lambda episode, message: verdict_of(next(verdicts)))
    with pytest.raises(ValueError, match=r"success: true → \[false, true\], from play to play, as for shop-1"):
        check_pin(SETTINGS, paths, stage="train")


def test_what_varied_at_curation_already_raises_no_alarm(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    """One of two plays is turned down at curation, and fails; today each play is, or none."""
    refused, verdicts = itertools.cycle((True, False)), itertools.cycle((False, True))
    with monkeypatch.context() as at_curation:
        with_reply("get_cost", lambda reply: refuse_if(next(refused)))(at_curation)
        at_curation.setattr(ShopEpisode, "verdict", lambda episode, message: verdict_of(next(verdicts)))
        pin_shop(paths)
    assert check_pin(SETTINGS, paths, stage="train").drift == []
    with_reply("get_cost", lambda reply: refuse_if(True))(monkeypatch)
    monkeypatch.setattr(ShopEpisode, "verdict", lambda episode, message: verdict_of(False))
    assert check_pin(SETTINGS, paths, stage="train").drift == []


def test_a_world_that_crashes_on_a_probe_cannot_be_compared_and_says_so(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Shop, "handlers", {**Shop.handlers, "order": lambda episode, given: given["nothing"]})
    with pytest.raises(ValueError, match=r"could not be compared .*order: unavailable: it crashed with KeyError"):
        check_pin(SETTINGS, paths, stage="train")
