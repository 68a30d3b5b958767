"""travel_desk: a stateful travel back office with scripted errors the agent must recover from.

Users ask to cancel a booking (level 1), to price a flight (level 2), to book one (level 3) or to replace one (level
4), and name an ordered second choice of class and card. A problem may script one error: a tool times out once, the
first class tried is sold out, or the first card tried is declined. Whatever is tried *first* fails, so luck cannot
pass for recovery. Expert demonstrations contain no error and no recovery: finding it is what RL is for.

Success is a state check (bookings equal to those of the reference solution, any class and card the user accepts
counting
as equal) and a response check (the closing message names the same booking numbers, amounts and currencies).

Every tool reply has the same token shape, because a tiny model that learns to copy by position loses it when an error
reply is shorter than an ordinary one. So errors have the form of ordinary replies here, the tool layer's included
(infra/decisions/0009). Everything is a function of `problem.world`; nothing is random at play time.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any

from tasks.environments.base import ErrorType, Verdict, wait
from tasks.environments.layer import ToolError
from tasks.environments.tools import call_text
from tasks.environments.world import ToolEpisode, World, one_of, tool
from tasks.records import Demonstration, Problem, ReferenceTurn, ToolCall

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

Airport = Annotated[str, one_of(sorted(CODES))]
Month = Annotated[str, one_of(MONTHS)]
SeatClass = Annotated[str, one_of(CLASSES)]
Currency = Annotated[str, one_of(CURRENCIES)]

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
# The grammar of user requests; all splits share it. Entities keep their order, wording varies.
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
FACT = re.compile(r"\bB?\d+\b|\b(?:" + "|".join(CURRENCIES) + r")\b")

REPEAT_PROBABILITY = (
    0.3  # the expert repeats a read-only call: "ask again" gets support for RL to find, without an error
)
COMPARE_PROBABILITY = 0.35  # the expert compares the user's second class or card, and then takes it
SWAP_PROBABILITY = 0.5  # the destination's airport first: which code is whose must come from the city, not the order
ASK_AGAIN_PROBABILITY = 0.1  # a city looked up once more after the other
MAX_REPEATS = 3  # an episode, so that repeats never bring it near the turn limit

Reply = dict[str, Any]
Move = ToolCall | str  # what an expert does next: a call, or the closing message
Expert = Generator[Move, dict[str, Any], None]


def _may_time_out(method: Callable[..., Reply]) -> Callable[..., Reply]:
    """The first valid call of the tool that `world.timeout_tool` names is answered with a timeout."""

    @wraps(method)
    def call(episode: TravelDeskEpisode, **arguments: Any) -> Reply:
        if episode.timeout_tool != method.__name__:
            return method(episode, **arguments)
        episode.timeout_tool = None
        return {"status": "timeout", "tool": method.__name__}

    return call


class TravelDeskEpisode(ToolEpisode):
    """One back end: the bookings are its state; errors scripted by the problem strike the first attempt."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.world = world = problem.world
        self.bookings: dict[str, tuple[str, ...]] = {world["booking"]: ()} if "booking" in world else {}
        self.accepted_cards: set[str] = set()
        self.timeout_tool = world.get("timeout_tool")
        self.sold_out_class: str | None = None
        self.declined_card: str | None = None

    @staticmethod
    def word_error(type: ErrorType, tool: str, message: str) -> str:
        # Replies hold this world's words only: a name the model made up is not echoed.
        return json.dumps({"status": "invalid", "tool": tool or "unknown"})

    def verdict(self, final_message: str | None) -> Verdict:
        expected, answer = TravelDeskEpisode(self.problem), ""
        for move in _solve(expected):
            answer = move if isinstance(move, str) else ""
        said = FACT.findall(final_message or "")
        checks = {
            "state": self._canonical_state() == expected._canonical_state(),
            "response": set(said) == set(FACT.findall(answer)),
        }
        return Verdict(all(checks.values()), checks)

    def _canonical_state(self) -> dict[str, tuple[str, ...]]:
        """The bookings, with every class and card the user accepts written as the first one they named."""
        accepted = {
            **dict.fromkeys(self.world.get("classes", ()), "class"),
            **dict.fromkeys(self.world.get("cards", ()), "card"),
        }
        return {booking: tuple(accepted.get(item, item) for item in seat) for booking, seat in self.bookings.items()}

    def _number(self, *key: str) -> int:
        """A two-digit figure of this world, fixed by the problem's seed."""
        return 10 + zlib.crc32(f"{self.world['seed']}/{'/'.join(key)}".encode()) % 90

    def _is_sold_out(self, travel_class: str) -> bool:
        if self.world["error"] != "sold_out" or travel_class not in self.world["classes"]:
            return False
        self.sold_out_class = self.sold_out_class or travel_class
        return travel_class == self.sold_out_class

    @tool("Code of the airport nearest to a city.", read_only=True)
    @_may_time_out
    def get_nearest_airport_by_city(self, location: str) -> Reply:
        if location not in AIRPORTS:
            raise ToolError("not_found", "no such city")
        return {"status": "ok", "airport": AIRPORTS[location]}

    @tool("Cost of one seat in US dollars.", read_only=True)
    @_may_time_out
    def get_flight_cost(
        self, travel_from: Airport, travel_to: Airport, travel_date: Month, travel_class: SeatClass
    ) -> Reply:
        if self._is_sold_out(travel_class):
            return {"status": "sold_out", "seat": travel_class}
        return {"status": "ok", "cost": self._number(travel_from, travel_to, travel_date, travel_class)}

    @tool("Whether a card can pay; it must be checked before it is charged.", idempotent=True)
    @_may_time_out
    def check_card(self, card_id: str) -> Reply:
        if card_id not in self.world.get("cards", ()):
            raise ToolError("not_found", "no such card")
        if self.world["error"] == "declined":
            self.declined_card = self.declined_card or card_id
            if card_id == self.declined_card:
                return {"status": "declined", "card": card_id}
        self.accepted_cards.add(card_id)
        return {"status": "ok", "card": card_id}

    @tool("Book one seat at its current cost.")
    @_may_time_out
    def book_flight(
        self,
        travel_from: Airport,
        travel_to: Airport,
        travel_date: Month,
        travel_class: SeatClass,
        travel_cost: int,
        card_id: str,
    ) -> Reply:
        if self._is_sold_out(travel_class):
            return {"status": "sold_out", "seat": travel_class}
        cost = self._number(travel_from, travel_to, travel_date, travel_class)
        if travel_cost != cost or card_id not in self.accepted_cards:
            raise ToolError("conflict", "another cost, or a card that was not accepted")
        booking = f"B{self._number('booking', str(len(self.bookings)))}"
        self.bookings[booking] = (travel_from, travel_to, travel_date, travel_class, card_id)
        return {"status": "ok", "booking_id": booking}

    @tool("Cancel a booking; answers the refund.")
    @_may_time_out
    def cancel_booking(self, booking_id: str) -> Reply:
        if booking_id not in self.bookings:
            raise ToolError("not_found", "no such booking")
        del self.bookings[booking_id]
        return {"status": "ok", "refund": self._number("refund", booking_id)}

    @tool("Convert an amount in US dollars.", read_only=True)
    @_may_time_out
    def convert_currency(self, amount: int, currency: Currency) -> Reply:
        return {"status": "ok", "amount": self._number("convert", str(int(amount)), currency)}


