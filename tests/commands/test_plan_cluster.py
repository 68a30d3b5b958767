"""`plan --gpus`: records of a run in; a split into trainers and engines, and where the next GPU goes, out."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.plan.cluster import ClusterPlan, check_options, cluster_as_json, plan_cluster, print_cluster
from tasks.core.console import SafeConsole
from tasks.core.files import write_jsonl
from tests.profiles import profile_params

TURN = {"fed": 40, "sampled": 20, "tool_seconds": 0.5}
REPLY = {
    "seconds": 0.5, "steps": 5.0, "live_seconds": 2.0, "fed": 80, "begun": 2, "reads": 1, "host_seconds": 0.01,
    "host_turns": 2,
}  # fmt: skip
ITERATION = {"episodes": 16, "refresh_seconds": 0.1, "collect_seconds": 2.0, "update_seconds": 1.0, "save_seconds": 0.1,
             "iteration_seconds": 3.2}  # fmt: skip


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of four groups of four episodes of two turns; params.yaml asks for eight groups of four."""
    params: dict[str, Any] = json.loads(json.dumps(profile_params("test")))
    params["paths"]["artifacts"] = str(tmp_path)
    params["train"] |= {"problems_per_iteration": 8, "group_size": 4}
    monkeypatch.setattr("tasks.commands.plan.cluster.read_params", lambda: params)
    episodes = [{"problem_id": f"p{number % 4}", "draw": 1, "turns": [TURN, TURN]} for number in range(16)]
    write_jsonl(tmp_path / "timings" / "turns.jsonl", episodes)
    write_jsonl(tmp_path / "timings" / "engine.jsonl", [REPLY, REPLY | {"steps": 8.0, "seconds": 0.7}])
    write_jsonl(tmp_path / "timings" / "train.jsonl", [{"iteration": number, **ITERATION} for number in range(1, 5)])
    return tmp_path / "timings"


def printed(plan: ClusterPlan) -> str:
    output = io.StringIO()
    print_cluster(plan, SafeConsole(file=output, width=160))
    return output.getvalue()


@pytest.mark.slow
def test_it_tells_the_best_split_of_every_size_and_what_was_measured(records: Path) -> None:
    plan = plan_cluster(4, 2)
    assert plan.gpus_per_node == 2
    assert [row.gpus for row, _ in plan.sizes] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    seconds = [row.outcome.iteration_seconds for row, _ in plan.sizes]
    assert seconds == sorted(seconds, reverse=True)
    told = printed(plan)
    assert "16 episodes of the last run (4 iterations)" in told
    assert "means: 2.0 turns, 40 tokens of prompt, 40 sampled, 40 of replies, 0.500 s of tools per turn" in told
    assert re.search(r"check: that run as simulated takes \S+ s per iteration, and took 3.2 s", told)
    assert re.search(r"1,024: .* gains < 0.5%", told)
    assert "streaming, 16 groups under way" in told
    assert json.loads(cluster_as_json(plan))["best"]["gpus"] == 4


@pytest.mark.slow
def test_a_run_that_streams_is_planned_with_its_groups_under_way(records: Path) -> None:
    from tasks.commands.plan import cluster

    params = cluster.read_params()
    streaming = {"groups_under_way": 11, "batch_deadline_seconds": None, "least_batch_share": 0.5}
    params["train"] |= {"max_staleness": 3, "importance_correction": "token_truncate", "streaming": streaming}
    told = printed(plan_cluster(4, 2))
    assert "streaming, 11 groups under way" in told
    assert "3 ahead (train.max_staleness 3)" in told


@pytest.mark.slow
def test_lengths_that_are_given_take_the_place_of_the_recorded_ones(records: Path) -> None:
    from tasks.commands.plan import cluster

    with pytest.raises(ValueError, match=r"--tokens 4000 200 80.*4,280 tokens.*sampling\.max_tokens_per_episode"):
        plan_cluster(4, 2, tokens=(4000, 200, 80))
    cluster.read_params()["sampling"]["max_tokens_per_episode"] = 4280
    told = printed(plan_cluster(4, 2, tokens=(4000, 200, 80)))
    assert "assumed: the lengths of --tokens (4,000 of prompt, 200 sampled, 80 of replies)" in told


@pytest.mark.slow
def test_of_a_named_card_speeds_are_assumed_and_said_to_be(records: Path) -> None:
    told = printed(plan_cluster(8, 1, model="Qwen2.5-7B", gpu="h100-80gb"))
    assert "assumed, and measured on no GPU: speeds of engines and trainers on h100-80gb" in told


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (10, 4), (8, 0)])
def test_gpus_that_cannot_be_split_are_refused(gpus: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"--gpus {gpus}"):
        plan_cluster(gpus, nodes)


def test_without_a_run_it_says_which_file_is_not_there_and_how_to_get_it(records: Path) -> None:
    (records / "turns.jsonl").unlink()
    with pytest.raises(ValueError, match=r"turns\.jsonl is not there.*python -m tasks train"):
        plan_cluster(8, 1)


def test_too_few_iterations_are_refused(records: Path) -> None:
    write_jsonl(records / "train.jsonl", [{"iteration": 1, **ITERATION}])
    with pytest.raises(ValueError, match=r"train\.num_iterations"):
        plan_cluster(8, 1)


def test_a_record_of_another_shape_is_refused(records: Path) -> None:
    write_jsonl(records / "train.jsonl", [{"iteration": number} for number in range(4)])
    with pytest.raises(ValueError, match="has no episodes"):
        plan_cluster(8, 1)


def test_a_card_of_unknown_speed_and_options_without_a_part_are_refused(records: Path) -> None:
    with pytest.raises(ValueError, match="speed"):
        plan_cluster(8, 1, gpu="48gb")
    with pytest.raises(ValueError, match="--dollars-per-hour"):
        check_options(1.0)
