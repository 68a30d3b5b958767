"""The real stages give the same model on services as in a folder; beside the tests that look at the finished flow."""

from __future__ import annotations

import pytest

from tests.pipeline.project import Project, make_project
from tests.services.fixtures import Services
from tests.services.installation import Installation

pytestmark = pytest.mark.outage  # two whole flows


def test_the_same_recipe_in_a_folder_and_on_services_gives_the_same_weights_and_the_same_decision(
    finished: Project, services: Services, tmp_path_factory: pytest.TempPathFactory
) -> None:
    on_services = Installation(make_project(tmp_path_factory.mktemp("same") / "project"), services, "same-recipe")
    on_services.project.flow()
    assert on_services.project.snapshot_hashes() == finished.snapshot_hashes()
    assert on_services.project.evaluation() == finished.evaluation()
    there, here = on_services.project.decision(), finished.decision()
    for part in ("decision", "reasons", "comparison", "challenger"):
        assert there[part] == here[part]
