"""Several vLLM servers and one version at a time, with servers of a few lines in vLLM's place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from tasks.core.background import run
from tasks.core.passing_faults import PassingFault
from tasks.engines.vllm.answers import Answer
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.server import Server, Weights
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.servers import Servers
from tasks.engines.vllm.turns import ask_turn
from tasks.models.differences import Tolerance
from tasks.models.policy_weights import Probe
from tasks.rollouts.engine import TurnReply, TurnRequest
from tests import tiny
from tests.engine_benches import vllm_settings

PATIENCE = 120  # seconds, on a busy machine


@dataclass(eq=False)
class Fake:
    """A server whose log-prob of every token is -1 - its version, and whose turns end when they are told to.

    A label ends with its version. `breaks` are calls that find it gone, and `loads` what a load really brings it.
    """

    url: str
    sampling = tiny.SAMPLING
    timeout_seconds = float(PATIENCE)
    version: float = 0.0
    named: str | None = "default"
    is_paused: bool = False
    is_up: bool = True
    hangs: bool = False  # what it is asked now is never answered, nor ended by a pause
    vllm: str | None = "0.32.0"
    breaks: list[str] = field(default_factory=list)
    loads: Callable[[float], float] = lambda version: version
    calls: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[int], int, int, str | None]] = field(default_factory=list)

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.breaks:
            self.breaks.remove(name)
            raise ServerDown(f"it is gone at {name}")

    async def health(self) -> int:
        return 200 if self.is_up else 503

    async def is_healthy(self) -> bool:
        return self.is_up

    async def served_model(self) -> str:
        return "policy"

    async def vllm_version(self) -> str | None:
        return self.vllm

    async def label(self) -> str | None:
        return self.named

    async def check_logprobs_mode(self) -> None:
        assert not self.is_paused

    async def pause(self) -> None:
        self.called("pause")
        self.is_paused = True

    async def resume(self) -> None:
        self.called("resume")
        self.is_paused = False

    async def load_weights(self, folder: Path) -> None:
        assert self.is_paused, "a turn would be written by two policies"
        self.called("load")
        self.version = self.loads(float(folder.name))

    async def move(self, url: str) -> None:
        self.url = url

    async def set_label(self, label: str) -> None:
        self.named = label

    async def serve_loaded(self, label: str) -> None:
        self.called("label")
        self.named = label

    async def token_logp(self, token_ids: list[int]) -> list[float]:
        assert not self.is_paused
        return [-1.0 - self.version] * (len(token_ids) - 1)

    async def generate(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int,
        seed: int,
        cache_salt: str | None,
        more_end_ids: tuple[int, ...],
    ) -> Answer:
        """Two tokens until it is paused; all that are left once it may end."""
        self.asked.append((prompt, max_new_tokens, seed, cache_salt))
        if self.hangs:
            await asyncio.Event().wait()
        while not (self.is_paused or self.may_end.is_set()):
            self.refuse_if_down()
            await asyncio.sleep(0.01)
        self.refuse_if_down()
        count = 2 if self.is_paused else max_new_tokens
        logps = [-1.0 - self.version] * count
        return Answer([7] * count, logps, None if self.is_paused else "length", len(prompt), 0)

    def refuse_if_down(self) -> None:
        if not self.is_up:
            raise ServerDown("it is gone")

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(autouse=True)
def _a_server_is_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.engines.vllm.servers.FIRST_PAUSE_SECONDS", 0.01)


def weights(version: int, *, is_probed: bool = True) -> Weights:
    probe = Probe([[1, 2, 3]], [[-1.0 - version] * 2], Tolerance(1e-3)) if is_probed else None
    return Weights(Path(str(version)), f"label-{version}", version, probe=probe)


def play(scene: Callable[[Servers, list[Fake]], Coroutine[Any, Any, None]], folder: Path, **of_second: Any) -> None:
    """Two external servers with weights 1, the second with what is changed of it."""

    async def whole() -> None:
        fakes: list[Fake] = []

        def make(url: str) -> VLLMClient:
            fakes.append(Fake(url, **(of_second if fakes else {})))
            return cast(VLLMClient, fakes[-1])

        settings = vllm_settings(folder, mode="server", urls=["http://a:8000", "http://b:8000"])
        servers = Servers(
            settings,
            make_client=make,
            start_process=cast(Any, None),
            reading=lambda _: nullcontext(),
            log_folder=folder,
        )
        await servers.open(weights(1), lambda _: None)
        await scene(servers, fakes)
        await servers.close()

    run(whole()).result(PATIENCE)


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


def turn(servers: Servers, episode: int) -> asyncio.Task[TurnReply]:
    request = TurnRequest(episode, [5, 6], max_new_tokens=5, seed=episode)
    return asyncio.create_task(ask_turn(servers, request, [5, 6], cast(Any, None)))


def states(servers: Servers) -> list[tuple[str, int]]:
    return [(server.state, server.weights.policy_version if server.weights else 0) for server in servers.all]


def test_new_weights_come_into_turns_which_keep_their_tokens_and_end_once(tmp_path: Path) -> None:
    """Five tokens each: two of version 1, two of version 2, the last of version 3."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        turns = [turn(servers, episode) for episode in range(4)]
        for version in (2, 3):
            await until(lambda: sum(server.num_in_flight for server in servers.all) == 4)
            await servers.serve(weights(version))
        for fake in fakes:
            fake.may_end.set()
        replies = await asyncio.gather(*turns)
        assert [reply.episode for reply in replies] == [0, 1, 2, 3]
        for reply in replies:
            assert reply.token_versions == [1, 1, 2, 2, 3]
            assert reply.sampler_logp == [-2.0, -2.0, -3.0, -3.0, -4.0], "under the version of each"
        assert servers.num_continued_turns == 8 and servers.num_retried_turns == 0
        asked = [asked for fake in fakes for asked in fake.asked]
        assert sorted((len(prompt), left, salt) for prompt, left, _, salt in asked) == (
            [(2, 5, "label-1")] * 4 + [(4, 3, "label-2")] * 4 + [(6, 1, "label-3")] * 4
        )
        assert len({seed for _, _, seed, _ in asked}) == 12, "each piece has random numbers of its own"

    play(scene, tmp_path)


