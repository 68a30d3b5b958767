"""Steps in C give the log-probs of the model's own forward, whatever its sizes, and are left out where they do not."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tasks.engines.transformers import check, step_in_c, traces
from tasks.engines.transformers.engine import TransformersEngine
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.shard_in_c import ShardInC
from tasks.engines.transformers.step_in_c import Pass, StepInC, Worker, drawn, fits
from tasks.engines.transformers.written_turn import WrittenTurn
from tasks.models.native.compiled import load_library
from tasks.rollouts.engine import TurnReply, TurnRequest
from tasks.rollouts.seeds import uniforms
from tests.engine_benches import plain_logp
from tests.small_models import KINDS, SIZES, a_model, compute_attention_otherwise

CONTEXT = 80


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test knows what another has checked or compiled."""
    monkeypatch.setattr(check, "_checked", {})
    monkeypatch.setattr(traces, "_KNOWN", {})
    step_in_c._library.cache_clear()
    yield
    step_in_c._library.cache_clear()


def an_engine(
    model: PreTrainedModel, *, num_threads: int = 1, temperature: float = 1.0, top_p: float = 1.0
) -> TransformersEngine:
    return TransformersEngine(
        model, end_ids=(3,), stop=None, max_context=CONTEXT, max_concurrent_episodes=50, kv_cache_bytes=None,
        num_threads=num_threads, temperature=temperature, top_p=top_p,
    )  # fmt: skip


def turns(engine: TransformersEngine, texts: Sequence[list[int]]) -> list[TurnReply]:
    for episode, text in enumerate(texts):
        engine.submit(TurnRequest(episode, text, 9, seed=episode))
    replies: list[TurnReply] = []
    while len(replies) < len(texts):
        replies += engine.poll()
    for episode in range(len(texts)):
        engine.release(episode)
    return sorted(replies, key=lambda reply: reply.episode)


def texts(count: int, *, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5, 40) for _ in range(chance.choice((1, 2, 17, 45)))] for _ in range(count)]


@torch.no_grad()
def own_logp(model: PreTrainedModel, text: list[int], reply: TurnReply, *, temperature: float = 1.0) -> list[float]:
    logits = model(input_ids=torch.tensor([[*text, *reply.token_ids]]), use_cache=False).logits[0] / temperature
    rows = torch.log_softmax(logits, -1)[len(text) - 1 : -1]
    return rows.gather(-1, torch.tensor(reply.token_ids)[:, None])[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_log_probs_are_those_of_the_models_own_forward(kind: str, sizes: dict[str, int]) -> None:
    model = a_model(kind, sizes, tie_word_embeddings=kind == "qwen3")
    with closing(an_engine(model, temperature=1.3)) as engine:
        assert isinstance(engine.shards[0], ShardInC)
        for text, reply in zip(texts(40), turns(engine, texts(40)), strict=True):
            assert reply.sampler_logp == pytest.approx(own_logp(model, text, reply, temperature=1.3), abs=2e-5)


def test_biases_of_every_product_and_scaled_angles_are_seen() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 16}  # fmt: skip
    model = a_model("llama", SIZES[0], attention_bias=True, mlp_bias=True, rope_parameters=scaled)
    with closing(an_engine(model)) as engine:
        assert isinstance(engine.shards[0], ShardInC)
        for text, reply in zip(texts(12), turns(engine, texts(12)), strict=True):
            assert reply.sampler_logp == pytest.approx(own_logp(model, text, reply), abs=2e-5)


@pytest.mark.slow
def test_the_likeliest_token_has_log_prob_0_and_a_nucleus_is_torchs() -> None:
    model = a_model("qwen3", SIZES[0])
    with closing(an_engine(model, temperature=0.0)) as engine:
        for text, reply in zip(texts(6), turns(engine, texts(6)), strict=True):
            ids = torch.tensor([[*text, *reply.token_ids[:-1]]])
            likeliest = model(input_ids=ids, use_cache=False).logits[0, len(text) - 1 :].argmax(-1)
            assert reply.token_ids == likeliest.tolist()
            assert reply.sampler_logp == [0.0] * len(reply.token_ids)
    with closing(an_engine(model, top_p=0.5)) as engine:
        replies = turns(engine, texts(30))
    for text, reply in zip(texts(30), replies, strict=True):
        ids = [*text, *reply.token_ids]
        expected = plain_logp(model, ids, temperature=1.0, top_p=0.5)[len(text) - 1 :]
        assert reply.sampler_logp == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_who_else_is_played_changes_no_bit(num_threads: int) -> None:
    """Alone, a turn at a time, and with 46 others in blocks of 36."""
    model = a_model("qwen3", SIZES[1])
    with closing(an_engine(model, num_threads=num_threads)) as engine:
        together = turns(engine, texts(47))
        assert len(engine.shards) == num_threads
    for episode in (0, 13, 46):
        with closing(an_engine(model)) as engine:
            engine.submit(TurnRequest(episode, texts(47)[episode], 9, seed=episode))
            (alone,) = engine.poll()
        assert (alone.token_ids, alone.sampler_logp) == (together[episode].token_ids, together[episode].sampler_logp)


