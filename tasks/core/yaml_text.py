"""YAML by libyaml, six to ten times as fast as PyYAML's own parser; what libyaml refuses, the other reads or explains.

Where both read a text they read the same. Only the other gets a text with a tab or a byte order mark within, which
libyaml takes for less than it is, one with a `!` alone, which it reads otherwise, and one that could nest 20,000 lists,
where libyaml crashes the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any

import yaml

MOST_EXPANDED = 100_000  # values, each alias counted as what it stands for
MOST_OPENED = 5_000  # characters that may begin a list or a mapping within another
TAB, MARK = "\t", "\ufeff"
LONE_TAG = re.compile(r"!(?:[\s,\]}]|$)")

Resolver = tuple[str, re.Pattern[str], Sequence[str]]  # tag, what has it, and the characters that it begins with


class Dialect:
    """Safe YAML with the methods of `changes`, and with `resolvers`: beside the usual ones, or `only` these."""

    def __init__(self, *changes: type, resolvers: Sequence[Resolver] = (), only: bool = False):
        self.changes, self.resolvers, self.only = changes, resolvers, only

    def load(self, text: str | bytes) -> Any:
        """YAMLError where the text is none, or where aliases make it far longer than it is; UnicodeDecodeError, or
        RecursionError where it is nested too deep.
        """
        text = text if isinstance(text, str) else text.decode("utf-8")
        if "&" in text and "*" in text and _expanded_size(self.compose(text), {}) > MOST_EXPANDED:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_EXPANDED:,} values, or for themselves")
        return self._read(yaml.load, text)

    def compose(self, text: str) -> Any:
        """The text as nodes with their places; raises as `load` does."""
        return self._read(yaml.compose, text)

    def _read(self, how: Callable[..., Any], text: str) -> Any:
        if self._quick is not None and _is_for_libyaml(text):
            with suppress(yaml.YAMLError, RecursionError, LookupError, AttributeError, ValueError):
                return how(text, Loader=self._quick)
        try:
            return how(text, Loader=self._slow)
        except (LookupError, AttributeError, ValueError) as error:  # of `!!int ""`, `!!timestamp x`, `2024-13-45`
            raise yaml.YAMLError("a value is not what its tag says, as in `!!int abc`, or is no date") from error

    @cached_property
    def _slow(self) -> Any:
        return self._loader(yaml.SafeLoader)

    @cached_property
    def _quick(self) -> Any:
        """None where PyYAML was built without libyaml."""
        return self._loader(yaml.CSafeLoader) if yaml.__with_libyaml__ else None

    def _loader(self, base: Any) -> Any:
        loader: Any = type(base.__name__, (*self.changes, base), {})
        if self.only:
            loader.yaml_implicit_resolvers = {}
        for tag, pattern, first in self.resolvers:
            loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, list(first))
        return loader


def _is_for_libyaml(text: str) -> bool:
    if TAB in text or MARK in text or ("!" in text and LONE_TAG.search(text)):
        return False
    return sum(map(text.count, "[{-?")) < MOST_OPENED


def _expanded_size(node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """How many values it is without aliases. `sizes` has those of nodes that were counted, by id: 1 kB of lists, of
    which each names the one before ten times, would be counted for ever.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = MOST_EXPANDED  # where it is met within itself
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[id(node)]


PLAIN = Dialect()
