"""travel_desk as TRL takes it: tools as methods of a class, a reward function, a chat template.

What the model calls goes to the same episode that turnwise plays, and is judged by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tasks.core.records import Problem
from tasks.environments.catalog import load_environment
from tasks.tools.base import block_until
from tests.worlds import environment_settings

# The embedded tokenizer's own template, with tool calls written out as turnwise writes them; TRL asks for that.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Method = Callable[..., str]


def answered_by_the_world(method: Method) -> Method:
    """A method that only declares a tool; whatever arguments the model wrote go to the episode, as turnwise's do."""

    @functools.wraps(method)
    def call(self: TravelDeskTools, **arguments: Any) -> str:
        return str(block_until(self._episode.call(method.__name__, arguments)).text)

    return call


class TravelDeskTools:
    """travel_desk as TRL wants an environment: a `reset`, and public methods with hints and docstrings as tools."""

    def __init__(self, problems: dict[str, Problem]):
        self._problems = problems
        self._world = load_environment(environment_settings())

    def reset(self, problem_id: str, **_: Any) -> None:
        self._episode = self._world.start(self._problems[problem_id])

    @answered_by_the_world
    def get_nearest_airport_by_city(self, location: str) -> str:  # type: ignore[empty-body]
        """Code of the airport nearest to a city.

        Args:
            location: A city.
        """

    @answered_by_the_world
    def get_flight_cost(  # type: ignore[empty-body]
        self, travel_from: str, travel_to: str, travel_date: str, travel_class: str
    ) -> str:
        """Cost of one seat in US dollars.

        Args:
            travel_from: An airport's code.
            travel_to: An airport's code.
            travel_date: A month.
            travel_class: economy, business or first.
        """

    @answered_by_the_world
    def check_card(self, card_id: str) -> str:  # type: ignore[empty-body]
        """Whether a card can pay; it must be checked before it is charged.

        Args:
            card_id: A card.
        """

    @answered_by_the_world
    def book_flight(  # type: ignore[empty-body]
        self, travel_from: str, travel_to: str, travel_date: str, travel_class: str, travel_cost: int, card_id: str
    ) -> str:
        """Book one seat at its current cost.

        Args:
            travel_from: An airport's code.
            travel_to: An airport's code.
            travel_date: A month.
            travel_class: economy, business or first.
            travel_cost: What get_flight_cost answered.
            card_id: A card that was checked.
        """

    @answered_by_the_world
    def cancel_booking(self, booking_id: str) -> str:  # type: ignore[empty-body]
        """Cancel a booking; answers the refund.

        Args:
            booking_id: A booking.
        """

    @answered_by_the_world
    def convert_currency(self, amount: int, currency: str) -> str:  # type: ignore[empty-body]
        """Convert an amount in US dollars.

        Args:
            amount: US dollars.
            currency: EUR, GBP, JPY or CAD.
        """


def outcome(completions: list[list[dict[str, Any]]], environments: list[TravelDeskTools], **_: Any) -> list[float]:
    """1 for a solved problem: the state of the world, and the closing message, as turnwise judges them."""
    rewards = []
    for messages, environment in zip(completions, environments, strict=True):
        last = messages[-1]
        closes = last["role"] == "assistant" and not last.get("tool_calls")
        rewards.append(float(block_until(environment._episode.verdict(last["content"] if closes else None)).success))
    return rewards
