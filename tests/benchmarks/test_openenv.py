"""What playing an OpenEnv server costs here: episodes of two steps on a stand-in whose steps cost nothing."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing

import pytest

from tasks.tools.replay import Script, play
from tests.environments import openenv_server

pytestmark = pytest.mark.bench

NUM_EPISODES, NUM_ROUNDS = 400, 5


@pytest.mark.parametrize("at_once", [1, 8, 64])
def test_an_episode_costs_a_few_milliseconds(at_once: int):
    """A session opened, reset, two steps and closed; this process' CPU is of the client alone."""
    with closing(openenv_server.make_environment(max_sessions=at_once)) as environment:
        problems = list(environment.generate(seed=1, num_problems=NUM_EPISODES, max_level=1))
        scripts = [Script.reference(problem) for problem in problems]
        play(environment, scripts[:50])  # warm
        wall, cpu = [], []
        for _ in range(NUM_ROUNDS):
            started, used = time.perf_counter(), time.process_time()
            played = play(environment, scripts)
            wall.append((time.perf_counter() - started) * 1000 / NUM_EPISODES)
            cpu.append((time.process_time() - used) * 1000 / NUM_EPISODES)
            assert all(one.verdict and one.verdict.success for one in played)
    print(
        f"\n{at_once} at once: {_shown(wall)} ms wall and {_shown(cpu)} ms CPU of an episode; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    assert statistics.median(cpu) < 50


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
