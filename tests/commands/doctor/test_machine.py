"""The machine: what a run would need beside what is there, with estimates that add up by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.commands.doctor import estimates, machine
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.core import progress
from tasks.core.progress import spell
from tasks.core.settings import Paths, load
from tasks.models.native.compiled import load_library
from tasks.models.settings import on_cpu
from tasks.planning import hardware
from tasks.planning.memory import model_bytes, plan_memory
from tests.commands.doctor.project import found, look, params
from tests.engine_benches import engine_settings, vllm_settings
from tests.planning.setups import setup
from tests.rollouts.agents.conftest import agent_settings
from tests.services.servers import ObjectStore

DVC_CONFIG = """
[core]
    no_scm = true
    remote = store
['remote "store"']
    url = {}
"""


@pytest.mark.slow
def test_settings_beyond_the_machine_are_told_with_both_numbers(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(
        look("threads", artifacts, compute=on_cpu(9999).model_dump()),
        "warn",
        "num_threads is 9999",
        "Set compute.num_threads to",
    )
    monkeypatch.setattr(hardware, "available_memory", lambda: 8e9)
    crowd = {"engine__max_concurrent_episodes": 10**6, "train__problems_per_iteration": 10**5}
    found(look("memory", artifacts, **crowd), "fail", "8.0 GB are free", "engine.max_concurrent_episodes: ")
    measured = {"engine__max_concurrent_episodes": 10**6, "evaluate__select_samples_per_problem": 10**5}
    found(look("memory", artifacts, **measured), "fail", "while evaluating", "engine.max_concurrent_episodes: ")
    endless = {"train__num_iterations": 10**9, "train__snapshot_interval": 1}
    found(look("disk", artifacts, **endless), "fail", "results take about 3,", "1,000,000,000 snapshots of 1.6 MB")
    found(look("duration", artifacts, **endless), "warn", "as long as the references", "Lower train.num_iterations")
    context = DoctorContext(load(DoctorSections, params()), Paths(artifacts))
    needed = plan_memory(estimates.planned_setup(context)).peak
    monkeypatch.setattr(hardware, "available_memory", lambda: needed / 0.95)
    assert look("memory", artifacts).result == "warn"  # 95% of what is there


def test_the_time_of_an_agent_itself_is_part_of_the_duration(artifacts: Path) -> None:
    """At 12 s per episode and 8 at once, N episodes take 1.5·N s. Without a measurement it is left out, and told."""
    sections = params(environment__name="agent", environment__settings=agent_settings())
    settings = load(DoctorSections, {**sections, "evaluate": {**sections["evaluate"], "sharded": None}})
    context = DoctorContext(settings, Paths(artifacts))
    assert machine.duration(context).text.endswith(", without the agent's own time")
    context.agent_seconds = 12.0
    sizes = {split: len(problems) for split, problems in context.problems.items()}
    episodes = estimates.first_drawn_episodes(settings.train)
    episodes += estimates.evaluated_episodes(settings.train, settings.evaluate, settings.environment, sizes)
    needed = episodes * 12.0 / settings.engine.max_concurrent_episodes
    assert f"of the agent itself {spell(needed)} or more, at 12 s per episode" in machine.duration(context).text
    context.agent_seconds = 1e6
    assert machine.duration(context).result == "warn"


def test_a_cpu_without_a_compiler_is_told_what_it_costs(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("compiler", artifacts).result == "pass"
    monkeypatch.setattr("tasks.models.native.compiled.COMPILERS", ("no-such-compiler",))
    found(look("compiler", artifacts), "warn", "no C compiler", "Install gcc")
    monkeypatch.setattr("tasks.models.native.compiled.COMPILERS", ("false",))  # a program that only fails
    load_library.cache_clear()
    found(look("compiler", artifacts), "warn", "no C compiler succeeds", "Install gcc or clang, with its headers")
    load_library.cache_clear()


def test_a_gpu_needs_a_compiler_and_pythons_headers_for_its_kernels(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton builds a module of Python in C; without packing and vLLM nothing is compiled by it."""
    on_gpu = {"compute": {**on_cpu(1).model_dump(), "device": "cuda"}}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found(look("compiler", artifacts, **on_gpu), "fail", "Python.h does not exist", "python3-dev")
    (tmp_path / "Python.h").touch()
    assert look("compiler", artifacts, **on_gpu).result == "pass"
    monkeypatch.setattr("tasks.models.native.compiled.COMPILERS", ("no-such-compiler",))
    found(look("compiler", artifacts, **on_gpu), "fail", "no C compiler", "Install gcc")
    assert look("compiler", artifacts, **on_gpu, train__packing="none").result == "pass"


def test_servers_that_would_share_the_trainers_gpu_fail(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda compute: 1)
    over_vllm = engine_settings("vllm", vllm_settings(artifacts / "weights", mode="server")).model_dump()
    found(look("memory", artifacts, engine=over_vllm), "fail", "ask for 2 GPUs", "mode: in_process")


def test_a_card_that_is_not_there_fails(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compute = {**on_cpu(1).model_dump(), "device": "cuda"}
    found(look("memory", artifacts, compute=compute), "fail", "compute.device is cuda", "cpu or auto")


def test_a_warm_start_that_trains_all_weights_under_lora_fails_with_its_memory(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb")
    monkeypatch.setattr("tasks.commands.doctor.machine.planned_setup", lambda context: wanted)
    told = look("memory", artifacts, assess__warm_start_below=0.5)
    found(told, "fail", "warm start would train all weights", "assess.warm_start_below: 0.0")
    without = look("memory", artifacts, assess__warm_start_below=0.0)
    assert without.result == "pass" and "warm start" not in without.finding


def test_a_model_whose_shape_is_not_told_cannot_be_estimated_which_is_no_fault(artifacts: Path) -> None:
    file = artifacts / "assess" / "base_model" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "hidden_size": None, "n_embd": 64}), encoding="utf-8")
    assert look("memory", artifacts).result == "pass"  # as GPT-2 calls it
    file.write_text(json.dumps({**config, "hidden_size": None}), encoding="utf-8")
    found(look("memory", artifacts), "warn", "no hidden_size", "Watch memory and time")


