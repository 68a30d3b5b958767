"""`python -m tasks serve` as a program: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import httpx2
import pytest
import yaml

from tests import tiny
from tests.commands.serve.clients import WAIT_SECONDS, ask, until, user
from tests.conftest import ROOT
from tests.profiles import profile_params

pytestmark = pytest.mark.slow
AGENT = "bob's-$(agent)"


def test_sigterm_answers_what_came_and_ends_with_0(tmp_path: Path):
    model = tiny.model_folder(
        tmp_path / AGENT, embedded=tiny.EMBEDDED.model_copy(update={"max_position_embeddings": 1024})
    )
    params = profile_params("demo")
    params["serve"] |= {"key_variable": "AGENT_KEY", "port": 0}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks", "serve", str(model), "--record", "served"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AGENT_KEY": "k-1234-5678"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = "".join(takewhile(str.strip, iter(process.stdout.readline, "")))
        command = "".join(takewhile(str.strip, iter(process.stdout.readline, "")))
        url = re.search(r"http://127\.0\.0\.1:\d+", told)
        assert url and re.search(rf"serving {re.escape(AGENT)}@[0-9a-f]{{12}} as {re.escape(AGENT)}\n", told)
        assert "RECORDING  every conversation is written to served" in told and "Bearer $AGENT_KEY" in command
        assert json.loads(shlex.split(command.replace("\\\n", ""))[-1])["model"] == AGENT
        assert "k-1234-5678" not in told + command
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, url[0], [user("hello")], model=AGENT, key="k-1234-5678") for _ in range(8)]
            until(lambda: _num_come(url[0]) == 8)
            process.send_signal(signal.SIGTERM)
            replies = [one.result() for one in asked]
        rest, _ = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        process.wait()

    assert [reply.status_code for reply in replies] == [200] * 8
    assert process.returncode == 0 and "it answered 8 requests, 8 of them recorded and 0 not recorded" in rest
    rows = [json.loads(line) for line in (tmp_path / "served" / "conversations.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and {row["version"] for row in rows} == {replies[0].headers["x-turnwise-version"]}
    assert not list((tmp_path / "artifacts" / "serve").iterdir())


def _num_come(url: str) -> int:
    found = httpx2.get(f"{url}/health").json()
    return int(found["answered"] + found["under_way"] + found["waiting"])