@pytest.mark.parametrize("call", ["pause", "load", "label", "resume"])
def test_a_server_that_missed_a_version_writes_nothing_before_it_has_it(tmp_path: Path, call: str) -> None:
    """It fails in the middle of a refresh; its turns go on with the other, and it comes back by itself."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        turns = [turn(servers, episode) for episode in range(2)]
        await until(lambda: [server.num_in_flight for server in servers.all] == [1, 1])
        fakes[1].breaks.append(call)
        fakes[1].may_end.set()  # its turns would be answered at once
        asked_before = len(fakes[1].asked)
        await servers.serve(weights(2))
        assert states(servers)[0] == ("ready", 2) and servers.num_restarts == 1
        fakes[0].may_end.set()
        replies = await asyncio.gather(*turns)
        assert all(set(reply.token_versions) <= {1, 2} for reply in replies)
        assert replies[0].token_versions == [1, 1, 2, 2, 2]
        await until(lambda: servers.all[1].state == "ready")
        assert states(servers)[1] == ("ready", 2) and (fakes[1].version, fakes[1].named) == (2.0, "label-2")
        salts = {salt for _, _, _, salt in fakes[1].asked[asked_before:]}
        assert salts <= {"label-2"}, "nothing by the version before"

    play(scene, tmp_path)


def test_weights_that_come_while_a_server_is_asked_for_its_label_reach_it_before_a_turn_does(tmp_path: Path) -> None:
    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        answers = asyncio.Event()

        async def slow_label() -> str | None:
            await answers.wait()
            return "label-1"

        for server, fake in zip(servers.all, fakes, strict=True):
            server.last_answer = 0.0
            cast(Any, fake).label = slow_label
            fake.may_end.set()
        turns = [turn(servers, episode) for episode in range(2)]
        await until(lambda: any(server.state == "busy" for server in servers.all))
        refreshed = asyncio.create_task(servers.serve(weights(2)))
        await asyncio.sleep(0)
        answers.set()
        await refreshed
        assert {version for task in turns for version in (await task).token_versions} == {2}
        assert states(servers) == [("ready", 2)] * 2

    play(scene, tmp_path)


def start_again(server: Server, fake: Fake) -> None:
    """On the weights of its start, which takes longer than the silence after which it is asked."""
    fake.version, fake.named, fake.hangs = 0.0, "default", False
    fake.may_end.set()
    server.last_answer = 0.0


def test_a_server_that_comes_back_with_old_weights_is_found_out_while_a_turn_hangs_on_it(tmp_path: Path) -> None:
    """Its machine lost its power: nothing ends the connection of that turn, which is asked again at once."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        fakes[0].hangs = True
        first = turn(servers, 0)
        await until(lambda: servers.all[0].num_in_flight == 1)
        start_again(servers.all[0], fakes[0])
        fakes[1].may_end.set()
        for reply in [*await asyncio.gather(*[turn(servers, episode) for episode in range(1, 4)]), await first]:
            assert (reply.token_versions, reply.sampler_logp) == ([1] * 5, [-2.0] * 5)
        await until(lambda: states(servers) == [("ready", 1)] * 2)
        assert (servers.num_restarts, servers.num_retried_turns) == (1, 1)

    play(scene, tmp_path)


