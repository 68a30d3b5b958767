"""vLLM in process beyond the contract: its prefix cache, the fault of tied embeddings, a death, and what is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from tasks.engines.vllm.ipc import check_transfer
from tasks.models.architecture import model_logp
from tasks.models.differences import tolerance_of
from tasks.models.folders import save_snapshot
from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import TurnRequest
from tasks.rollouts.probe import check_weights, probe_sequences
from tests import tiny
from tests.engine_benches import TravelDesk, play

if TYPE_CHECKING:
    from tests.engine_benches import VLLMBench


@pytest.fixture
def probe(vllm_in_process: VLLMBench) -> list[list[int]]:
    return probe_sequences(vllm_in_process.chat, TravelDesk(), tiny.problems(40), max_tokens=200)


@pytest.mark.slow
def test_a_second_turn_finds_the_conversation_so_far_in_the_prefix_cache(vllm_in_process: VLLMBench) -> None:
    """Whole blocks alone are kept, of 32 tokens here: 4 of them lie within the 150 tokens asked for and 4 written."""
    engine, _ = vllm_in_process.engine()
    before = engine.counts()
    engine.submit(TurnRequest(1, list(range(20, 170)), max_new_tokens=4, seed=1))
    (first,) = engine.poll()
    engine.submit(TurnRequest(1, list(range(200, 216)), max_new_tokens=4, seed=2))
    engine.poll()
    engine.release(1)
    queries, hits = (engine.counts()[name] - before[name] for name in ("prefix_cache_queries", "prefix_cache_hits"))
    assert queries == 150 + (150 + len(first.token_ids) + 16)
    assert hits == 128


@pytest.mark.slow
def test_most_of_what_an_episode_asks_for_is_in_the_prefix_cache(vllm_in_process: VLLMBench) -> None:
    before = vllm_in_process.live.counts()
    play(vllm_in_process, concurrency=8)
    after = vllm_in_process.live.counts()
    hits, queries = (after[name] - before[name] for name in ("prefix_cache_hits", "prefix_cache_queries"))
    assert hits / queries > 0.3


@pytest.mark.slow
def test_the_probe_passes_the_export_and_catches_a_reload_with_tied_embeddings(
    vllm_in_process: VLLMBench, probe: list[list[int]], tmp_path: Path
) -> None:
    """The same weights twice: as they are exported, and as `save_pretrained` writes them, the head left out."""
    engine, model = vllm_in_process.engine()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    save_snapshot(tmp_path / "tied", model, vllm_in_process.chat.tokenizer)
    vllm_in_process.live.core.load(tmp_path / "tied")
    assert vllm_in_process.live.core.empty_prefix_cache()
    with pytest.raises(ValueError, match=r"does not have the trainer's weights.*at token \d+ of probe sequence [0-3]"):
        check_weights(engine, model_logp(model, probe), probe, tolerance=tolerance_of("float32"))

    engine.refresh(PolicyWeights.of(model), engine.policy_version + 1)
    found = check_weights(engine, model_logp(model, probe), probe, tolerance=tolerance_of("float32"))
    assert found.differences.max < 1e-4


@pytest.mark.slow
def test_a_refresh_that_broke_off_is_never_generated_with(vllm_in_process: VLLMBench) -> None:
    engine, model = vllm_in_process.engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_in_process.live.core.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(ValueError, match="would not empty its prefix cache"):
            engine.refresh(PolicyWeights.of(model), engine.policy_version + 1)
    engine.submit(TurnRequest(1, list(range(20, 40)), max_new_tokens=2, seed=1))
    with pytest.raises(ValueError, match=r"weights it calls .'half applied'. where policy version"):
        engine.poll()
    engine.release(1)
    engine.refresh(PolicyWeights.of(model), engine.policy_version + 1)
    engine.submit(TurnRequest(2, list(range(20, 40)), max_new_tokens=2, seed=1))
    assert engine.poll()[0].policy_version == engine.policy_version
    engine.release(2)


@pytest.mark.slow
def test_nobody_else_can_reach_the_engine_core(vllm_in_process: VLLMBench) -> None:
    """It is asked over sockets in a folder for this user alone; only torch's own ports are on loopback."""
    live = vllm_in_process.live
    folder = live.core.sockets
    core = psutil.Process(live.core.watch.core.pid)
    ours = psutil.Process(os.getpid())
    assert folder.stat().st_mode & 0o777 == 0o700
    sockets = [str(found.laddr) for process in (core, ours) for found in process.net_connections("unix")]
    assert {Path(path).parent for path in sockets if Path(path).name in os.listdir(folder)} == {folder}
    assert os.listdir(folder), "requests go another way"
    ports = [found.laddr.ip for found in core.net_connections("inet") if found.status == psutil.CONN_LISTEN]
    assert set(ports) <= {"127.0.0.1"}


@pytest.mark.drill
def test_a_killed_engine_core_is_started_again_and_its_turns_come_out_the_same(vllm_in_process: VLLMBench) -> None:
    """Eight turns, and the same eight with a kill -9 under way."""
    engine, _ = vllm_in_process.engine()
    live = vllm_in_process.live
    for seed in range(8):
        engine.submit(TurnRequest(seed, list(range(20, 60)), max_new_tokens=100, seed=seed))
    whole: dict[int, list[int]] = {}
    while len(whole) < 8:
        whole |= {reply.episode: reply.token_ids for reply in engine.poll()}
    restarts = engine.counts()["engine_restarts"]
    for seed in range(8):
        engine.release(seed)
        engine.submit(TurnRequest(seed, list(range(20, 60)), max_new_tokens=100, seed=seed))
    os.kill(live.core.watch.core.pid, signal.SIGKILL)
    again: dict[int, list[int]] = {}
    while len(again) < 8:
        again |= {reply.episode: reply.token_ids for reply in engine.poll()}
    assert again == whole
    assert engine.counts()["engine_restarts"] == restarts + 1
    for seed in range(8):
        engine.release(seed)


def test_ways_to_send_weights_that_cannot_work_are_refused_in_one_line() -> None:
    check_transfer("disk", mode="server", on_gpu=False)
    check_transfer("ipc", mode="in_process", on_gpu=True)
    check_transfer("nccl", mode="server", on_gpu=True)
    for transfer, mode in (("ipc", "server"), ("nccl", "in_process")):
        with pytest.raises(ValueError, match=f"transfer is {transfer} and engine.settings.mode is {mode}, so new"):
            check_transfer(transfer, mode=mode, on_gpu=True)  # type: ignore[arg-type]
    for transfer, mode in (("ipc", "in_process"), ("nccl", "server")):
        with pytest.raises(ValueError, match=f"transfer is {transfer}, which goes from GPU to GPU") as error:
            check_transfer(transfer, mode=mode, on_gpu=False)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
