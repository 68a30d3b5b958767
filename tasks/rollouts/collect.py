"""Many episodes at once: a bounded number in flight, results in the order of the keys.

While tools are slow, other episodes go on: the engine works for all that wait for a turn, and stops when a tool has
answered. A fault of an environment or an endpoint is not the policy's: the episode restarts with the same key, and so
the same random numbers, in a fresh environment; after `limits.max_attempts` it is recorded as `environment_error`,
never rewarded or scored. `fault_log.py` stops the run when too many are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.rollouts.clock import RolloutClock
from tasks.rollouts.conversation import Conversation, EpisodeKey, EpisodeKind
from tasks.rollouts.fault_log import FaultLog, JudgedTogether, in_words
from tasks.rollouts.finished import FinishedEpisodes, find_missing, merge_finished
from tasks.rollouts.kinds import kind_of
from tasks.rollouts.settings import PlaySettings
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from tasks.core.progress import Bar
    from tasks.rollouts.load import Engines


class Abandoned(Exception):
    """The collection was called off."""


class Collector:
    """Runs episodes of one stage and kind, which share `environment`. `faults` counts what faults cost so far, and is
    judged with those of `others`; `clock` has the seconds of the last episodes' turns.
    """

    def __init__(
        self,
        kind: EpisodeKind[Any],
        environment: Environment,
        *,
        max_concurrent_episodes: int,
        seed: int,
        stage: str,
        others: JudgedTogether | None = None,
    ):
        self.kind, self.environment, self.max_concurrent_episodes = kind, environment, max_concurrent_episodes
        self.seed, self.stage = seed, stage
        self.fingerprint = environment.fingerprint()
        self.faults = FaultLog(environment.limits, others)
        self.clock = RolloutClock()
        self.is_abandoned = False
        self.answered: SimpleQueue[Conversation | None] = SimpleQueue()  # episodes that waited; None ends a wait

    def collect(
        self, keys: Sequence[EpisodeKey], on_end: Callable[[Trajectory], None] = lambda trajectory: None
    ) -> list[Trajectory]:
        """One trajectory per key, in order; `on_end` gets each as it ends. ValueError where too many are lost."""
        self.begin(on_end)
        self.add(keys)
        try:
            while self.waiting or self.running:
                self.step()
        finally:
            self.close_running()  # on an error, close their servers too
        return [self.ended[number] for number in range(len(keys))]

    def begin(self, on_end: Callable[[Trajectory], None] = lambda trajectory: None) -> None:
        """Forget every episode."""
        self.waiting: deque[tuple[int, EpisodeKey, int]] = deque()  # number, key, attempt
        self.running: dict[Conversation, int] = {}  # the number of each episode's key
        self.ready: list[Conversation] = []  # those whose next turn is requested by the next step
        self.ended: dict[int, Trajectory] = {}
        self.answered = SimpleQueue()
        self.num_added = self.num_waits = 0
        self.is_held = False
        self.on_end = on_end
        self.clock.forget()

    def add(self, keys: Sequence[EpisodeKey]) -> range:
        """The numbers under which `ended` will have the trajectories."""
        numbers = range(self.num_added, self.num_added + len(keys))
        self.waiting.extend((number, key, 0) for number, key in zip(numbers, keys, strict=True))
        self.num_added += len(keys)
        return numbers

    def step(self) -> None:
        """Go on until an episode got a turn or an answer, or `wake` was called."""
        self._check_wanted()
        ready, self.ready = self.ready, []
        for run in chain(ready, self._open_more()):
            self._settle(run)
        for run in self._advance():
            self._settle(run)

    def complete_turns(self) -> None:
        """Let the engine complete the turns under way and begin no others; those come with the next step."""
        self.is_held = True
        while self.kind.num_turns:
            self._check_wanted()
            for run in self._advance():
                self._settle(run)
        self.is_held = False

    def close_running(self) -> None:
        for run in self.running:
            run.close()

    def wake(self) -> None:
        """From another thread: the step under way ends."""
        self.answered.put(None)

    def abandon(self) -> None:
        """From another thread: collections raise Abandoned after the engine's current step; the engine is then
        unusable.
        """
        self.is_abandoned = True
        self.wake()

    def counts(self) -> dict[str, float]:
        return {**self.faults.counts(), **self.environment.counts(), **self.kind.counts()}

    def _open_more(self) -> Iterator[Conversation]:
        """One after another: the engine may read the first one's prompt while the next one opens."""
        while self.waiting and len(self.running) < self.max_concurrent_episodes:
            number, key, attempt = self.waiting.popleft()
            run = self.kind.open(key, self.environment, seed=self.seed, stage=self.stage, attempt=attempt)
            self.running[run] = number
            yield run

    def _advance(self) -> list[Conversation]:
        runs: list[Conversation] = self.kind.poll(self._has_answer)
        for replied in runs:
            self.clock.end_turn(replied)
        while self.num_waits or self._has_answer():
            try:
                run = self.answered.get(block=not runs and not self.kind.num_turns)
            except Empty:
                break
            self._check_wanted()
            if run is None:
                break
            self.num_waits -= 1
            self.clock.end_wait(run)
            run.resume()
            runs.append(run)
        return runs

    def _has_answer(self) -> bool:
        return not self.answered.empty()

    def _check_wanted(self) -> None:
        if self.is_abandoned:
            raise Abandoned

    def _settle(self, run: Conversation) -> None:
        if run.waiting_for is None and run.outcome is None and self.is_held:
            self.ready.append(run)
        elif run.waiting_for is None and run.outcome is None:
            self.kind.submit(run)
            self.clock.begin_turn(run)
        if run.waiting_for is not None:
            self.num_waits += 1
            self.clock.begin_wait(run)
            answered = self.answered  # of these episodes: one that is discarded answers to nobody
            run.waiting_for.add_done_callback(lambda _: answered.put(run))
        elif run.outcome is not None:
            number = self.running.pop(run)
            self.kind.release(run)
            run.close()
            self.clock.end_episode(run)
            self.faults.num_retries += run.num_retries
            if run.fault is not None and run.attempt + 1 < self.environment.limits.max_attempts:
                self.faults.restart(run.fault)
                self.waiting.append((number, run.key, run.attempt + 1))
            else:
                self._keep(number, run)

    def _keep(self, number: int, run: Conversation) -> None:
        self.ended[number] = trajectory = run.trajectory(fingerprint=self.fingerprint)
        num_left = len(self.waiting) + len(self.running)
        if run.fault is not None:
            self.kind.lose(run.fault, self.faults, num_left=num_left)
        self.on_end(trajectory)
        self.faults.finish(trajectory, num_left=num_left)


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
    others: JudgedTogether | None = None,
) -> list[Trajectory]:
    """Play every problem `play.samples_per_problem` times with the model in a folder; order is problems × samples.

    `engines`, `bar` and `others` belong to a caller that plays several models. `finished` episodes are not played
    again; new ones are added to them. Where none is missing, no model is loaded.
    """
    from tasks.rollouts.load import Engines, load_checked_chat

    keys = measured_keys(problems, play.samples_per_problem)
    if not find_missing(keys, finished):
        return merge_finished(keys, [], finished)
    chat = load_checked_chat(model_folder, environment, problems, play.sampling)
    with ExitStack() as resources:
        at_hand = engines or resources.enter_context(closing(Engines(play)))
        engine = at_hand.over(model_folder, chat, environment, problems)
        collector = Collector(
            resources.enter_context(kind_of(environment, engine, chat, play.sampling)),
            environment,
            max_concurrent_episodes=play.engine.max_concurrent_episodes,
            seed=play.seed,
            stage=stage,
            others=others,
        )
        played = collect_missing(collector, keys, finished, label=label, bar=bar)
        try:
            at_hand.confirm(model_folder)
        except ValueError:
            if finished is not None:
                finished.forget()
            raise
    return played


