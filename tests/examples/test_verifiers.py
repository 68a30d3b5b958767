"""A taskset of verifiers v1, by its own harness and in its own environment, asks a policy of turnwise."""

from __future__ import annotations

import os
import subprocess

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem
from tests import tiny
from tests.agents_of_others import python_of
from tests.conftest import ROOT
from tests.rollouts.agents.conftest import VERDICT, Imitator, agent_world, collect

pytestmark = pytest.mark.agents

FOLDER = ROOT / "infra" / "examples" / "agents" / "verifiers"
PROGRAM = FOLDER / "play_taskset.py"
# What a program of an agent gets beside its address: where its taskset is, and the certificates of this machine.
VARIABLES = {"PYTHONPATH": str(FOLDER)} | {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def problems() -> list[Problem]:
    command = [python_of("verifiers"), str(PROGRAM), "problems", "sums"]
    done = subprocess.run(command, env={**os.environ, **VARIABLES}, check=True, capture_output=True, timeout=300)
    return [Problem.model_validate_json(line) for line in done.stdout.splitlines()]


def test_its_tasks_are_problems_its_harness_asks_the_policy_and_its_reward_is_the_verdict(chat: ChatFormat):
    """64 sums. The policy says 2 + 2 right and 2 + 3 wrong; one turn each, every token of which was recorded."""
    found = problems()
    assert (len(found), found[1].requests) == (64, ["What is 2 + 3 ?"])
    assert found[1].reference[0].answer == "5"
    played = collect(
        agent_world(
            object=None,
            command=[python_of("verifiers"), str(PROGRAM)],
            environment={name: {"value": value} for name, value in VARIABLES.items()},
            world=None,
            verdict=VERDICT,
            deadline_seconds=300.0,  # verifiers takes five seconds of CPU to import, and installs its harness once
        ),
        Imitator(chat, {found[0].requests[0]: ["It is 4"], found[1].requests[0]: ["It is 6"]}),
        chat,
        found[:2],
        sampling=tiny.ROOMY,
    )
    assert [trajectory.outcome for trajectory in played] == ["success", "failure"]
    assert [trajectory.details["rewards"] for trajectory in played] == [{"says_the_sum": 1.0}, {"says_the_sum": 0.0}]
    for trajectory, text in zip(played, ("It is 4", "It is 6"), strict=True):
        (sequence,) = trajectory.sequences
        sampled = [id for id, is_sampled in zip(sequence.token_ids, sequence.sampled_mask, strict=True) if is_sampled]
        assert sampled == [*chat.encode(text), chat.end_of_turn]
