"""Traces: which episodes are shown, and what MLflow gives back of them, on a real sqlite store."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import write_jsonl
from tasks.core.records import TokenSequence, Turn
from tasks.core.settings import Paths
from tasks.tracking import traces
from tasks.tracking.runs import FlowRuns
from tasks.tracking.trace_choice import Choice, Episode, choose, read_index
from tasks.tracking.traces import log_traces
from tests.measurement.hostile import HANDLER, HUGE, NO_UTF_8_SHOWN, PROBLEM, SURROGATE, write_hostile_episodes
from tests.measurement.synthetic import REQUEST, call_turn, trajectory, write_artifacts
from tests.rewards.shaped import shaped
from tests.tracking.project import SETTINGS

WON, LOST = Episode("a", True), Episode("a", False)


def problem_row(problem_id: str) -> dict[str, Any]:
    """A curated problem as Rescorer looks it up."""
    return {
        "id": problem_id,
        "category": "book/declined",
        "level": 1,
        "requests": [REQUEST],
        "world": {},
        "reference": [{"calls": [], "answer": "x"}],
        "split_group": "g",
    }


def read_back(runs: FlowRuns) -> list[Any]:
    return list(runs.client.search_traces(locations=[runs.experiment_id], run_id=runs.parent_id))


def flow(paths: Paths, *, num_traces: int = 20) -> FlowRuns:
    runs = FlowRuns(SETTINGS.model_copy(update={"num_traces": num_traces}), {"seed": 7}, paths)
    runs.begin()
    return runs


def test_improved_then_regressed_then_a_failure_of_each_policy_and_nothing_twice():
    """p0 improved, p1 regressed, p2 failed everywhere. The best's failure on p1 was shown as regressed already."""
    keys = [(f"p{number}", 0) for number in range(3)]
    episodes = {
        "base": dict(zip(keys, [LOST, LOST, LOST], strict=True)),
        "warm_start": dict(zip(keys, [LOST, WON, LOST], strict=True)),
        "best": dict(zip(keys, [WON, LOST, LOST], strict=True)),
    }
    assert choose(episodes, 20) == [
        Choice("warm_start", "improved", ("p0", 0)),
        Choice("best", "improved", ("p0", 0)),
        Choice("warm_start", "regressed", ("p1", 0)),
        Choice("best", "regressed", ("p1", 0)),
        Choice("base", "failure", ("p0", 0)),
        Choice("base", "failure", ("p1", 0)),
        Choice("warm_start", "failure", ("p2", 0)),
        Choice("best", "failure", ("p2", 0)),
        Choice("base", "failure", ("p2", 0)),
    ]
    assert len(choose(episodes, 3)) == 3


def test_every_category_gives_one_before_any_gives_a_second():
    best = {("p0", 0): Episode("a", False), ("p1", 0): Episode("a", False), ("p2", 0): Episode("b", False)}
    assert [choice.key[0] for choice in choose({"best": best}, 2)] == ["p0", "p2"]


