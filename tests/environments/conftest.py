"""MCP environments for tests: made from the test server, closed afterwards, and no process of theirs left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tasks.environments.mcp.environment import MCPEnvironment

PATIENCE = 120.0  # seconds


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def mcp_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MCPEnvironment]]:
    """Makes environments, without wrappers. On a busy machine a server may take its time to end and to say why."""
    from tasks.environments.mcp import environment as mcp
    from tasks.environments.mcp import sessions as mcp_sessions
    from tasks.environments.mcp import stdio as mcp_stdio
    from tests.environments import mcp_server

    for name in ("EXIT_SECONDS", "LAST_WORDS_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(mcp_stdio, name, PATIENCE)
    monkeypatch.setattr(mcp_sessions, "ACCOUNT_SECONDS", PATIENCE)
    for module in (mcp_sessions, mcp):
        monkeypatch.setattr(module, "CLOSE_SECONDS", PATIENCE)
    before, made = _children(), []

    def make(**changed: Any) -> MCPEnvironment:
        made.append(mcp_server.make_environment(**changed))
        return made[-1]

    yield make
    for environment in made:
        environment.close()
    assert _children() <= before


@pytest.fixture(scope="session")
def mcp_url() -> Iterator[str]:
    """The hotel over HTTP, with every trouble."""
    from tests.environments import mcp_server

    command = [sys.executable, str(mcp_server.FILE), "--http", "--trouble"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