def test_an_answer_after_a_silence_counts_only_if_the_weights_are_still_there(tmp_path: Path) -> None:
    """A request may wait for a machine that is away, and reach the server that was started again on it."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        first = turn(servers, 0)
        await until(lambda: servers.all[0].num_in_flight == 1)
        start_again(servers.all[0], fakes[0])
        fakes[1].may_end.set()
        reply = await first
        assert (reply.token_versions, reply.sampler_logp) == ([1] * 5, [-2.0] * 5)
        assert (servers.num_restarts, servers.num_retried_turns) == (1, 1)

    play(scene, tmp_path)


def test_a_turn_that_a_server_ends_while_it_is_asked_for_its_label_is_lost_and_not_cut_short_by_us(
    tmp_path: Path,
) -> None:
    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        answers = asyncio.Event()

        async def slow_label() -> str | None:
            await answers.wait()
            return fakes[0].named

        first = turn(servers, 0)
        await until(lambda: servers.all[0].num_in_flight == 1)
        cast(Any, fakes[0]).label = slow_label
        servers.all[0].last_answer = 0.0
        others = [turn(servers, episode) for episode in range(1, 3)]
        await until(lambda: servers.all[0].state == "busy")
        fakes[0].is_paused = True  # it is shut down
        await until(lambda: servers.num_retried_turns == 1)
        answers.set()
        for fake in fakes:
            fake.may_end.set()
        assert {tuple(reply.token_versions) for reply in await asyncio.gather(first, *others)} == {(1,) * 5}
        assert servers.num_continued_turns == 0

    play(scene, tmp_path)


def test_a_load_that_brought_other_weights_is_found_out_by_that_servers_own_log_probs_and_repeated(
    tmp_path: Path,
) -> None:
    """By each server's own: here the other one has the right ones, and a mean over both would be within bounds."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        wrong = iter([2.0015])
        fakes[1].loads = lambda version: next(wrong, version)
        await servers.serve(weights(2))
        assert [fake.calls.count("load") for fake in fakes] == [2, 3]  # version 1, version 2; one of them twice
        assert [fake.version for fake in fakes] == [2.0, 2.0]
        assert servers.num_redone == 1

    play(scene, tmp_path)


def test_a_server_that_computes_another_model_ends_the_run_with_a_line_that_names_it(tmp_path: Path) -> None:
    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        fakes[1].loads = lambda version: version + 0.5
        with pytest.raises(ValueError, match=r"^vLLM server 2 at http://b:8000 loaded .* version 2 and comp") as error:
            await servers.serve(weights(2))
        message = str(error.value)
        assert "differ from the trainer's (nats): mean 0.5" in message and "Start it on the model" in message
        assert "\n" not in message
        assert servers.all[1].state != "ready"

    play(scene, tmp_path)


def test_servers_of_two_versions_of_vllm_are_refused_with_a_line_that_names_both(tmp_path: Path) -> None:
    async def nothing(servers: Servers, fakes: list[Fake]) -> None:
        raise AssertionError("they were opened")

    with pytest.raises(ValueError, match=r"server . at http://.:8000 runs vLLM 0\.3\d\.0 and server . .* one version"):
        play(nothing, tmp_path, vllm="0.31.0")


def test_servers_open_once_the_last_of_them_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.engines.vllm.waiting.LOOK_AGAIN_SECONDS", 0.01)
    looks: list[int] = []

    async def starting(fake: Fake) -> int:
        looks.append(1)
        return 200 if len(looks) > 4 else 503

    monkeypatch.setattr(Fake, "health", starting)

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        assert states(servers) == [("ready", 1)] * 2 and servers.num_restarts == 0

    play(scene, tmp_path)


def test_a_server_that_a_killed_run_left_paused_goes_on(tmp_path: Path) -> None:
    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        assert not fakes[1].is_paused and states(servers)[1] == ("ready", 1)

    play(scene, tmp_path, is_paused=True)


