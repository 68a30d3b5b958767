"""The problems of this example: people tell the agent what to remember, and its memory must hold that and no more.

`python infra/examples/memory/problems.py` writes problems.jsonl beside this file, the same bytes each time. Everything
a problem says is made up here; nothing is read from anywhere.

Of the four categories, `corrected` is one that nobody demonstrates: its reference meets an error of the server on its
way, and curation shows no errors. What to do there is left for reinforcement learning to find.
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
            say = f"{OPENINGS[number % len(OPENINGS)]} {name}"
            company, slip = COMPANIES[(place + person) % 10], CITIES[(place + 1 + person % 9) % 10]
            home, job = _create(_person(name, f"lives in {city}")), _create(_person(name), _company(company))
            both = _create(_person(name, f"lives in {city}"), _company(company))
            works = _call("create_relations", relations=[{"from": name, "to": company, "relationType": "works_for"}])
            more = {"entityName": name, "contents": [f"lives in {city}"]}  # declined: nobody is known yet
            yield _problem("home", number, f"{say} lives in {city}.", [name, city], [home])
            yield _problem("job", number, f"{say} works for {company}.", [name, company], [job, works])
            yield _problem(
                "both", number, f"{say} lives in {city} and works for {company}.", [name, city, company], [both, works]
            )
            yield _problem(
                "corrected", number, f"{say} lives in {slip}, sorry, in {city}.", [name, city],
                [_call("add_observations", observations=[more]), home],
            )  # fmt: skip


def _problem(
    category: str, number: int, request: str, hinges_on: list[str], calls: list[dict[str, Any]]
) -> dict[str, Any]:
    """A row as `curate.source` takes it. What the checker compares with is in `world`, and no server reads it."""
    made: dict[str, list[Any]] = {"entities": [], "relations": []}
    for call in calls:
        for part in made:
            made[part] += call["arguments"].get(part, [])
    return {
        "id": f"{category}-{number:03d}",
        "category": category,
        "level": len(calls),
        "requests": [request],
        "world": {"name": hinges_on[0], "graph": made},
        "reference": [{"calls": calls, "answer": f"I will remember that about {hinges_on[0]}."}],
        "split_group": " ".join(hinges_on),
    }


def _create(*entities: dict[str, Any]) -> dict[str, Any]:
    return _call("create_entities", entities=list(entities))


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def _person(name: str, *observations: str) -> dict[str, Any]:
    return {"name": name, "entityType": "person", "observations": list(observations)}


def _company(name: str) -> dict[str, Any]:
    return {"name": name, "entityType": "company", "observations": []}


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8")
    print(f"{FILE}: {sum(1 for _ in problems())} problems")
