"""The problems of this example: a shelf has room for 50 units of a product, and the user wants it full.

`python infra/examples/shop/problems.py` writes problems.jsonl beside this file, the same bytes each time. The model
reads the requests and the tools' replies alone; it learns from demonstrations, and then from its own episodes, how much
a shelf still takes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("problems.jsonl")
NUM_PROBLEMS = 900
ROOM = 50  # units of a product
PRODUCTS = ("bolts", "nuts", "screws")


def problems() -> Iterator[dict[str, Any]]:
    """Every third one has a second request in the same conversation."""
    for number in range(NUM_PROBLEMS):
        rng = random.Random(number)
        shelf = {product: rng.randrange(ROOM) for product in PRODUCTS}
        wanted = rng.sample(PRODUCTS, 2 if number % 3 == 2 else 1)
        yield {
            "id": f"shop-{number:03d}",
            "category": "then another" if len(wanted) == 2 else "one product",
            "level": len(wanted),
            "requests": [f"Please fill the shelf with {wanted[0]}.", *(f"And with {name}." for name in wanted[1:])],
            # `reset` takes `shelf`; the checker compares with `filled`; the model sees neither.
            "world": {"shelf": shelf, "filled": {**shelf, **dict.fromkeys(wanted, ROOM)}},
            "reference": [{"calls": calls(name, shelf[name]), "answer": f"{name} are full."} for name in wanted],
            "split_group": json.dumps(shelf, sort_keys=True),
        }


def calls(product: str, units: int) -> list[dict[str, Any]]:
    return [
        {"name": "count", "arguments": {"product": product}},
        {"name": "order", "arguments": {"product": product, "units": ROOM - units}},
    ]


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8")
    print(f"{FILE}: {NUM_PROBLEMS} problems")
