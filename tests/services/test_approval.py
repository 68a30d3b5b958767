"""A run that waits for a person: suspended on a real server, answered on Prefect's page or from a shell, and taken up
by another worker; and a run that a person cancels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.tracking.versions import FOLDER_TAG
from tests.pipeline.toy_project import make_toy_project, release_knobs, turn_knob
from tests.services.fixtures import Services
from tests.services.installation import RUN_SECONDS, Installation
from tests.services.servers import Worker, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.services]
RETRY = {"type": "SCHEDULED", "name": "AwaitingRetry"}  # what the page's button sends
BY, REASON = "Jane Doe", "looked at ten episodes"


class Site(Installation):
    """A toy installation whose promotions wait for a person, and its worker."""

    worker_process: Worker

    def switch_worker_off(self) -> None:
        """kill -9 of the worker and all that it started."""
        self.worker_process.kill()
        wait_until(lambda: self.project.processes() == [], "the end of all that the worker started")

    def wait_for_the_end_of(self, run: str, name: str) -> dict[str, Any]:
        """Of its process too: Prefect's worker dies where a run comes again before that (with --limit)."""
        state = self.wait_for(run, name)
        wait_until(lambda: len(self.project.processes()) == 1, "nothing but the worker")
        return state

    def set_state(self, run: str, state: dict[str, str]) -> None:
        done = self.api.call("POST", f"/flow_runs/{run}/set_state", {"state": state})
        assert done["status"] == "ACCEPT", done

    def slots_taken(self) -> int:
        limits = self.api.call("POST", "/v2/concurrency_limits/filter", {})
        (limit,) = [limit for limit in limits if limit["name"].startswith(f"{self.name}-")]
        return int(limit["active_slots"])

    def form_of(self, run: str) -> tuple[dict[str, Any], str]:
        """The schema and the text that Prefect's page shows where a person resumes the run."""
        keys = self.state(run)["state_details"]["run_input_keyset"]
        schema, text = (
            self.api.call("GET", f"/flow_runs/{run}/input/{keys[part]}") for part in ("schema", "description")
        )
        return dict(schema), str(text)

    def answer_on_the_page(self, run: str, **answer: str) -> str:
        """What the page sends; ACCEPT or REJECT."""
        return str(self.api.call("POST", f"/flow_runs/{run}/resume", {"run_input": answer})["status"])


@contextmanager
def open_site(folder: Path, services: Services, name: str) -> Iterator[Site]:
    site = Site(make_toy_project(folder / "project"), services, name)
    site.project.set_params({"promote.approval": True})
    site.deploy("--pool", name)
    site.worker_process = site.worker(name)
    site.worker_process.start()
    yield site
    site.worker_process.stop()
    for process in site.project.processes():
        process.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, services: Services) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("approval"), services, "approved-agent") as site:
        yield site


@pytest.fixture(scope="module")
def other_site(tmp_path_factory: pytest.TempPathFactory, services: Services) -> Iterator[Site]:
    """Another one, without a champion yet: against one a toy is no better."""
    with open_site(tmp_path_factory.mktemp("approval"), services, "declined-agent") as site:
        yield site


def test_a_cancelled_run_ends_its_children_in_seconds_says_so_in_both_and_promotes_nothing(site: Site):
    turn_knob(site.project, "hold_train")
    run = site.start_run()
    child = site.project.artifacts / ".train.pid"
    wait_until(child.exists, "train at work")
    site.set_state(run, {"type": "CANCELLING"})
    asked = time.monotonic()
    wait_until(lambda: not psutil.pid_exists(int(child.read_text())), "the end of the child")
    assert time.monotonic() - asked < 120  # it is held, and ends for nothing else
    site.wait_for(run, "Cancelled")
    wait_until(lambda: site.parents()[0].info.status == "KILLED", "MLflow's word")
    assert site.stage_run("train").info.status == "KILLED"
    assert site.champion() is None
    release_knobs(site.project)


