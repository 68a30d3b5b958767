"""The problems of this example: people tell the agent what to remember, and its memory must hold that and no more.

`python infra/examples/memory/problems.py` writes problems.jsonl beside this file, the same bytes each time. Everything
a problem says is made up here; nothing is read from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("problems.jsonl")
PEOPLE = ("Ada", "Ben", "Cleo", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena")
CITIES = ("Athens", "Bonn", "Cairo", "Delhi", "Essen", "Faro", "Graz", "Hanoi", "Izmir", "Jena")
COMPANIES = ("Acme", "Globex", "Hooli", "Initech", "Oscorp", "Stark", "Tyrell", "Umbrella", "Wayne", "Wonka")
OPENINGS = ("Please remember that", "Note that", "Keep in mind that")


def problems() -> Iterator[dict[str, Any]]:
    """120 of each category, each with one of three openings."""
    for person, name in enumerate(PEOPLE):
        for place, city in enumerate(CITIES):
            number = person * len(CITIES) + place
            say = OPENINGS[number % len(OPENINGS)]
            company, other = COMPANIES[(place + person) % 10], CITIES[(place + 1 + person % 9) % 10]
            home, job = _person(name, f"lives in {city}"), _person(name)
            works = [_entity(company, "company")], [{"from": name, "to": company, "relationType": "works_for"}]
            yield _problem(number, "home", 1, f"{say} {name} lives in {city}.", f"{name} {city}", [home])
            yield _problem(
                number, "corrected", 1, f"{say} {name} lives in {other}, sorry, in {city}.", f"{name} {city}", [home]
            )
            yield _problem(
                number, "job", 2, f"{say} {name} works for {company}.", f"{name} {company}", [job, *works[0]], works[1]
            )
            yield _problem(
                number, "both", 2, f"{say} {name} lives in {city} and works for {company}.",
                f"{name} {city} {company}", [home, *works[0]], works[1],
            )  # fmt: skip


def _problem(
    number: int,
    category: str,
    level: int,
    request: str,
    split_group: str,
    entities: list[dict[str, Any]],
    relations: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """A row as `curate.source` takes it. What the checker compares with is in `world`, and no server reads it."""
    name = entities[0]["name"]
    calls: list[dict[str, Any]] = [{"name": "create_entities", "arguments": {"entities": entities}}]
    if relations:
        calls.append({"name": "create_relations", "arguments": {"relations": relations}})
    return {
        "id": f"{category}-{number:03d}",
        "category": category,
        "level": level,
        "requests": [request],
        "world": {"name": name, "graph": {"entities": entities, "relations": relations or []}},
        "reference": [{"calls": calls, "answer": f"I will remember that about {name}."}],
        "split_group": split_group,
    }


def _person(name: str, *observations: str) -> dict[str, Any]:
    return _entity(name, "person", *observations)


def _entity(name: str, kind: str, *observations: str) -> dict[str, Any]:
    return {"name": name, "entityType": kind, "observations": list(observations)}


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8")
    print(f"{FILE.relative_to(Path.cwd())}: {sum(1 for _ in problems())} problems")
