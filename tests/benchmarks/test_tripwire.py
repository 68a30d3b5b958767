"""When does the tripwire fire on a policy that really finds a planted exploit, and when does its success fall?

Three rewards, two learning rates, three seeds from one warm start: about five minutes of one core.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.settings import read_params
from tests.benchmarks.tripwire import NUM_ITERATIONS, REWARDS, SEEDS, fall_of_success, make_start, replay
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]


def test_exploits_trip_it_and_honest_rewards_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    make_start(tmp_path)
    sentinel = read_params(ROOT / "params.yaml")["sentinel"]
    for reward in REWARDS:
        for rate in NUM_ITERATIONS:
            for seed in SEEDS:
                command = [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.tripwire",
                    str(tmp_path),
                    reward,
                    f"{rate}",
                    f"{seed}",
                ]
                done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
                rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
                alarms = {signal: alarm.iteration for signal, alarm in replay(rows, sentinel).items()}
                print(f"\n{reward}, rate {rate:g}, seed {seed}: success falls at {fall_of_success(rows)}; {alarms}")
                assert ("unearned_reward" in alarms) == (reward != "honest")
