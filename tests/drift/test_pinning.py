"""The pin at work: stages stop before a model is loaded, an accepted drift is written down once and told by lineage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.settings import Paths, load, read_params
from tasks.drift.pin import (
    ACCEPT_VARIABLE,
    accepted_changes,
    check_pin,
    make_pin,
    play_probes,
    read_accepted,
    write_pin,
)
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.pipeline.order import stage_module
from tasks.tools.settings import FaultSettings
from tests import tiny
from tests.conftest import ROOT
from tests.environments.shop import PROBLEM, SETTINGS, TOOLS, Shop, open_shop, pin_shop
from tests.measurement.synthetic import BASELINE
from tests.stages.curated import curated_project
from tests.worlds import cache_settings, environment_settings

STOPPED = "the environment has changed since curation"


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.delenv(ACCEPT_VARIABLE, raising=False)
    return open_shop(tmp_path / "artifacts", monkeypatch)


def drift_to(version: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shop, "version", version)


def accept(paths: Paths, stage: str, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as here:
        here.setenv(ACCEPT_VARIABLE, "1")
        check_pin(SETTINGS, paths, stage=stage)


# ---- accepting


def test_a_drift_is_refused_with_what_changed_and_both_ways_on(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    drift_to("2", monkeypatch)
    with pytest.raises(ValueError) as caught:
        check_pin(SETTINGS, paths, stage="train")
    first, line, last = str(caught.value).splitlines()
    assert first.startswith(f"train: {STOPPED}")
    assert line == '  environment.version: "1" → "2"'
    assert "dvc repro --force curate" in last
    assert "--accept-drift" in last
    assert read_accepted(paths) == []


def test_an_accepted_drift_is_not_asked_about_again_and_every_stage_under_it_is_named(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    drift_to("2", monkeypatch)
    accept(paths, "assess", monkeypatch)
    checked = check_pin(SETTINGS, paths, stage="train")
    assert checked.drift == ['environment.version: "1" → "2"']
    assert (
        "train: continues under an accepted drift of the environment (1 change, listed in " in capsys.readouterr().err
    )
    (record,) = read_accepted(paths)
    assert record["stages"] == ["assess", "train"]
    assert record["changes"] == checked.drift
    assert record["pinned"] != record["today"] == checked.pin
    assert accepted_changes(paths) == ['assess, train: environment.version: "1" → "2"']


def test_a_further_drift_stops_again_and_says_what_is_new_since(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    drift_to("2", monkeypatch)
    accept(paths, "assess", monkeypatch)
    drift_to("3", monkeypatch)
    with pytest.raises(ValueError, match=r"has changed since the drift that was accepted") as caught:
        check_pin(SETTINGS, paths, stage="train")
    assert '  environment.version: "2" → "3"' in str(caught.value).splitlines()
    accept(paths, "train", monkeypatch)
    assert accepted_changes(paths) == [
        'assess: environment.version: "1" → "2"',
        'train: environment.version: "1" → "3"',
    ]


def test_a_drift_that_went_away_leaves_the_lineage_of_stages_run_again(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        drift_to("2", patch)
        accept(paths, "assess", patch)
        accept(paths, "train", patch)
    assert check_pin(SETTINGS, paths, stage="train").drift == []
    assert accepted_changes(paths) == ['assess: environment.version: "1" → "2"']
    check_pin(SETTINGS, paths, stage="assess")
    assert accepted_changes(paths) == []
    assert len(read_accepted(paths)) == 1  # what was accepted stays on record


def test_curating_again_needs_no_acceptance_and_forgets_the_old_one(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    drift_to("2", monkeypatch)
    accept(paths, "train", monkeypatch)
    pin_shop(paths)
    assert check_pin(SETTINGS, paths, stage="train").drift == []
    assert accepted_changes(paths) == []


def test_an_accepted_reply_that_is_never_the_same_twice_stays_accepted(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    """The list of products now ends with a number of its own each time: its plays agree on the type alone."""
    ticks = iter(range(1000))
    answer = {**Shop.handlers, "list_stock": lambda episode, given: {"products": [], "seen": next(ticks)}}
    monkeypatch.setattr(Shop, "handlers", answer)
    accept(paths, "assess", monkeypatch)
    for stage in ("train", "evaluate", "promote"):
        check_pin(SETTINGS, paths, stage=stage)
    (record,) = read_accepted(paths)
    assert record["stages"] == ["assess", "train", "evaluate", "promote"]


def test_the_order_of_tools_survives_the_file_of_what_was_accepted(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Shop, "offered", tuple(reversed(TOOLS)))
    accept(paths, "assess", monkeypatch)
    check_pin(SETTINGS, paths, stage="train")
    assert len(read_accepted(paths)) == 1


def test_only_so_many_lines_are_shown_and_the_rest_counted(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Shop, "offered", tuple(replace(tool, version="2", idempotent=True) for tool in TOOLS))
    monkeypatch.setattr(Shop, "handlers", dict.fromkeys(Shop.handlers, lambda *_: {}))
    for part in ("version", "seed_scheme", "data"):
        monkeypatch.setattr(Shop, part, "2")
    with pytest.raises(ValueError, match=STOPPED) as caught:
        check_pin(SETTINGS, paths, stage="train")
    _, *lines, _ = str(caught.value).splitlines()
    assert lines[0] == '  environment.version: "1" → "2"'
    assert lines[-1] == "  and 5 more"  # 3 of the world, 8 of the tools, 4 of replies and 2 of the verdict, less 12
    assert len(lines) == 13


def test_a_missing_pin_names_the_stage_that_makes_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"environment\.json: does not exist.*python -m tasks curate"):
        check_pin(SETTINGS, Paths(tmp_path), stage="train")


def test_a_broken_record_of_acceptances_says_what_to_do(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(paths.artifacts.parent)  # the project whose record it is
    Path("params.yaml").write_text(f"paths: {{artifacts: {paths.artifacts.name}}}\n", encoding="utf-8")
    (paths.artifacts / "accepted_drift.json").write_text("[{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"accepted_drift\.json: not JSON.*`rm .*accepted_drift\.json`"):
        check_pin(SETTINGS, paths, stage="train")


# ---- what stands around the world


def test_probes_meet_the_world_itself_and_no_fault_on_purpose(paths: Paths):
    faults = FaultSettings(
        seed=0, seen_by="model", error_rate=0.5, timeout_rate=0.2, rate_limit_rate=0.1, latency_rate=0.0,
        latency_seconds=0.0, truncate_rate=1.0, rename_rate=1.0,
    )  # fmt: skip
    assert check_pin(environment_settings("shop", faults=faults), paths, stage="train").drift == []


def test_a_recording_does_not_hide_that_the_tools_answer_otherwise(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    cache = cache_settings("replay", paths.artifacts / "cache")
    settings = environment_settings("shop", cache=cache)
    check_pin(settings, paths, stage="assess")
    monkeypatch.setattr(Shop, "handlers", {**Shop.handlers, "list_stock": lambda episode, given: "empty"})
    with pytest.raises(ValueError, match="reply of list_stock: "):
        check_pin(settings, paths, stage="train")


def test_with_the_tools_switched_off_the_recorded_description_alone_is_compared(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    from tasks.environments.catalog import load_environment

    cache = {"folder": str(paths.artifacts / "cache"), "frozen": None}
    load_environment(environment_settings("shop", cache={**cache, "mode": "record"})).close()
    strict = environment_settings("shop", cache={**cache, "mode": "strict"})
    monkeypatch.setattr(Shop, "handlers", {})  # no tool could answer
    assert check_pin(strict, paths, stage="train").drift == []
    assert play_probes(strict, [PROBLEM]) == []
    pin = read_json(paths.stage("curate") / "environment.json")
    pin["description"]["environment"]["version"] = "0"
    write_pin(paths.stage("curate"), pin)
    with pytest.raises(ValueError, match=r'environment\.version: "0" → "1"'):
        check_pin(strict, paths, stage="train")


# ---- stages


class ModelLoadedError(Exception):
    """Not one of those that `tasks.models.files.loading` says in other words."""


def load_weights(*args: Any, **kwargs: Any) -> None:
    raise ModelLoadedError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def project(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """travel_desk on the test profile up to where a stage loads its model, which fails the test that gets there."""
    monkeypatch.delenv(ACCEPT_VARIABLE, raising=False)
    paths = curated_project(tmp_path, monkeypatch)
    for name in ("demonstrations", "references"):
        write_jsonl(paths.stage("curate") / f"{name}.jsonl", [])
    write_json(paths.stage("assess") / "baseline.json", {**BASELINE, "gate": "rl"})
    pin_travel_desk(paths)
    shutil.copytree(model, paths.start_model)
    shutil.copytree(model, paths.stage("train") / "snapshots" / "iteration-0001")
    # Below `load_model`, whoever calls it (tests/contracts/test_loading.py: nothing else loads a model).
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load_weights)
    return paths


def pin_travel_desk(paths: Paths) -> None:
    probes = tiny.problems(2, max_level=1)
    write_pin(paths.stage("curate"), make_pin(TravelDesk(), probes, [play_probes(environment_settings(), probes)]))


def run(stage: str, paths: Paths) -> None:
    module = stage_module(stage)
    module.run(load(module.SETTINGS, read_params()), paths)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["assess", "train", "evaluate"])
def test_a_stage_stops_before_it_loads_a_model(stage: str, project: Paths, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelLoadedError):
        run(stage, project)  # nothing changed, so it gets there
    monkeypatch.setattr(TravelDesk, "version", "2")
    before = sorted(path.name for path in project.stage(stage).rglob("*"))
    with pytest.raises(ValueError, match=f"{stage}: {STOPPED}"):
        run(stage, project)
    assert sorted(path.name for path in project.stage(stage).rglob("*")) == before


# ---- the command line


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_command_line_tells_a_drift_in_one_block_and_accepts_it_when_told_to(project: Paths):
    file = project.stage("curate") / "environment.json"
    pin = json.loads(file.read_text(encoding="utf-8"))
    pin["description"]["tools"]["cancel_booking"]["description"] = "Cancel a booking.\x1b[31m"
    write_pin(file.parent, pin)
    project.split("train").unlink()

    refused = command("tasks", "train")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: train: {STOPPED}")
    assert (
        '  tools.cancel_booking.description: "Cancel a booking.\\u001b[31m" → "Cancel a booking; answers'
        in refused.stderr
    )
    assert "\x1b" not in refused.stderr
    assert "Traceback" not in refused.stderr

    going_on = command("tasks", "train", "--accept-drift")
    assert "train: continues under an accepted drift of the environment (1 change" in going_on.stderr
    assert "train.jsonl: does not exist" in going_on.stderr  # as far as this project goes
    (record,) = read_accepted(project)
    assert record["stages"] == ["train"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [("tasks", "assess"), ("tasks", "evaluate"), ("tasks", "promote"), ("tasks", "ablate"), ("flows", "run")]
)
def test_every_command_that_checks_can_be_told_to_accept(program: tuple[str, str]):
    assert "--accept-drift" in command(*program, "--help").stdout
