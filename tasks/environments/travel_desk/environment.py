"""travel_desk: a stateful travel back office with scripted errors the agent must recover from.

Users ask to cancel (level 1), price (2), book (3) or replace (4) a booking, and name a second choice of class and card.
A problem may script one error: one timeout of a tool, the first class tried sold out, or the first card tried declined.
Whatever is tried first fails, so luck cannot pass for recovery. Demonstrations show neither error nor recovery: RL must
find it. Success compares the bookings with the reference solution's (accepted classes and cards count as equal) and the
booking numbers, amounts and currencies of the closing message.

Every reply has the same token shape, errors included: a tiny model that copies by position fails on a shorter reply
(infra/decisions/0009). Everything is a function of `problem.world`; nothing is random at play time.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Annotated, Any, NamedTuple

from tasks.core.json_text import json_row, parse
from tasks.core.records import Demonstration, Problem, ReferenceTurn, ToolCall
from tasks.environments.travel_desk.experts import free_expert, record, solve, think
from tasks.environments.travel_desk.problems import (
    AIRPORTS,
    CARDS,
    CLASSES,
    CODES,
    CURRENCIES,
    CUTS,
    LEVELS,
    MONTHS,
    WORLD_KEYS,
    categories,
    draw_problem,
)
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, one_of, tool
from tasks.tools.base import ErrorType, Expert, Verdict
from tasks.tools.layer import ToolError

Airport = Annotated[str, one_of(sorted(CODES))]
Month = Annotated[str, one_of(MONTHS)]
SeatClass = Annotated[str, one_of(CLASSES)]
Currency = Annotated[str, one_of(CURRENCIES)]
FACT = re.compile(r"\bB?\d+\b|\b(?:" + "|".join(CURRENCIES) + r")\b")

Reply = dict[str, Any]
State = dict[str, tuple[str, ...]]  # the bookings by number


def _may_time_out(method: Callable[..., Reply]) -> Callable[..., Reply]:
    """Answer the first valid call of the tool in `world.timeout_tool` with a timeout."""

    @wraps(method)
    def call(episode: TravelDeskEpisode, **arguments: Any) -> Reply:
        if episode.timeout_tool != method.__name__:
            return method(episode, **arguments)
        episode.timeout_tool = None
        return {"status": "timeout", "tool": method.__name__}

    return call


class TravelDeskEpisode(ToolEpisode):
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
        # A name the model made up is not echoed: replies contain only this environment's words.
        return json.dumps({"status": "invalid", "tool": tool or "unknown"})

    def verdict(self, final_message: str | None) -> Verdict:
        solution, said = _solution(json_row(self.world)), FACT.findall(final_message or "")
        checks = {"state": self._canonical_state() == solution.state, "response": set(said) == solution.facts}
        return Verdict(all(checks.values()), checks)

    def _canonical_state(self) -> State:
        """The bookings; classes and cards that the user accepts are written alike."""
        accepted = {
            **dict.fromkeys(self.world.get("classes", ()), "class"),
            **dict.fromkeys(self.world.get("cards", ()), "card"),
        }
        return {booking: tuple(accepted.get(item, item) for item in seat) for booking, seat in self.bookings.items()}

    def _number(self, *key: str) -> int:
        """A two-digit figure, fixed by the problem's seed."""
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


class _Solution(NamedTuple):
    """The reference solution: its turn, the state in which it ends, and the facts of its closing message."""

    turn: ReferenceTurn
    state: State
    facts: frozenset[str]


@lru_cache(maxsize=1 << 14)
def _solution(world: bytes) -> _Solution:
    """Of a world (JSON): every episode of a problem is judged against it."""
    episode = TravelDeskEpisode(Problem.model_construct(world=parse(world)))
    *calls, answer = solve(episode)
    turn = ReferenceTurn(calls=[call for call in calls if isinstance(call, ToolCall)], answer=str(answer))
    return _Solution(turn, episode._canonical_state(), frozenset(FACT.findall(turn.answer)))


class TravelDesk(ToolEnvironment):
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
                f"problem {problem.id!r}: `world` lacks {', '.join(sorted(missing))}, so travel_desk cannot build it. "
                f"The README shows a complete problem."
            )
        return super().start(problem, stream=stream)

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """Problems of all categories up to `max_level`, in turn; deterministic in all arguments."""
        wanted = [category for category in categories() if LEVELS[category[0]] <= max_level]
        for index in range(num_problems):
            rng, problem_id = random.Random(f"{seed}/{index}"), f"td-{seed}-{index:06d}"
            yield _with_reference(draw_problem(rng, problem_id, *wanted[index % len(wanted)]))

    def shards(self, problem: Problem) -> list[str]:
        """What is asked for, where and when, and how it is paid: two to four parts."""
        return CUTS.split(problem.requests[0])

    def expert(self) -> Expert:
        return self.demonstrate

    def demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        if problem.world["error"] != "none":
            return None
        return record(TravelDeskEpisode(problem), free_expert(problem.world, rng))

    def thoughts(self, demonstration: Demonstration) -> list[str]:
        return think(demonstration)

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


def _with_reference(problem: Problem) -> Problem:
    return problem.model_copy(update={"reference": [_solution(json_row(problem.world)).turn]})


ENVIRONMENT = TravelDesk
