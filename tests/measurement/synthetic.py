"""A small finished run made up from a seed, in the formats the stages agreed on: what the measurement tests read.

Success is drawn from rates fixed here, so a test can tell what a page or a table must say. No model and no world runs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.core.settings import Paths
from tasks.measurement.statistics import paired_difference, summarise
from tasks.measurement.tries import best_of_k

# category: (warm start, best) chance of success; the base never succeeds.
RATES = {
    "book/declined": (0.25, 0.93),
    "book/none": (0.85, 0.98),
    "book/sold_out": (0.20, 0.95),
    "book/timeout/check_card": (0.38, 0.92),
    "book/timeout/get_flight_cost": (0.30, 0.93),
    "book/timeout/get_nearest_airport_by_city": (0.11, 0.88),
    "cancel/none": (0.99, 1.00),
    "quote/none": (0.95, 0.99),
    "quote/timeout/convert_currency": (0.42, 0.95),
    "quote/timeout/get_flight_cost": (0.36, 0.96),
    "quote/timeout/get_nearest_airport_by_city": (0.21, 0.90),
}
# baseline.json where a test needs one and not what is in it.
BASELINE = {
    "success_rate": 0.5, "ci_low": 0.4, "ci_high": 0.6, "num_problems": 20, "samples_per_problem": 1, "gate": "rl",
}  # fmt: skip
SECONDS = {
    "curate": 6.2,
    "assess": 8.1,
    "warm_start": 31.4,
    "train": 88.9,
    "evaluate": 34.0,
    "promote": 5.3,
    "total": 178.4,
}
REQUEST = "Book a business or else economy flight from Oslo to Rome in May. Pay with card_3 or else card_8."
FLIGHT = {"travel_from": "OSL", "travel_to": "FCO", "travel_date": "May", "travel_class": "business"}
STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("get_nearest_airport_by_city", {"location": "Oslo"}, '{"status": "ok", "airport": "OSL"}'),
    ("get_nearest_airport_by_city", {"location": "Rome"}, '{"status": "ok", "airport": "FCO"}'),
    ("get_flight_cost", FLIGHT, '{"status": "ok", "cost": 56}'),
    ("check_card", {"card_id": "card_3"}, '{"status": "declined", "card": "card_3"}'),
    ("check_card", {"card_id": "card_8"}, '{"status": "ok", "card": "card_8"}'),
    ("book_flight", {**FLIGHT, "travel_cost": 56, "card_id": "card_8"}, '{"status": "ok", "booking_id": "B41"}'),
]


def call_turn(name: str, arguments: dict[str, Any], reply: str) -> Turn:
    call = {"name": name, "arguments": arguments}
    return Turn(text=f"<tool_call>\n{json.dumps(call)}\n</tool_call>", calls=[call], replies=[reply])


def trajectory(
    problem_id: str = "p0",
    success: bool = True,
    *,
    category: str = "book/declined",
    sample_index: int = 0,
    outcome: str | None = None,
    turns: list[Turn] | None = None,
    num_calls: int = 6,
    num_invalid_calls: int = 0,
) -> Trajectory:
    """One episode with 3 sampled tokens of 5."""
    if turns is None:
        turns = [call_turn(*step) for step in STEPS[: 6 if success else 4]]
        turns.append(Turn(text="Booked as B41." if success else "Booked as B17."))
    return Trajectory(
        problem_id=problem_id,
        category=category,
        request=REQUEST,
        draw=0,
        sample_index=sample_index,
        policy_version=0,
        environment_fingerprint="f00d",
        sequences=[TokenSequence([1, 2, 3, 4, 5], [False, False, True, True, True], [0.0, 0.0, -0.1, -0.2, -0.3])],
        turns=turns,
        outcome=outcome or ("success" if success else "failure"),  # type: ignore[arg-type]
        limit="max_turns" if outcome == "max_turns" else None,
        checks={"state": success, "response": success},
        num_calls=num_calls,
        num_invalid_calls=num_invalid_calls,
    )


def gibberish(problem_id: str, category: str, sample_index: int) -> Trajectory:
    """What an untrained model writes."""
    turns = [Turn(text="card_7 Lima}} the B38 ok ok first<tool_call> EUR March", stop_reason="max_tokens_per_turn")]
    return trajectory(problem_id, False, category=category, sample_index=sample_index, turns=turns, num_calls=0)


def write_artifacts(
    folder: Path,
    *,
    problems_per_type: int = 10,
    samples_per_problem: int = 2,
    num_snapshots: int = 8,
    promoted: bool | None = True,
    seed: int = 0,
) -> Paths:
    """Stage files of a finished run under `folder`; `promoted=None` leaves out promotion and the flow's record."""
    rng, paths = random.Random(seed), Paths(folder)
    problems = [(f"td-{i:04d}", category) for i, category in enumerate(sorted(RATES) * problems_per_type)]
    keys = [(*problem, sample) for problem in problems for sample in range(samples_per_problem)]

    def play(rate_of: dict[str, float], samples: list[tuple[str, str, int]]) -> list[Trajectory]:
        return [
            trajectory(problem, rng.random() < rate_of[category], category=category, sample_index=sample)
            for problem, category, sample in samples
        ]

    test = {
        "base": [gibberish(*key) for key in keys],
        "warm_start": play({name: rates[0] for name, rates in RATES.items()}, keys),
        "best": play({name: rates[1] for name, rates in RATES.items()}, keys),
    }
    names = [f"iteration-{10 * (i + 1):04d}" for i in range(num_snapshots)]
    select = {}
    for i, name in enumerate(names):
        share = 1 - 0.25 ** ((i + 1) * 8 / num_snapshots / 2.2)
        rates = {key: warm + (best - warm) * share for key, (warm, best) in RATES.items()}
        select[name] = play(rates, [(*problem, 0) for problem in problems])
    _write_evaluation(paths, select, test)
    _write_training(paths, rng, num_iterations=10 * num_snapshots)
    write_json(
        paths.stage("assess") / "baseline.json", {**summarise(test["base"], confidence=0.95), "gate": "warm_start"}
    )
    if promoted is not None:
        _write_promotion(paths, promoted, names[-1])
    return paths


