"""The in-process engine in little memory: whatever waits, leaves the cache, is read in chunks or copied, every episode
has the tokens and log-probs it has alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.engine import TransformersEngine
from tasks.engines.transformers.memory import ForwardLimits, batch_prompts, position_bytes
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.rows import Row
from tasks.engines.transformers.shard import EngineShard, Shard
from tasks.engines.transformers.shard_in_c import CopyingCache, ShardInC
from tasks.engines.transformers.step_in_c import StepInC
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest
from tests import tiny

pytestmark = pytest.mark.slow
CONTEXT, NO_LIMIT = 120, ForwardLimits(num_bytes=1 << 40, per_token=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(tiny.model_folder(tmp_path_factory.mktemp("model") / "m"), compute=on_cpu(1))


@pytest.fixture(scope="module")
def decoder(model: PreTrainedModel) -> Decoder:
    return Decoder(model, temperature=1.0, top_p=1.0)


@pytest.fixture(scope="module", params=["own_forward", "in_c"])
def stepper(request: pytest.FixtureRequest, model: PreTrainedModel, decoder: Decoder) -> Decoder | StepInC:
    """What computes the steps of a shard, of either kind."""
    if request.param == "own_forward":
        return decoder
    return StepInC(model, max_context=CONTEXT, temperature=1.0, top_p=1.0)


@dataclass(frozen=True)
class Script:
    """An episode's texts and turn limits: what it reads never depends on what it writes. `pauses` are in steps."""

    reads: list[list[int]]
    writes: list[int]
    pauses: list[int]


def a_script(chance: random.Random, start: list[int]) -> Script:
    turns = chance.randint(1, 3)
    lengths = [chance.choice((1, 2, 7, 30)), *(chance.choice((1, 3, 9, 26)) for _ in range(turns - 1))]
    reads = [[chance.randrange(20, 90) for _ in range(length)] for length in lengths]
    reads[0] = start[: chance.choice((0, 8, 20, 24))] + reads[0]
    return Script(reads, [chance.randint(1, 4) for _ in reads], [chance.randint(0, 3) for _ in reads])


def a_shard(
    stepper: Decoder | StepInC, *, max_positions: int = 100 * CONTEXT, limits: ForwardLimits = NO_LIMIT
) -> Shard:
    if isinstance(stepper, StepInC):
        return ShardInC(
            stepper, end_ids=(25,), stop=None, max_context=CONTEXT, max_positions=max_positions, has_thread=False
        )
    return own_shard(stepper, max_positions=max_positions, limits=limits)


def own_shard(decoder: Decoder, *, max_positions: int = 100 * CONTEXT, limits: ForwardLimits = NO_LIMIT) -> EngineShard:
    return EngineShard(
        decoder, end_ids=(25,), stop=None, max_context=CONTEXT, max_episodes=12,
        max_positions=max_positions, limits=limits,
    )  # fmt: skip


def played(shard: Shard, scripts: dict[EpisodeHandle, Script]) -> dict[EpisodeHandle, list[TurnReply]]:
    """All of them at once; each reads on after its pause, and is released after its last turn."""
    found: dict[EpisodeHandle, list[TurnReply]] = {episode: [] for episode in scripts}
    due = {episode: script.pauses[0] for episode, script in scripts.items()}
    num_released = 0
    for step in range(2000):
        requests: list[TurnRequest | EpisodeHandle] = []
        for episode in [episode for episode, when in due.items() if when <= step]:
            del due[episode]
            turn = len(found[episode])
            if turn == len(scripts[episode].reads):
                requests.append(episode)
                num_released += 1
            else:
                requests.append(request(episode, turn, scripts[episode]))
        for reply in shard.start(requests, 0)():
            found[reply.episode].append(reply)
            turn = len(found[reply.episode])
            pauses = scripts[reply.episode].pauses
            due[reply.episode] = step + 1 + (pauses[turn] if turn < len(pauses) else 0)
        if num_released == len(scripts):
            return found
    raise AssertionError("episodes wait for ever")


def request(episode: EpisodeHandle, turn: int, script: Script) -> TurnRequest:
    return TurnRequest(episode, script.reads[turn], script.writes[turn], seed=100 * episode + turn)