def test_the_estimates_add_up_by_hand(curated: Path) -> None:
    context = DoctorContext(
        load(DoctorSections, params(train__num_iterations=25, train__snapshot_interval=10)), Paths(curated)
    )
    setup = estimates.planned_setup(context)
    assert estimates.num_snapshots(context.settings.train) == 3
    assert model_bytes(setup) == 4 * 1000 * 400  # one matrix of float32, from its header
    # Keys and values (2) in 2 layers, 2 heads of 64/4 = 16.
    assert setup.shape.key_value_elements == 2 * 2 * 2 * 16
    evaluate, sizes = context.settings.evaluate, {"select": 10, "test": 20}
    assert (evaluate.select_samples_per_problem, evaluate.test_samples_per_problem, evaluate.greedy) == (1, 1, True)
    # Three snapshots on select; three models on test, sampled and greedily.
    found = estimates.evaluated_episodes(context.settings.train, evaluate, context.settings.environment, sizes)
    assert found == 3 * 10 + 3 * 20 + 3 * 20


@pytest.mark.parametrize(("num_problems", "in_parts"), [(5, 5), (None, 20), (264, 20)])
def test_problems_told_in_parts_are_episodes_of_the_estimate(num_problems: int | None, in_parts: int) -> None:
    """Three models, two samples; and the best snapshot's second of two replays."""
    options = {"reveal": "sharded", "num_problems": num_problems, "samples_per_problem": 2, "num_replays": 2}
    without, told = (load(DoctorSections, params(evaluate__sharded=value)) for value in (None, options))
    sizes = {"select": 10, "test": 20}
    assert num_episodes(told, sizes) - num_episodes(without, sizes) == (3 + 1) * 2 * in_parts


def num_episodes(given: DoctorSections, sizes: dict[str, int]) -> int:
    return estimates.evaluated_episodes(given.train, given.evaluate, given.environment, sizes)


def test_where_requests_are_told_in_parts_anyway_they_are_played_at_once_too() -> None:
    options = {"reveal": "sharded", "num_problems": None, "samples_per_problem": 2, "num_replays": 1}
    user = {"played_by": "script", "reveal": "sharded", "model": None}
    told = load(DoctorSections, params(evaluate__sharded=options, environment__user=user))
    without = load(DoctorSections, params(evaluate__sharded=None, environment__user=user))
    sizes = {"select": 10, "test": 20}
    assert num_episodes(told, sizes) - num_episodes(without, sizes) == 3 * 2 * (20 + 20)


def test_other_environments_and_every_attempt_of_reflexion_are_episodes_of_the_estimate() -> None:
    """4 iterations of 3 problems, 5 samples each: 60 episodes, 6 attempts at each of 10 problems, 5 of them more."""
    budgets = {"max_turns": None, "max_tokens_per_turn": None, "max_tokens_per_episode": None}
    other = {
        "name": "bfcl", "settings": {"categories": ["multi_turn_base"], "turns": "first"}, "source": None,
        "max_level": None, "budgets": {**budgets, "max_completion_tokens": None}, "num_problems": 7,
        "samples_per_problem": 2,
    }  # fmt: skip
    again = {
        "policy": "base", "max_attempts": None, "question": "What went wrong?", "max_note_tokens": 9,
        "max_memory_tokens": 9,
    }  # fmt: skip
    iterations = {"train__num_iterations": 4, "train__problems_per_iteration": 3, "train__group_size": 5}
    sizes = {"select": 10, "test": 10}

    def count(**changed: Any) -> int:
        return num_episodes(load(DoctorSections, params(**iterations, **changed)), sizes)

    assert count(evaluate__also=[other]) - count() == 3 * 7 * 2
    assert count(evaluate__reflexion=again) - count() == 2 * 5 * 10
    assert count(evaluate__reflexion={**again, "max_attempts": 2}) - count() == 2 * 1 * 10


def test_times_are_told_as_people_do() -> None:
    assert [progress.spell(value) for value in (0.2, 60, 600, 7200, 40 * 86400)] == [
        "1 s", "60 s", "10 min", "2.0 h", "40 days"
    ]  # fmt: skip


@pytest.mark.slow
def test_s3_is_asked_for_what_params_and_dvc_name_there(
    artifacts: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifacts.parent
    monkeypatch.chdir(folder)
    assert look("storage", artifacts).finding == "nothing is on S3"
    for name, value in object_store.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    ours, theirs = (f"s3://{bucket}/doctor" for bucket in (object_store.bucket, object_store.strangers_bucket))
    found(look("storage", artifacts, paths__remote=theirs), "fail", "paths.remote", "Check the name")
    for url, result in ((theirs, "fail"), (ours, "pass")):
        (folder / ".dvc").mkdir(exist_ok=True)
        (folder / ".dvc" / "config").write_text(DVC_CONFIG.format(url), encoding="utf-8")
        told = look("storage", artifacts, paths__remote=ours)
        assert (told.result, "DVC's remote" in told.finding) == (result, True), told
