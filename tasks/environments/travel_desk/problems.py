"""The problems of travel_desk: entities, request grammar, and the draw of one problem from a random stream. The
reference solution is added later, by playing the problem (`environment.py`).
"""

from __future__ import annotations

import random
import re
from typing import Any

from tasks.core.records import Problem, ReferenceTurn

AIRPORTS = {
    "Paris": "CDG", "Tokyo": "HND", "London": "LHR", "Berlin": "BER", "Madrid": "MAD", "Rome": "FCO",
    "Oslo": "OSL", "Vienna": "VIE", "Lisbon": "LIS", "Dublin": "DUB", "Cairo": "CAI", "Delhi": "DEL",
    "Sydney": "SYD", "Toronto": "YYZ", "Chicago": "ORD", "Boston": "BOS", "Seattle": "SEA", "Denver": "DEN",
    "Miami": "MIA", "Austin": "AUS", "Lima": "LIM", "Quito": "UIO", "Seoul": "ICN", "Osaka": "KIX",
}  # fmt: skip
CITIES, CODES = list(AIRPORTS), frozenset(AIRPORTS.values())
CLASSES = ("economy", "business", "first")
CURRENCIES = ("EUR", "GBP", "JPY", "CAD")
MONTHS = ("January", "February", "March", "April", "May", "June", "July",
          "August", "September", "October", "November", "December")  # fmt: skip
CARDS = tuple(f"card_{number}" for number in range(20))

LEVELS = {"cancel": 1, "quote": 2, "book": 3, "change": 4}
ROUTE = ("origin", "destination", "month", "classes")
WORLD_KEYS = {
    "cancel": ("booking",),
    "quote": (*ROUTE, "currency"),
    "book": (*ROUTE, "cards"),
    "change": ("booking", *ROUTE, "cards"),
}
MAY_TIME_OUT = {
    "quote": ("get_nearest_airport_by_city", "get_flight_cost", "convert_currency"),
    "book": ("get_nearest_airport_by_city", "get_flight_cost", "check_card"),
    "change": ("get_nearest_airport_by_city", "get_flight_cost", "check_card"),
}
# The grammar of user requests, shared by all splits: entities keep their order, wording varies.
GREETINGS = ("", "", "Hello. ", "Good morning. ")
REQUESTS = {
    "cancel": ("Cancel booking {booking} and tell me the refund.",
               "Please cancel booking {booking}. What is the refund?"),
    "quote": ("How much is {a_class} {class} flight from {origin} to {destination} in {month} in {currency}?",
              "What does {a_class} {class} seat from {origin} to {destination} in {month} cost in {currency}?"),
    "book": ("Book {a_class} {class} or else {class2} flight from {origin} to {destination} in {month}. "
             "Pay with {card} or else {card2}.",
             "I need {a_class} {class} or else {class2} seat from {origin} to {destination} in {month}. "
             "Charge {card} or else {card2}."),
    "change": ("Cancel booking {booking}. Then book {a_class} {class} or else {class2} flight from {origin} "
               "to {destination} in {month}. Pay with {card} or else {card2}.",),
}  # fmt: skip


# Where a request of the grammar is cut for a user who tells it in parts; joined again they are the request.
CUTS = re.compile(r" (?=from [A-Z]|in (?:EUR|GBP|JPY|CAD)\b|Then |Pay |Charge |and tell |What is )")


def categories() -> list[tuple[str, str, str | None]]:
    """(kind, error, tool that times out), easiest kind first."""
    kinds = [(kind, "none", None) for kind in LEVELS]
    timeouts = [(kind, "timeout", tool) for kind, tools in MAY_TIME_OUT.items() for tool in tools]
    refusals = [(kind, error, None) for kind in ("book", "change") for error in ("sold_out", "declined")]
    return [*kinds, *timeouts, *refusals]


def draw_problem(rng: random.Random, problem_id: str, kind: str, error: str, timeout_tool: str | None) -> Problem:
    """One problem without its reference. A seed depends on the order of the draws: keep it."""
    origin, destination = rng.sample(CITIES, 2)
    booking, classes, cards = f"B{rng.randint(10, 99)}", rng.sample(CLASSES, 2), rng.sample(CARDS, 2)
    month, currency = rng.choice(MONTHS), rng.choice(CURRENCIES)
    world: dict[str, Any] = {"kind": kind, "error": error, "seed": rng.randrange(1 << 30)}
    if timeout_tool:
        world["timeout_tool"] = timeout_tool
    if kind in ("cancel", "change"):
        world["booking"] = booking
    if kind != "cancel":
        world |= {"origin": origin, "destination": destination, "month": month, "classes": classes}
    if kind in ("book", "change"):
        world["cards"] = cards
    if kind == "quote":
        world["currency"] = currency
    words = {
        "booking": booking,
        "a_class": "an" if classes[0] == "economy" else "a",
        "class": classes[0],
        "class2": classes[1],
        "origin": origin,
        "destination": destination,
        "month": month,
        "currency": currency,
        "card": cards[0],
        "card2": cards[1],
    }
    request = rng.choice(GREETINGS) + rng.choice(REQUESTS[kind]).format(**words)
    return Problem(
        id=problem_id,
        category="/".join(filter(None, (kind, error, timeout_tool))),
        level=LEVELS[kind],
        requests=[request],
        world=world,
        reference=[ReferenceTurn(calls=[], answer="")],
        split_group=f"booking {booking}" if kind == "cancel" else f"route {origin} {destination}",
    )
