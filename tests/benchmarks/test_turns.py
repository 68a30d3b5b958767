"""Turns per second with prompts of 18,000 tokens and an engine that costs nothing: one interpreter, and the pool.

What was replaced is measured in the same run: a request's ids through `json`, as before, and through the client's own
code. The pool is measured in wall time, in rounds between those of one process; a tool computes so many milliseconds.
CPU time where it says so, since machines are shared. Written to artifacts/bench/turns.json.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.chat.format import ChatFormat
from tasks.core import json_text
from tasks.core.files import write_json
from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.engines.vllm.prompt_ids import encode_body, parse_answer
from tasks.environments.bfcl.environment import BFCL
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.base import Environment
from tasks.tools.pool.environment import PooledEnvironment
from tasks.tools.settings import PoolSettings
from tests import tiny
from tests.benchmarks.demo import demo_params
from tests.chat.templates import QWEN
from tests.conftest import ROOT
from tests.tools.busy_world import MAKE, Busy
from tests.worlds import environment_settings

pytestmark = pytest.mark.bench
NUM_TOKENS, NUM_PROBLEMS, GROUP, NUM_CALLS, ROUNDS = 18_000, 8, 8, 8, 3
NUM_TURNS = NUM_PROBLEMS * GROUP * (NUM_CALLS + 1)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def make_chat(text: str) -> ChatFormat:
    """Byte pairs learnt from the text, and the template of Qwen's models."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=SPECIAL[1], pad_token=SPECIAL[2], additional_special_tokens=SPECIAL[:1]
    )
    tokenizer.chat_template = QWEN
    return ChatFormat(tokenizer, source="bench")


def problems() -> list[Problem]:
    turn = ReferenceTurn(calls=[], answer="Done.")
    return [
        Problem(id=f"p{n}", category="c", level=1, requests=[f"Go, {n}."], world={}, reference=[turn], split_group="g")
        for n in range(NUM_PROBLEMS)
    ]


def play(chat: ChatFormat, world: Environment, milliseconds: float) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process) of 64 episodes of nine turns; every prompt is read anew."""
    chat._short_replies.cache_clear()
    chat._long_replies.cache_clear()
    call = call_text(ToolCall(name="compute", arguments={"milliseconds": milliseconds}))
    engine = ScriptedEngine(
        [[chat.encode(text) for text in (*[call] * NUM_CALLS, "Done.")]], end_of_turn=chat.end_of_turn
    )
    limits = {"max_turns": 99, "max_tokens_per_turn": 200, "max_tokens_per_episode": 2 * NUM_TOKENS}
    episodes = EngineEpisodes(engine, chat, tiny.SAMPLING.model_copy(update=limits))
    collector = Collector(episodes, world, max_concurrent_episodes=64, seed=0, stage="bench")
    keys = [EpisodeKey(problem, 0, sample) for problem in problems() for sample in range(GROUP)]
    wall, cpu = time.perf_counter(), time.process_time()
    played = collector.collect(keys)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    assert sum(len(one.turns) for one in played) == NUM_TURNS
    assert {one.outcome for one in played} == {"success"}
    assert min(one.sequences[0].sampled_mask.index(True) for one in played) > 0.95 * NUM_TOKENS
    return seconds


def pool_of(num_workers: int) -> PooledEnvironment:
    pool = PoolSettings(num_workers=num_workers, max_restarts=0, memory_gib=4)
    return PooledEnvironment(Busy(), environment_settings(), pool, make=MAKE)


def request_seconds() -> dict[str, float]:
    """CPU seconds that a turn's ids take on their way to a server and back."""
    ids = [random.Random(0).randrange(150_000) for _ in range(NUM_TOKENS)]
    body = {"prompt": ids, "max_tokens": 1}
    choice = {"token_ids": [1], "prompt_token_ids": ids}
    content = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()

    def before() -> None:
        json.dumps(body, separators=(",", ":")).encode()
        assert json_text.parse(content)["choices"][0]["prompt_token_ids"] == ids

    def after() -> None:
        encode_body(body)
        assert parse_answer(content, ids)["choices"][0]["prompt_token_ids"] == ids

    return {"request_before": cpu_of(before), "request_after": cpu_of(after)}


def cpu_of(work: Callable[[], None]) -> float:
    rounds = []
    for _ in range(30):
        start = time.process_time()
        work()
        rounds.append(time.process_time() - start)
    return statistics.median(rounds)


def test_turns_per_second_of_one_interpreter_and_of_the_pool() -> None:
    docs = json.dumps([tool.schema() for tool in BFCL().tools])
    chat = make_chat(docs)
    Busy.rules = chat.decode((chat.encode(docs) * 3)[: NUM_TOKENS - 200])
    worlds: dict[str, Any] = {"here": Busy(), "1 worker": pool_of(1), "2 workers": pool_of(2)}
    figures: dict[str, Any] = request_seconds()
    try:
        for milliseconds in (0.0, 1.0, 4.0):
            rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in worlds}
            for number in range(ROUNDS + 1):
                for name, world in worlds.items():
                    seconds = play(chat, world, milliseconds)
                    if number:  # the first starts workers
                        rounds[name].append(seconds)
            for name, found in rounds.items():
                figures[f"{milliseconds:g} ms, {name}"] = {
                    "turns_per_second": NUM_TURNS / statistics.median(wall for wall, _ in found),
                    "turns_per_cpu_second_here": NUM_TURNS / statistics.median(cpu for _, cpu in found),
                    "range": [NUM_TURNS / max(wall for wall, _ in found), NUM_TURNS / min(wall for wall, _ in found)],
                }
    finally:
        for world in worlds.values():
            world.close()
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "turns.json", figures)
    Console().print(figures)
    assert figures["request_before"] > 2 * figures["request_after"]
    here, pooled = (figures[f"4 ms, {name}"]["turns_per_cpu_second_here"] for name in ("here", "2 workers"))
    assert pooled > 1.5 * here, "the tool computes in the workers"
    busy = [figures[f"4 ms, {name}"]["turns_per_second"] for name in worlds]
    assert busy[2] > busy[1], "two workers compute at once"
