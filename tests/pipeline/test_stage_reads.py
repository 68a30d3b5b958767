"""assess, warm_start and train read each file of weights twice at most: to hash it and to load it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.core import files
from tasks.core.files import read_json, write_jsonl
from tasks.core.settings import Paths, load
from tasks.drift.pin import make_pin, play_probes, write_pin
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.pipeline.order import stage_module
from tests import tiny
from tests.opened import counting_reads
from tests.pipeline.training_worker import unwatched
from tests.profiles import profile_params
from tests.stages.curated import PROBLEMS, curated_project
from tests.stages.evaluate.test_evaluate_reads import loads as loads
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    made, world = curated_project(tmp_path, monkeypatch), TravelDesk()
    write_jsonl(made.stage("curate") / "references.jsonl", [])
    write_pin(made.stage("curate"), make_pin(world, PROBLEMS[:2], [play_probes(environment_settings(), PROBLEMS[:2])]))
    return made


def reads_of(stage: str, params: dict[str, Any], paths: Paths, loads: Counter[str]) -> Counter[str]:
    loads.clear()
    files._hashes.clear()
    with counting_reads(".safetensors") as hashed:
        module = stage_module(stage)
        module.run(load(module.SETTINGS, params), paths)
    return hashed + Counter({str(Path(path).absolute()): count for path, count in loads.items()})


def test_no_stage_before_evaluate_reads_a_file_of_weights_more_than_twice(paths: Paths, loads: Counter[str]) -> None:
    base = tiny.model_folder(Path("base").absolute())
    params = profile_params("test")
    params["model"]["path"] = str(base)
    params["assess"] |= {"num_problems": 5, "max_episodes": 20}  # 0 of 20 could still be 20%: three looks
    params["warm_start"] |= {"num_steps": 2, "batch_size": 2, "checkpoint_interval": 1}
    params["train"] |= {"num_iterations": 2, "problems_per_iteration": 2, "group_size": 2, "snapshot_interval": 1}
    params["train"]["lora"] = {"rank": 2, "alpha": 4.0, "target_modules": "all-linear"}
    params["sentinel"] |= unwatched(params["sentinel"])
    whole = str(base / "model.safetensors")
    started = str((paths.start_model / "model.safetensors").absolute())

    assert reads_of("assess", params, paths, loads) == {whole: 2}
    assert len(read_json(paths.stage("assess") / "baseline.json")["decision"]["looks"]) == 3
    warm_start = reads_of("warm_start", params, paths, loads)
    assert (warm_start[whole], max(warm_start.values())) == (2, 2)
    train = reads_of("train", params, paths, loads)
    assert (train[started], max(train.values())) == (2, 2)