class TravelDesk(World):
    """The world: six tools, a problem generator, an error-free expert."""

    name = "travel_desk"
    episode_class = TravelDeskEpisode
    seed_scheme = "crc32/1"
    data = AIRPORTS

    def start(self, problem: Problem, *, stream: str = "") -> ToolEpisode:
        kind = problem.world.get("kind")
        if kind not in WORLD_KEYS:
            raise ValueError(
                f"problem {problem.id!r}: world.kind = {kind!r} is not one that travel_desk can build. "
                f"Choose one of: {', '.join(WORLD_KEYS)}."
            )
        missing = {"error", "seed", *WORLD_KEYS[kind]} - problem.world.keys()
        if missing:
            raise ValueError(
                f"problem {problem.id!r}: world lacks {', '.join(sorted(missing))}, so travel_desk cannot build it. "
                f"The README shows a complete problem."
            )
        return super().start(problem, stream=stream)

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """Problems in turn over the categories up to `max_level`; deterministic in all arguments."""
        categories = [item for item in _categories() if LEVELS[item[0]] <= max_level]
        for index in range(num_problems):
            kind, error, timeout_tool = categories[index % len(categories)]
            yield _draw_problem(random.Random(f"{seed}/{index}"), f"td-{seed}-{index:06d}", kind, error, timeout_tool)

    def demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        if problem.world["error"] != "none":
            return None
        return _record(problem, _free_expert(problem.world, rng))

    def vocabulary(self) -> list[str]:
        numbers = [str(number) for number in range(10, 100)]
        refusals = [
            json.dumps({"status": "timeout", "tool": "check_card"}),
            json.dumps({"status": "declined", "card": CARDS[0]}),
            json.dumps({"status": "sold_out", "seat": CLASSES[0]}),
            TravelDeskEpisode.word_error("unknown_tool", "", ""),
        ]
        names = [tool.name for tool in self.tools]
        entities = [*AIRPORTS, *sorted(CODES), *CLASSES, *CURRENCIES, *MONTHS, *CARDS, *names]
        return [*entities, *numbers, *refusals]


