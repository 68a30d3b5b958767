"""Many episodes at once on one MCP server, by stdio and by HTTP, and a GRPO run end to end on its tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.mcp.environment import MCPEnvironment
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.base import Environment
from tests import tiny
from tests.environments import mcp_server
from tests.profiles import profile_params

pytestmark = pytest.mark.slow

ROOMY = tiny.ROOMY.model_copy(update={"max_turns": 5, "max_tokens_per_turn": 90, "max_tokens_per_episode": 900})
Make = Callable[..., MCPEnvironment]


def reference_texts(problem: Problem) -> list[str]:
    turn = problem.reference[0]
    return [*map(call_text, turn.calls), turn.answer]


def collect(environment: Environment, scripts: list[tuple[Problem, list[str]]]) -> list[Trajectory]:
    """Play every script at the same time, with an engine that writes it."""
    chat = ChatFormat(tiny.tokenizer(), source="test")
    ids = [[chat.encode(text) for text in texts] for _, texts in scripts]
    collector = Collector(
        EngineEpisodes(ScriptedEngine(ids, end_of_turn=chat.end_of_turn), chat, ROOMY),
        environment,
        max_concurrent_episodes=len(scripts),
        seed=0,
        stage="test",
    )
    return collector.collect([EpisodeKey(problem, 0, number) for number, (problem, _) in enumerate(scripts)])


@pytest.mark.parametrize(("way", "num_sessions"), [("stdio", 3), ("http", 64)])
def test_64_episodes_at_once_each_get_their_own_verdict(
    mcp_world: Make, mcp_url: str, way: str, num_sessions: int
) -> None:
    """Every third episode closes without a word of the price; over stdio all 64 share three servers in turn."""
    address = {"command": None, "url": mcp_url} if way == "http" else {}
    environment = mcp_world(max_servers=num_sessions, **address)
    scripts = [
        (problem, [*reference_texts(problem)[:-1], "Done."] if number % 3 == 0 else reference_texts(problem))
        for number, problem in enumerate(mcp_server.problems(64))
    ]
    played = collect(environment, scripts)
    assert [t.outcome for t in played] == ["failure" if number % 3 == 0 else "success" for number in range(64)]
    assert all(t.checks["bookings"] for t in played)
    assert len(environment.sessions.open_sessions) == num_sessions


def warm_started(folder: Path, texts: list[list[str]], problems: list[Problem]) -> Path:
    """A tiny model that has seen a few solutions, so that it calls tools at all."""
    from tasks.learning.sft.trainer import SupervisedTrainer
    from tasks.learning.shared.rows import Row
    from tasks.learning.shared.settings import SupervisedSettings
    from tasks.models.embedded import build_model, build_tokenizer
    from tasks.models.folders import load_model, save_snapshot

    names = [*mcp_server.ROOMS, *mcp_server.GUESTS]
    words = build_tokenizer([text for texts_of in texts for text in texts_of], names, tiny.EMBEDDED)
    model = build_model(len(words), tiny.EMBEDDED, seed=0, end_of_turn=words.eos_token_id)
    chat = ChatFormat(words, source="test")
    rows = []
    for problem, (_, written, reply, answer) in zip(problems, texts, strict=True):
        prompt, call = chat.prompt_ids(problem.requests[0], []), [*chat.encode(written), chat.end_of_turn]
        between, last = chat.reply_ids((reply,)), [*chat.encode(answer), chat.end_of_turn]
        mask = [False] * len(prompt) + [True] * len(call) + [False] * len(between) + [True] * len(last)
        rows.append(Row([*prompt, *call, *between, *last], mask, [0.0] * len(mask), advantage=1.0))
    params = profile_params("test")["warm_start"]
    settings = SupervisedSettings.model_validate({**params, "num_steps": 60, "batch_size": 12})
    save_snapshot(folder, model, words)
    trainer = SupervisedTrainer(load_model(folder, compute=on_cpu(1)), rows, settings, seed=0)
    for _ in range(settings.num_steps):
        trainer.step()
    save_snapshot(folder, trainer.model, words)
    return folder


@pytest.mark.slow
def test_a_short_grpo_run_on_a_servers_tools(tmp_path: Path) -> None:
    """Two iterations of 4 problems × 4, the world loaded by name as in any run."""
    from tasks.core.settings import load
    from tasks.stages.train.settings import TrainSections
    from tasks.stages.train.stage import train_policy

    before = psutil.Process().children(recursive=True)
    free = [problem for problem in mcp_server.problems(24) if problem.category == "free"]
    texts = []
    for problem in free:
        (call,), price = problem.reference[0].calls, problem.world["price"]
        reply = json.dumps({"booking": 1, "price": price}, indent=2)
        texts.append([problem.requests[0], call_text(call), reply, problem.reference[0].answer])
    start = warm_started(tmp_path / "start", texts, free)
    params: dict[str, Any] = profile_params("test")
    params["environment"] = mcp_server.environment_settings(max_servers=3).model_dump()
    params["sampling"] |= {"max_tokens_per_turn": 40, "max_tokens_per_episode": 256, "temperature": 1.0}
    params["train"] |= {
        "num_iterations": 2, "snapshot_interval": 2, "checkpoint_interval": 2, "problems_per_iteration": 4,
        "group_size": 4, "problem_sampler": "uniform", "zero_variance_groups": "keep",
    }  # fmt: skip
    rows = train_policy(
        load(TrainSections, params), start=start, problems=mcp_server.problems(24), output=tmp_path / "output",
        resume=tmp_path / "resume", alarms=tmp_path / "alarms",
    )  # fmt: skip
    assert len(rows) == 2
    assert all(row["num_episodes"] == 16 for row in rows)
    assert max(row["success_rate"] for row in rows) > 0  # bookings were made, and judged by the server's own database
    assert all(row["episodes_dropped"] == row["episode_restarts"] == 0 for row in rows)
    started = set(psutil.Process().children(recursive=True)) - set(before)
    assert not psutil.wait_procs(started, timeout=120)[1]
