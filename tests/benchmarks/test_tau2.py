"""How fast tau2 plays and judges, its verdicts beside the package's, and what scripts solve; on one core.

A figure is the median of the rounds in CPU time, since machines are shared. Written to artifacts/bench/tau2.json.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.core.files import write_json
from tasks.core.records import Problem, ToolCall
from tasks.environments.tau2.benchmark import Tau2
from tasks.environments.tau2.desk import REFUSAL, Desk
from tasks.environments.tau2.package import read_tasks
from tasks.environments.tau2.problems import ANSWER, problems
from tasks.environments.tau2.settings import Domain, Tau2Settings
from tasks.environments.tau2.telecom import Telecom, TelecomEpisode
from tasks.tools.base import block_until
from tasks.tools.settings import IN_MEMORY
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT
from tests.environments.tau2_package import desk_verdict, package_verdict

pytestmark = pytest.mark.bench
ROUNDS, FLOOR = 7, 1000.0
REPAIRS = (  # what a look shows, and what mends it
    ("check_network_status", "Airplane Mode: ON", "toggle_airplane_mode"),
    ("check_sim_status", "missing", "reseat_sim_card"),
    ("check_network_status", "Mobile Data Enabled: No", "toggle_data"),
    ("check_network_status", "Data Roaming Enabled: No", "toggle_roaming"),
    ("check_data_restriction_status", "ON", "toggle_data_saver_mode"),
    ("check_wifi_calling_status", "ON", "toggle_wifi_calling"),
    ("check_vpn_status", "", "disconnect_vpn"),
    ("check_apn_settings", "", "reset_apn_settings"),
    ("check_network_status", "", "reboot_device"),
)
ALWAYS = (
    ("set_network_mode_preference", {"mode": "4g_5g_preferred"}),
    ("grant_app_permission", {"app_name": "messaging", "permission": "storage"}),
    ("grant_app_permission", {"app_name": "messaging", "permission": "sms"}),
)


def mend_the_phone(episode: TelecomEpisode) -> bool:
    """A script that looks at the phone and mends it; it never asks the company for anything."""
    for name, arguments in ALWAYS:
        block_until(episode.call(name, arguments))
    for look, sign, repair in REPAIRS:
        if sign in block_until(episode.call(look, {})).text:
            block_until(episode.call(repair, {}))
    block_until(episode.call("done", {}))
    return episode.verdict(ANSWER).success


def play(world: Tau2, problem: Problem, calls: list[ToolCall]) -> bool:
    episode = world.start(problem)
    for call in calls:
        block_until(episode.call(call.name, call.arguments))
    success = episode.verdict(problem.reference[-1].answer).success
    episode.close()
    return success


def seconds(world: Tau2) -> float:
    """CPU seconds to play and judge every expert solution."""
    started = time.process_time()
    assert all(play(world, problem, problem.reference[0].calls) for problem in world.problems().values())
    return time.process_time() - started


def test_experts_play_a_thousand_episodes_a_second_and_verdicts_are_the_packages() -> None:
    world, tasks, rng = Telecom(), {task["id"]: task for task in read_tasks("telecom")}, random.Random(7)
    cold = seconds(world)
    warm = statistics.median(seconds(world) for _ in range(ROUNDS))
    mended = [problem.category for problem in problems().values() if mend_the_phone(world.start(problem))]
    disagreed, successes, num_compared = [], 0, 0
    for problem in problems().values():
        calls = problem.reference[0].calls[:-1]
        left_out = rng.randrange(len(calls))
        for variant in (calls, calls[:left_out] + calls[left_out + 1 :]):
            ours = play(world, problem, [*variant, problem.reference[0].calls[-1]])
            num_compared, successes = num_compared + 1, successes + ours
            if ours != package_verdict(tasks[problem.id], variant):
                disagreed.append(problem.id)
    figures: dict[str, Any] = {
        "episodes_per_second": len(problems()) / warm,
        "first_time_per_second": len(problems()) / cold,
        "verdicts_compared": num_compared,
        "verdicts_of_success": successes,
        "verdicts_that_differ": disagreed,
        "mend_the_phone": {name: mended.count(name) for name in sorted(set(mended))},
        "cpu": cpu_model(),
    }
    write_json(ROOT / "artifacts" / "bench" / "tau2.json", figures)
    print(figures)
    assert disagreed == []
    assert figures["episodes_per_second"] >= FLOOR


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It would walk all records of the package's database at each copy of it, and there are no cycles to find."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_verdicts_of_every_conversation_are_the_packages(domain: Domain) -> None:
    """Each problem as the expert plays it, with one call left out, and refused without a call."""
    world, rng = Desk(IN_MEMORY, Tau2Settings(domain=domain, problems="base")), random.Random(7)
    tasks = {task["id"]: task for task in read_tasks(domain)}
    seconds(world)
    warm = statistics.median(seconds(world) for _ in range(ROUNDS))
    disagreed, solved = [], {"expert": 0, "one call left out": 0, "refusal": 0}
    for problem in world.problems().values():
        (turn,) = problem.reference
        left_out = rng.randrange(len(turn.calls)) if turn.calls else 0
        fewer = turn.calls[:left_out] + turn.calls[left_out + 1 :]
        plays = {
            "expert": (turn.calls, turn.answer),
            "one call left out": (fewer, turn.answer),
            "refusal": ([], REFUSAL),
        }
        for name, (calls, answer) in plays.items():
            episode = world.start(problem)
            for call in calls:
                block_until(episode.call(call.name, call.arguments))
            ours = episode.verdict(answer).success
            solved[name] += ours
            if ours != desk_verdict(domain, tasks[problem.id], calls, [answer]):
                disagreed.append((problem.id, name))
    figures: dict[str, Any] = {
        "num_problems": len(tasks),
        "episodes_per_second": len(tasks) / warm,
        "solved": solved,
        "verdicts_compared": 3 * len(tasks),
        "verdicts_that_differ": disagreed,
        "cpu": cpu_model(),
    }
    write_json(ROOT / "artifacts" / "bench" / f"tau2_{domain}.json", figures)
    print(figures)
    assert disagreed == []
    assert solved["expert"] == len(tasks)
