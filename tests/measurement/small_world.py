"""Four problems and five policies that a person can hold in their head, and as many made-up trajectories as one likes.

problem   type        base  best  warm_start  champion  frontier     from base to best
p-better  book/none   ✗✗    ✓✓    ✗✓          ✓✓        ✓            improved
p-worse   quote/none  ✓✓    ✗✗    ✓✓          ✓✓        ✓            regressed: runs out of turns, after a timeout
p-mixed   quote/none  ✗✓    ✓✗    ✓✓          ✓✓        ✓            same
p-same    book/none   ✓✓    ✓✓    ✓✓          ✓✓        ✓            same
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.core.files import write_json, write_jsonl
from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.report.browser import Policy

TYPES = {"p-better": "book/none", "p-worse": "quote/none", "p-mixed": "quote/none", "p-same": "book/none"}
REQUESTS = {
    "p-better": "Book a seat from Oslo to Rome.",
    "p-worse": "What does Lima to Łódź cost?",
    "p-mixed": "How much is 東京 to Quito?",
    "p-same": "Book the night train to Vienna.",
}
OUTCOMES = {
    "base": {"p-better": "✗✗", "p-worse": "✓✓", "p-mixed": "✗✓", "p-same": "✓✓"},
    "best": {"p-better": "✓✓", "p-worse": "✗✗", "p-mixed": "✓✗", "p-same": "✓✓"},
    "warm_start": {"p-better": "✗✓", "p-worse": "✓✓", "p-mixed": "✓✓", "p-same": "✓✓"},
    "champion": dict.fromkeys(TYPES, "✓✓"),
    "frontier": dict.fromkeys(TYPES, "✓"),
}
LABELS = {
    "base": "base",
    "best": "iteration-0100",
    "warm_start": "warm start",
    "champion": "champion, version 3",
    "frontier": "big-model-1",
}
# What the model says, a word a token: ids are places in this list, as in the tokenizer of `write_tokenizer`.
VOCABULARY = ["[UNK]", "find_city", "get_cost", "book_flight", "Oslo", "Rome", "economy", "business", "done", "<b>"]


def call_turn(tool: str, reply: str, *, error: str | None = None, **arguments: Any) -> Turn:
    words = [tool, *(value for value in arguments.values() if isinstance(value, str))]
    return Turn(text=" ".join(words), calls=[{"name": tool, "arguments": arguments}], replies=[reply], errors=[error])


def turns_of(policy: str, problem: str, success: bool) -> list[Turn]:
    """Base and best find the same city; then base asks for economy. On p-worse best meets a timeout and stops."""
    find = call_turn("find_city", '{"city": "OSL"}', city="Oslo")
    if problem == "p-worse" and policy == "best":
        return [find, call_turn("get_cost", "no answer in 3 s", error="timeout", to="Rome")]
    seat = "economy" if policy == "base" and problem == "p-better" else "business"
    book = call_turn("book_flight", '{"status": "ok", "booking": "B41"}', seat=seat)
    return [find, book, Turn(text="done")] if success else [find, book]


def tokens_of(turns: list[Turn]) -> tuple[list[int], list[bool], list[float]]:
    """A prompt token before each turn, then a token a word; the first is certain, the next has log-prob −2."""
    ids, mask, logp = [], [], []
    for turn in turns:
        words = turn.text.split()
        ids += [0, *(VOCABULARY.index(word) if word in VOCABULARY else 0 for word in words)]
        mask += [False, *([True] * len(words))]
        logp += [0.0, *(0.0 if i == 0 else -2.0 for i in range(len(words)))]
    return ids, mask, logp


def small_episode(policy: str, problem: str, sample: int, success: bool) -> Trajectory:
    turns = turns_of(policy, problem, success)
    sequences = [] if policy == "frontier" else [TokenSequence(*tokens_of(turns))]
    ran_out = problem == "p-worse" and not success
    return Trajectory(
        problem_id=problem, category=TYPES[problem], request=REQUESTS[problem], draw=0, sample_index=sample,
        policy_version=0, environment_fingerprint="f00d", sequences=sequences,
        turns=turns, outcome="success" if success else "max_turns" if ran_out else "failure",
        limit="max_turns" if ran_out else None, checks={"state": success}, num_calls=2, num_invalid_calls=0,
        details={} if success else {"differs": ["booking"]},
    )  # fmt: skip


def small_policies(folder: Path) -> list[Policy]:
    """The five policies of the table above, with their files and the tokenizer of all but the frontier."""
    model = write_tokenizer(folder / "model")
    policies = []
    for name, outcomes in OUTCOMES.items():
        file = folder / f"{name}.jsonl"
        episodes = [
            small_episode(name, problem, sample, mark == "✓")
            for problem, marks in outcomes.items()
            for sample, mark in enumerate(marks)
        ]
        write_jsonl(file, (episode.to_row() for episode in episodes))
        policies.append(Policy(name, LABELS[name], file, None if name == "frontier" else model))
    return policies


def write_tokenizer(folder: Path) -> Path:
    """A model folder with nothing in it but a tokenizer of whole words."""
    words = {word: number for number, word in enumerate(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    splitter = {"type": "WhitespaceSplit"}
    write_json(folder / "tokenizer.json", {**rest, "added_tokens": [], "pre_tokenizer": splitter, "model": model})
    return folder


def many_policies(
    folder: Path, num_trajectories: int, *, samples_per_problem: int = 2, tokens_per_turn: int = 30
) -> list[Policy]:
    """`num_trajectories` over four policies, each of some six turns and 2,000 characters; a hundred differ."""
    names = ("base", "best", "warm_start", "champion")
    num_problems = num_trajectories // len(names) // samples_per_problem
    rng = random.Random(0)
    cities = [f"{rng.choice('BCDFGLMNPRST')}{''.join(rng.choices('aeiounrstl', k=6))}" for _ in range(400)]
    rows = [_made_up(rng, cities, tokens_per_turn).to_row() for _ in range(100)]

    def played() -> Iterator[dict[str, Any]]:
        for problem in range(num_problems):
            request = f"From {cities[problem % 400]} to {cities[problem * 7 % 400]}, request {problem}, please."
            named = {"problem_id": f"made-up-{problem:05d}", "category": f"kind-{problem % 12}", "request": request}
            for sample in range(samples_per_problem):
                yield {**rng.choice(rows), **named, "sample_index": sample}

    policies = [Policy(name, LABELS[name], folder / f"{name}.jsonl") for name in names]
    for policy in policies:
        write_jsonl(policy.trajectories, played())
    return policies


def _made_up(rng: random.Random, cities: list[str], tokens_per_turn: int) -> Trajectory:
    turns = []
    for _ in range(rng.randint(4, 7)):
        arguments = {"from": rng.choice(cities), "to": rng.choice(cities), "date": f"2026-{rng.randint(1, 12):02d}"}
        call = {"name": rng.choice(["get_cost", "find_city", "book_flight", "check_card"]), "arguments": arguments}
        reply = json.dumps({"status": "ok", "cost": rng.randint(20, 900), "via": rng.choices(cities, k=12)})
        error = rng.choice([None, None, None, "timeout", "not_found"])
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
        turns.append(Turn(text=text, calls=[call], replies=[reply], errors=[error]))
    turns.append(Turn(text=f"The best fare is to {rng.choice(cities)}."))
    count = 2 * tokens_per_turn * len(turns)  # of a prompt or reply, then of the turn
    success = rng.random() < 0.6
    return Trajectory(
        problem_id="", category="", request="", draw=0, sample_index=0, policy_version=0, environment_fingerprint="",
        sequences=[
            TokenSequence(
                rng.choices(range(600), k=count),
                ([False] * tokens_per_turn + [True] * tokens_per_turn) * len(turns),
                [-abs(rng.gauss(0, 1)) for _ in range(count)],
            )
        ],
        turns=turns,
        outcome="success" if success else "failure", limit=None, checks={"state": success}, num_calls=len(turns) - 1,
        num_invalid_calls=0,
    )  # fmt: skip