def test_two_servers_that_fail_in_one_refresh_with_no_restart_left_end_in_the_line(tmp_path: Path) -> None:
    """The second fails when the first has used up the restarts."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        async def pause_later() -> None:
            await until(lambda: servers.stopped)
            raise ServerDown("it is gone too")

        limited(servers, max_restarts=0)
        fakes[0].breaks.append("pause")
        cast(Any, fakes[1]).pause = pause_later
        await servers.serve(weights(2))
        assert [state for state, _ in states(servers)] == ["down", "down"]
        with pytest.raises(
            ValueError, match=r"^vLLM server 1 failed \(it is gone at pause\), and .*max_restarts \(0\)"
        ):
            await servers.serve(weights(3))

    play(scene, tmp_path)


def limited(servers: Servers, **changed: Any) -> None:
    servers.settings = servers.settings.model_copy(update=changed)


@pytest.mark.parametrize("is_soon", [True, False])
def test_an_outage_of_all_external_servers_counts_once_and_a_second_one_ends_the_run_for_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_soon: bool
) -> None:
    """Both are gone. The second is noticed a moment later, or when its turn is given up long after."""
    if not is_soon:
        monkeypatch.setattr("tasks.engines.vllm.servers.OUTAGE_SECONDS", 0.0)

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        limited(servers, max_restarts=1)
        turns = [turn(servers, episode) for episode in range(2)]
        await until(lambda: [server.num_in_flight for server in servers.all] == [1, 1])
        for fake in fakes:
            fake.is_up = False
        await until(lambda: [server.state for server in servers.all] == ["down", "down"])
        for fake in fakes:
            fake.is_up = True
            fake.may_end.set()
        await asyncio.gather(*turns)
        await until(lambda: states(servers) == [("ready", 1)] * 2)
        assert servers.num_restarts == 1 and servers.stopped is None
        for fake in fakes:
            fake.is_up = False
        with pytest.raises(PassingFault, match=r"^vLLM server \d failed \(it is gone\), and .*max_restarts \(1\)"):
            await asyncio.gather(*[turn(servers, episode) for episode in range(10, 14)])

    play(scene, tmp_path)


def test_an_external_server_that_fails_twice_in_one_outage_counts_twice(tmp_path: Path) -> None:
    """Else one that answers nonsense would be asked for ever while another is away."""

    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        down = ServerDown("its answer does not add up")
        for server in (servers.all[0], servers.all[1], servers.all[1]):
            await servers.fail(server, server.incarnation, down)
            await until(lambda: all(server.state == "ready" for server in servers.all))
        assert servers.num_restarts == 2

    play(scene, tmp_path)


def test_external_servers_that_stay_away_end_the_run_for_a_later_start(tmp_path: Path) -> None:
    async def scene(servers: Servers, fakes: list[Fake]) -> None:
        limited(servers, start_timeout_seconds=0.05)
        for fake in fakes:
            fake.is_up = False
        with pytest.raises(PassingFault, match=r"^vLLM server \d at http://.:8000 has been away for .* no other"):
            await asyncio.gather(*[turn(servers, episode) for episode in range(2)])
        assert servers.num_restarts == 1

    play(scene, tmp_path)


class Started:
    """In the place of a server of ours."""

    url = "unix:/nowhere"

    async def wait_ready(self) -> float:
        return 0.0

    async def ending(self) -> str:
        return ""

    def stop(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize("loads", ["right", "wrong"])
def test_a_server_that_starts_with_other_log_probs_loads_as_in_a_refresh_before_the_run_ends(loads: str) -> None:
    fake = Fake("", version=2.5)
    if loads == "wrong":
        fake.loads = lambda version: version + 0.5
    server, given = Server(1, cast(VLLMClient, fake), lambda _: nullcontext()), weights(2)
    start = server.start(lambda: given, lambda folder, number: Started())
    if loads == "right":
        run(start).result(PATIENCE)
        assert server.weights is given and (fake.calls.count("load"), server.num_redone_loads) == (1, 1)
        return
    with pytest.raises(ValueError, match=r"^vLLM server 1 loaded the weights of policy version 2 and computes with"):
        run(start).result(PATIENCE)
    assert server.weights is None and fake.calls.count("load") == 2


def test_a_server_names_itself() -> None:
    server = Server(2, cast(VLLMClient, Fake("http://b:8000")), lambda _: nullcontext())
    assert str(server) == "server 2 at http://b:8000"
