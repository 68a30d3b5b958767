"""Whether a process is known to be gone: its number, its host's name and its folder may all be somebody else's too."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tasks.core import processes
from tasks.core.processes import OF_THE_HOST, is_gone, this_process


def test_this_process_is_not_gone_and_another_of_its_number_is():
    own = this_process()
    assert not is_gone(own)
    assert is_gone({**own, "started": own["started"] - 60})


def test_a_process_that_ended_is_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = processes.process_start(child.pid)
        other = {**this_process(), "pid": child.pid, "started": started}
        assert not is_gone(other)
        child.kill()
        child.wait()
    assert is_gone(other)


@pytest.mark.parametrize(
    ("differs", "namespace", "is_known_gone"),
    [
        ({"host": "another"}, OF_THE_HOST, False),
        ({"installation": "another"}, OF_THE_HOST, False),
        ({"namespace": "pid:[4026532000]"}, OF_THE_HOST, False),  # a container on this machine
        ({"boot": "before"}, OF_THE_HOST, True),  # this machine was started anew
        ({"boot": "elsewhere"}, "pid:[4026532000]", False),  # two containers of one image, on two machines
    ],
)
def test_a_dead_number_says_nothing_where_it_may_be_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, differs: dict[str, Any], namespace: str, is_known_gone: bool
):
    here = {**this_process(), "installation": "one", "namespace": namespace, "started": -60.0, "pid": os.getpid()}
    monkeypatch.setattr(processes, "this_process", lambda: here)
    assert is_gone(here)
    assert is_gone({**here, **differs}) is is_known_gone
