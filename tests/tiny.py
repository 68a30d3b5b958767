"""Small real models for tests: three architectures over one real tokenizer, built in under a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tasks.chat.format import load_chat
from tasks.core.records import Problem, Score, Trajectory
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.embedded import build_model, build_tokenizer
from tasks.models.folders import save_snapshot
from tasks.models.settings import EmbeddedModelSettings, on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EngineEpisodes
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings, SamplingSettings

ARCHITECTURES = ("qwen2", "qwen3", "llama")
SAMPLING = SamplingSettings(
    temperature=1.0,
    top_p=1.0,
    max_turns=4,
    max_tokens_per_turn=24,
    max_thinking_tokens_per_turn=None,
    max_tokens_per_episode=200,
    max_completion_tokens=None,
    stop_strings=[],
)
# No limit that a reference of any level meets.
ROOMY = SAMPLING.model_copy(update={"max_turns": 10, "max_tokens_per_turn": 60, "max_tokens_per_episode": 600})
EMBEDDED = EmbeddedModelSettings(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.08,
    max_position_embeddings=256,
    tools_in_prompt=False,
    thinks=False,
)
THINKING = EMBEDDED.model_copy(update={"thinks": True})
HEADS_FOR_VLLM = {"num_attention_heads": 2, "num_key_value_heads": 1}  # its CPU kernels want a head size of 32 or more


def problems(count: int, *, seed: int = 3, max_level: int = 3) -> list[Problem]:
    return list(TravelDesk().generate(seed=seed, num_problems=count, max_level=max_level))


def tokenizer(embedded: EmbeddedModelSettings = EMBEDDED) -> Any:
    world = TravelDesk()
    texts = []
    for number, problem in enumerate(problems(66)):
        texts += problem.requests
        demonstration = world.demonstrate(problem, random.Random(number))
        if demonstration:
            texts += [*demonstration.assistant_texts, *(r for replies in demonstration.replies for r in replies)]
            texts += world.thoughts(demonstration) if embedded.thinks else []
    return build_tokenizer(texts, world.vocabulary(), embedded)


def model_folder(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, embedded: EmbeddedModelSettings = EMBEDDED
) -> Path:
    """A random-weight model folder of one architecture, with the embedded tokenizer beside it."""
    import transformers

    words = tokenizer(embedded)
    model = build_model(len(words), embedded, seed=seed, end_of_turn=words.eos_token_id)
    if architecture != "qwen3":
        shared = {
            key: getattr(model.config, key)
            for key in EmbeddedModelSettings.model_fields
            if key not in ("tools_in_prompt", "thinks")
        }
        kinds = {
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        }
        config_class, model_class = kinds[architecture]
        config = config_class(
            vocab_size=len(words), tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
            eos_token_id=words.eos_token_id, **shared,
        )  # fmt: skip
        model = model_class(config).float()
    save_snapshot(folder, model, words)
    return folder


def reward_of_any_text(problem: Problem, trajectory: Trajectory, settings: Any) -> Score:
    """In the place of correctness, which is 0 for an untrained model: differs within every group, so weights move."""
    return Score(sum(trajectory.sequences[0].token_ids) % 7 / 7, {})


def collector(
    folder: Path, *, sampling: SamplingSettings = SAMPLING, concurrency: int = 32, seed: int = 5, stage: str = "test"
) -> Collector:
    kind = EngineEpisodes(engine(folder, sampling, concurrency=concurrency), load_chat(folder), sampling)
    return Collector(kind, TravelDesk(), max_concurrent_episodes=concurrency, seed=seed, stage=stage)


def engine(folder: Path, sampling: SamplingSettings = SAMPLING, *, concurrency: int = 32) -> Engine:
    settings = EngineSettings(
        name="transformers", max_concurrent_episodes=concurrency, probe_tolerance=1e-3, settings=None
    )
    return load_engine(folder, load_chat(folder), engine=settings, sampling=sampling, compute=on_cpu(1))