def measured_keys(problems: Sequence[Problem], samples_per_problem: int) -> list[EpisodeKey]:
    """Draw number 0: every model measured on one stage's problems meets the same random numbers."""
    return [EpisodeKey(problem, 0, sample) for problem in problems for sample in range(samples_per_problem)]


def collect_missing(
    collector: Collector,
    keys: Sequence[EpisodeKey],
    finished: FinishedEpisodes | None,
    *,
    label: str,
    bar: Bar | None = None,
) -> list[Trajectory]:
    """Play the keys that are not `finished`; all episodes in order. Policy version 0, whatever a refreshed engine
    counts.
    """
    from tasks.core.progress import progress_bar

    missing = find_missing(keys, finished)
    num_finished = len(keys) - len(missing)
    collector.faults.num_finished += num_finished
    shown = nullcontext(bar) if bar else progress_bar(label, total=len(keys), done=num_finished)
    with shown as advancing, nullcontext() if finished is None else closing(finished):

        def end(trajectory: Trajectory) -> None:
            trajectory.policy_version = 0
            for turn in trajectory.turns:
                turn.policy_version = 0
            if finished is not None:
                finished.add(trajectory)
            advancing.advance()

        played = collector.collect(missing, on_end=end)
    if note := in_words(collector.counts()):
        tell(f"{label}: {note}")
    return merge_finished(keys, played, finished)
