"""S3 at its worst under a whole flow with `paths.remote`: the run ends as if nothing had happened, or says what lacks.

The faults are those of a proxy before the server (`tests/storage/fault_proxy.py`); `tests/storage/` has each alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core.files import content_hash
from tasks.core.stages import STAGES
from tasks.core.urls import parse_url
from tasks.storage.client import connect
from tasks.storage.folders import get_folder
from tasks.storage.mirror import RESULTS
from tests.pipeline.project import Project, make_project
from tests.pipeline.test_kills import stage_process
from tests.pipeline.toy_project import make_toy_project, release_knobs
from tests.services.fixtures import Services
from tests.services.installation import Installation, check_promoted_once, hold
from tests.services.servers import wait_until
from tests.storage.fault_proxy import FaultProxy
from tests.storage.places import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.outage]

REFUSED_SECONDS = 10.0


@pytest.fixture
def proxy(services: Services) -> Iterator[FaultProxy]:
    proxy = FaultProxy(services.store.port)
    yield proxy
    proxy.close()


def install(project: Project, services: Services, name: str, proxy: FaultProxy) -> Installation:
    """On the services, and on S3 by way of the proxy."""
    installation = Installation(project, services, name)
    project.server["AWS_ENDPOINT_URL_S3"] = proxy.endpoint
    project.set_params({"storage.endpoint_url": proxy.endpoint})
    return installation


def check_remote(installation: Installation, folder: Path, monkeypatch: pytest.MonkeyPatch, *stages: str) -> None:
    """What S3 has of these stages is what the workspace has, byte for byte."""
    for name, value in installation.services.store.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it may have the keys of another test's server
    store, remote = connect(SETTINGS), parse_url(installation.project.params()["paths"]["remote"])
    for stage in stages:
        get_folder(store, remote / RESULTS / stage, folder / stage)
        assert content_hash(folder / stage) == content_hash(installation.project.artifacts / stage)


def test_a_flow_under_which_s3_is_slow_cuts_refuses_and_alters_ends_bitwise_the_same_with_all_of_it_on_s3(
    finished: Project, services: Services, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project")
    installation = install(project, services, "s3-at-its-worst", proxy)

    def heal_at(stage: str) -> int | None:
        """How many faults were left by then."""
        wait_until(lambda: stage_process(project, stage) or flow.poll() is not None, f"{stage} at work", pause=0.05)
        assert flow.poll() is None, flow.communicate()
        left = proxy.times
        proxy.heal()
        return left

    flow = project.start("flows", "run")
    heal_at("curate")
    proxy.delay_seconds = 0.2
    heal_at("warm_start")
    proxy.times, proxy.cut_up_at = 2, 100_000
    assert heal_at("train") == 0
    proxy.refuses = True
    time.sleep(REFUSED_SECONDS)
    proxy.heal()
    heal_at("evaluate")
    proxy.times, proxy.flip_up_at = 2, 20_000
    output, errors = flow.communicate(timeout=600)
    assert flow.returncode == 0, output + errors
    assert proxy.times == 0
    assert project.snapshot_hashes() == finished.snapshot_hashes()
    assert project.decision()["decision"] == finished.decision()["decision"]
    assert installation.versions() == [1]
    check_remote(installation, tmp_path / "read", monkeypatch, *STAGES)


def test_s3_that_never_comes_back_costs_its_copy_alone_and_report_sends_that_later(
    services: Services, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_toy_project(tmp_path / "project")
    installation = install(project, services, "s3-gone", proxy)
    project.set_params({"storage.finish_seconds": 3.0, "storage.max_attempts": 2})
    flow = hold(installation, "train")
    proxy.refuses = True
    release_knobs(project)
    output, errors = flow.communicate(timeout=300)
    assert flow.returncode == 0, output + errors
    assert "`python -m tasks report` sends what is missing" in output + errors
    check_promoted_once(installation)

    refused = project.run("flows", "run")
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode != 0 and "paths.remote" in line

    proxy.heal()
    project._succeed("tasks", "report")
    check_remote(installation, tmp_path / "read", monkeypatch, *STAGES)
