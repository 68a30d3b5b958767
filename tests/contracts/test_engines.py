"""One contract over every training engine and three model families: what it says it sampled is what the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.models import load_model
from tasks.records import Trajectory
from tasks.rollouts.chat import ChatFormat, load_chat
from tasks.rollouts.engine import Engine, TurnRequest
from tasks.rollouts.episode import EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m", request.param)


def make_engine(
    folder: Path, *, concurrency: int = 16, sampling: SamplingSettings = tiny.SAMPLING
) -> tuple[Engine, ChatFormat]:
    chat = load_chat(folder)
    settings = EngineSettings(name="transformers", max_concurrent_episodes=concurrency, probe_tolerance=1e-3, vllm=None)
    return load_engine(load_model(folder, num_threads=1), chat, engine=settings, sampling=sampling), chat


def play(folder: Path, *, concurrency: int, sampling: SamplingSettings = tiny.SAMPLING) -> list[Trajectory]:
    keys = [EpisodeKey(problem, 0, sample) for problem in tiny.problems(22) for sample in range(2)]
    return tiny.collector(folder, concurrency=concurrency, sampling=sampling).collect(keys)


def plain_logp(folder: Path, token_ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of every token but the first from one ordinary forward, no cache and no batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def test_log_probs_agree_with_a_plain_forward_over_whole_episodes(folder: Path) -> None:
    for trajectory in play(folder, concurrency=7)[:12]:
        expected = plain_logp(folder, trajectory.token_ids)
        for position, is_sampled in enumerate(trajectory.sampled_mask):
            if is_sampled:
                assert trajectory.sampler_logp[position] == pytest.approx(expected[position - 1].item(), abs=1e-5)


def test_log_probs_are_of_the_distribution_after_temperature(folder: Path) -> None:
    sampling = tiny.SAMPLING.model_copy(update={"temperature": 0.7})
    trajectory = play(folder, concurrency=5, sampling=sampling)[0]
    expected = plain_logp(folder, trajectory.token_ids, temperature=0.7)
    first = trajectory.sampled_mask.index(True)
    assert trajectory.sampler_logp[first] == pytest.approx(expected[first - 1].item(), abs=1e-5)


def test_the_same_seed_gives_the_same_tokens_at_other_concurrencies(folder: Path) -> None:
    alone, few, many = (play(folder, concurrency=n) for n in (1, 5, 44))
    assert [t.token_ids for t in alone] == [t.token_ids for t in few] == [t.token_ids for t in many]
    for one, other in zip(alone, many, strict=True):
        assert one.sampler_logp == pytest.approx(other.sampler_logp, abs=1e-5)


def test_another_sample_index_gives_other_tokens(folder: Path) -> None:
    played = play(folder, concurrency=16)
    assert played[0].problem_id == played[1].problem_id
    assert played[0].token_ids != played[1].token_ids


def test_a_turn_stops_at_its_token_limit_and_is_not_complete(folder: Path) -> None:
    engine, chat = make_engine(folder)
    engine.submit(TurnRequest(1, chat.prompt_ids("Cancel booking B42.", []), max_new_tokens=3, seed=1))
    (reply,) = engine.poll()
    assert len(reply.token_ids) == 3 or reply.token_ids[-1] == chat.end_of_turn
    assert (reply.finish == "end_of_turn") == (reply.token_ids[-1] == chat.end_of_turn)


def test_a_long_tool_reply_is_read_like_a_short_one(folder: Path) -> None:
    """Replies over 24 tokens take another path (a forward of their own); both must leave the same cache behind."""
    engine, chat = make_engine(folder)
    prompt, reply = chat.prompt_ids("Cancel booking B42.", []), chat.encode('{"status": "ok", "cost": 56} ' * 6)
    for handle, appended in ((1, reply[:20]), (2, reply)):
        engine.submit(TurnRequest(handle, prompt, max_new_tokens=4, seed=handle))
        (first,) = engine.poll()
        engine.submit(TurnRequest(handle, appended, max_new_tokens=4, seed=9))
        (second,) = engine.poll()
        token_ids = [*prompt, *first.token_ids, *appended, *second.token_ids]
        expected = plain_logp(folder, token_ids)[-len(second.token_ids) :]
        assert second.sampler_logp == pytest.approx(expected.tolist(), abs=1e-5)
        engine.release(handle)


def test_changing_a_tool_reply_changes_what_follows(folder: Path) -> None:
    engine, chat = make_engine(folder)
    logps = []
    for handle, text in ((1, '{"status": "ok", "cost": 56}'), (2, '{"status": "ok", "cost": 83}')):
        engine.submit(TurnRequest(handle, chat.prompt_ids("Cancel booking B42.", []), max_new_tokens=1, seed=1))
        engine.poll()
        engine.submit(TurnRequest(handle, chat.encode(text), max_new_tokens=1, seed=1))
        logps.append(engine.poll()[0].sampler_logp[0])
    assert abs(logps[0] - logps[1]) > 1e-4


def test_new_weights_are_generated_with_at_once(folder: Path) -> None:
    model, chat = load_model(folder, num_threads=1), load_chat(folder)
    engine = load_engine(
        model,
        chat,
        engine=EngineSettings(name="transformers", max_concurrent_episodes=2, probe_tolerance=1e-3, vllm=None),
        sampling=tiny.SAMPLING,
    )
    prompt = chat.prompt_ids("Cancel booking B42.", [])
    logps = []
    for handle in (1, 2):
        engine.submit(TurnRequest(handle, prompt, max_new_tokens=1, seed=1))
        logps.append(engine.poll()[0].sampler_logp[0])
        engine.release(handle)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
    assert logps[0] != logps[1]