def one_step(step: StepInC) -> list[float]:
    turn = WrittenTurn(5, room=1, ends=array("q"))
    turn.feed([7, 8, 9], fed=0)
    worker = Worker(has_thread=False)
    assert step.start(RaggedCache(2, 1, CONTEXT), [Pass([turn], [0])], worker, max_steps=1)() == [0]
    return turn.take()[1]


def test_weights_that_change_in_place_or_are_replaced_are_seen() -> None:
    model = a_model("llama", SIZES[0])
    step = StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=1.0)
    found = [one_step(step)]
    layer = model.model.layers[1]

    def add_in_place() -> None:
        layer.mlp.up_proj.weight.add_(0.1)

    def add_to_norm() -> None:
        layer.input_layernorm.weight.mul_(1.5)

    def replace() -> None:
        layer.self_attn.v_proj.weight = torch.nn.Parameter(2 * layer.self_attn.v_proj.weight)

    def embed() -> None:
        model.model.embed_tokens.weight.mul_(1.1)

    for change in (add_in_place, add_to_norm, replace, embed):
        with torch.no_grad():
            change()
        step.take_weights()
        found.append(one_step(step))
        anew = StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=1.0)
        assert found[-1] == one_step(anew) != found[-2]
    layer.mlp.down_proj.weight.data.add_(0.1)  # which torch does not count
    step.take_weights()
    assert one_step(step) == found[-1]
    step.take_weights(have_changed=True)
    assert one_step(step) != found[-1]


def test_wider_vectors_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 floats, as with AVX-512; elsewhere the compiler takes two registers for one."""
    model, found = a_model("qwen3", SIZES[1]), []
    for defines in ([], ["WIDTH=16"], ["WIDTH=8"]):
        monkeypatch.setattr(step_in_c, "load_library", lambda name, defines=defines: load_library(name, *defines))
        step_in_c._library.cache_clear()
        with closing(an_engine(model)) as engine:
            assert isinstance(engine.shards[0], ShardInC)
            found.append(turns(engine, texts(20)))
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert other.token_ids == one.token_ids
            assert other.sampler_logp == pytest.approx(one.sampler_logp, abs=2e-5)


def test_an_id_without_an_embedding_is_an_error_and_nothing_is_read_beyond() -> None:
    with closing(an_engine(a_model("llama", SIZES[3]))) as engine:
        engine.submit(TurnRequest(0, [5, 40], 3, seed=0))
        with pytest.raises(IndexError, match="id is 40, and the model has embeddings of 40 tokens"):
            engine.poll()


def begun(step: StepInC, ids: list[int], *, room: int = 9) -> tuple[Worker, Callable[[], list[int]]]:
    """A job of one turn, under way in a thread."""
    turn, worker = WrittenTurn(5, room=room, ends=array("q")), Worker(has_thread=True)
    turn.feed(ids, fed=0)
    return worker, step.start(RaggedCache(2, 1, CONTEXT), [Pass([turn], [0])], worker, max_steps=room)


def test_what_a_thread_of_c_reads_outlives_whoever_dropped_it() -> None:
    """The model's embedding and norms, and the angles, are read where they are: ASan found them freed amid steps."""
    model = a_model("qwen3", SIZES[0])
    step = StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=1.0)
    alive = [weakref.ref(model), weakref.ref(step)]
    worker, finish = begun(step, [7, 8, 9])
    del model, step, finish
    gc.collect()
    assert None not in [found() for found in alive]
    worker.close()
    del worker
    gc.collect()
    assert [found() for found in alive] == [None, None]


