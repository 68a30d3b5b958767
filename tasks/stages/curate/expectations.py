"""The suite of the validation: what must be true of curated rows, each as a sentence, with why and what to do if not.

A `Check` names a class of Great Expectations over plain tables that `curate` makes. Left out: running it
(`validation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation: a sentence that must be true, the Great Expectations class that tests it, and the help if not.

    `detail` names the column that says more about a row that breaks it.
    """

    name: str
    table: str
    expectation: str
    arguments: dict[str, Any]
    why: str
    remedy: str
    detail: str | None = None


def checks(*, num_demonstrations: int, num_problems: int | None, apart: Sequence[str]) -> list[Check]:
    """Every expectation, causes before their consequences: the first that fails is the one worth reading.

    `num_problems` is what the source must hold, None where nobody knows; `apart` are the splits that share no group.
    """
    return [
        *_source_checks(num_problems),
        *_schema_checks(),
        *_reference_checks(),
        *_split_checks(apart),
        *_demonstration_checks(num_demonstrations),
    ]


def _source_checks(num_problems: int | None) -> list[Check]:
    if num_problems is None:
        return []
    return [
        Check("the source holds as many problems as were published", "problems", "ExpectTableRowCountToEqual",
              {"value": num_problems}, "With fewer or more it is another benchmark under the same name.",
              "Install the version of the package that the README names."),
    ]  # fmt: skip


def _schema_checks() -> list[Check]:
    why, remedy = "Every later stage relies on it.", "Correct the row; the README shows a complete one."
    types = {"id": "str", "category": "str", "split_group": "str", "level": "int"}
    return [
        *[
            Check(f"each {column} is of type {type_}", "problems", "ExpectColumnValuesToBeOfType",
                  {"column": column, "type_": type_}, why, remedy)
            for column, type_ in types.items()
        ],
        *[
            Check(f"no {column} is empty", "problems", "ExpectColumnValueLengthsToBeBetween",
                  {"column": column, "min_value": 1}, why, remedy)
            for column in ("id", "category", "split_group")
        ],
        Check("each level is at least 1", "problems", "ExpectColumnValuesToBeBetween",
              {"column": "level", "min_value": 1}, "1 is the easiest level.", remedy),
        Check("each id is unique", "problems", "ExpectColumnValuesToBeUnique", {"column": "id"},
              "Results and random streams are kept by id, so two problems would be taken for one.",
              "Give every row an id of its own, or remove the copy."),
        Check("each request has one turn of the reference", "problems", "ExpectColumnPairValuesToBeEqual",
              {"column_A": "num_requests", "column_B": "num_reference_turns"},
              "`requests` and `reference` have one entry a user turn.", "Make the two lists equally long."),
    ]  # fmt: skip


def _reference_checks() -> list[Check]:
    return [
        Check("each tool named by a reference exists", "problems", "ExpectColumnValuesToBeInSet",
              {"column": "unknown_tools", "value_set": [""]}, "No model could solve it with the tools there are.",
              "Correct the tool's name, or choose the environment that has it.", "unknown_tools"),
        Check("each call of a reference is valid", "problems", "ExpectColumnValuesToBeInSet",
              {"column": "invalid_call", "value_set": [""]}, "A reference its own world turns down solves nothing.",
              "Correct the arguments of the call, or remove the row.", "invalid_call"),
        Check("each reference solution scores 1", "problems", "ExpectColumnValuesToBeInSet",
              {"column": "reference_score", "value_set": [1]},
              "A problem without a reachable solution is reward 0 whatever the model does.",
              "Correct the reference or the world, or remove the row.", "fault"),
    ]  # fmt: skip


def _split_checks(apart: Sequence[str]) -> list[Check]:
    sides = "two sides" if "train" in apart else f"two sides of {' and '.join(apart)}"
    return [
        Check("no split is empty", "splits", "ExpectColumnValuesToBeBetween",
              {"column": "num_problems", "min_value": 1},
              "Each stage needs its split: train to learn, select to choose a snapshot, test to confirm it.",
              "Add problems with further values of split_group; or, before the first champion, change "
              "curate.split_seed or move curate.train_share away from 0 and 1."),
        Check(f"no split group is on {sides}", "problems", "ExpectColumnValuesToBeInSet",
              {"column": "num_sides", "value_set": [0, 1]}, "Test scores would be inflated by what train gave away.",
              "This is a fault of turnwise: please report it.", "split_group"),
    ]  # fmt: skip


def _demonstration_checks(num_demonstrations: int) -> list[Check]:
    return [
        Check("demonstrations are as many as asked for", "demonstrations", "ExpectTableRowCountToEqual",
              {"value": num_demonstrations},
              "A warm start learns from them, and no problem of train has an expert episode free of errors.",
              "Add problems with one request and no scripted error, or set curate.num_demonstrations to 0."),
        Check("each demonstration is of a train problem", "demonstrations", "ExpectColumnValuesToBeInSet",
              {"column": "split", "value_set": ["train"]}, "Test scores would be inflated.",
              "This is a fault of turnwise: please report it.", "split"),
        Check("each demonstration scores 1 without an invalid call", "demonstrations", "ExpectColumnValuesToBeInSet",
              {"column": "fault", "value_set": [""]}, "The warm start would learn a mistake.",
              "Correct `demonstrate` of the environment.", "fault"),
    ]  # fmt: skip
