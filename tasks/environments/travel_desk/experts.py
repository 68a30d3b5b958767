"""The reference solution of travel_desk, and the expert that demonstrates.

Both follow a plan: a generator that yields calls, receives the replies, and ends with the closing message. The
reference meets errors with a retry or a second choice; the expert meets none and takes detours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from tasks.core.records import Demonstration, ToolCall
from tasks.core.tool_calls import call_text, parse_calls
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import block_until

REPEAT_PROBABILITY = 0.3  # of a read-only call, without an error: RL needs "ask again" to have some probability
COMPARE_PROBABILITY = 0.35  # the expert compares the user's second class or card, and then takes it
SWAP_PROBABILITY = 0.5  # destination's airport first, so that codes are matched by city, not by order
ASK_AGAIN_PROBABILITY = 0.1  # a city looked up once more after the other
MAX_REPEATS = 3  # per episode, far below the turn limit

# What a thought says of a call: its part of the plan, and the step itself.
THOUGHTS = {
    "get_nearest_airport_by_city": ("airports", "look up {location}"),
    "get_flight_cost": ("price", "price of {travel_class}"),
    "convert_currency": ("currency", "convert to {currency}"),
    "check_card": ("card", "check {card_id}"),
    "book_flight": ("booking", "book with {card_id}"),
    "cancel_booking": ("cancel", "cancel {booking_id}"),
}
WAITING_THOUGHT, LAST_THOUGHT = "ask", "answer"

Move = ToolCall | str  # what an expert does next: a call, or the closing message
Expert = Generator[Move, dict[str, Any], None]


def solve(episode: ToolEpisode) -> Iterator[Move]:
    """Solve a new episode and yield each move. Other episodes of the problem are judged against its final state."""
    world = episode.problem.world
    plan = _plan(world, world.get("classes", [""])[0], world.get("cards", [""])[0])
    move = next(plan)
    while isinstance(move, ToolCall):
        yield move
        reply = json.loads(block_until(episode.call(move.name, move.arguments)).text)
        if reply["status"] == "timeout":
            continue
        if reply["status"] == "sold_out":
            move = _replace(move, travel_class=world["classes"][1])
        elif reply["status"] == "declined":
            move = _replace(move, card_id=world["cards"][1])
        else:
            move = plan.send({**reply, "call": move})
    yield move


def _replace(call: ToolCall, **changed: str) -> ToolCall:
    return ToolCall(name=call.name, arguments={**call.arguments, **changed})


def _plan(world: Mapping[str, Any], travel_class: str, card: str, cities: Sequence[str] = ()) -> Expert:
    """The shortest solution; each reply is sent back with its call. `cities`: the order of the lookups."""
    kind = world["kind"]
    if kind in ("cancel", "change"):
        reply = yield ToolCall(name="cancel_booking", arguments={"booking_id": world["booking"]})
    if kind == "cancel":
        yield f"The refund is {reply['refund']}."
        return
    codes = {}
    for city in cities or (world["origin"], world["destination"]):
        reply = yield ToolCall(name="get_nearest_airport_by_city", arguments={"location": city})
        codes[city] = reply["airport"]
    flight = {
        "travel_from": codes[world["origin"]],
        "travel_to": codes[world["destination"]],
        "travel_date": world["month"],
        "travel_class": travel_class,
    }
    reply = yield ToolCall(name="get_flight_cost", arguments=flight)
    if kind == "quote":
        price = {"amount": reply["cost"], "currency": world["currency"]}
        reply = yield ToolCall(name="convert_currency", arguments=price)
        yield f"It costs {reply['amount']} {world['currency']}."
        return
    seat = {**reply["call"].arguments, "travel_cost": reply["cost"]}
    reply = yield ToolCall(name="check_card", arguments={"card_id": card})
    reply = yield ToolCall(name="book_flight", arguments={**seat, "card_id": reply["card"]})
    yield f"Booked as {reply['booking_id']}."


def free_expert(world: Mapping[str, Any], rng: random.Random) -> Expert:
    """The plan with detours: repeated read-only calls, and the second choice compared and then taken."""
    repeats = MAX_REPEATS
    cities = _lookups(world, rng) if "origin" in world else ()
    plan = _plan(world, world.get("classes", [""])[0], world.get("cards", [""])[0], cities)
    move = next(plan)
    while isinstance(move, ToolCall):
        reply = yield move
        second = _second_choice(world, move)
        probability = COMPARE_PROBABILITY if second else REPEAT_PROBABILITY
        if move.name not in ("book_flight", "cancel_booking") and repeats and rng.random() < probability:
            repeats -= 1
            move = second or move
        else:
            move = plan.send({**reply, "call": move})
    yield move


def _lookups(world: Mapping[str, Any], rng: random.Random) -> list[str]:
    cities = [world["origin"], world["destination"]]
    if rng.random() < SWAP_PROBABILITY:
        cities.reverse()
    if rng.random() < ASK_AGAIN_PROBABILITY:
        cities.append(cities[0])
    return cities


def _second_choice(world: Mapping[str, Any], call: ToolCall) -> ToolCall | None:
    """The same call with the user's second class or card, if the first was tried and there is a second."""
    if world["kind"] in ("book", "change"):
        if call.name == "get_flight_cost" and call.arguments["travel_class"] == world["classes"][0]:
            return _replace(call, travel_class=world["classes"][1])
        if call.name == "check_card" and call.arguments["card_id"] == world["cards"][0]:
            return _replace(call, card_id=world["cards"][1])
    return None


def record(episode: ToolEpisode, expert: Expert) -> Demonstration:
    problem = episode.problem
    texts: list[str] = []
    replies: list[list[str]] = []
    move = next(expert)
    while isinstance(move, ToolCall):
        reply = block_until(episode.call(move.name, move.arguments))
        texts.append(call_text(move))
        replies.append([reply.text])
        move = expert.send(json.loads(reply.text))
    return Demonstration(
        problem_id=problem.id, request=problem.requests[0], assistant_texts=[*texts, move], replies=[*replies, []]
    )


def think(demonstration: Demonstration) -> list[str]:
    """A thought before each message: the step it takes, and at first the plan. A function of its calls alone."""
    told = [next((call for call in parse_calls(text) if call), None) for text in demonstration.assistant_texts[:-1]]
    plan = ", ".join(dict.fromkeys(THOUGHTS[call.name][0] for call in told if call))
    steps = [THOUGHTS[call.name][1].format(**call.arguments) if call else WAITING_THOUGHT for call in told]
    return [f"{plan}: {steps[0]}", *steps[1:], LAST_THOUGHT]