@pytest.mark.parametrize("is_resized", [True, False])
def test_weights_of_another_shape_or_dtype_are_refused(is_resized: bool) -> None:
    """Else C would write or read beyond them."""
    model = a_model("qwen3", SIZES[0], tie_word_embeddings=True)
    step = StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=1.0)
    if is_resized:
        model.resize_token_embeddings(400)
    else:
        model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="became another tensor after the engine was opened"):
        step.take_weights()


def test_angles_of_a_part_of_each_head_are_left_to_the_models_own_forward() -> None:
    rotary = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    sizes = {**SIZES[0], "head_dim": 128}
    assert fits(a_model("llama", sizes, rope_parameters=rotary))
    assert not fits(a_model("llama", sizes, rope_parameters={**rotary, "partial_rotary_factor": 0.5}))


def test_logits_that_are_no_numbers_give_a_token_and_no_log_prob_whatever_the_nucleus() -> None:
    model = a_model("llama", SIZES[0])
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    for top_p in (1.0, 0.5):
        step = StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=top_p)
        assert all(math.isnan(logp) for logp in one_step(step))


def test_a_turn_without_text_or_room_is_an_error() -> None:
    for ids, room in (([], 3), ([5], 0)):
        with closing(an_engine(a_model("llama", SIZES[0]))) as engine:
            engine.submit(TurnRequest(0, [5, 6], 3, seed=0))
            engine.submit(TurnRequest(1, ids, room, seed=0))
            with pytest.raises(ValueError, match=f"begins after {len(ids)} tokens and may have {room}"):
                engine.poll()


def test_a_fork_neither_waits_for_the_thread_that_it_has_not_nor_begins_a_job() -> None:
    step = StepInC(a_model("qwen3", SIZES[0]), max_context=CONTEXT, temperature=1.0, top_p=1.0)
    worker, finish = begun(step, [7, 8, 9])
    finish()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits
        try:
            turn = WrittenTurn(5, room=3, ends=array("q"))
            turn.feed([7], fed=0)
            step.start(RaggedCache(2, 1, CONTEXT), [Pass([turn], [0])], worker, max_steps=3)
        except RuntimeError:
            worker.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.close()


@pytest.mark.slow
def test_an_engine_that_is_dropped_or_closed_amid_steps_lets_them_end_first() -> None:
    """Else the thread of C would write into memory that is somebody else's by then."""
    for is_closed in (True, False) * 5:
        engine = an_engine(a_model("qwen3", SIZES[0]), num_threads=2)
        for episode, text in enumerate(texts(47)):
            engine.submit(TurnRequest(episode, text, 9, seed=episode))
        engine.poll(lambda: True)  # both shards have begun
        workers = [shard.worker for shard in engine.shards if isinstance(shard, ShardInC)]
        assert all(worker.address for worker in workers)
        if is_closed:
            engine.close()
            assert not any(worker.address for worker in workers)
        del engine, workers


@given(st.integers(0, 2**64 - 1))
def test_tokens_are_drawn_with_numpys_numbers(seed: int) -> None:
    library = step_in_c._library()
    assert library is not None
    assert drawn(library, seed, 70).tolist() == uniforms(seed, 70).tolist()


def plays_by_own_forward(model: PreTrainedModel) -> bool:
    with closing(an_engine(model)) as engine:
        return not isinstance(engine.shards[0], ShardInC)


@pytest.mark.slow
def test_what_the_code_does_not_compute_is_left_to_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("llama", SIZES[0])
    assert fits(model)
    assert not fits(a_model("llama", SIZES[0], hidden_act="gelu"))
    assert not fits(a_model("llama", SIZES[0]).to(torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr(step_in_c, "MAX_BYTES", 1000)
        assert not fits(model)
    monkeypatch.setattr("tasks.models.native.compiled.COMPILERS", ("no-such-compiler",))
    load_library.cache_clear()
    step_in_c._library.cache_clear()
    assert plays_by_own_forward(model)
    load_library.cache_clear()


@pytest.mark.slow
def test_a_family_that_computes_otherwise_than_the_code_plays_by_its_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = a_model("llama", SIZES[0])
    compute_attention_otherwise(monkeypatch)
    assert fits(model)
    assert plays_by_own_forward(model)
