"""Many episodes over one engine: a bounded number in flight, results in the order they were asked for.

While tools are slow, other episodes go on; the engine generates for whoever has a turn to be written, and comes back
when a tool has answered, so that nobody's turn holds up another's. An environment that fails is not the policy's fault:
the episode starts again with the same key (and so the same random numbers) in a fresh environment, and after
`limits.max_attempts` it is recorded as `environment_error`, which nothing rewards. Where too many are lost that way,
the run stops (`fault_log.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.rollouts.engine import Engine, EpisodeHandle
from tasks.rollouts.episode import EpisodeKey, EpisodeRun
from tasks.rollouts.fault_log import FaultLog, in_words
from tasks.rollouts.finished import FinishedEpisodes, missing_of, with_finished
from tasks.rollouts.settings import PlaySettings, SamplingSettings
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from tasks.core.progress import Bar
    from tasks.rollouts.load import Engines

WAKE = 0  # the handle of no episode: it ends a wait for tools


class Abandoned(Exception):
    """The collection was called off."""


class Collector:
    """Runs episodes of one stage with one engine; `chat` and `environment` are shared by all of them.

    `faults` counts what the environment cost so far: calls repeated, episodes restarted, episodes dropped.
    """

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
        num_finished: int = 0,
    ):
        self.engine, self.chat, self.environment = engine, chat, environment
        self.sampling, self.max_concurrent_episodes = sampling, max_concurrent_episodes
        self.seed, self.stage = seed, stage
        self.fingerprint = environment.fingerprint()
        self.faults = FaultLog(environment.limits, num_finished=num_finished)
        self.num_opened = 0
        self.is_abandoned = False
        self.answered: SimpleQueue[EpisodeHandle] = SimpleQueue()  # episodes whose tool has answered
        # The samples of a problem follow one another; prompts of all problems at once would fill the memory.
        self.prompt_ids = lru_cache(maxsize=max_concurrent_episodes)(self._prompt_ids)

    def collect(
        self,
        keys: Sequence[EpisodeKey],
        on_done: Callable[[], None] = lambda: None,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Trajectory]:
        """One trajectory a key, in the order of the keys. ValueError where the environment loses too many of them.
        `keep` is handed each as soon as its episode is over.
        """
        self.prompt_ids.cache_clear()
        self.problems = {key.problem.id: key.problem for key in keys}
        self.waiting = deque((number, key, 0) for number, key in enumerate(keys))
        self.running: dict[EpisodeHandle, tuple[int, EpisodeRun]] = {}
        self.held: dict[EpisodeHandle, list[int]] = {}  # what the engine has of each episode
        self.answered = SimpleQueue()
        self.num_turns = self.num_waits = 0  # episodes the engine writes for, and episodes a tool works for
        finished: dict[int, Trajectory] = {}
        try:
            while self.waiting or self.running:
                self._check_wanted()
                self._fill_up()
                for run in self._advanced():
                    trajectory = self._settle(run)
                    if trajectory is not None:
                        number, _ = self.running.pop(run.handle)
                        finished[number] = trajectory
                        keep(trajectory)
                        self.faults.finish(trajectory, num_left=len(keys) - len(finished))
                        on_done()
        finally:
            for _, run in self.running.values():  # an error is on its way; servers must not outlive it
                run.episode.close()
        return [finished[number] for number in range(len(keys))]

    def abandon(self) -> None:
        """From another thread: the collection under way, and any after it, ends with Abandoned once the engine's step
        is done; neither a turn nor a tool is waited for. The engine is of no more use then.
        """
        self.is_abandoned = True
        self.answered.put(WAKE)

    def counts(self) -> dict[str, float]:
        """Totals of this stage so far: what faults cost, how the tool cache and the engine's prefix cache did."""
        return {**self.faults.counts(), **self.environment.counts(), **self.engine.counts()}

    def _fill_up(self) -> None:
        while self.waiting and len(self.running) < self.max_concurrent_episodes:
            number, key, attempt = self.waiting.popleft()
            run = self._open(key, attempt)
            self.running[run.handle] = (number, run)
            self._submit(run)

    def _advanced(self) -> list[EpisodeRun]:
        """The episodes that a reply of the engine or of a tool has brought further; waits where there is none yet."""
        runs = []
        for reply in self.engine.poll(self._has_answer) if self.num_turns else []:
            self.num_turns -= 1
            self.held[reply.episode] += reply.token_ids
            _, run = self.running[reply.episode]
            run.advance(reply)
            runs.append(run)
        while self.num_waits:
            try:
                handle = self.answered.get(block=not runs and not self.num_turns)
            except Empty:
                break
            self._check_wanted()
            self.num_waits -= 1
            _, run = self.running[handle]
            run.resume()
            runs.append(run)
        return runs

    def _has_answer(self) -> bool:
        return not self.answered.empty()

    def _check_wanted(self) -> None:
        if self.is_abandoned:
            raise Abandoned

    def _settle(self, run: EpisodeRun) -> Trajectory | None:
        """Ask for what the episode needs next; its trajectory where it is over and will not be tried again."""
        if run.waiting_for is not None:
            self.num_waits += 1
            run.waiting_for.add_done_callback(lambda _: self.answered.put(run.handle))
            return None
        if run.outcome is None:
            self._submit(run)
            return None
        del self.held[run.handle]
        self.engine.release(run.handle)
        run.episode.close()
        self.faults.num_retries += run.num_retries
        if run.fault is not None and run.attempt + 1 < self.environment.limits.max_attempts:
            self.faults.restart(run.fault)
            number, _ = self.running.pop(run.handle)
            self.waiting.append((number, run.key, run.attempt + 1))
            return None
        return run.trajectory(fingerprint=self.fingerprint)

    def _submit(self, run: EpisodeRun) -> None:
        """Ask for the next turn. What the engine then holds must be the episode so far, token by token: a prompt that
        is not an extension of the last would train on text that was never sampled.
        """
        request = run.next_request()
        held = self.held.setdefault(run.handle, [])
        held += request.token_ids
        assert held == run.token_ids, f"problem {run.key.problem.id}: the prompt does not extend the conversation"
        self.num_turns += 1
        self.engine.submit(request)

    def _open(self, key: EpisodeKey, attempt: int) -> EpisodeRun:
        self.num_opened += 1
        return EpisodeRun(
            key,
            self.num_opened,
            environment=self.environment,
            chat=self.chat,
            prompt_ids=self.prompt_ids(key.problem.id),
            sampling=self.sampling,
            seed=self.seed,
            stage=self.stage,
            attempt=attempt,
        )

    def _prompt_ids(self, problem_id: str) -> list[int]:
        """Rendered once for all samples of a problem: prompts of thousands of tokens cost milliseconds each."""
        problem = self.problems[problem_id]
        tools = [tool.schema() for tool in self.environment.tools_for(problem)]
        return self.chat.prompt_ids(problem.requests[0], tools)


