"""One finished flow on the test profile, which every file that only looks at it or copies it shares."""

from __future__ import annotations

import pytest

from tests.pipeline.project import Project, make_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One flow on the test profile; tests that change anything copy it first."""
    project = make_project(tmp_path_factory.mktemp("finished") / "project")
    project.flow()
    return project
