"""One contract over every training engine and three model families: what it says it sampled is what the model gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import AdjustableEngine, Engine, TurnReply, TurnRequest
from tasks.rollouts.episode import EpisodeKey
from tests import tiny
from tests.engine_benches import Bench, TransformersBench, collector, plain_logp, play
from tests.own_forward import own_forward

pytestmark = pytest.mark.slow
MOST_TURNS = 64


@pytest.fixture(
    scope="module", params=[*tiny.ARCHITECTURES, "two_shards", "own_forward", "vllm_in_process", "vllm_server"]
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A transformers engine over each family, which steps in C in one shard or two, or by the model's own forward; any
    other name is a fixture of tests/conftest.py.
    """
    if request.param in tiny.ARCHITECTURES:
        yield TransformersBench(tmp_path_factory.mktemp("model"), request.param)
    elif request.param == "two_shards":
        yield TransformersBench(tmp_path_factory.mktemp("model"), "qwen3", num_threads=2)
    elif request.param == "own_forward":
        with own_forward():
            yield TransformersBench(tmp_path_factory.mktemp("model"), "qwen3", num_threads=2)
    else:
        yield request.getfixturevalue(request.param)


def ask(
    engine: Engine, prompt: list[int], *, seeds: range, max_new_tokens: int, end_ids: Sequence[tuple[int, ...]] = ()
) -> list[TurnReply]:
    """One turn of one episode a seed, all at once; in the order of the seeds, as are `end_ids`."""
    for number, seed in enumerate(seeds):
        engine.submit(TurnRequest(seed, prompt, max_new_tokens, seed, end_ids[number] if end_ids else ()))
    replies = until_all(engine, len(seeds))
    for reply in replies:
        engine.release(reply.episode)
    return sorted(replies, key=lambda reply: reply.episode)


def opening(bench: Bench) -> list[int]:
    return bench.chat.prompt_ids("Cancel booking B42.", [])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_log_probs_are_of_the_distribution_sampled_from_over_whole_episodes(
    bench: Bench, temperature: float, top_p: float
) -> None:
    sampling = tiny.SAMPLING.model_copy(update={"temperature": temperature, "top_p": top_p})
    played = play(bench, concurrency=7, sampling=sampling, num_problems=8)
    _, model = bench.engine()
    for trajectory in played[:12]:
        expected = plain_logp(model, trajectory.sequences[0].token_ids, temperature=temperature, top_p=top_p)
        sampled = [number for number, is_sampled in enumerate(trajectory.sequences[0].sampled_mask) if is_sampled]
        assert [trajectory.sequences[0].sampler_logp[number] for number in sampled] == pytest.approx(
            [expected[number - 1] for number in sampled], abs=bench.tolerance
        )


def test_log_probs_of_given_tokens_are_before_temperature_and_top_p(bench: Bench) -> None:
    engine, model = bench.engine(tiny.SAMPLING.model_copy(update={"temperature": 0.5, "top_p": 0.5}))
    sequences = [opening(bench), [*opening(bench), *range(20, 90)]]
    for found, token_ids in zip(engine.token_logp(sequences), sequences, strict=True):
        assert found == pytest.approx(plain_logp(model, token_ids), abs=bench.tolerance)


def test_the_same_seed_gives_the_same_tokens_at_other_concurrencies(bench: Bench) -> None:
    """44 episodes; one at a time, which takes a server longest, the first 6 of them."""
    few, many = (play(bench, concurrency=n) for n in (5, 44))
    alone = play(bench, concurrency=1, num_problems=3)
    assert [t.sequences[0].token_ids for t in few] == [t.sequences[0].token_ids for t in many]
    assert [t.sequences[0].token_ids for t in alone] == [t.sequences[0].token_ids for t in many[:6]]
    for one, other in zip(alone + few[6:], many, strict=True):
        assert one.sequences[0].sampler_logp == pytest.approx(other.sequences[0].sampler_logp, abs=bench.tolerance)


def test_another_sample_index_gives_other_tokens(bench: Bench) -> None:
    played = play(bench, concurrency=16)
    assert played[0].problem_id == played[1].problem_id
    assert played[0].sequences[0].token_ids != played[1].sequences[0].token_ids


def test_a_turn_ends_with_the_end_of_turn_token_or_at_its_limit(bench: Bench) -> None:
    """A random model ends one turn in some six hundred tokens: of 32 turns of up to 100 tokens a few do."""
    engine, _ = bench.engine()
    replies = ask(engine, opening(bench), seeds=range(32), max_new_tokens=100)
    assert {reply.finish for reply in replies} == {"end_of_turn", "length"}
    for reply in replies:
        assert len(reply.sampler_logp) == len(reply.token_ids)
        assert bench.chat.end_of_turn not in reply.token_ids[:-1]
        assert (reply.finish == "end_of_turn") == (reply.token_ids[-1] == bench.chat.end_of_turn)
        assert reply.finish == "end_of_turn" or len(reply.token_ids) == 100