def sample_episodes(
    model_folder: Path,
    environment: Environment,
    problems: Sequence[Problem],
    play: PlaySettings,
    *,
    stage: str,
    label: str,
    engines: Engines | None = None,
    finished: FinishedEpisodes | None = None,
    bar: Bar | None = None,
) -> list[Trajectory]:
    """Play every problem `play.samples_per_problem` times with the model in a folder; order is problems × samples.

    The draw number is 0, so every model measured on one stage's problems meets the same random numbers, and so is the
    policy version, whatever an engine that is refreshed counts. `engines` are the caller's, where it has several models
    to play, and so is a `bar` that shows them all. Episodes that are `finished` are not played again, those played here
    join them; where none is missing, no model is loaded.
    """
    from tasks.core.progress import progress_bar
    from tasks.rollouts.load import Engines, load_checked_chat

    keys = [EpisodeKey(problem, 0, sample) for problem in problems for sample in range(play.samples_per_problem)]
    missing = missing_of(keys, finished)
    if not missing:
        return with_finished(keys, [], finished)
    chat = load_checked_chat(model_folder, environment, problems, play.sampling)
    with nullcontext(engines) if engines else closing(Engines(play)) as at_hand:
        collector = Collector(
            at_hand.over(model_folder, chat, environment, problems),
            chat,
            environment,
            sampling=play.sampling,
            max_concurrent_episodes=play.engine.max_concurrent_episodes,
            seed=play.seed,
            stage=stage,
            num_finished=len(keys) - len(missing),
        )
        shown = nullcontext(bar) if bar else progress_bar(label, total=len(keys), done=len(keys) - len(missing))
        with shown as advancing:
            played = collector.collect(missing, on_done=advancing.advance, keep=partial(_keep, finished))
        try:
            at_hand.confirm(model_folder)
        except ValueError:
            if finished is not None:
                finished.forget()
            raise
    if note := in_words(collector.counts()):
        tell(f"{label}: {note}")
    return with_finished(keys, played, finished)


def _keep(finished: FinishedEpisodes | None, trajectory: Trajectory) -> None:
    trajectory.policy_version = 0
    for turn in trajectory.turns:
        turn.policy_version = 0
    if finished is not None:
        finished.add(trajectory)
