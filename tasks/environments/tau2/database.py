"""The company's database behind an episode of retail or airline, with the package's own methods on it.

All episodes share the package's records. An episode copies the one that a method looks up by its id, which it may then
change; to go through all of a table is to read. A whole copy for each would take 0.4 s and 30 MB of airline's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

from tasks.environments.tau2.package import load_module, read_json, tools_class
from tasks.environments.tau2.settings import Domain

MODULES: Mapping[Domain, tuple[str, str]] = {  # its class of tools, and that of its database
    "retail": ("RetailAgentTools", "RetailDB"),
    "airline": ("AirlineAgentTools", "FlightDB"),
}


class Table(MutableMapping[str, Any]):
    """Records by id: `shared` are everybody's, `own` the episode's."""

    def __init__(self, shared: Mapping[str, Any]):
        self.shared = shared
        self.own: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.own:
            self.own[key] = self.shared[key].model_copy(deep=True)
        return self.own[key]

    def __setitem__(self, key: str, record: Any) -> None:
        self.own[key] = record

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError("no method of the package deletes a record")

    def __contains__(self, key: object) -> bool:
        return key in self.own or key in self.shared

    def __iter__(self) -> Iterator[str]:
        yield from self.shared
        yield from (key for key in self.own if key not in self.shared)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def peek(self, key: str) -> Any:
        """The record as it is, without a copy; None where there is none."""
        return self.own.get(key, self.shared.get(key))

    def values(self) -> Any:
        return [self.peek(key) for key in self]

    def items(self) -> Any:
        return [(key, self.peek(key)) for key in self]


class Database:
    """One episode's. `tables` are those of the package's database, by name."""

    def __init__(self, domain: Domain):
        tools, database = MODULES[domain]
        self.tables = {name: Table(records) for name, records in _shared(domain).items()}
        self.methods = tools_class(domain, tools)()
        self.methods.db = _model(domain, database).model_construct(**self.tables)

    def act(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out a method; whatever the package raises."""
        return getattr(self.methods, name)(**arguments)

    def differences(self, other: Database) -> list[str]:
        """The records that differ, as `orders/#W1`, by the package's own hash: none where the databases' are equal."""
        hash_of = load_module("utils").get_pydantic_hash
        found = []
        for name, table in self.tables.items():
            beside = other.tables[name]
            for key in sorted({*table.own, *beside.own}):
                records = table.peek(key), beside.peek(key)
                if None in records or hash_of(records[0]) != hash_of(records[1]):
                    found.append(f"{name}/{key}")
        return found


@cache
def _shared(domain: Domain) -> Mapping[str, Mapping[str, Any]]:
    """The package's records by table and id, which nobody changes."""
    found = _model(domain, MODULES[domain][1]).model_validate(read_json(domain, "db.json.gz"))
    return {name: getattr(found, name) for name in type(found).model_fields}


def _model(domain: Domain, database: str) -> Any:
    return getattr(load_module(f"{domain}.data_model"), database)
