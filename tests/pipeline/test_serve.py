"""`flows serve` and everybody who comes near it: its owner, a stranger on the machine, a page of another origin; then
what ends it, and what the next one finds.

One `serve` takes all the visits while its first run is held in a stage, and is killed at the end; a second one has to
put things in order and is ended by a signal. The clock starts no run here (`test_schedule.py` waits for it).
"""

from __future__ import annotations

import http.server
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from flows.server import STOP_SECONDS
from flows.supervisor import CLOSING_SECONDS, REPORTING_SECONDS
from tasks.core.child_processes import GRACE_SECONDS
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tests.browser.conftest import PATIENCE, browser  # noqa: F401 (a fixture)
from tests.pipeline.prefect_api import PrefectApi, free_port, server_of
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project, release_knobs, turn_knob

pytestmark = pytest.mark.flow

WAIT_SECONDS = 600
NOBODY = 65534
GREETING = re.compile(r"Prefect's page: (http://127\.0\.0\.1:\d+) \(password: (.+?)\)\. Next run: (.+)\. Ctrl-C ends\.")


class Serving:
    """A `serve` that has said where its page is."""

    def __init__(self, project: Project, port: int):
        self.port, self.project, self.folder, self.artifacts = port, project, project.folder, project.artifacts
        self.output: list[str] = []
        self.next: Serving  # which the last tests start
        self.run: str
        self.process = project.start("flows", "serve", "--cron", "0 3 1 1 *", "--port", str(port))
        threading.Thread(target=self._read, daemon=True).start()
        wait_for(lambda: self.greeting or self.process.poll() is not None)
        assert self.greeting, self.output
        self.page, self.password_file, self.next_run = self.greeting.groups()
        self.password = (self.folder / self.password_file).read_text(encoding="utf-8").strip()
        self.api = PrefectApi(self.page, self.password)

    def hold_a_run(self) -> Serving:
        """Start one and wait until it is held in its first stage, and is in MLflow's books."""
        turn_knob(self.project, "hold_curate")
        (self.artifacts / ".curate.pid").unlink(missing_ok=True)
        self.run = self.api.start_run()
        wait_for(lambda: (self.artifacts / ".curate.pid").exists())
        wait_for(lambda: "RUNNING" in mlflow_statuses(self.project, "stage"))
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)

    @property
    def greeting(self) -> re.Match[str] | None:
        return GREETING.search("".join(self.output))


def wait_for(is_there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_there():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def serving(databases: Path) -> Iterator[Serving]:
    """In a folder that other users of the machine may enter, as a project's usually is."""
    place = Path(tempfile.mkdtemp(prefix="turnwise-serve-"))
    place.chmod(0o755)
    project = make_toy_project(place / "project").lay(databases)
    try:
        yield Serving(project, free_port()).hold_a_run()
    finally:
        for process in project.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(place, ignore_errors=True)


def test_the_line_names_the_page_the_password_and_the_next_run(serving: Serving):
    assert serving.page == f"http://127.0.0.1:{serving.port}"
    assert serving.password_file == "artifacts/.prefect/password"
    assert re.fullmatch(r"Fri 2027-01-01 03:00 \w+|\w+ 20\d\d-01-01 03:00 \w+", serving.next_run)
    assert "".join(serving.output).count("Prefect's page") == 1


def test_without_the_password_every_route_refuses_and_nothing_changes(serving: Serving):
    before = serving.api.num_runs()
    assert serving.api.open_paths() <= {"/health", "/ready"}
    assert serving.api.send("GET", "/admin/settings").status == 401
    assert serving.api.num_runs() == before


@pytest.mark.parametrize("path", ["/events/out", "/events/in", "/logs/out", "/task_runs/subscriptions/scheduled"])
def test_nor_do_its_sockets_tell_anything(serving: Serving, path: str):
    address = f"{serving.api.url.replace('http', 'ws', 1)}{path}"
    with pytest.raises((InvalidStatus, ConnectionClosed)), connect(address, proxy=None) as silent:
        silent.recv(timeout=WAIT_SECONDS)
    with connect(address, subprotocols=["prefect"], proxy=None) as guessing:  # type: ignore[list-item]
        guessing.send('{"type": "auth", "token": "turnwise:guess"}')
        with pytest.raises(ConnectionClosed):
            guessing.recv(timeout=WAIT_SECONDS)


def test_another_user_of_the_machine_finds_the_password_nowhere(serving: Serving):
    """Where the tests may not become another user, what lets one in is looked at instead: modes and owners."""
    home = serving.artifacts / ".prefect"
    secrets = serving.api.secrets
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "password").stat().st_mode) == 0o600
    assert serving.api.leaks(serving.folder.parent) == []
    assert not any(secret in "".join(serving.output) for secret in secrets)
    if os.getuid() == 0:
        script = "cat params.yaml; cat artifacts/.prefect/*; cd artifacts/.prefect; cat password; ls"
        script += "; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'"
        seen = subprocess.run(
            ["sh", "-c", script], cwd=serving.folder, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True
        )
        assert b"minimum_success" in seen.stdout  # it may read what is beside
        assert not any(secret.encode() in seen.stdout for secret in secrets)
        assert b"prefect.db" not in seen.stdout


