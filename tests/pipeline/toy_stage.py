"""One stage of the toy project (`toy_project.py`): writes what the real stage would, with made-up numbers, in a blink.

Files in `knobs/` make it wait until they are gone (`hold_train`; `early_train`: before it reads params), fail
(`fail_train`), print its environment (`print_train`) or draw a progress bar, whose last step waits likewise
(`bar_train`). Which process it is stands in `artifacts/.<stage>.pid` from its first moment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.files import file_hash, read_yaml, write_json, write_jsonl, write_text
from tasks.core.provenance import GRAPH, provenance, write_provenance
from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.core.settings import Paths, load, read_params
from tasks.drift.pin import check_pin, make_pin, write_pin
from tasks.environments.settings import EnvironmentSettings
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.measurement.statistics import paired_difference, summarise
from tasks.models.folders import folder_hash, weights_hash
from tasks.stages.evaluate.identity import hash_episodes
from tasks.stages.evaluate.measurement_key import key_parts
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.tracking.metrics import live_logger

DATA = "toy_problems.txt"
PROBLEMS = [f"p{number}" for number in range(200)]
FINGERPRINT = TravelDesk().fingerprint()
ENVIRONMENT = EnvironmentSettings.model_validate(read_params()["environment"])


def played(share: float, problems: Sequence[str] = PROBLEMS) -> list[Trajectory]:
    """Every problem once; the first `share` of them succeed."""
    return [
        Trajectory(
            problem_id=problem,
            category="cancel/none",
            request="Cancel booking B1.",
            draw=0,
            sample_index=0,
            policy_version=0,
            environment_fingerprint=FINGERPRINT,
            sequences=[TokenSequence([1, 2], [False, True], [0.0, -0.1])],
            turns=[Turn("Done.")],
            outcome="success" if number < share * len(problems) else "failure",
            limit=None,
            checks={"state": True, "response": True},
            num_calls=1,
            num_invalid_calls=0,
        )
        for number, problem in enumerate(problems)
    ]


def result(share: float) -> dict[str, Any]:
    return dict(summarise(played(share), confidence=0.95))


def problem_row(name: str) -> dict[str, Any]:
    call = {"name": "cancel_booking", "arguments": {"booking_id": name}}
    return {
        "id": name,
        "category": "cancel/none",
        "level": 1,
        "requests": ["Cancel booking B1."],
        "world": {"booking": name},
        "reference": [{"calls": [call], "answer": "Done."}],
        "split_group": name,
    }


def curate(out: Path) -> None:
    rotated = read_params()["curate"]["test_rotation"]
    train = Path(DATA).read_text(encoding="utf-8").split()
    splits = {"train": train, "select": PROBLEMS, "test": [*PROBLEMS[rotated:], *PROBLEMS[:rotated]]}
    for split, problems in splits.items():
        write_jsonl(out / f"{split}.jsonl", map(problem_row, problems))
    for name in ("demonstrations", "references"):
        write_jsonl(out / f"{name}.jsonl", [])
    card = {
        "num_problems": {"test": 200},
        "by_category": {"test": {"cancel/none": 200}},
        "num_duplicates_removed": 0,
        "hashes": {"test.jsonl": "abc"},
        "split": "groups",
        "environment": "travel_desk",
        "fingerprint": FINGERPRINT,
        "expectations": [],
    }
    write_json(out / "card.json", card)
    write_pin(out, make_pin(TravelDesk(), [], []))


def assess(out: Path) -> None:
    write_json(out / "baseline.json", {**result(0.0), "gate": "warm_start"})


def warm_start(out: Path) -> None:
    (out / "model").mkdir(parents=True)
    rows = [{"step": step, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 11)]
    write_jsonl(out / "metrics.jsonl", rows)


def train(out: Path) -> None:
    """Ten iterations, logged live too, and two snapshots whose weights follow from the params and problems."""
    log = live_logger(os.environ)
    rows = [
        {"iteration": number, "optimizer_steps": 2 * number, "success_rate": number / 10, "kl": 0.01}
        for number in range(1, 11)
    ]
    for row in rows:
        if log:
            log(row)
    write_jsonl(out / "metrics.jsonl", rows)
    lines = ["iteration,success_rate", *(f"{row['iteration']},{row['success_rate']}" for row in rows)]
    write_text(out / "curve.csv", "\n".join([*lines, ""]))
    params, problems = read_params(), file_hash(Path("artifacts/curate/train.jsonl"))
    for step in (5, 10):
        folder = out / "snapshots" / f"iteration-{step:04d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        weights = json.dumps([params["seed"], params["train"], problems, step])
        (folder / "model.safetensors").write_text(weights, encoding="utf-8")


def evaluate(out: Path) -> None:
    shares = {"base": 0.0, "warm_start": 0.4, "best": 0.95}
    for name, share in shares.items():
        write_jsonl(out / "trajectories" / f"test_{name}.jsonl", (item.to_row() for item in played(share)))
    paths, best = Paths("artifacts"), Path("artifacts/train/snapshots/iteration-0010")
    settings, checked = (
        load(EvaluateSections, read_params()),
        check_pin(ENVIRONMENT, Paths("artifacts"), stage="evaluate"),
    )
    evaluation = {
        "best_snapshot": "iteration-0010",
        "confidence": 0.95,
        "sampling": settings.plays["test"].sampling.model_dump(include={"temperature", "top_p"}),
        "select": {"iteration-0005": result(0.6), "iteration-0010": result(0.95)},
        "test": {name: result(share) for name, share in shares.items()},
        "gain_over_warm_start": paired_difference(played(0.95), played(0.4), confidence=0.95),
        "weights": {"best": weights_hash(best)},
        "folders": {"base": "none", "warm_start": "none", "best": folder_hash(best)},
        "measurement": {"parts": key_parts(settings.plays["test"], paths, settings.environment, checked)},
        "contents": hash_episodes(out / "trajectories"),
        "environment": checked.to_row(),
    }
    write_json(out / "evaluation.json", evaluation)
    write_json(out / "metrics.json", {"test_success": 0.95, "learning_rate": read_params()["train"]["learning_rate"]})


def wait_while_held(knob: str) -> None:
    """Not for ever: a test that went wrong may have left it."""
    for _ in range(6000):
        if not (Path("knobs") / knob).exists():
            return
        time.sleep(0.1)


def note_process(stage: str) -> None:
    Path("artifacts").mkdir(exist_ok=True)
    Path(f"artifacts/.{stage}.pid").write_text(str(os.getpid()), encoding="utf-8")


def main(stage: str) -> None:
    knobs = {file.name for file in Path("knobs").glob("*")}
    if f"early_{stage}" in knobs:
        note_process(stage)
        wait_while_held(f"early_{stage}")
    paths, watched = Paths("artifacts"), read_yaml(GRAPH)["stages"][stage]["params"]
    sections = {
        name: value for name, value in read_params().items() if name in {item.split(".")[0] for item in watched}
    }
    record = provenance(stage, sections, paths, num_threads=1, device="cpu")
    note_process(stage)
    print(f"{stage} is at work", flush=True)
    if f"print_{stage}" in knobs:
        for name, value in os.environ.items():
            print(f"printed by {stage}: {name}={value}", flush=True)
    if f"fail_{stage}" in knobs:
        print(f"error: {stage}: the toy broke", file=sys.stderr)
        raise SystemExit(3)
    wait_while_held(f"hold_{stage}")
    if f"bar_{stage}" in knobs:
        from tasks.core.progress import progress_bar

        with progress_bar(stage, total=5) as bar:
            for _ in range(4):
                bar.advance("detail")
            wait_while_held(f"bar_{stage}")
            bar.advance("detail")
    {"curate": curate, "assess": assess, "warm_start": warm_start, "train": train, "evaluate": evaluate}[stage](
        paths.stage(stage)
    )
    write_provenance(record, paths)


if __name__ == "__main__":
    main(sys.argv[1])
