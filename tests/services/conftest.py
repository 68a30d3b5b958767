"""A toy project on real servers, for each drill a new one; what it started ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.toy_project import make_toy_project
from tests.services.fixtures import Services
from tests.services.installation import Installation


@pytest.fixture
def installation(tmp_path: Path, services: Services, request: pytest.FixtureRequest) -> Iterator[Installation]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    installation = Installation(make_toy_project(tmp_path / "project"), services, name)
    yield installation
    for process in installation.project.processes():
        process.kill()