def test_the_server_calls_nobody_and_a_stage_knows_nothing_of_it(serving: Serving):
    environment = server_of(serving.process.pid).environ()
    assert TELEMETRY_OFF.items() <= environment.items()
    stage = psutil.Process(int((serving.artifacts / ".curate.pid").read_text()))
    assert serving.password not in stage.environ().values()
    assert TELEMETRY_OFF.items() <= stage.environ().items()


ATTACK = """
async ({api, token, deployment}) => {
    const tries = {
        read: () => fetch(`${api}/flow_runs/filter`, {method: "POST", body: "{}"}),
        health: () => fetch(`${api}/health`),
        withSecret: () => fetch(`${api}/flows/`, {headers: {Authorization: `Basic ${token}`}}),
        settings: () => fetch(`${api.replace("/api", "")}/ui-settings`),
        start: () => fetch(`${api}/deployments/${deployment}/create_flow_run`, {method: "POST",
            headers: {"Content-Type": "application/json"}, body: "{}"}),
        blindStart: () => fetch(`${api}/deployments/${deployment}/create_flow_run`, {method: "POST", mode: "no-cors",
            headers: {"Content-Type": "text/plain"}, body: "{}"}).then(answer => answer.text()).then(text => {
                if (!text) throw new Error("opaque"); return text; }),
    };
    const found = {};
    for (const [name, attempt] of Object.entries(tries)) {
        try {
            const answer = await attempt();
            found[name] = answer.status ?? answer;
        } catch (error) {
            found[name] = "refused";
        }
    }
    found.socket = await new Promise(done => {
        const socket = new WebSocket(`${api.replace("http", "ws")}/logs/out`, "prefect");
        socket.onopen = () => socket.send(JSON.stringify({type: "auth", token: "turnwise:guess"}));
        socket.onmessage = message => done(message.data);
        socket.onclose = () => done("refused");
    });
    return found;
}
"""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A page of another origin, as near as can be: the same address, another port."""
    handler = http.server.SimpleHTTPRequestHandler
    handler.log_message = lambda *arguments: None  # type: ignore[method-assign]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.browser
def test_a_page_of_another_origin_reads_and_changes_nothing(serving: Serving, browser, elsewhere: str):  # noqa: F811
    deployment = serving.api.call("GET", "/deployments/name/retrain/travel-desk-agent")["id"]
    before = serving.api.num_runs()
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(elsewhere)
    found = page.evaluate(ATTACK, {"api": serving.api.url, "token": serving.api.token, "deployment": deployment})
    assert set(found.values()) == {"refused"}, found
    page.set_content(f"<iframe src='{serving.page}'></iframe>")
    page.wait_for_load_state("networkidle")
    assert [frame.url for frame in page.frames[1:] if frame.url.startswith(serving.page)] == []
    page.close()
    assert serving.api.num_runs() == before


@pytest.mark.browser
def test_its_owner_logs_in_on_the_page_and_sees_the_run(serving: Serving, browser):  # noqa: F811
    asked: set[str] = set()
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.on("request", lambda request: asked.add(request.url.split("/")[2]))
    page.goto(serving.page)
    page.fill("input", serving.password)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{serving.page}/dashboard")
    page.goto(f"{serving.page}/runs/flow-run/{serving.run}")
    page.get_by_text("curate is at work").first.wait_for()
    assert asked == {serving.page.removeprefix("http://")}
    context.close()


def test_a_run_that_falls_due_while_one_is_at_work_is_skipped(serving: Serving):
    due = serving.api.start_run()
    wait_for(lambda: serving.api.state(due) == "COMPLETED")
    assert serving.api.call("GET", f"/flow_runs/{due}")["state_name"] == "Skipped"
    assert serving.api.state(serving.run) == "RUNNING"


LATER = {"state": {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}}


def test_kill_9_of_serve_ends_everything_and_the_next_one_puts_it_in_order(serving: Serving):
    """The flow may close its own books in what time it is left, so a run that had none, as when the machine is switched
    off, is put beside it.
    """
    project, api = serving.project, serving.api
    deployment = api.call("GET", "/deployments/name/retrain/travel-desk-agent")
    later = api.call("POST", f"/deployments/{deployment['id']}/create_flow_run", LATER)["id"]
    dead = api.call("POST", "/flow_runs/", {"flow_id": deployment["flow_id"], "state": {"type": "RUNNING"}})["id"]
    experiment = project.mlflow().get_experiment_by_name("travel-desk").experiment_id
    project.mlflow().create_run(experiment, tags={"folder": str(serving.folder), "kind": "flow"})
    serving.process.kill()
    release_knobs(project)  # whatever were left would now go on, to the promotion
    wait_for(lambda: project.processes() == [])
    assert not (serving.artifacts / "promote").exists()
    assert "RUNNING" in mlflow_statuses(project)

    serving.next = Serving(project, serving.port)  # which is free again at once
    assert serving.next.password != serving.password
    assert {serving.next.api.state(run) for run in (serving.run, dead)} == {"CRASHED"}
    assert mlflow_statuses(project) == {"KILLED"}
    assert serving.next.api.state(later) == "SCHEDULED"  # a person planned it


def test_one_signal_ends_all_and_closes_the_books(serving: Serving):
    """Whether in Prefect's too is for the next one to see to, where its server was busy.

    Within ten seconds: the limits in the code allow 8 s, and 5 s were measured. A machine that others load may be
    slower than either, so that the clock is only asked for twelve times as much.
    """
    assert CLOSING_SECONDS + REPORTING_SECONDS + max(STOP_SECONDS, GRACE_SECONDS) <= 8
    second = serving.next.hold_a_run()
    signalled = time.monotonic()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=WAIT_SECONDS) == 143
    wait_for(lambda: serving.project.processes() == [])
    assert time.monotonic() - signalled < 120
    assert mlflow_statuses(serving.project) == {"KILLED"}
    assert not (serving.artifacts / "promote").exists()
    assert not (serving.folder / second.password_file).exists()
    assert "Traceback" not in "".join(second.output)


@pytest.mark.outage
def test_a_run_that_waits_for_a_person_outlives_kill_9_of_serve_and_is_approved_from_a_shell(
    databases: Path, tmp_path: Path
):
    project = make_toy_project(tmp_path / "project").lay(databases)
    project.set_params({"promote.approval": True})
    first = Serving(project, free_port())
    run = first.api.start_run()
    wait_for(lambda: any(f"python -m flows approve {run}" in line for line in first.api.log(run)))
    wait_for(lambda: state_name(first.api, run) == "Suspended")
    first.process.kill()
    wait_for(lambda: project.processes() == [])
    second = Serving(project, first.port)
    assert state_name(second.api, run) == "Suspended"
    name = name_of(second.api, run)
    # Nothing is exported: it finds the `serve` of its folder.
    project._succeed("flows", "approve", run[:-8], "--by", "Jane Doe", "--reason", "looked at ten episodes")
    wait_for(lambda: second.api.state(run) in ("COMPLETED", "FAILED", "CRASHED"))
    assert (state_name(second.api, run), name_of(second.api, run)) == ("Promoted", name)
    with (project.folder / "params.yaml").open("a", encoding="utf-8") as params:
        params.write("trian: {}\n")
    broken = second.api.start_run()
    wait_for(lambda: second.api.state(broken) == "FAILED")
    time.sleep(5)  # its process ends
    second.process.send_signal(signal.SIGTERM)
    second.process.wait(timeout=WAIT_SECONDS)
    assert project.versions() == [1]
    assert second.process.stderr is not None
    log = second.process.stderr.read()
    assert log.count("trian") == 1 and "Traceback" not in log, log


def state_name(api: PrefectApi, run: str) -> str:
    return str(api.call("GET", f"/flow_runs/{run}")["state_name"])


def name_of(api: PrefectApi, run: str) -> str:
    return str(api.call("GET", f"/flow_runs/{run}")["name"])


def mlflow_statuses(project: Project, kind: str = "%") -> set[str]:
    client = project.mlflow()
    experiment = client.get_experiment_by_name("travel-desk")
    runs = client.search_runs([experiment.experiment_id], f"tags.kind LIKE '{kind}'") if experiment else []
    return {run.info.status for run in runs}
