"""A recorded run, played again with the tools switched off: the same trajectories, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.format import ChatFormat, load_chat
from tasks.core.tool_calls import call_text
from tasks.environments.catalog import load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings
from tasks.tools.base import Environment
from tasks.tools.cache.store import ToolStore, write_frozen
from tasks.tools.settings import FaultSettings
from tests import tiny
from tests.worlds import cache_settings, environment_settings

pytestmark = pytest.mark.slow

SAMPLES = 6
PROBLEMS = tiny.problems(34, max_level=4)[:17]  # one of each category
SAMPLING = tiny.SAMPLING.model_copy(update={"max_tokens_per_turn": 64, "max_tokens_per_episode": 256})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has seen how a call is written, and still gets many of them wrong."""
    folder = tiny.model_folder(tmp_path_factory.mktemp("model") / "m")
    model = load_model(folder, compute=on_cpu(1))
    _imitate(model, load_chat(folder))
    model.save_pretrained(folder)
    return folder


def _imitate(model: Any, chat: ChatFormat) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    book = next(problem for problem in PROBLEMS if problem.category == "book/none").reference[0]
    texts = [*map(call_text, book.calls[:4]), book.answer]
    for step in range(150):
        text = texts[step % len(texts)]
        prompt = chat.prompt_ids(PROBLEMS[step % len(PROBLEMS)].requests[0], [])
        ids = torch.tensor([[*prompt, *chat.encode(text), chat.end_of_turn]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def settings(folder: Path, mode: str, *, frozen: Path | None = None, **changed: Any) -> EnvironmentSettings:
    cache = cache_settings(mode, folder, frozen)
    return environment_settings(cache=cache, **changed)


def run(model_folder: Path, environment: EnvironmentSettings) -> tuple[str, Collector]:
    """The trajectories of a run as they would be written, and what ran it."""
    chat = load_chat(model_folder)
    engine = EngineSettings(name="transformers", max_concurrent_episodes=32, probe_tolerance=1e-3, settings=None)
    collector = Collector(
        EngineEpisodes(
            load_engine(model_folder, chat, engine=engine, sampling=SAMPLING, compute=on_cpu(1)),
            chat,
            SAMPLING,
        ),
        load_environment(environment),
        max_concurrent_episodes=32,
        seed=5,
        stage="test",
    )
    keys = [EpisodeKey(problem, 0, sample) for problem in PROBLEMS for sample in range(SAMPLES)]
    return json.dumps([trajectory.to_row() for trajectory in collector.collect(keys)]), collector


class SwitchedOff:
    """In the place of the world's class: it overrides nothing, and whatever is done with it is an error."""

    def __getattr__(self, name: str) -> Any:
        if name == "tools_for":
            return Environment.tools_for
        raise AssertionError(f"the world was asked for {name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("the world was made")


def test_a_strict_replay_writes_the_same_bytes_with_the_tools_switched_off(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recorded, _ = run(model_folder, settings(tmp_path / "store", "record"))
    assert recorded == run(model_folder, environment_settings())[0]  # recording itself changes nothing
    rows = json.loads(recorded)
    replies = [reply for row in rows for turn in row["turns"] for reply in turn["replies"]]
    assert sum('"status": "ok"' in reply for reply in replies) > 20  # of the tools, not errors of the layer alone
    assert sum('"status": "invalid"' in reply for reply in replies) > 20
    monkeypatch.setattr("tasks.environments.travel_desk.environment.TravelDesk", SwitchedOff())

    replayed, collector = run(model_folder, settings(tmp_path / "store", "strict"))
    assert replayed == recorded
    counts = collector.environment.counts()
    assert counts == {"tool_cache_hits": len(replies) + len(rows), "tool_cache_misses": 0, "tool_cache_changes": 0}

    store = ToolStore(tmp_path / "store")
    write_frozen(frozen := tmp_path / "frozen.jsonl", dict(store.entries()))
    store.close()
    shutil.rmtree(tmp_path / "store")
    assert run(model_folder, settings(tmp_path / "store", "strict", frozen=frozen))[0] == recorded
    assert not (tmp_path / "store").exists()


def test_faults_on_purpose_that_the_model_meets_are_replayed_as_well(model_folder: Path, tmp_path: Path):
    """They stand outside the cache, so its answers are whole and the same chance strikes them again."""
    faults = FaultSettings(
        seed=1, seen_by="model", error_rate=0.1, timeout_rate=0.1, rate_limit_rate=0.1, latency_rate=0.0,
        latency_seconds=0.0, truncate_rate=0.2, rename_rate=0.2,
    )  # fmt: skip
    recorded, _ = run(model_folder, settings(tmp_path, "record", faults=faults))
    assert recorded != run(model_folder, settings(tmp_path, "record"))[0]
    assert run(model_folder, settings(tmp_path, "strict", faults=faults))[0] == recorded
