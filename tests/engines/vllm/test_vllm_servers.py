"""vLLM's own servers, on CPU: what they generate, and what becomes of it when they are killed, stopped or cut short.

Two servers are started once for all tests. Drills restart them; the next test goes on with whichever is up.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tasks.chat.format import load_chat
from tasks.core.background import run
from tasks.core.records import Trajectory
from tasks.engines.vllm.server import Server, TornWeights, check_whole
from tasks.engines.vllm.server_engine import ServerEngine
from tasks.engines.vllm.server_process import ServerProcess
from tasks.engines.vllm.shared import Start
from tasks.engines.vllm.weights_folder import WeightsFolder
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import TurnReply, TurnRequest
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tests import tiny
from tests.conftest import ROOT
from tests.engine_benches import (
    SERVERS,
    VLLMServerBench,
    engine_settings,
    group_of,
    is_running,
    plain_logp,
    vllm_settings,
)
from tests.engines.vllm.fault_proxy import FAULTS, FaultProxy

pytest.importorskip("vllm")
pytestmark = pytest.mark.drill

KEYS = [EpisodeKey(problem, 0, sample) for problem in tiny.problems(12) for sample in range(2)]
PROBE = [[5, 9, 33, 70, 8, 2, 41], list(range(20, 80))]


def settings(folder: Path, **changes: Any) -> EngineSettings:
    return engine_settings("vllm", vllm_settings(folder, **(SERVERS | changes)))


def make_engine(model: Path, folder: Path, sampling: SamplingSettings = tiny.SAMPLING, **changes: Any) -> ServerEngine:
    return ServerEngine(Start(model, load_chat(model), sampling, settings(folder, **changes), None))


@pytest.fixture(scope="module")
def engine(vllm_servers: VLLMServerBench) -> ServerEngine:
    found, _ = vllm_servers.engine()
    assert isinstance(found, ServerEngine)
    return found


@pytest.fixture(scope="module")
def model_folder(vllm_servers: VLLMServerBench) -> Path:
    return vllm_servers.folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return load_model(model_folder, compute=on_cpu(1))


@pytest.fixture(scope="module")
def undisturbed(engine: ServerEngine, model_folder: Path) -> list[Trajectory]:
    return collector(engine, model_folder).collect(KEYS)


def collector(engine: Any, model_folder: Path, *, concurrency: int = 16) -> Collector:
    return Collector(
        EngineEpisodes(engine, load_chat(model_folder), tiny.SAMPLING),
        TravelDesk(),
        max_concurrent_episodes=concurrency,
        seed=5,
        stage="test",
    )


def servers_of(engine: ServerEngine) -> list[Server]:
    assert engine.servers is not None
    return engine.servers.all


def api_process(server: Server) -> psutil.Process:
    """The process that answers requests."""
    assert isinstance(server.process, ServerProcess)
    return psutil.Process(server.process.pid)


def ready(engine: ServerEngine, count: int) -> list[Server]:
    """The servers in rotation, once there are `count`."""
    return within(400, lambda: [found for found in [_ready(engine)] if len(found) >= count])[0]


def _ready(engine: ServerEngine) -> list[Server]:
    return [server for server in servers_of(engine) if server.state == "ready"]


def within(seconds: float, look: Callable[[], Any]) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
    return found


def assert_same_tokens(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert [item.sequences[0].token_ids for item in found] == [item.sequences[0].token_ids for item in expected]
    assert [item.outcome for item in found] == [item.outcome for item in expected]
    assert all(item.fault is None for item in found)


def failures(engine: ServerEngine, event: str) -> list[dict[str, Any]]:
    assert engine.servers is not None
    lines = (engine.servers.log_folder / "failures.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def one_turn(engine: ServerEngine, model_folder: Path, *, episode: int = 901, **request: Any) -> TurnReply:
    prompt = load_chat(model_folder).prompt_ids("Cancel booking B42.", [])
    engine.submit(TurnRequest(episode, prompt, **({"max_new_tokens": 24, "seed": 7} | request)))
    (reply,) = engine.poll()
    engine.release(episode)
    return reply


def test_sampled_ids_have_the_log_probs_a_plain_forward_gives_them(undisturbed: list[Trajectory], model: Any) -> None:
    for trajectory in undisturbed:
        expected = plain_logp(model, trajectory.sequences[0].token_ids)
        for position, is_sampled in enumerate(trajectory.sequences[0].sampled_mask):
            if is_sampled:
                assert trajectory.sequences[0].sampler_logp[position] == pytest.approx(expected[position - 1], abs=1e-4)


def test_the_same_seed_gives_the_same_tokens_at_another_concurrency_and_spread(
    engine: ServerEngine, model_folder: Path, undisturbed: list[Trajectory]
) -> None:
    assert_same_tokens(collector(engine, model_folder, concurrency=3).collect(KEYS), undisturbed)


def listens(process: psutil.Process) -> list[Any]:
    """The ports a process listens on."""
    return [found for found in process.net_connections("inet") if found.status == psutil.CONN_LISTEN]


def can_connect(path: Path, *, user: int) -> bool:
    """Whether a process of that user reaches a socket; a fork, since that user may not run this Python."""
    with socket.socket(socket.AF_UNIX) as client:
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setuid(user)
            os._exit(13 if client.connect_ex(str(path)) == errno.EACCES else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 13


def test_neither_a_web_page_nor_another_user_of_the_machine_can_reach_a_server(engine: ServerEngine) -> None:
    """Its routes swap weights and read and write files. The process that has them listens on no port, which is all that
    a page can ask, and its sockets are in a folder that other users cannot enter. What listens on loopback in the
    engine core is torch's gloo, which waits for other parts of the model and takes no commands.
    """
    for server in ready(engine, 2):
        assert isinstance(server.process, ServerProcess)
        family, folder = group_of(server), server.process.folder
        assert folder is not None and len(family) >= 2, "API, engine core"
        assert not listens(api_process(server))
        assert {port.laddr.ip for process in family for port in listens(process)} <= {"127.0.0.1"}
        paths = {str(found.laddr) for process in family for found in process.net_connections("unix")}
        in_the_open = [path for path in paths if path.startswith("/") and Path(path).parent != folder]
        assert str(server.process.socket) in paths and not in_the_open
        assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.geteuid()
        assert os.geteuid() != 0 or not can_connect(server.process.socket, user=65534)
    weights = engine.weights_folder.folder
    assert {folder.stat().st_mode & 0o777 for folder in (weights, weights.parent)} == {0o700}


def test_episodes_are_spread_evenly_and_stay_with_the_server_whose_prefix_cache_has_them(
    engine: ServerEngine, model_folder: Path
) -> None:
    ready(engine, 2)
    chat, before = load_chat(model_folder), engine.counts()
    prompt = chat.prompt_ids("Cancel booking B42. " * 8, [])
    assert 32 < len(prompt) < 150, "one block at least, and room for what follows"
    for episode in range(6):
        engine.submit(TurnRequest(episode, prompt, max_new_tokens=4, seed=episode))
    within(400, lambda: [len(server.episodes) for server in servers_of(engine)] == [3, 3])
    homes = {episode: server for server in servers_of(engine) for episode in server.episodes}
    replies: list[TurnReply] = []
    while len(replies) < 6:
        replies += engine.poll()
    for episode in range(6):
        engine.submit(TurnRequest(episode, chat.encode("no. " * 4), max_new_tokens=4, seed=episode))
    while engine.poll():
        pass
    assert homes == {episode: server for server in servers_of(engine) for episode in server.episodes}
    for episode in range(6):
        engine.release(episode)
    assert engine.counts()["prefix_cache_hits"] - before["prefix_cache_hits"] >= 32 * 6


def test_more_prompts_at_once_than_a_step_holds_are_all_answered(engine: ServerEngine) -> None:
    """200 prompts of 150 tokens against 4,096 a step: with prompts read in pieces, seeded requests end vLLM on CPU."""
    before = engine.counts()
    for episode in range(200):
        engine.submit(TurnRequest(episode, [5 + episode, *range(20, 169)], max_new_tokens=1, seed=episode))
    replies: list[TurnReply] = []
    while len(replies) < 200:
        replies += engine.poll()
    for episode in range(200):
        engine.release(episode)
    assert engine.counts()["engine_restarts"] == before["engine_restarts"]


def test_a_turn_ends_at_its_limit_at_a_stop_string_and_at_end_of_turn(
    engine: ServerEngine, model_folder: Path, undisturbed: list[Trajectory]
) -> None:
    chat = load_chat(model_folder)
    cut = one_turn(engine, model_folder, max_new_tokens=3)
    assert (len(cut.token_ids), cut.finish) == (3, "length")

    whole = one_turn(engine, model_folder)
    text = chat.decode(whole.token_ids[4:6])
    clients = [server.client for server in servers_of(engine)]
    for client in clients:
        client.sampling = tiny.SAMPLING.model_copy(update={"stop_strings": [text]})
    stopped = one_turn(engine, model_folder)
    for client in clients:
        client.sampling = tiny.SAMPLING
    assert stopped.finish == "stop_string" and chat.decode(stopped.token_ids).endswith(text)
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]

    ended = [item for item in undisturbed if chat.end_of_turn in item.sequences[0].token_ids]
    assert ended, "no turn of these episodes ended by itself"


def test_a_server_with_a_shorter_context_than_episodes_need_is_refused(
    engine: ServerEngine, model_folder: Path, tmp_path: Path
) -> None:
    (server, *_) = ready(engine, 1)
    given = make_engine(model_folder, tmp_path, urls=[server.client.url])
    given.submit(TurnRequest(1, [5] * 190, max_new_tokens=30, seed=1))
    with pytest.raises(ValueError, match=r"after 11 of 30 tokens, where its context of 201 was full.*--max-model-len"):
        given.poll()
    given.close()


def test_new_weights_are_generated_with_and_their_version_is_on_the_reply(
    engine: ServerEngine, model_folder: Path, model: Any
) -> None:
    other, before = changed(model_folder), engine.counts()
    version = engine.policy_version + 1
    engine.refresh(PolicyWeights.of(other), version)
    assert engine.token_logp(PROBE) == [pytest.approx(plain_logp(other, ids), abs=1e-4) for ids in PROBE]
    assert one_turn(engine, model_folder).policy_version == version
    engine.refresh(PolicyWeights.of(model), version + 1)
    assert engine.token_logp(PROBE) == [pytest.approx(plain_logp(model, ids), abs=1e-4) for ids in PROBE]
    assert engine.counts()["refreshes_redone"] == before["refreshes_redone"]


def test_a_server_that_takes_other_weights_than_the_rest_is_found_out_and_takes_them_again(
    engine: ServerEngine, model_folder: Path, model: Any, tmp_path: Path
) -> None:
    first, _ = ready(engine, 2)
    assert first.weights is not None and engine.servers is not None
    wrong = WeightsFolder(tmp_path, load_chat(model_folder).tokenizer, dtype="float32").export(
        PolicyWeights.of(changed(model_folder)), 1
    )
    run(first.client.load_weights(wrong)).result()
    before = engine.counts()["refreshes_redone"]

    assert engine.token_logp(PROBE) == [pytest.approx(plain_logp(model, ids), abs=1e-4) for ids in PROBE]
    assert engine.counts()["refreshes_redone"] == before + 1


def changed(model_folder: Path) -> Any:
    """Other weights: the head and the layers below it differ."""
    other = load_model(model_folder, compute=on_cpu(1))
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.mark.parametrize("fault", FAULTS)
def test_a_turn_that_is_answered_wrongly_is_asked_for_again(
    engine: ServerEngine, model_folder: Path, undisturbed: list[Trajectory], tmp_path: Path, fault: str
) -> None:
    """A proxy before the real server spoils one answer, or keeps it; every episode is what it would have been."""
    (server, *_) = ready(engine, 1)
    patience: dict[str, Any] = {"request_timeout_seconds": 8.0} if fault == "silent" else {}  # a turn takes 0.3 s
    with FaultProxy(server.client.url) as proxy:
        given = make_engine(model_folder, tmp_path, urls=[proxy.url, server.client.url], **patience)
        given.submit(TurnRequest(1, [5, 6, 7], max_new_tokens=2, seed=1))
        given.poll()
        given.release(1)
        proxy.spoil(fault, times=1)
        found = collector(given, model_folder).collect(KEYS)
        counts = given.counts()
        given.close()
    assert_same_tokens(found, undisturbed)
    assert counts["engine_retried_turns"] >= 1, "one turn is spoilt; those in flight with it are asked for again too"
    assert len(failures(given, "turn_retried")) == counts["engine_retried_turns"]
    silences = [row for row in failures(given, "server_failed") if "completions within 8 s" in row["reason"]]
    assert (fault == "silent") == bool(silences)


def test_beyond_max_restarts_the_run_stops_with_one_line(
    engine: ServerEngine, model_folder: Path, tmp_path: Path
) -> None:
    (server, *_) = ready(engine, 1)
    with FaultProxy(server.client.url) as proxy:
        given = make_engine(model_folder, tmp_path, urls=[proxy.url], max_restarts=0)
        assert len(one_turn(given, model_folder, max_new_tokens=2).token_ids) == 2
        proxy.spoil("500", times=1000)
        with pytest.raises(ValueError, match=r"vLLM server 1 failed \(status 500.*max_restarts \(0\) are used up") as e:
            one_turn(given, model_folder)
        given.close()
    assert "\n" not in str(e.value)


def test_servers_without_the_routes_for_new_weights_are_refused_by_training_and_serve_a_fixed_model(
    engine: ServerEngine, model_folder: Path, model: Any, tmp_path: Path
) -> None:
    (server, *_) = ready(engine, 1)
    with FaultProxy(server.client.url, hides=("/weight_info", "/collective_rpc")) as proxy:
        given = make_engine(model_folder, tmp_path, urls=[proxy.url])
        with pytest.raises(ValueError, match="has no routes for new weights, so training would go on generating"):
            given.refresh(PolicyWeights.of(model), 0)
        assert given.token_logp(PROBE) == [pytest.approx(plain_logp(model, ids), abs=1e-4) for ids in PROBE]
        given.close()


def test_a_server_whose_owner_started_it_anew_gets_the_weights_again_before_a_turn(
    engine: ServerEngine, model_folder: Path, model: Any, tmp_path: Path
) -> None:
    (server, *_) = ready(engine, 1)
    given = make_engine(model_folder, tmp_path, urls=[server.client.url])
    given.refresh(PolicyWeights.of(model), 3)
    (seen,) = servers_of(given)
    run(seen.client.set_label("default")).result()  # what a server says that was started a moment ago
    seen.last_answer = 0.0
    assert one_turn(given, model_folder).policy_version == 3
    assert seen.weights is not None and run(seen.client.label()).result() == seen.weights.label
    assert given.counts()["engine_restarts"] == 1
    assert "it serves weights 'default'" in failures(given, "server_failed")[0]["reason"]
    given.close()
    engine.refresh(PolicyWeights.of(model), engine.policy_version + 1)


def test_a_server_that_stays_away_ends_the_run_with_one_line(
    engine: ServerEngine, model_folder: Path, tmp_path: Path
) -> None:
    (server, *_) = ready(engine, 1)
    with FaultProxy(server.client.url) as proxy:
        given = make_engine(model_folder, tmp_path, urls=[proxy.url])
        one_turn(given, model_folder)
    assert given.servers is not None
    given.servers.settings = given.servers.settings.model_copy(update={"start_timeout_seconds": 2.0})
    with pytest.raises(ValueError, match=r"vLLM server 1 at .* has been away for \d+ s .*, and there is no other"):
        one_turn(given, model_folder)
    given.close()


@pytest.mark.parametrize("is_raw", [True, False])
def test_log_probs_of_another_distribution_than_is_sampled_from_are_refused(
    engine: ServerEngine, model_folder: Path, tmp_path: Path, is_raw: bool
) -> None:
    (server, *_) = ready(engine, 1)
    sampling = tiny.SAMPLING.model_copy(update={"temperature": 0.7})
    with FaultProxy(server.client.url, overrides={"temperature": 1.0} if is_raw else None) as proxy:
        given = make_engine(model_folder, tmp_path, sampling, urls=[proxy.url])
        if is_raw:
            with pytest.raises(ValueError, match="Start it with --logprobs-mode processed_logprobs"):
                one_turn(given, model_folder)
        else:
            one_turn(given, model_folder)
        given.close()


def test_a_refresh_cut_short_is_done_again_before_anything_is_generated(
    engine: ServerEngine, model_folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server dies between the export and its reload, the other between its reload and its label."""
    one, other = ready(engine, 2)
    before, new = engine.counts(), changed(model_folder)
    load, label_it, killed = one.client.load_weights, other.client.serve_loaded, set[str]()

    async def killed_before_loading(folder: Path) -> None:
        if "one" not in killed:
            killed.add("one")
            api_process(one).kill()
        await load(folder)

    async def killed_before_its_label(label: str) -> None:
        if "other" not in killed:
            killed.add("other")
            api_process(other).kill()
        await label_it(label)

    monkeypatch.setattr(one.client, "load_weights", killed_before_loading)
    monkeypatch.setattr(other.client, "serve_loaded", killed_before_its_label)
    version = engine.policy_version + 1
    engine.refresh(PolicyWeights.of(new), version)
    assert not [server for server in (one, other) if server.state == "ready"]
    reply = one_turn(engine, model_folder)
    ready(engine, 2)

    assert engine.counts()["refreshes_redone"] == before["refreshes_redone"] + 2
    assert reply.policy_version == version
    expected = [pytest.approx(plain_logp(new, ids), abs=1e-4) for ids in PROBE]
    assert engine.token_logp(PROBE) == expected
    engine.refresh(PolicyWeights.of(model), version + 1)


