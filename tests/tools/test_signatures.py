"""Signatures of tools: what their annotations make of a model's JSON, and which signatures say too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from datetime import date
from enum import Enum
from threading import Lock
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, ToolReply, Verdict, block_until
from tasks.tools.signatures import _direct, read_signature
from tests import tiny
from tests.worlds import QUICK

PROBLEM = tiny.problems(1)[0]


class Size(Enum):
    SMALL = "small"
    BIG = "big"


class Reader(BaseModel):
    name: str
    age: int = 3


class Place(Settings):
    """A strict class: it takes an Enum's text from JSON alone."""

    size: Size


def even(number: int) -> int:
    if number % 2:
        raise ValueError("it is odd")
    return number


class ShelfEpisode(ToolEpisode):
    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.seen: list[Any] = []

    @tool("Copies of a book.", read_only=True)
    def stock(self, size: Size = Size.SMALL, who: Reader | None = None, day: date | None = None) -> str:
        return self._see(size, who, day)

    @tool("Put a book somewhere.")
    async def put(self, place: Place, tags: set[str], half: Annotated[int, AfterValidator(even)] = 2) -> str:
        return self._see(place, tags, half)

    @tool("Reserve copies.", blocking=True)
    def reserve(self, copies: Annotated[int, Field(ge=1)], most: int | None = None, days: Literal[1, 2] = 1) -> str:
        return self._see(copies, most, days)

    @tool("Reserve several books.")
    def reserve_all(self, copies: list[int], prices: dict[str, int]) -> str:
        return self._see(copies, prices)

    @tool("Pay.")
    def pay(self, price: float, tip: int | float = Field(default=0), note: Any = None) -> str:
        return self._see(price, tip, note)

    @tool("Where a book came from.")
    def origin(self, source: Annotated[str, Field(alias="from"), StringConstraints(to_lower=True)]) -> str:
        return self._see(source)

    def _see(self, *values: Any) -> str:
        self.seen = list(values)
        return "seen"

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(True)


class Shelf(ToolEnvironment):
    name, episode_class = "shelf", ShelfEpisode


def seen(name: str, arguments: dict[str, Any]) -> list[Any]:
    episode = Shelf(QUICK).start(PROBLEM)
    assert isinstance(episode, ShelfEpisode)
    assert block_until(episode.call(name, arguments)) == ToolReply("seen")
    return episode.seen


def refused(name: str, arguments: dict[str, Any]) -> str:
    episode = Shelf(QUICK).start(PROBLEM)
    reply = block_until(episode.call(name, arguments))
    assert isinstance(episode, ShelfEpisode)
    assert (reply.valid, reply.error, episode.seen) == (False, "invalid_arguments", [])
    error = json.loads(reply.text)["error"]
    assert error["type"] == "invalid_arguments"
    return str(error["message"])


@pytest.mark.parametrize(
    ("name", "arguments", "values"),
    [
        ("stock", {}, [Size.SMALL, None, None]),
        ("stock", {"size": "big"}, [Size.BIG, None, None]),
        ("stock", {"who": {"name": "Ada", "age": 4.0}}, [Size.SMALL, Reader(name="Ada", age=4), None]),
        ("stock", {"day": "2026-11-28"}, [Size.SMALL, None, date(2026, 11, 28)]),
        ("put", {"place": {"size": "big"}, "tags": ["a", "b"]}, [Place(size=Size.BIG), {"a", "b"}, 2]),
        ("origin", {"from": "Kent"}, ["kent"]),
        ("pay", {"price": 1.5}, [1.5, 0, None]),
    ],
)
def test_an_argument_is_what_its_annotation_says(name: str, arguments: dict[str, Any], values: list[Any]):
    assert seen(name, arguments) == values


@pytest.mark.parametrize(
    ("name", "arguments", "values"),
    [
        ("reserve", {"copies": 3.0, "most": 5.0, "days": 2.0}, "[3, 5, 2]"),
        ("reserve", {"copies": 3, "most": None}, "[3, None, 1]"),
        ("reserve", {"copies": 1e20}, "[100000000000000000000, None, 1]"),
        ("reserve_all", {"copies": [1.0, 2], "prices": {"a": 3.0}}, "[[1, 2], {'a': 3}]"),
        ("pay", {"price": 3.0, "tip": 2.0, "note": 1.0}, "[3.0, 2.0, 1.0]"),
    ],
)
def test_a_whole_number_with_a_point_is_an_integer_where_one_is_annotated(
    name: str, arguments: dict[str, Any], values: str
):
    assert str(seen(name, arguments)) == values