def test_nobody_answers_and_it_is_declined_the_next_holds_nothing_outlives_kill_9_and_is_approved_on_the_page(
    site: Site,
):
    site.project.set_params({"pipeline.approval_timeout_hours": 1e-6})
    unanswered = site.start_run()
    site.wait_for(unanswered, "Suspended")
    site.project.set_params({"pipeline.approval_timeout_hours": 72.0})
    run = site.start_run()
    assert "nobody approved it" in site.wait_for(unanswered, "Declined")["message"]
    site.wait_for_the_end_of(run, "Suspended")  # it was put up again
    assert site.slots_taken() == 0
    assert site.champion() is None
    assert run in site.project._succeed("flows", "approve")

    schema, text = site.form_of(run)
    assert schema["required"] == ["answer", "by", "reason"]
    key = text.partition("/artifacts/key/")[2].partition(")")[0]
    page = site.api.call("GET", f"/artifacts/{key}/latest")["data"]
    assert "waits for approval" in page and "95.0% of test" in page
    assert site.answer_on_the_page(run, answer="perhaps", by=BY, reason=REASON) == "REJECT"
    site.switch_worker_off()
    assert site.answer_on_the_page(run, answer="approve", by=BY, reason=REASON) == "ACCEPT"
    assert site.champion() is None
    site.worker_process.start()
    message = site.wait_for(run, "Promoted")["message"]
    assert BY in message and REASON in message
    tags = site.api.call("GET", f"/flow_runs/{run}")["tags"]
    assert "promoted" in tags and "waiting" not in tags
    page = site.api.call("GET", f"/artifacts/{key}/latest")["data"]
    assert page.startswith("# promote: ") and "waits for approval" not in page
    told = [(parent.data.tags["decision"], parent.data.tags["approval"]) for parent in site.parents()[:2]]
    assert told == [("promote", "given"), ("hold", "withdrawn")]  # of this run, and of the one nobody answered
    lineage = site.project._succeed("tasks", "lineage", f"models:/{site.name}@champion")
    assert BY in lineage and REASON in lineage


@pytest.mark.outage
def test_a_declined_run_promotes_nothing_and_the_next_decides_anew_and_holds(other_site: Site):
    run = other_site.start_run()
    other_site.wait_for_the_end_of(run, "Suspended")
    other_site.project._succeed("flows", "approve", run, "--decline", "--by", BY, "--reason", "it books twice")
    assert "it books twice" in other_site.wait_for(run, "Declined")["message"]
    again = other_site.start_run()
    other_site.wait_for(again, "Held")
    assert "reason: decision" in other_site.api.call("GET", f"/flow_runs/{again}")["tags"]
    other_site.wait_for(other_site.start_run(), "Unchanged")
    assert other_site.champion() is None


@pytest.mark.outage
def test_a_retry_on_the_page_asks_again_and_carries_out_an_answer_that_could_not_be_carried_out(other_site: Site):
    other_site.project.set_params({"train.learning_rate": 0.25})
    run = other_site.start_run()
    other_site.wait_for_the_end_of(run, "Suspended")
    other_site.set_state(run, {"type": "CRASHED"})
    other_site.set_state(run, RETRY)
    wait_until(lambda: other_site.state(run)["name"] == "Suspended", "the question anew", RUN_SECONDS)
    other_site.wait_for_the_end_of(run, "Suspended")
    client, version = other_site.services.mlflow.client(), max(other_site.versions())
    kept = client.get_model_version(other_site.name, version).tags[FOLDER_TAG]
    client.set_model_version_tag(other_site.name, version, FOLDER_TAG, "edited")
    assert other_site.answer_on_the_page(run, answer="approve", by=BY, reason=REASON) == "ACCEPT"
    assert "registry restore" in other_site.wait_for_the_end_of(run, "Failed")["message"]
    client.set_model_version_tag(other_site.name, version, FOLDER_TAG, kept)
    other_site.set_state(run, RETRY)
    wait_until(lambda: other_site.state(run)["name"] == "Promoted", "the retry", RUN_SECONDS)
    assert int(other_site.champion().version) == version
