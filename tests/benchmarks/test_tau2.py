"""How fast tau2 plays and judges, its verdicts beside the package's, and what scripts solve; on one core.

A figure is the median of the rounds in CPU time, since machines are shared. Written to artifacts/bench/tau2.json.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import pytest

from tasks.core.files import write_json
from tasks.core.records import Problem, ToolCall
from tasks.environments.tau2.package import read_tasks
from tasks.environments.tau2.problems import ANSWER, problems
from tasks.environments.tau2.telecom import Telecom, TelecomEpisode
from tasks.tools.base import block_until
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT
from tests.environments.tau2_package import package_verdict

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


def play(world: Telecom, problem: Problem, calls: list[ToolCall]) -> bool:
    episode = world.start(problem)
    for call in calls:
        block_until(episode.call(call.name, call.arguments))
    success = episode.verdict(ANSWER).success
    episode.close()
    return success


def seconds(world: Telecom) -> float:
    """CPU seconds to play and judge every expert solution."""
    started = time.process_time()
    assert all(play(world, problem, problem.reference[0].calls) for problem in problems().values())
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