def test_what_pydantic_refuses_though_the_schema_allows_it_blames_the_call():
    assert "day: Input should be a valid date" in refused("stock", {"day": "the day after"})
    assert "half: Value error, it is odd" in refused("put", {"place": {"size": "big"}, "tags": [], "half": 3})
    assert "what JSON cannot" in refused("pay", {"price": 1.0, "note": float("nan")})
    assert '"huge" is not one of' in refused("stock", {"size": "huge"})


def test_a_tool_of_texts_and_numbers_is_called_without_any_detour():
    def plain(self: Any, a: str, b: float | None, c: Literal["x"], d: bool = True) -> None: ...

    assert read_signature(plain)[1].__code__ is _direct(plain, {}).__code__


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (list[str], ["a"]),
        (list[str] | None, ["a"]),
        (list[dict[str, Any]], [{"a": ["b"]}]),
        (dict[str, list[float]], {"a": [0.5]}),
        (int | list[str], ["a"]),
        (list[int], [1]),
        (Any, {"a": ["b"]}),
        (Any | int, ["a"]),
    ],
)
def test_what_a_method_does_to_its_argument_is_not_done_to_the_call(annotation: Any, value: Any):
    """The call is of the problem's reference, or of a trajectory."""
    seen: list[Any] = []

    def keep(self: Any, given: Any) -> None:
        seen.append(deepcopy(given))
        spoil(given)

    keep.__annotations__["given"] = annotation
    arguments = {"given": deepcopy(value)}
    read_signature(keep)[1](None, arguments)
    assert (seen, arguments) == ([value], {"given": value})


def spoil(value: Any) -> None:
    """Change every list and object in it."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            spoil(item)
        value.clear()


class Odd(ToolEpisode):
    """Methods that say too little of their arguments."""

    def bare(self, isbn) -> None: ...

    def many(self, *isbn: str) -> None: ...

    def named(self, isbn: str, **kw: str) -> None: ...

    def placed(self, isbn: str, /) -> None: ...

    def unknown(self, copies: int, isbn: Foo) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def unreadable(self, copies: int, lock: Lock) -> None: ...

    def uncallable(self, then: Callable[[], None]) -> None: ...

    def hidden(self, _isbn: str) -> None: ...

    def selfless(isbn: str) -> None: ...  # type: ignore[misc]

    def empty() -> None: ...  # type: ignore[misc]

    @staticmethod
    def static(isbn: str) -> None: ...

    @classmethod
    def of_class(cls, isbn: str) -> None: ...


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("bare", "an argument isbn without a type.*isbn: str"),
        ("many", r"\*isbn: .*an argument for each"),
        ("named", r"\*\*kw: .*an argument for each"),
        ("placed", "takes isbn by its place alone.*/"),
        ("unknown", "an argument isbn .*NameError: name 'Foo' is not defined.*import the type"),
        ("unreadable", "an argument lock .*no JSON Schema"),
        ("uncallable", "an argument then .*no JSON Schema"),
        ("hidden", "an argument _isbn, .*another one"),
        ("selfless", "no self.*Write self first"),
        ("empty", "no self"),
        ("static", "is a staticmethod.*Leave @staticmethod out"),
        ("of_class", "is a classmethod.*Leave @classmethod out"),
    ],
)
@pytest.mark.parametrize("is_outermost", [True, False])
def test_a_signature_that_says_too_little_is_refused_in_one_line_with_file_tool_and_argument(
    method: str, says: str, is_outermost: bool
):
    found = vars(Odd)[method]
    marked = found if is_outermost or not isinstance(found, staticmethod | classmethod) else found.__func__
    tool("Does something.")(marked)
    again = marked if marked is found else type(found)(marked)
    episode_class = type("MarkedEpisode", (ShelfEpisode,), {method: again})
    world = type("Marked", (ToolEnvironment,), {"name": "marked", "episode_class": episode_class})
    with pytest.raises(ValueError, match=rf"^tests/tools/test_signatures\.py:\d+: the tool {method} .*{says}") as told:
        world(QUICK)
    assert "\n" not in str(told.value)


def test_tool_without_parentheses_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r'Write @tool\("what it does"\)'):

        class Silent(ToolEpisode):
            @tool  # type: ignore[arg-type]
            def stock(self, isbn: str) -> None: ...  # type: ignore[misc]


def test_an_annotation_of_the_reply_may_be_unknown():
    def stock(self: Any, isbn: str) -> Foo: ...  # type: ignore[name-defined]  # noqa: F821

    assert read_signature(stock)[0]["required"] == ["isbn"]


def test_the_shelf_is_an_environment() -> None:
    world: Environment = Shelf(QUICK)
    assert [item.name for item in world.tools] == ["stock", "put", "reserve", "reserve_all", "pay", "origin"]
