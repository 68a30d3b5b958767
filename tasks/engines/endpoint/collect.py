"""Many episodes of a model behind an endpoint: a bounded number in flight, results in the order they were asked for.

The loop of `collect.py` without tokens: here the model is one more thing an episode waits for, beside its tools. What
an endpoint or an environment fails at is not the model's fault: the episode starts again, and after
`limits.max_attempts` it is recorded as `environment_error`, which nothing scores. Where too many are lost, the run
stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.endpoint.episode import ChatModel, EndpointFault, TextEpisode, Usage
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.fault_log import FaultLog, in_words
from tasks.rollouts.finished import FinishedEpisodes, missing_of, with_finished
from tasks.tools.base import Environment


class TextCollector:
    """Plays episodes of one stage with one model. `faults` counts what environment and endpoint cost so far."""

    def __init__(
        self,
        model: ChatModel,
        environment: Environment,
        *,
        max_turns: int,
        max_concurrent_episodes: int,
        seed: int,
        stage: str,
        num_finished: int = 0,
    ):
        self.model, self.environment = model, environment
        self.max_turns, self.max_concurrent_episodes = max_turns, max_concurrent_episodes
        self.seed, self.stage = seed, stage
        self.fingerprint = environment.fingerprint()
        self.faults = FaultLog(environment.limits, num_finished=num_finished)
        self.num_lost, self.num_before = 0, num_finished  # to the endpoint; before a kill

    def collect(
        self,
        keys: Sequence[EpisodeKey],
        on_done: Callable[[], None] = lambda: None,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Trajectory]:
        """One trajectory a key, in the order of the keys. ValueError where too many are lost, or asking is no use.
        `keep` is handed each as soon as its episode is over.
        """
        self.waiting = deque((number, key, 0) for number, key in enumerate(keys))
        self.running: dict[int, TextEpisode] = {}
        self.answered: SimpleQueue[int] = SimpleQueue()  # episodes whose tool or model has answered
        self.usage = [Usage() for _ in keys]
        finished: dict[int, Trajectory] = {}
        try:
            while len(finished) < len(keys):
                if self.waiting and len(self.running) < self.max_concurrent_episodes:
                    number, key, attempt = self.waiting.popleft()
                    self.running[number] = self._open(number, key, attempt)
                else:
                    number = self.answered.get()
                run = self.running[number]
                run.resume()
                trajectory = self._settle(number, run, num_episodes=self.num_before + len(keys))
                if trajectory is not None:
                    finished[number] = trajectory
                    keep(trajectory)
                    self.faults.finish(trajectory, num_left=len(keys) - len(finished))
                    on_done()
        finally:
            for run in self.running.values():  # an error is on its way; servers must not outlive it
                if run.waiting_for is not None:
                    run.waiting_for.cancel()
                run.episode.close()
        return [finished[number] for number in range(len(keys))]

    def counts(self) -> dict[str, int]:
        """Totals of this stage so far: what faults cost, and how the tool cache did."""
        return {**self.faults.counts(), **self.environment.counts()}

    def _open(self, number: int, key: EpisodeKey, attempt: int) -> TextEpisode:
        return TextEpisode(
            key,
            model=self.model,
            environment=self.environment,
            max_turns=self.max_turns,
            seed=self.seed,
            stage=self.stage,
            usage=self.usage[number],
            attempt=attempt,
        )

    def _settle(self, number: int, run: TextEpisode, *, num_episodes: int) -> Trajectory | None:
        """Wait for what the episode needs next; its trajectory where it is over and will not be tried again."""
        if run.waiting_for is not None:
            run.waiting_for.add_done_callback(lambda _: self.answered.put(number))
            return None
        del self.running[number]
        run.episode.close()
        self.faults.num_retries += run.num_retries
        if run.fault is not None and run.attempt + 1 < self.environment.limits.max_attempts:
            self.faults.restart(run.fault)
            self.waiting.append((number, run.key, run.attempt + 1))
            return None
        if isinstance(run.fault, EndpointFault):
            self._lose(run.fault, num_episodes)
        return run.trajectory(fingerprint=self.fingerprint)

    def _lose(self, fault: EndpointFault, num_episodes: int) -> None:
        """Count an episode the endpoint cost. ValueError where it is one too many, or where nothing ever came back."""
        self.num_lost += 1
        share = self.environment.limits.max_dropped_share
        if (self.num_before or self.model.num_answered) and self.num_lost <= share * num_episodes:
            return
        raise ValueError(
            f"evaluate.frontier: the endpoint of {self.model.name!r} lost {self.num_lost} of {num_episodes} episodes "
            f"after {self.model.num_answered} answers ({fault}); environment.tools.max_dropped_share allows "
            f"{share:.0%}, and what is left is no fair sample. Repair the endpoint, or set evaluate.frontier to null."
        )


def play(
    model: Endpoint,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    max_turns: int,
    seed: int,
    stage: str,
    label: str,
    finished: FinishedEpisodes | None = None,
) -> list[Trajectory]:
    """Play the first problems with a model behind an endpoint, as its settings say; order is problems × samples.

    The draw number is 0 and the stage's name is that of other models' episodes, so that chance in the tools is shared.
    Episodes that are `finished` have been paid for and are not asked for again; those played here join them.
    """
    from tasks.core.progress import progress_bar

    settings = model.settings
    chosen = problems[: settings.num_problems]
    keys = [EpisodeKey(problem, 0, sample) for problem in chosen for sample in range(settings.samples_per_problem)]
    missing = missing_of(keys, finished)
    collector = TextCollector(
        model,
        environment,
        max_turns=max_turns,
        max_concurrent_episodes=settings.max_concurrent_episodes,
        seed=seed,
        stage=stage,
        num_finished=len(keys) - len(missing),
    )
    with progress_bar(label, total=len(keys), done=len(keys) - len(missing)) as bar:
        if finished is None:
            played = collector.collect(missing, on_done=bar.advance)
        else:
            played = collector.collect(missing, on_done=bar.advance, keep=finished.add)
    if note := in_words(collector.counts()):
        tell(f"{label}: {note}")
    return with_finished(keys, played, finished)
