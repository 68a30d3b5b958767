"""The in-process engine's restarts with a core of a few lines in vLLM's place, which dies when it is told to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.chat.format import load_chat
from tasks.engines.vllm.core_process import NotStarted, VLLMCore
from tasks.engines.vllm.in_process import VLLMEngine
from tasks.engines.vllm.shared import Start
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tasks.rollouts.engine import TurnRequest
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings

TURNS = [TurnRequest(number, [5, 6, 7 + number], max_new_tokens=1, seed=number) for number in range(3)]
PATIENCE = 120  # seconds, on a busy machine


class Death(Exception):
    """What is raised once the core is dead."""


class Watch:
    def __init__(self) -> None:
        self.is_awaited = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        assert not self.is_awaited
        self.is_awaited = True
        try:
            yield
        finally:
            self.is_awaited = False

    def dismiss(self) -> None:
        """Nothing guards it."""


class Core:
    """Answers turns with token 9, and dies at the first call of `dies_at`, if any."""

    def __init__(self, watch: Watch, dies_at: str):
        self.watch, self.dies_at, self.is_dead = watch, dies_at, threading.Event()
        self.llm_engine = self.engine_core = self
        self.label, self.asked, self.is_stepping = "", dict[str, list[int]](), threading.Event()
        self.is_paused = False

    def live(self, call: str) -> None:
        if self.dies_at == call:
            self.is_dead.set()
        if self.is_dead.is_set():
            raise Death

    def add_request(self, name: str, prompt: dict[str, Any], params: None, *, lora_request: None) -> None:
        self.live(f"add {len(self.asked)}")
        self.asked[name] = list(prompt["prompt_token_ids"])

    def step(self) -> list[Any]:
        self.is_stepping.set()
        if self.dies_at == "close":
            assert self.is_dead.wait(PATIENCE)
        self.waited_for("step")
        reason = "abort" if self.is_paused else "length"
        outputs = [output(name, ids, self.label, reason) for name, ids in self.asked.items()]
        self.asked.clear()
        return outputs

    def update_weight_version(self, name: str) -> None:
        self.waited_for(f"label {name}")
        self.label = name

    def sleep(self, level: int, mode: str) -> None:
        """Requests are ended at the next step, with the one token that each has."""
        assert (level, mode) == (0, "abort")
        self.waited_for("sleep")
        self.is_paused = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.waited_for("wake_up")
        self.is_paused = False

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        assert (Path(kwargs["weights_path"]) / "model.safetensors").exists()
        self.waited_for(method)

    def reset_prefix_cache(self) -> bool:
        self.waited_for("reset")
        return True

    def waited_for(self, call: str) -> None:
        assert self.watch.is_awaited, f"a core that hangs in {call} would never be killed"
        self.live(call)

    def shutdown(self) -> None:
        self.is_dead.set()


def output(name: str, prompt: list[int], label: str, reason: str) -> Any:
    spans = [SimpleNamespace(version=label)]
    completion = SimpleNamespace(
        token_ids=[9], weight_versions=spans, logprobs=[{9: SimpleNamespace(logprob=-1.0)}], finish_reason=reason
    )
    return SimpleNamespace(request_id=name, outputs=[completion], prompt_token_ids=prompt, num_cached_tokens=0)


class Engine(VLLMEngine):
    """Starts one core after another: each dies where `deaths` says, "start" being before it is there."""

    dead = Death

    def __init__(self, deaths: list[str], folder: Path, *, max_restarts: int):
        self.deaths, self.num_starts = deque(deaths), 0
        settings = engine_settings("vllm", vllm_settings(folder / "weights", max_restarts=max_restarts))
        super().__init__(Start(folder / "m", load_chat(folder / "m"), tiny.SAMPLING, settings, None))

    def _start(self) -> Any:
        self.num_starts += 1
        death = self.deaths.popleft() if self.deaths else ""
        if death == "start":
            raise NotStarted("vLLM did not start with it: no memory.")
        watch: Any = Watch()
        core: Any = Core(watch, death)
        return VLLMCore(core, watch, Path("no sockets"))


@pytest.fixture(autouse=True)
def _vllm_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.engines.vllm.in_process.turn_params", lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    tiny.model_folder(folder / "m")
    return folder


@pytest.mark.parametrize(
    ("deaths", "num_retried"),
    [
        (["step"], 3),  # with all three under way
        (["step", "add 1", "start", "label 0", "step"], 1 + 3 + 3),  # one of three asked again, none, none, all, all
        (["add 1"], 2),  # the first and the second; the third meets the new core
        (["label 0", "label 0"], 0),
    ],
)
def test_no_turn_is_lost_however_often_vllm_dies_within_its_restarts(
    folder: Path, deaths: list[str], num_retried: int
) -> None:
    engine = Engine(deaths, folder, max_restarts=len(deaths))
    for turn in TURNS:
        engine.submit(turn)
    replies = []
    while found := engine.poll():
        replies += found
    assert sorted(reply.episode for reply in replies) == [0, 1, 2]
    assert engine.conversation == {number: [5, 6, 7 + number, 9] for number in range(3)}
    assert engine.counts()["engine_restarts"] == len(deaths)
    assert engine.counts()["engine_retried_turns"] == num_retried
    engine.close()


@pytest.mark.parametrize(
    ("deaths", "message"),
    [
        (["step", "step"], r"^vLLM's process died\. engine\.settings\.max_restarts \(1\) is used up"),
        (["step", "start"], r"no memory\. engine\.settings\.max_restarts \(1\) is used up"),
    ],
)
def test_beyond_max_restarts_the_run_stops_with_one_line(folder: Path, deaths: list[str], message: str) -> None:
    engine = Engine(deaths, folder, max_restarts=1)
    engine.submit(TURNS[0])
    with pytest.raises(ValueError, match=message) as error:
        engine.poll()
    assert "\n" not in str(error.value)
    engine.close()


def test_a_refresh_is_done_again_until_vllm_has_lived_through_it(folder: Path) -> None:
    engine = Engine(["label half applied", "reload_weights", "start", "reset", "label 3"], folder, max_restarts=5)
    engine.refresh(PolicyWeights.of(load_model(folder / "m", compute=on_cpu(1))), 3)
    assert (engine.policy_version, engine.counts()["engine_restarts"]) == (3, 5)
    engine.submit(TURNS[0])
    assert engine.poll()[0].policy_version == 3
    engine.close()


@pytest.mark.parametrize(
    ("deaths", "versions", "num_retried"),
    [
        ([], [0, 3], 0),
        (["sleep"], [3], 0),  # what it had not given back is lost with it, and one token ends a turn here
        (["reload_weights", "label 3"], [0, 3], 0),  # what had been given back is kept
        (["wake_up"], [0, 3], 2),
    ],
)
def test_turns_under_way_keep_their_tokens_however_often_vllm_dies_in_a_refresh(
    folder: Path, deaths: list[str], versions: list[int], num_retried: int
) -> None:
    """Two turns, each of which has written one token when the weights come."""
    engine = Engine(deaths, folder, max_restarts=len(deaths))
    for number in range(2):
        engine.submit(TurnRequest(number, [5, 6, 7 + number], max_new_tokens=2, seed=number))
    engine.refresh(PolicyWeights.of(load_model(folder / "m", compute=on_cpu(1))), 3)
    replies = engine.poll()
    assert [reply.token_versions for reply in replies] == [versions, versions]
    assert engine.conversation == {number: [5, 6, 7 + number, *len(versions) * [9]] for number in range(2)}
    assert engine.counts()["engine_retried_turns"] == num_retried
    engine.close()


@pytest.mark.parametrize("is_starting", [False, True])
def test_closing_ends_a_thread_that_waits_for_a_turn_and_starts_nothing_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_starting: bool
) -> None:
    """While it waits for a step, and while it starts vLLM again after a death."""
    engine = Engine(["step" if is_starting else "close"], folder, max_restarts=5)
    core: Any = engine.core.llm
    start, begins, may_end = engine._start, threading.Event(), threading.Event()

    def slow_start() -> Any:
        begins.set()
        assert may_end.wait(PATIENCE)
        return start()

    monkeypatch.setattr(engine, "_start", slow_start)
    engine.submit(TURNS[0])
    errors: list[Exception] = []

    def poll() -> None:
        try:
            engine.poll()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    assert (begins if is_starting else core.is_stepping).wait(PATIENCE)
    engine.close()
    may_end.set()
    thread.join(PATIENCE)
    assert [str(error) for error in errors] == ["the engine is closed"]
    last: Any = engine.core.llm
    assert engine.num_starts == 1 + is_starting and last.is_dead.is_set()
