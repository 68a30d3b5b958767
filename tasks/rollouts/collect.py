"""Many episodes over one engine: a bounded number in flight, results in the order they were asked for.

An environment that fails is not the policy's fault: the episode starts again with the same key (and so the same random
numbers) in a fresh environment, and after `MAX_ATTEMPTS` it is recorded as `environment_error`, which nothing rewards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.environments.base import Environment, EnvironmentFault
from tasks.records import Problem, Trajectory
from tasks.rollouts.chat import ChatFormat
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EpisodeKey, EpisodeRun
from tasks.rollouts.options import EngineSettings, SamplingSettings

MAX_ATTEMPTS = 3


class Collector:
    """Runs episodes of one stage with one engine; `chat` and `environment` are shared by all of them."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        environment: Environment,
        *,
        sampling: SamplingSettings,
        max_concurrent_episodes: int,
        seed: int,
        stage: str,
    ):
        self.engine, self.chat, self.environment = engine, chat, environment
        self.sampling, self.max_concurrent_episodes = sampling, max_concurrent_episodes
        self.seed, self.stage = seed, stage
        self.tools = [tool.schema() for tool in environment.tools]
        self.fingerprint = environment.fingerprint()
        self.num_opened = 0

    def collect(self, keys: Sequence[EpisodeKey], on_done: Callable[[], None] = lambda: None) -> list[Trajectory]:
        """One trajectory a key, in the order of the keys."""
        waiting = deque(enumerate(keys))
        attempts = [0] * len(keys)
        running: dict[int, tuple[int, EpisodeRun]] = {}
        self.held: dict[int, list[int]] = {}  # what the engine has of each episode
        finished: dict[int, Trajectory] = {}
        while waiting or running:
            while waiting and len(running) < self.max_concurrent_episodes:
                number, key = waiting.popleft()
                attempts[number] += 1
                run = self._open(key)
                running[run.handle] = (number, run)
                self._submit(run)
            for reply in self.engine.poll():
                number, run = running[reply.episode]
                self.held[reply.episode] += reply.token_ids
                try:
                    run.advance(reply)
                except EnvironmentFault:
                    run.abandon()
                if run.outcome is None:
                    self._submit(run)
                    continue
                del running[reply.episode], self.held[reply.episode]
                self.engine.release(reply.episode)
                if run.outcome == "environment_error" and attempts[number] < MAX_ATTEMPTS:
                    waiting.append((number, run.key))
                    continue
                finished[number] = run.trajectory(
                    policy_version=self.engine.policy_version, fingerprint=self.fingerprint
                )
                on_done()
        return [finished[number] for number in range(len(keys))]

    def _submit(self, run: EpisodeRun) -> None:
        """Ask for the next turn. What the engine then holds must be the episode so far, token by token: a prompt that
        is not an extension of the last would train on text that was never sampled.
        """
        request = run.next_request()
        held = self.held.setdefault(run.handle, [])
        held += request.token_ids
        assert held == run.token_ids, f"problem {run.key.problem.id}: the prompt does not extend the conversation"
        self.engine.submit(request)

    def _open(self, key: EpisodeKey) -> EpisodeRun:
        if len(key.problem.requests) > 1:
            raise ValueError(
                f"problem {key.problem.id!r}: has {len(key.problem.requests)} user requests, and episodes play "
                f"one, so it would be judged on what was never asked. Keep only the first request of its row."
            )
        prompt_ids = self.chat.prompt_ids(key.problem.requests[0], self.tools)
        self.num_opened += 1
        return EpisodeRun(
            key,
            self.num_opened,
            environment=self.environment,
            chat=self.chat,
            prompt_ids=prompt_ids,
            sampling=self.sampling,
            seed=self.seed,
            stage=self.stage,
        )


def sample_episodes(
    model_folder: Path,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    seed: int,
    stage: str,
    samples_per_problem: int,
    num_threads: int,
    label: str,
) -> list[Trajectory]:
    """Play every problem `samples_per_problem` times with the model in a folder; order is problems × samples.

    The draw number is 0, so every model measured on one stage's problems meets the same random numbers.
    """
    from tasks.models import load_model
    from tasks.progress import progress_bar
    from tasks.rollouts.load import load_checked_chat, load_engine

    chat = load_checked_chat(model_folder, environment, problems, sampling)
    model = load_model(model_folder, num_threads=num_threads)
    collector = Collector(
        load_engine(model, chat, engine=engine, sampling=sampling),
        chat,
        environment,
        sampling=sampling,
        max_concurrent_episodes=engine.max_concurrent_episodes,
        seed=seed,
        stage=stage,
    )
    keys = [EpisodeKey(problem, 0, sample) for problem in problems for sample in range(samples_per_problem)]
    with progress_bar(label, total=len(keys)) as bar:
        return collector.collect(keys, on_done=bar.advance)