def _categories() -> list[tuple[str, str, str | None]]:
    """(kind, error, tool that times out) of every type of problem, easiest kind first."""
    kinds = [(kind, "none", None) for kind in LEVELS]
    timeouts = [(kind, "timeout", tool) for kind, tools in MAY_TIME_OUT.items() for tool in tools]
    refusals = [(kind, error, None) for kind in ("book", "change") for error in ("sold_out", "declined")]
    return [*kinds, *timeouts, *refusals]


def _draw_problem(rng: random.Random, problem_id: str, kind: str, error: str, timeout_tool: str | None) -> Problem:
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
    blank = Problem(
        id=problem_id,
        category="/".join(filter(None, (kind, error, timeout_tool))),
        level=LEVELS[kind],
        requests=[request],
        world=world,
        reference=[ReferenceTurn(calls=[], answer="")],
        split_group=f"booking {booking}" if kind == "cancel" else f"route {origin} {destination}",
    )
    *calls, answer = _solve(TravelDeskEpisode(blank))
    reference = ReferenceTurn(calls=[call for call in calls if isinstance(call, ToolCall)], answer=str(answer))
    return blank.model_copy(update={"reference": [reference]})


def _solve(episode: TravelDeskEpisode) -> Iterator[Move]:
    """Solve a fresh episode and yield each move: the plan without detours, an error met by a retry or a second choice.

    What it leaves behind is what every other episode of the problem is judged by.
    """
    world = episode.world
    plan = _plan(world, world.get("classes", [""])[0], world.get("cards", [""])[0])
    move = next(plan)
    while isinstance(move, ToolCall):
        yield move
        reply = json.loads(wait(episode.call(move.name, move.arguments)).text)
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
    """The shortest way to solve a problem; each reply is sent back with the call that got it.

    `cities` are the airports to look up and in which order, where that is not origin and then destination.
    """
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


def _free_expert(world: Mapping[str, Any], rng: random.Random) -> Expert:
    """The plan with detours: repeats of read-only calls, and the second choice compared and then taken."""
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
    """The cities the expert asks about, in any order, sometimes one of them again."""
    cities = [world["origin"], world["destination"]]
    if rng.random() < SWAP_PROBABILITY:
        cities.reverse()
    if rng.random() < ASK_AGAIN_PROBABILITY:
        cities.append(cities[0])
    return cities


def _second_choice(world: Mapping[str, Any], call: ToolCall) -> ToolCall | None:
    """The same call for the user's second class or card, where the first was tried and a second is accepted."""
    if world["kind"] in ("book", "change"):
        if call.name == "get_flight_cost" and call.arguments["travel_class"] == world["classes"][0]:
            return _replace(call, travel_class=world["classes"][1])
        if call.name == "check_card" and call.arguments["card_id"] == world["cards"][0]:
            return _replace(call, card_id=world["cards"][1])
    return None


def _record(problem: Problem, expert: Expert) -> Demonstration:
    """Play an expert on a fresh episode and write down both sides."""
    episode = TravelDeskEpisode(problem)
    texts: list[str] = []
    replies: list[list[str]] = []
    move = next(expert)
    while isinstance(move, ToolCall):
        reply = wait(episode.call(move.name, move.arguments))
        texts.append(call_text(move))
        replies.append([reply.text])
        move = expert.send(json.loads(reply.text))
    return Demonstration(
        problem_id=problem.id, request=problem.requests[0], assistant_texts=[*texts, move], replies=[*replies, []]
    )