def test_a_turn_ends_with_an_id_of_its_request_too(bench: Bench) -> None:
    """The middle token of each of 8 turns is then an end of that request alone."""
    engine, _ = bench.engine()
    whole = ask(engine, opening(bench), seeds=range(8), max_new_tokens=12)
    end_ids = [(reply.token_ids[len(reply.token_ids) // 2], bench.chat.end_of_turn) for reply in whole]
    ended = ask(engine, opening(bench), seeds=range(8), max_new_tokens=12, end_ids=end_ids)
    for before, reply, (own, _) in zip(whole, ended, end_ids, strict=True):
        assert reply.token_ids == before.token_ids[: before.token_ids.index(own) + 1]
        assert len(reply.sampler_logp) == len(reply.token_ids)
        assert reply.finish == "end_of_turn"


def test_a_turn_ends_with_the_token_that_completes_a_stop_string(bench: Bench) -> None:
    strings = ["a", "zzz"]
    engine, _ = bench.engine(tiny.SAMPLING.model_copy(update={"stop_strings": strings}))
    replies = ask(engine, opening(bench), seeds=range(32), max_new_tokens=60)
    stopped = [reply for reply in replies if reply.finish == "stop_string"]
    assert len(stopped) >= 8
    for reply in replies:
        assert "a" not in bench.chat.decode(reply.token_ids[:-1])
        assert (reply.finish == "stop_string") == ("a" in bench.chat.decode(reply.token_ids))
        assert len(reply.sampler_logp) == len(reply.token_ids)


def test_an_episode_may_fill_its_context_to_the_last_token(bench: Bench) -> None:
    """200 tokens is the limit: a prompt of 190 leaves 10."""
    engine, model = bench.engine()
    prompt = [*opening(bench), *range(20, 220)][:190]
    replies = ask(engine, prompt, seeds=range(4), max_new_tokens=10)
    for reply in replies:
        assert len(reply.token_ids) == 10
        expected = plain_logp(model, [*prompt, *reply.token_ids])[-10:]
        assert reply.sampler_logp == pytest.approx(expected, abs=bench.tolerance)


def test_no_episode_is_longer_than_its_limit(bench: Bench) -> None:
    played = play(bench, concurrency=16, sampling=tiny.SAMPLING.model_copy(update={"max_tokens_per_episode": 130}))
    overlong = [trajectory for trajectory in played if trajectory.limit == "max_tokens_per_episode"]
    assert len(overlong) >= 10
    for trajectory in overlong:
        assert len(trajectory.sequences[0].token_ids) == 130 or not trajectory.sequences[0].sampled_mask[-1]
    assert not any(is_sampled for trajectory in played for is_sampled in trajectory.sequences[0].sampled_mask[130:])


def test_a_long_tool_reply_is_read_like_a_short_one(bench: Bench) -> None:
    """In the transformers engine replies over 24 tokens take another path, a forward of their own."""
    engine, model = bench.engine()
    prompt, reply = opening(bench), bench.chat.encode('{"status": "ok", "cost": 56} ' * 6)
    for handle, appended in ((1, reply[:20]), (2, reply)):
        engine.submit(TurnRequest(handle, prompt, max_new_tokens=4, seed=handle))
        (first,) = engine.poll()
        engine.submit(TurnRequest(handle, appended, max_new_tokens=4, seed=9))
        (second,) = engine.poll()
        token_ids = [*prompt, *first.token_ids, *appended, *second.token_ids]
        expected = plain_logp(model, token_ids)[-len(second.token_ids) :]
        assert second.sampler_logp == pytest.approx(expected, abs=bench.tolerance)
        engine.release(handle)


def test_replies_of_several_lengths_are_read_together_as_they_are_alone(bench: Bench) -> None:
    """The transformers engine feeds them in one step, padded to the longest."""
    engine, model = bench.engine()
    prompt, reply = opening(bench), bench.chat.encode('{"status": "ok", "cost": 56} ' * 6)
    held: dict[int, list[int]] = {}
    lengths = {1: 3, 2: 20, 3: 11}
    for handle in lengths:
        engine.submit(TurnRequest(handle, prompt, max_new_tokens=1, seed=handle))
        (first,) = engine.poll()
        held[handle] = [*prompt, *first.token_ids]
    for handle, length in lengths.items():
        engine.submit(TurnRequest(handle, reply[:length], max_new_tokens=4, seed=9))
    replies: list[TurnReply] = []
    while len(replies) < len(lengths):
        replies += engine.poll()
    for found in replies:
        token_ids = [*held[found.episode], *reply[: lengths[found.episode]], *found.token_ids]
        expected = plain_logp(model, token_ids)[-len(found.token_ids) :]
        assert found.sampler_logp == pytest.approx(expected, abs=bench.tolerance)
        engine.release(found.episode)


def test_changing_a_tool_reply_changes_what_follows(bench: Bench) -> None:
    engine, _ = bench.engine()
    logps = []
    for handle, text in ((1, '{"status": "ok", "cost": 56}'), (2, '{"status": "ok", "cost": 83}')):
        engine.submit(TurnRequest(handle, opening(bench), max_new_tokens=1, seed=1))
        engine.poll()
        engine.submit(TurnRequest(handle, bench.chat.encode(text), max_new_tokens=1, seed=1))
        logps.append(engine.poll()[0].sampler_logp[0])
        engine.release(handle)
    assert abs(logps[0] - logps[1]) > 1e-3


def test_a_refresh_generates_with_the_new_weights(bench: Bench) -> None:
    """Every matrix is changed, the tied head among them; what was computed before must not shine through."""
    engine, model = bench.engine()
    prompt = opening(bench)
    before = ask(engine, prompt, seeds=range(4), max_new_tokens=8)
    _change(model)
    engine.refresh(PolicyWeights.of(model), engine.policy_version + 1)
    after = ask(engine, prompt, seeds=range(4), max_new_tokens=8)
    assert [reply.token_ids for reply in before] != [reply.token_ids for reply in after]
    for reply in after:
        expected = plain_logp(model, [*prompt, *reply.token_ids])[len(prompt) - 1 :]
        assert reply.sampler_logp == pytest.approx(expected, abs=bench.tolerance)


def test_a_turn_under_way_survives_a_refresh_and_each_token_is_of_its_version(bench: Bench) -> None:
    """Refreshes with longer and longer pauses until eight turns are written, with another conversation between its
    turns; once more where a server on a busy machine wrote each turn between two refreshes. Of each reply, the tokens
    of a version have the log-probs that a plain forward of those weights gives after all tokens before.
    """
    engine, model = bench.engine()
    prompt, first = opening(bench), engine.policy_version
    (begun,) = ask_only(engine, TurnRequest(99, prompt, max_new_tokens=3, seed=99))
    weights, replies, version = {first: copy.deepcopy(model)}, list[TurnReply](), first
    while not any(len(set(reply.token_versions)) > 1 for reply in replies):
        begins = len(replies)
        assert begins < MOST_TURNS, "every turn was written between two refreshes"
        for number in range(8):
            engine.submit(TurnRequest(begins + number, prompt, max_new_tokens=12 + 10 * number, seed=begins + number))
        for num_pauses in count(1):
            replies += engine.poll(after(6 * num_pauses))
            version += 1
            if not engine.has_own_memory:
                cast(AdjustableEngine, engine).pause()
            _change(model, by=0.05 if len(weights) % 2 else -0.05)
            engine.refresh(PolicyWeights.of(model), version)
            weights[version] = copy.deepcopy(model)
            if len(replies) == begins + 8:
                break
    (last,) = ask_only(engine, TurnRequest(99, prompt[:5], max_new_tokens=4, seed=7))
    for episode in (*range(len(replies)), 99):
        engine.release(episode)
    asked = {reply.episode: [*prompt, *reply.token_ids] for reply in replies}
    asked[99] = [*prompt, *begun.token_ids, *prompt[:5], *last.token_ids]
    assert sorted(asked) == [*range(len(replies)), 99]
    for reply in [*replies, last]:
        assert reply.token_versions == sorted(reply.token_versions)
        assert reply.policy_version == reply.token_versions[-1]
        of = {version: plain_logp(weights[version], asked[reply.episode]) for version in set(reply.token_versions)}
        start = len(asked[reply.episode]) - 1 - len(reply.token_ids)
        expected = [of[version][start + number] for number, version in enumerate(reply.token_versions)]
        assert reply.sampler_logp == pytest.approx(expected, abs=bench.tolerance)
    assert set(last.token_versions) == {version}


def ask_only(engine: Engine, request: TurnRequest) -> list[TurnReply]:
    engine.submit(request)
    return until_all(engine, 1)


def until_all(engine: Engine, num_turns: int) -> list[TurnReply]:
    replies: list[TurnReply] = []
    while len(replies) < num_turns:
        replies += engine.poll()
    return replies


def after(num_steps: int) -> Callable[[], bool]:
    """True from the next question after so many on: an engine asks between its steps."""
    asked = count(1)
    return lambda: next(asked) > num_steps


def _change(model: PreTrainedModel, *, by: float = 0.05) -> None:
    """By the same numbers whenever it is called: `-by` is the way back."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def test_turns_and_trajectories_say_which_policy_wrote_them(bench: Bench) -> None:
    engine, model = bench.engine()
    version = engine.policy_version + 3
    engine.refresh(PolicyWeights.of(model), version)
    keys = [EpisodeKey(problem, 0, 0) for problem in tiny.problems(4)]
    for trajectory in collector(bench, engine, sampling=tiny.SAMPLING, concurrency=4).collect(keys):
        assert trajectory.policy_version == version
        assert {turn.policy_version for turn in trajectory.turns} == {version}