def assert_alike(found: Sequence[TurnReply], expected: Sequence[TurnReply]) -> None:
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.sampler_logp == pytest.approx(other.sampler_logp, abs=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_every_episode_is_as_it_is_alone_under_any_budget_and_any_size_of_forward(
    stepper: Decoder | StepInC, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets of one to six of the longest episodes, growth by 1 to 40 positions, forwards of 1 to 90 tokens; storage
    that C has not written has no numbers.
    """
    chance = random.Random(seed)
    storage_like = CopyingCache.storage_like
    monkeypatch.setattr(CopyingCache, "storage_like", lambda *given: storage_like(*given).fill_(math.nan))
    monkeypatch.setattr("tasks.engines.transformers.rows.STEP", chance.randint(1, 40))
    monkeypatch.setattr("tasks.engines.transformers.rows.PREFIX_BLOCK", chance.choice((4, 8, 512)))
    start = [chance.randrange(20, 90) for _ in range(24)]
    scripts = {episode: a_script(chance, start) for episode in range(12)}
    scripts[12] = scripts[3]
    alone = {episode: played(a_shard(stepper), {episode: script})[episode] for episode, script in scripts.items()}
    limits = ForwardLimits(num_bytes=chance.randint(1, 90), per_token=1, in_step=chance.choice((0, 3, 24)))
    shard = a_shard(stepper, max_positions=chance.randint(2, 7) * CONTEXT, limits=limits)
    together = played(shard, scripts)
    for episode, expected in alone.items():
        assert_alike(together[episode], expected)
    assert shard.rows.live == shard.rows.waiting == []


def test_an_episode_in_the_way_leaves_and_is_computed_anew(stepper: Decoder | StepInC) -> None:
    """Room for two rows of 40 and one for padding. Both grow from 20 + 4 to 20 + 4 + 30 + 4: the younger leaves."""
    script = Script([[*range(30, 50)], [*range(20, 50)]], [4, 4], [0, 0])
    alone = [played(a_shard(stepper), {episode: script})[episode] for episode in (0, 1)]
    shard = a_shard(stepper, max_positions=2 * CONTEXT)
    shard.rows.max_positions = 3 * 40
    both = played(shard, {0: script, 1: script})
    assert shard.rows.num_recomputed == 23  # all that was cached: the last token written is not
    for episode in (0, 1):
        assert_alike(both[episode], alone[episode])


def test_while_every_tool_is_slow_an_idle_episode_gives_its_place(stepper: Decoder | StepInC) -> None:
    """Room for one: the second is played while the first waits, and neither waits for the other's tool."""
    shard = a_shard(stepper, max_positions=2 * CONTEXT)
    shard.rows.max_positions = 2 * 40
    script = Script([[*range(30, 50)], [*range(20, 30)]], [4, 4], [0, 0])
    turns = [(0, 0), (1, 0), (0, 1), (1, 1)]
    found: dict[EpisodeHandle, list[TurnReply]] = {0: [], 1: []}
    for episode, turn in turns:
        replies = shard.start([request(episode, turn, script)], 0)()
        while not replies:
            replies = shard.start([], 0)()
        found[episode] += replies
    for episode in (0, 1):
        assert_alike(found[episode], played(a_shard(stepper), {episode: script})[episode])


def an_engine(model: PreTrainedModel, *, kv_cache_bytes: int | None) -> TransformersEngine:
    return TransformersEngine(
        model, end_ids=(25,), temperature=1.0, top_p=1.0, stop=None, max_context=CONTEXT, max_concurrent_episodes=8,
        kv_cache_bytes=kv_cache_bytes, num_threads=1,
    )  # fmt: skip


def turns_of(engine: TransformersEngine, episodes: range) -> list[TurnReply]:
    for episode in episodes:
        engine.submit(TurnRequest(episode, [*range(30 + episode, 70)], 12, seed=episode))
    replies: list[TurnReply] = []
    while len(replies) < len(episodes):
        for reply in engine.poll():
            replies.append(reply)
            engine.release(reply.episode)
    return sorted(replies, key=lambda reply: reply.episode)


def test_with_room_for_two_episodes_the_others_wait_and_have_the_same_tokens(model: PreTrainedModel) -> None:
    room = 3 * CONTEXT * position_bytes(model)  # a third for padding
    with closing(an_engine(model, kv_cache_bytes=room)) as small, closing(an_engine(model, kv_cache_bytes=None)) as big:
        assert_alike(turns_of(small, range(8)), turns_of(big, range(8)))
        assert kv_bytes(small) <= room < kv_bytes(big)


def kv_bytes(engine: TransformersEngine) -> int:
    return sum(tensor.numel() * tensor.element_size() for shard in engine.shards for tensor in shard.cache.storage)


def test_a_budget_that_fits_no_episode_is_refused_with_the_arithmetic(model: PreTrainedModel) -> None:
    """Two layers with keys and values of 2 heads of 16 floats: 512 bytes a token, 122,880 for 120 tokens twice."""
    assert position_bytes(model) == 512
    with pytest.raises(ValueError, match="kv_cache_gib") as refused:
        an_engine(model, kv_cache_bytes=122_879)
    assert "2 × 120 × 512 bytes" in str(refused.value)
    assert "at most 119" in str(refused.value)
    an_engine(model, kv_cache_bytes=122_880).close()


def test_sleep_gives_the_cache_back_and_the_next_turn_goes_on(model: PreTrainedModel) -> None:
    with (
        closing(an_engine(model, kv_cache_bytes=None)) as engine,
        closing(an_engine(model, kv_cache_bytes=None)) as one,
    ):
        first = TurnRequest(0, [*range(30, 50)], 6, seed=1)
        second = TurnRequest(0, [*range(20, 30)], 6, seed=2)
        replies = []
        for at_hand, sleeps in ((engine, True), (one, False)):
            for item in (first, second):
                at_hand.submit(item)
                replies += at_hand.poll()
                if sleeps:
                    at_hand.sleep()
                    assert all(layer.keys is None for shard in at_hand.shards for layer in shard.cache.layers)
        assert_alike(replies[:2], replies[2:])


def test_a_play_after_a_sleep_has_the_cache_of_the_one_before_at_once(
    stepper: Decoder | StepInC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows come one at a time: 1, 2, 4 and 8 slots the first time. More of them, or longer ones, make it grow."""
    shard, sizes, resize = a_shard(stepper), list[tuple[int, int]](), RaggedCache.resize

    def noted(cache: RaggedCache, num_slots: int, capacity: int, **kept: int) -> None:
        sizes.append((num_slots, capacity))
        resize(cache, num_slots, capacity, **kept)

    monkeypatch.setattr(RaggedCache, "resize", noted)
    monkeypatch.setattr("tasks.engines.transformers.rows.STEP", 8)

    def play(num_episodes: int, length: int) -> list[tuple[int, int]]:
        sizes.clear()
        played(shard, {episode: Script([[30] * length], [2], [0]) for episode in range(num_episodes)})
        shard.sleep([])
        return sizes

    assert play(6, 20) == [(1, 24), (2, 24), (4, 24), (8, 24)]
    assert play(6, 20) == play(3, 5) == [(8, 24)]
    assert play(9, 20) == [(8, 24), (16, 24)]
    assert play(1, 40) == [(1, 48)]


def test_a_prompt_that_starts_as_another_is_copied_up_to_there(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8: of 30 tokens, 24 of which are shared, one prompt is read whole and of the other 5, with the step."""
    monkeypatch.setattr("tasks.engines.transformers.rows.PREFIX_BLOCK", 8)
    start, shard = [*range(30, 54)], own_shard(decoder)
    widths: list[tuple[int, ...]] = []
    monkeypatch.setattr(decoder, "prefill", recorded(decoder.prefill, widths))
    shard.advance([TurnRequest(n, [*start, *range(20 + n, 26 + n)], 4, seed=n) for n in range(2)], 0)
    assert widths == [(1, 29)]
    assert [row.fed for row in shard.rows.live] == [30, 30]


def recorded(prefill: Callable[..., tuple[torch.Tensor, ...]], shapes: list[tuple[int, ...]]) -> Callable[..., object]:
    def run(ids_BT: torch.Tensor, place_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes.append(tuple(ids_BT.shape))
        return prefill(ids_BT, place_T)

    return run


def test_long_replies_of_similar_length_share_a_forward(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """26, 30, 31 and 60 tokens, each after the one token not yet cached: two forwards, of three replies and of one."""
    shard = own_shard(decoder)
    shard.advance([TurnRequest(n, [*range(30, 40)], 1, seed=n) for n in range(4)], 0)
    fed: list[tuple[int, int]] = []
    feed = shard.reader._feed

    def recorded_feed(rows: list[Row], width: int) -> None:
        fed.append((len(rows), width))
        feed(rows, width)

    monkeypatch.setattr(shard.reader, "_feed", recorded_feed)
    lengths = (26, 60, 31, 30)
    shard.advance([TurnRequest(n, [*range(20, 20 + length)], 1, seed=n) for n, length in enumerate(lengths)], 0)
    assert fed == [(3, 31), (1, 60)]


def test_prompts_of_one_forward_are_of_similar_length_where_not_all_fit() -> None:
    limits = ForwardLimits(num_bytes=100, per_token=1)
    assert [*batch_prompts([10, 50, 12, 11], limits)] == [[1], [2, 3, 0]]
    assert [*batch_prompts([10, 25, 12, 11], limits)] == [[0, 1, 2, 3]]
    assert [*batch_prompts([], limits)] == []


def test_a_forward_over_cached_text_counts_its_mask() -> None:
    """30 tokens over 70 and themselves: 30·(1 + 100) = 3,030 bytes with one for each pair; with a byte less, 29."""
    limits = ForwardLimits(num_bytes=3030, per_token=1, per_pair=1)
    assert limits.width(40, fed=70) == 30
    assert replace(limits, num_bytes=3029).width(40, fed=70) == 29
    assert limits.width(40) == 40