def test_turns_under_way_keep_their_tokens_when_one_of_two_servers_dies_in_a_refresh(
    engine: ServerEngine, model_folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns go on with the other. Each token has the log-prob that the weights of its version give it."""
    one, other = ready(engine, 2)
    before, new = engine.counts(), changed(model_folder)
    prompt = load_chat(model_folder).prompt_ids("Cancel booking B42.", [])
    load, killed = other.client.load_weights, list[bool]()

    async def killed_before_loading(folder: Path) -> None:
        if not killed:
            killed.append(True)
            api_process(other).kill()
        await load(folder)

    monkeypatch.setattr(other.client, "load_weights", killed_before_loading)
    for episode in range(16):
        engine.submit(TurnRequest(episode, prompt, max_new_tokens=100, seed=episode))
    within(60, lambda: one.num_in_flight and other.num_in_flight)
    version = engine.policy_version + 1
    engine.refresh(PolicyWeights.of(new), version)
    assert one.state == "ready" and other.state != "ready"
    replies: list[TurnReply] = []
    while len(replies) < 16:
        replies += engine.poll()
    for reply in replies:
        engine.release(reply.episode)
        of = {
            item: plain_logp(weights, [*prompt, *reply.token_ids])[len(prompt) - 1 :]
            for item, weights in ((version - 1, model), (version, new))
        }
        expected = [of[item][place] for place, item in enumerate(reply.token_versions)]
        assert reply.sampler_logp == pytest.approx(expected, abs=1e-4)
    assert sorted(reply.episode for reply in replies) == list(range(16))
    assert engine.counts()["engine_continued_turns"] > before["engine_continued_turns"]
    assert engine.counts()["engine_retried_turns"] == before["engine_retried_turns"], "none was lost with it"
    ready(engine, 2)
    engine.refresh(PolicyWeights.of(model), version + 1)


def test_a_server_that_is_stopped_is_started_again_and_loses_its_turns_to_another(
    engine: ServerEngine, model_folder: Path, undisturbed: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, before = ready(engine, 2)[0], engine.counts()
    monkeypatch.setattr(victim.client, "timeout_seconds", 12.0)  # a turn takes 0.3 s, or more on a busy machine
    api = api_process(victim)
    stopped: list[psutil.Process] = []

    def stop_in_mid_batch(_: Trajectory) -> None:
        if not stopped and victim.num_in_flight > 1:
            stopped.append(api)
            api.suspend()

    found = collector(engine, model_folder).collect(KEYS, on_end=stop_in_mid_batch)
    assert stopped
    assert_same_tokens(found, undisturbed)
    assert engine.counts()["engine_restarts"] > before["engine_restarts"]
    reasons = [row["reason"] for row in failures(engine, "server_failed")]
    assert any("no answer to /v1/completions within 12 s" in reason for reason in reasons)
    within(400, lambda: not is_running(api))


def test_torn_weights_are_not_served(model_folder: Path, model: Any, tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path, load_chat(model_folder).tokenizer, dtype="float32").export(
        PolicyWeights.of(model), 1
    )
    check_whole(folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TornWeights, match="not whole, so not to be served"):
        check_whole(folder)


@pytest.mark.parametrize(
    "is_vllm", [False, pytest.param(True, marks=pytest.mark.bench)], ids=["a program that fails", "vllm"]
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_vllm: bool
) -> None:
    """vLLM needs 15 s to find that it does not know a model; what a program says that fails at once is told alike."""
    broken = shutil.copytree(model_folder, tmp_path / "model")
    (broken / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "qwen3"}')
    if not is_vllm:
        command = [sys.executable, "-S", "-c", "import sys; sys.exit('ValueError: NoSuchModel')"]
        monkeypatch.setattr("tasks.engines.vllm.server_process.serve_command", lambda *_, **__: command)
    engine = make_engine(model_folder, tmp_path / "servers", num_servers=1)
    engine.model_folder = broken
    said = "" if is_vllm else "ValueError: NoSuchModel"
    message = rf"vLLM server 1 is not there: it ended while it was starting; .*log ends: .*{said}"
    with pytest.raises(ValueError, match=message) as e:
        engine.token_logp(PROBE)
    assert "\n" not in str(e.value)


def test_kill_9_of_a_server_in_mid_batch_changes_no_episode(
    engine: ServerEngine, model_folder: Path, undisturbed: list[Trajectory]
) -> None:
    """The last to use both servers, so that nothing waits for the one that is started again."""
    victim, before = ready(engine, 2)[0], engine.counts()
    api = api_process(victim)

    def kill_in_mid_batch(_: Trajectory) -> None:
        if api.is_running() and victim.num_in_flight > 1:
            api.kill()

    found = collector(engine, model_folder).collect(KEYS, on_end=kill_in_mid_batch)
    assert not is_running(api), "the server was not in the middle of anything"
    assert_same_tokens(found, undisturbed)
    after = engine.counts()
    assert after["engine_restarts"] == before["engine_restarts"] + 1
    assert after["engine_retried_turns"] > before["engine_retried_turns"]
    assert len(failures(engine, "turn_retried")) == after["engine_retried_turns"]


def is_vllm(process: psutil.Process) -> bool:
    try:
        return "VLLM" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # one of the short-lived ones that vLLM runs while it starts
        return False


def test_no_server_outlives_kill_9_of_whoever_started_it(model_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.engines.vllm.test_vllm_servers import make_engine\n"
        "make_engine(Path(sys.argv[1]), Path(sys.argv[2]), num_servers=1).token_logp([[1, 2, 3]])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(model_folder), str(tmp_path)], cwd=ROOT)
    family = psutil.Process(parent.pid)

    def engine_is_there() -> list[psutil.Process]:
        children = family.children(recursive=True)
        return children if any(map(is_vllm, children)) else []

    children = within(400, engine_is_there)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    within(120, lambda: not [child for child in children if is_running(child)])
