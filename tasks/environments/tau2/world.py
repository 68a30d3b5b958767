"""The state behind an episode of telecom: the company's database and the user's phone, with the package's own methods.

A world starts from the package's data and the actions that break it; its bytes are kept, and an episode loads them,
which takes a third of a millisecond. Nothing that a model wrote is evaluated: methods are looked up by name.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from tasks.environments.tau2.package import data_file, load_module, tools_class

Side = Literal["assistant", "user"]
CLASSES: Mapping[Side, str] = {"assistant": "TelecomAgentTools", "user": "TelecomUserTools"}
DRAWS_A_BILL_ID = "refuel_data"
Action = Mapping[str, Any]  # {env_type, func_name, arguments}, and assert_value in an assertion


class World:
    """`tools` act on the database, `user_tools` on the phone; the names are those that `sync_tools` reads."""

    def __init__(self, tools: Mapping[str, Any], user_tools: Mapping[str, Any]):
        self.tools, self.user_tools = _side("assistant", tools), _side("user", user_tools)

    def act(self, side: Side, name: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out a method and let both sides learn of it, also where it raises; whatever the package raises."""
        num_bills = len(self.tools.db.bills)
        try:
            return self.method(side, name)(**arguments)
        finally:
            if name == DRAWS_A_BILL_ID:
                self._name_bills_from(num_bills)
            _sync()(self)

    def method(self, side: Side, name: str) -> Any:
        """ValueError if the class has no such public method."""
        if name.startswith("_") or not callable(getattr(tools_class("telecom", CLASSES[side]), name, None)):
            raise ValueError(f"{CLASSES[side]} has no method {name!r}")
        return getattr(self.tools if side == "assistant" else self.user_tools, name)

    def holds(self, assertion: Action) -> bool:
        found = self.method(assertion["env_type"], assertion["func_name"])(**assertion["arguments"])
        return bool(found == assertion["assert_value"])

    def _name_bills_from(self, first: int) -> None:
        """Give new bills ids that depend on the state alone: the package draws them, and replies would differ."""
        for number, bill in enumerate(self.tools.db.bills[first:], first):
            drawn, bill.bill_id = bill.bill_id, f"B{hashlib.sha256(f'draft {number}'.encode()).hexdigest()[:8]}"
            bill_ids = self.tools.get_customer_by_id(bill.customer_id).bill_ids
            bill_ids[bill_ids.index(drawn)] = bill.bill_id


def pristine(actions: Sequence[Action]) -> bytes:
    """A world after these actions and before the first call, pickled: loading is faster than doing them again."""
    world = fresh(_untouched())
    for action in actions:
        world.act(action["env_type"], action["func_name"], action["arguments"])
    return _bytes(world)


def fresh(state: bytes) -> World:
    """The world of a new episode, from the bytes of `pristine`."""
    return World(*pickle.loads(state))


@cache
def _untouched() -> bytes:
    """The package's data as every telecom problem finds it."""
    agent, user = (load_module(f"telecom.{CLASSES[side]}") for side in ("assistant", "user"))
    fields = user.TelecomUserTools.model_fields
    world = World(
        {"db": agent.TelecomDB.load(str(data_file("telecom", "db.toml")))},
        {
            "db": user.TelecomUserDB.load(str(data_file("telecom", "user_db.toml"))),
            **{name: fields[name].get_default() for name in ("network_mode_preference", "default_vpn_details")},
        },
    )
    _sync()(world)
    return _bytes(world)


def _bytes(world: World) -> bytes:
    return pickle.dumps((vars(world.tools), vars(world.user_tools)), protocol=pickle.HIGHEST_PROTOCOL)


def _side(side: Side, state: Mapping[str, Any]) -> Any:
    made = tools_class("telecom", CLASSES[side])()
    vars(made).update(state)
    return made


@cache
def _sync() -> Callable[[World], None]:
    """What the company knows reaches the phone, and what the user paid the company; a second time changes nothing."""
    found: Callable[[World], None] = load_module("telecom.environment").Environment.sync_tools
    return found