def _write_evaluation(paths: Paths, select: dict[str, list[Trajectory]], test: dict[str, list[Trajectory]]) -> None:
    folder = paths.stage("evaluate")
    results = {name: summarise(items, confidence=0.95) for name, items in select.items()}
    write_json(
        folder / "evaluation.json",
        {
            "best_snapshot": max(results, key=lambda name: results[name]["success_rate"]),
            "confidence": 0.95,
            "weights": {"base": "b0", "warm_start": "a1", "best": "c2"},
            "select": results,
            "test": {name: summarise(items, confidence=0.95) for name, items in test.items()},
            "greedy": {name: summarise(items[::2], confidence=0.95) for name, items in test.items()},
            "gain_over_warm_start": paired_difference(test["best"], test["warm_start"], confidence=0.95),
            "warm_start_best_of_k": best_of_k(test["warm_start"], test["best"], confidence=0.95),
        },
    )
    for name, items in test.items():
        write_jsonl(folder / "trajectories" / f"test_{name}.jsonl", (item.to_row() for item in items))


def add_frontier(
    paths: Paths, rate: float = 0.96, *, model: str = "lab/big-model-1", cost: float | None = 0.0432
) -> None:
    """As if a model behind an endpoint had been played too; each episode took 6 requests and 12,345 + 412 tokens."""
    file = paths.stage("evaluate") / "evaluation.json"
    evaluation = read_json(file)
    result = {**evaluation["test"]["best"], "success_rate": rate, "ci_low": rate - 0.03, "ci_high": rate + 0.02}
    usage = {"requests": 6.0, "input_tokens": 12345.0, "output_tokens": 412.0, "cost": cost}
    frontier = {"model": model, "result": result, "usage_per_episode": usage}
    write_json(file, {**evaluation, "frontier": frontier})


def _write_training(paths: Paths, rng: random.Random, num_iterations: int) -> None:
    rows = []
    for iteration in range(1, num_iterations + 1):
        rate = 0.35 + 0.5 * (1 - 0.25 ** (iteration / 20)) + rng.gauss(0, 0.06)
        left = 1 - iteration / num_iterations
        rows.append(
            {
                "iteration": iteration,
                "optimizer_steps": 2 * iteration,
                "success_rate": min(1.0, max(0.0, rate)),
                "mean_sampled_tokens": 60 + 20 * left,
                "entropy": 0.04 + 0.06 * left,
                "kl": 0.01 * (iteration % 10),
                "informative_group_share": 0.2 + 0.5 * left,
            }
        )
    write_jsonl(paths.stage("train") / "metrics.jsonl", rows)


def _write_promotion(paths: Paths, promoted: bool, snapshot: str) -> None:
    """decision.json as promote writes it, less what nothing here reads; without promotion version 3 stays champion."""
    reasons = [f"{snapshot} succeeds on 93.5% of test, at least promote.minimum_success (60.0%)."]
    if promoted:
        reasons += ["Against the warm start (45.0%) that is +48.5 points, 95% interval +45.0 to +51.9: better."]
    else:
        reasons += [
            "Against the champion, version 3 (93.2%) that is +0.3 points, 95% interval -1.1 to +1.7: "
            "no clear difference.",
            "The champion, version 3 stays.",
        ]
    write_json(
        paths.stage("promote") / "decision.json",
        {
            "decision": "promote" if promoted else "hold",
            "reasons": reasons,
            "model": "travel-desk-agent",
            "challenger": {"snapshot": snapshot, "weights": "c2"},
            "champion_after": {"version": 1, "weights": "c2"} if promoted else {"version": 3, "weights": "d4"},
            "is_champion": promoted,
        },
    )
    write_json(paths.artifacts / "run.json", {"seconds": SECONDS, "mlflow_run_id": "0f" * 16, "cached": {}})


def set_champion(paths: Paths, rate: float, *, version: int = 3) -> None:
    """As if version 3 had been champion, with `rate` on this test set."""
    file = paths.stage("promote") / "decision.json"
    other = {"success_rate": rate, "ci_low": rate - 0.02, "ci_high": rate + 0.02}
    met = {"champion_before": {"version": version}, "comparison": {"against": "the champion", "other": other}}
    write_json(file, {**read_json(file), **met})
