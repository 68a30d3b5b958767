"""The in-process engine's shards and traced steps: nothing depends on which thread is faster, no weight is stale."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tasks.chat.format import load_chat
from tasks.core.records import Trajectory
from tasks.engines.transformers import check, decode_step, traces
from tasks.engines.transformers.decode_step import Decoder, Step, is_traceable
from tasks.engines.transformers.engine import TransformersEngine
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import TurnRequest
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tests import tiny

pytestmark = pytest.mark.slow
SLOTS, CONTEXT = 6, 64


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def two_shards(folder: Path) -> TransformersEngine:
    chat = load_chat(folder)
    return TransformersEngine(
        load_model(folder, compute=on_cpu(2)), end_ids=chat.end_ids, temperature=1.0, top_p=1.0, stop=None,
        max_context=tiny.SAMPLING.max_tokens_per_episode, max_concurrent_episodes=8, kv_cache_bytes=None,
        num_threads=2,
    )  # fmt: skip


def played(folder: Path, engine: TransformersEngine) -> list[Trajectory]:
    """20 episodes, 8 at a time, so that shards are filled up while others work."""
    collector = Collector(
        EngineEpisodes(engine, load_chat(folder), tiny.SAMPLING),
        TravelDesk(),
        max_concurrent_episodes=8,
        seed=5,
        stage="test",
    )
    return collector.collect([EpisodeKey(problem, 0, 0) for problem in tiny.problems(20)])


def slowed(start: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Its step ends late: in the shard's thread, where the model's own forward steps."""
    chance = random.Random(seed)

    def slow(*arguments: Any, **named: Any) -> Any:
        finish = start(*arguments, **named)

        def finish_late() -> Any:
            time.sleep(chance.choice((0.0, 0.0, 0.004)))
            return finish()

        return finish_late

    return slow


@pytest.fixture(params=["own_forward", "in_c"])
def _either_kind(request: pytest.FixtureRequest) -> None:
    if request.param == "own_forward":
        request.getfixturevalue("_own_forward")


@pytest.mark.usefixtures("_either_kind")
def test_whichever_shard_is_slow_every_log_prob_is_bitwise_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[tuple[list[int], list[float]]] = []
    for seed in range(3):
        with closing(two_shards(folder)) as engine:
            assert len(engine.shards) == 2
            for number, shard in enumerate(engine.shards if seed else []):
                monkeypatch.setattr(shard, "start", slowed(shard.start, 10 * seed + number))
            found = [(item.sequences[0].token_ids, item.sequences[0].sampler_logp) for item in played(folder, engine)]
        expected = expected or found
        assert found == expected


@pytest.mark.usefixtures("_either_kind")
def test_a_second_play_with_the_same_engine_is_bitwise_the_first(folder: Path) -> None:
    """As in a run that is killed between two iterations, whose second is the first of a new process."""
    with closing(two_shards(folder)) as engine:
        first, second = (
            [(item.sequences[0].token_ids, item.sequences[0].sampler_logp) for item in played(folder, engine)]
            for _ in range(2)
        )
    assert first == second


def test_a_new_episode_goes_to_the_shard_with_the_fewest(folder: Path) -> None:
    with closing(two_shards(folder)) as engine:
        for episode in range(3):
            engine.submit(TurnRequest(episode, [5, 6, 7], max_new_tokens=1, seed=episode))
        assert [engine.shard_of[episode] for episode in range(3)] == [0, 1, 0]
        while any(engine.num_turns):
            engine.poll()
        engine.release(2)
        engine.release(0)
        engine.submit(TurnRequest(3, [5, 6, 7], max_new_tokens=1, seed=3))
        assert engine.shard_of == {1: 1, 3: 0}
        (reply,) = engine.poll()
        assert reply.episode == 3


@pytest.mark.usefixtures("_own_forward")
def test_shards_leave_torchs_threads_to_everyone_else_as_they_were(folder: Path) -> None:
    torch.set_num_threads(2)
    with closing(two_shards(folder)) as engine:
        assert [thread.submit(torch.get_num_threads).result() for thread in engine.threads] == [1, 1]
        played(folder, engine)
        assert [thread.submit(torch.get_num_threads).result() for thread in engine.threads] == [1, 1]
        assert torch.get_num_threads() == 2


def test_a_model_whose_weights_no_cache_holds_has_one_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.engines.transformers.engine.MAX_BYTES_IN_SHARDS", 1000)
    with closing(two_shards(folder)) as engine:
        assert len(engine.shards) == 1
        assert engine.threads == []