@pytest.mark.slow
def test_a_trace_has_a_span_a_turn_and_a_span_a_call_with_texts_tokens_and_reward(project: Paths):
    """A prompt of 2 tokens, a call of 2, its reply of 1, an answer of 1: the first turn reads 2, the second 5."""
    turns = [call_turn("check_card", {"card_id": "card_3"}, '{"status": "declined"}'), Turn(text="Declined.")]
    episode = trajectory("p0", False, turns=turns, num_calls=1)
    episode.turns[0].errors = ["declined"]
    mask = [False, False, True, True, False, True]
    episode.sequences = [TokenSequence([1, 2, 3, 4, 5, 6], mask, [0.0, 0.0, -0.5, -1.5, 0.0, -0.25])]
    write_jsonl(project.stage("evaluate") / "trajectories" / "test_best.jsonl", [episode.to_row()])
    write_jsonl(project.split("test"), [problem_row("p0")])
    runs = flow(project)
    rewards = shaped(format=0.2, call_validity=0.1)
    place = {"experiment_id": runs.experiment_id, "run_id": runs.parent_id, "evaluation": ""}
    assert log_traces(runs.client, project, rewards, most=5, **place) == 1

    (trace,) = read_back(runs)
    root, first, call, second = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    assert trace.info.tags["policy"] == "best"
    assert trace.info.tags["chosen_as"] == "failure"
    assert root.inputs == {"request": REQUEST}
    assert root.outputs == {"answer": "Declined.", "outcome": "failure"}
    assert root.attributes["reward_parts"] == {"outcome": 0.0, "format": 0.2, "call_validity": 0.1}
    assert root.attributes["problem_id"] == "p0"
    assert root.attributes["times"].startswith("not measured")
    assert [span.parent_id for span in (first, call, second)] == [root.span_id, first.span_id, root.span_id]
    assert first.inputs == {"messages": [{"role": "user", "content": REQUEST}]}
    assert first.outputs["content"] == turns[0].text
    assert first.attributes["mean_sampler_logp"] == -1.0
    assert call.name == "check_card"
    assert call.inputs == {"arguments": {"card_id": "card_3"}}
    assert call.outputs == {"reply": '{"status": "declined"}'}
    assert call.attributes["error"] == "declined"
    assert second.inputs == {"messages": [{"role": "tool", "content": '{"status": "declined"}'}]}
    assert trace.info.token_usage == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}


@pytest.mark.slow
def test_a_flow_writes_its_sample_to_the_parent_run_and_the_next_repeats_it_for_another_evaluation_alone(
    project: Paths,
):
    write_artifacts(project.artifacts, problems_per_type=2, num_snapshots=2)
    numbers = []
    for command in ("x", "x", "another"):
        lock = {"schema": "2.0", "stages": {"evaluate": {"cmd": command}}}
        Path("dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
        runs = flow(project, num_traces=6)
        runs.log_traces()
        runs.finish()
        found = read_back(runs)
        assert {trace.info.tags["policy"] for trace in found} in (set(), {"base", "warm_start", "best"})
        numbers.append(len(found))
    assert numbers == [6, 0, 6]


@pytest.mark.slow
def test_what_a_model_or_tool_wrote_arrives_as_text_and_cut_to_a_length(project: Paths):
    write_artifacts(project.artifacts, problems_per_type=1, num_snapshots=1)
    write_hostile_episodes(project)
    file = project.stage("evaluate") / "trajectories" / "test_best.jsonl"
    assert next(iter(read_index(file)))[0] == PROBLEM
    runs = flow(project, num_traces=8)
    runs.log_traces()
    trace = next(
        item
        for item in read_back(runs)
        if item.info.tags["problem_id"] == PROBLEM and item.info.tags["policy"] == "best"
    )
    calls = [span for span in trace.data.spans if span.span_type == "TOOL"]
    assert [span.name for span in calls] == [HANDLER, "read_log", "malformed call"]
    assert HANDLER in calls[0].outputs["reply"]
    assert SURROGATE.replace("\ud83d", "\N{REPLACEMENT CHARACTER}") in calls[0].outputs["reply"]
    assert calls[1].outputs["reply"] == f"{HUGE[:10_000]}… 990,000 more characters"
    assert calls[2].outputs["reply"] == f"no text: {NO_UTF_8_SHOWN}"


@pytest.mark.slow
def test_a_fault_while_writing_is_one_line_and_the_flow_goes_on(
    project: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_artifacts(project.artifacts, problems_per_type=1, num_snapshots=1)

    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError("the server\nhung up")

    monkeypatch.setattr(traces, "_write", broken)
    runs = flow(project)
    with caplog.at_level(logging.WARNING):
        runs.log_traces()
    runs.finish()
    assert runs.client.get_run(runs.parent_id).info.status == "FINISHED"
    (line,) = [record.getMessage() for record in caplog.records if record.name == traces.__name__]
    assert line.startswith("no traces in MLflow (OSError: the server hung up)")
