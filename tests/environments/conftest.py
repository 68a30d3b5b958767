"""MCP environments for tests: made from the test server, closed afterwards, and no process of theirs left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tasks.environments.mcp import MCPEnvironment


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def mcp_world() -> Iterator[Callable[..., MCPEnvironment]]:
    """Makes environments, without wrappers."""
    from tasks.environments.mcp import MCPEnvironment
    from tests.environments import mcp_server

    before, made = _children(), []

    def make(**changed: Any) -> MCPEnvironment:
        made.append(MCPEnvironment.from_settings(mcp_server.environment_settings(**changed)))
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