def stepped(decoder: Decoder, model: PreTrainedModel) -> list[torch.Tensor]:
    """Three prompts of 9 tokens, then a step that feeds two of them 4 and 4 more, then a plain one of all three."""
    cache = RaggedCache(model.config.num_hidden_layers, SLOTS, CONTEXT)
    numbers = torch.arange(CONTEXT * SLOTS)
    ids = torch.randint(20, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    found = [*decoder.prefill(ids, numbers[:9])]
    for row in range(3):
        cache.fill(row, found, row, 9)
    appended = [[30, 31, 32, 33] * 2 + [40, 41, 42], [*range(9, 13)] * 2 + [13, 9, 13], [0] * 4 + [2] * 4 + [0, 1, 2]]
    noise = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    feed = Step(torch.tensor(appended), numbers[8:11], numbers[:14], noise, torch.tensor([0, 2]), numbers[:4])
    plain = Step(torch.tensor([[50, 51, 52], [14, 10, 14], [0, 1, 2]]), numbers[:3], numbers[:15], noise, None, None)
    return [*found, *decoder.step(cache, feed), *decoder.step(cache, plain), *cache.storage]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_a_traced_step_is_bitwise_the_models_own_forward(architecture: str, tmp_path: Path) -> None:
    model = load_model(tiny.model_folder(tmp_path / "m", architecture), compute=on_cpu(1))
    traced, plain = (Decoder(model, temperature=0.8, top_p=0.9) for _ in range(2))
    assert {has_appends for has_appends, *_ in traced.traced} == {False, True}
    plain.traced, plain.traced_prefill = {}, None
    for _ in range(3):  # torch's interpreter looks on the first time, and settles what it runs from then on
        for one, other in zip(stepped(traced, model), stepped(plain, model), strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def test_a_schedule_takes_no_new_traces_and_each_value_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and two kinds of step are traced, and two more where a nucleus comes or goes, however often."""
    trace, num_traces = torch.jit.trace, [0]

    def counted(*args: Any, **how: Any) -> Any:
        num_traces[0] += 1
        return trace(*args, **how)

    monkeypatch.setattr(torch.jit, "trace", counted)
    monkeypatch.setattr(traces, "_KNOWN", {})
    model = load_model(folder, compute=on_cpu(1))
    decoder = Decoder(model, temperature=1.0, top_p=1.0)
    assert num_traces == [3]
    for temperature, top_p in [(1.5, 1.0), (1.3, 1.0), (0.7, 0.5), (0.7, 0.8), (1.1, 1.0), (0.9, 0.6)]:
        decoder.set_distribution(temperature=temperature, top_p=top_p)
        found = stepped(decoder, model)
        plain = Decoder(model, temperature=temperature, top_p=top_p)
        plain.traced, plain.traced_prefill = {}, None
        assert all(torch.equal(one, other) for one, other in zip(found, stepped(plain, model), strict=True))
    assert num_traces == [5]


@torch.no_grad()
def test_new_weights_are_seen_whether_they_are_written_in_place_or_put_in_their_place(folder: Path) -> None:
    model = load_model(folder, compute=on_cpu(1))
    decoder = Decoder(model, temperature=1.0, top_p=1.0)
    before = stepped(decoder, model)
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    written = stepped(decoder, model)
    assert not torch.equal(before[-1], written[-1]) or not torch.equal(before[-5], written[-5])
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 2)
    decoder.take_weights()
    replaced = stepped(decoder, model)
    plain = Decoder(model, temperature=1.0, top_p=1.0)
    plain.traced, plain.traced_prefill = {}, None
    assert not all(torch.equal(one, other) for one, other in zip(written, replaced, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(replaced, stepped(plain, model), strict=True))


def test_only_a_family_known_to_compute_the_same_whatever_the_values_are_is_traced(folder: Path) -> None:
    model = load_model(folder, compute=on_cpu(1))
    assert is_traceable(model)
    model.config.model_type = "mixtral"  # its experts depend on the tokens
    assert not is_traceable(model)
    assert Decoder(model, temperature=1.0, top_p=1.0).traced == {}
    model.config.model_type = "qwen3"
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}  # goes by the positions
    assert not is_traceable(model)


@pytest.mark.usefixtures("_own_forward")
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_family_that_is_traced_is_held_to_its_own_forward_once_in_a_process(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the engine samples at temperature 1.2, and says so nowhere. No other random number is drawn."""
    model = load_model(tiny.model_folder(tmp_path / "m", architecture), compute=on_cpu(1))
    before = torch.get_rng_state()
    with monkeypatch.context() as patch:
        sample = decode_step.sample_tokens
        patch.setattr(traces, "_KNOWN", {})
        patch.setattr(decode_step, "sample_tokens", lambda *args, **how: sample(*args, **{**how, "temperature": 1.2}))
        with pytest.raises(ValueError, match=r"differ from those of the model's own forward.*another policy"):
            check.check_architecture(model, max_tokens=80)
    check.check_architecture(model, max_tokens=80)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(check, "_gaps_from_own_forward", lambda model, in_c: pytest.fail("it was played again"))
    check.check_architecture(model, max_tokens=80)
