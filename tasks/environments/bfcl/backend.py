"""The state behind a bfcl episode: instances of the package's classes, one set for the model, one for the ground truth.

Calls and replies match the package's, but nothing is evaluated: tools are looked up by name and called with keywords.
Instances are new for each episode. State that the package shares between them (module globals, default arguments) is
copied too; the two sides of an episode share it, as they do in the package.
"""

from __future__ import annotations

import decimal
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

from tasks.environments.bfcl.package import WITHOUT_STATE, owners, signature, tool_class, tools_of_class

MAX_DIGITS = 1_000  # of precision and of decimal places; ground truths use at most 10
MAX_NUMBER_CHARACTERS = 100
MAX_PATHS, MAX_TREE_CHARACTERS = 20_000, 2_000_000  # the package's largest tree: 124 and 17,379
MUTABLE = (dict, list)


class Side:
    """One set of instances, by class name. `defaults`: the mutable default arguments of their methods."""

    def __init__(self, instances: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]):
        self.instances, self.defaults = instances, defaults

    def answer(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """(reply, whether the tool raised)."""
        try:
            given = {name: deepcopy(value) if type(value) in MUTABLE else value for name, value in arguments.items()}
            if tool in self.defaults:
                given = {**self.defaults[tool], **given}
            return self._reply(tool, given), False
        except Exception as error:
            return f"Error during execution: {error!s}", True

    def differences(self, truth: Side) -> list[str]:
        """The public attributes, such as `TicketAPI.queue`, that differ from the ground truth."""
        return [
            f"{name}.{attribute}"
            for name, instance in truth.instances.items()
            for attribute, value in vars(instance).items()
            if not attribute.startswith("_") and getattr(self.instances[name], attribute) != value
        ]

    def _reply(self, tool: str, arguments: dict[str, Any]) -> str:
        owner = owners().get(tool)
        if owner is None or owner not in self.instances:
            raise NameError(f"name '{tool}' is not defined")
        instance = self.instances[owner]
        if tool in BOUNDS:
            BOUNDS[tool](instance, arguments)
        method = getattr(instance, tool)
        with precision_kept() if tool in SETS_PRECISION else nullcontext():
            return in_text(method(**arguments))


def in_text(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is dict:
        try:
            return json.dumps(value)
        except Exception:  # not JSON, such as a Decimal
            return str(value)
    return str(value)


def pristine(involved_classes: Sequence[str], initial_config: Mapping[str, Any], *, long_context: bool) -> bytes:
    """Both sides before the first call, pickled: loading is faster than building the instances again."""
    sides = [
        {name: _instance(name, initial_config.get(name, {}), long_context) for name in involved_classes}
        for _ in range(2)
    ]
    tools = [tool.name for name in involved_classes for tool in tools_of_class(name)]
    defaults = {tool: found for tool in tools if (found := _mutable_defaults(tool))}
    return pickle.dumps((*sides, defaults), protocol=pickle.HIGHEST_PROTOCOL)


def fresh(state: bytes) -> tuple[Side, Side]:
    """(model, ground truth) of a new episode, from the bytes of `pristine`."""
    model, truth, defaults = pickle.loads(state)
    return Side(model, defaults), Side(truth, defaults)


def _instance(name: str, scenario: Mapping[str, Any], long_context: bool) -> Any:
    instance = tool_class(name)()
    if name != WITHOUT_STATE:
        instance._load_scenario(deepcopy(scenario), long_context=long_context)
    return instance


def _mutable_defaults(tool: str) -> dict[str, Any]:
    """Default arguments that a method could change for all later calls; all are empty."""
    parameters = signature(tool).parameters.values()
    return {item.name: type(item.default)() for item in parameters if isinstance(item.default, MUTABLE)}


@contextmanager
def precision_kept() -> Iterator[None]:
    """MathAPI changes the precision of mpmath (process) and of decimal (thread); restore both."""
    import mpmath

    with mpmath.mp.workdps(mpmath.mp.dps), decimal.localcontext():
        yield


def _bounded_power(_: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a slow power of integers, with the package's own error: too many digits to print."""
    base, exponent = arguments.get("base"), arguments.get("exponent")
    limit = sys.get_int_max_str_digits() or sys.int_info.default_max_str_digits
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        at_least_bits = exponent * (base.bit_length() - 1)
        if at_least_bits > 4 * limit:  # 3.33 bits per digit
            raise ValueError(
                f"Exceeds the limit ({limit} digits) for integer string conversion; "
                f"use sys.set_int_max_str_digits() to increase the limit"
            )


def _bounded_precision(_: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse precision that would take minutes, and numbers whose exponent alone would."""
    try:
        digits = int(arguments.get("precision", 0))
    except (TypeError, ValueError, OverflowError):
        return  # the tool reports it
    if digits > MAX_DIGITS:
        raise ValueError(f"precision is limited to {MAX_DIGITS} digits")
    if any(isinstance(value, str) and len(value) > MAX_NUMBER_CHARACTERS for value in arguments.values()):
        raise ValueError(f"a number given as text is limited to {MAX_NUMBER_CHARACTERS} characters")


def _bounded_places(_: Any, arguments: Mapping[str, Any]) -> None:
    places = arguments.get("decimal_places")
    if isinstance(places, int) and places < -MAX_DIGITS:  # the tool divides an integer by 10 to that power
        raise ValueError(f"decimal_places is limited to {-MAX_DIGITS}")


def _bounded_tree(instance: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse to walk a huge tree: `cp` of a directory shares its content, so a hundred calls can build millions of
    paths, and two calls a directory that contains itself.
    """
    path = arguments.get("path", ".")
    start: Any = instance._navigate_to_directory(path) if isinstance(path, str) else None
    waiting = [(start, len(path))] if hasattr(start, "contents") else []
    num_paths = num_characters = 0
    while waiting:
        directory, length = waiting.pop()
        for name, item in directory.contents.items():
            num_paths, num_characters = num_paths + 1, num_characters + length + len(name) + 1
            if hasattr(item, "contents"):
                waiting.append((item, length + len(name) + 1))
            elif isinstance(item.content, str):
                num_characters += len(item.content)
            if num_paths > MAX_PATHS or num_characters > MAX_TREE_CHARACTERS:
                raise ValueError(f"a tree is limited to {MAX_PATHS} paths and {MAX_TREE_CHARACTERS} characters")


BOUNDS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "power": _bounded_power,
    "logarithm": _bounded_precision,
    "square_root": _bounded_precision,
    "round_number": _bounded_places,
    "find": _bounded_tree,
    "du": _bounded_tree,
}
SETS_PRECISION = frozenset({"logarithm", "square_root"})
