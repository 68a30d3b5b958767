"""One GRPO run. The whole state is saved every few iterations: a killed run ends bitwise as one never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks.core.files import number_of
from tasks.core.records import Metrics, Problem
from tasks.environments.catalog import load_environment
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.grpo.exploration import draws_by_schedule, samples_at, temperature_at, top_p_at
from tasks.learning.grpo.mini_batches import oldest_version
from tasks.learning.grpo.solve_rates import Played
from tasks.learning.shared.checkpoints import Checkpoints
from tasks.learning.shared.ranks import ALONE, Ranks
from tasks.learning.shared.whole_policy import WholePolicy
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import AdjustableEngine
from tasks.rollouts.kinds import kind_of
from tasks.rollouts.load import load_checked_chat, load_engine
from tasks.rollouts.probe import probe_sequences
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.collect_ahead import Batch, Pipeline, measure_staleness, refuse_stale
from tasks.stages.train.group_stream import BATCHES_AHEAD, GroupStream
from tasks.stages.train.groups import group_collector, load_prefixes, success_by_environment
from tasks.stages.train.policy import build_trainer, call_followers, load_policy
from tasks.stages.train.sentinel import Sentinel, fair_row
from tasks.stages.train.serving import Serving, add_hit_rate
from tasks.stages.train.snapshots import Snapshots, policy_weights
from tasks.stages.train.stopwatch import Stopwatch
from tasks.stages.train.unearned import name_unearned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.stages.train.settings import TrainSections


class TrainingRun:
    """A run in the folder `resume`; it continues from the newest whole checkpoint there."""

    def __init__(
        self,
        settings: TrainSections,
        *,
        start: Path,
        problems: Sequence[Problem],
        resume: Path,
        baseline: Sequence[Played] = (),
        ranks: Ranks | None = None,
    ):
        self.settings, self.params, self.start, self.problems = settings, settings.train, start, problems
        self.baseline, self.ranks = baseline, ranks or ALONE
        self.sentinel = Sentinel(settings.sentinel)
        self.num_rollbacks = 0
        self.last_counts: dict[str, float] = {}
        self.metrics: list[Metrics] = []
        self.stopwatch = Stopwatch()
        self.checkpoints = Checkpoints(resume)
        with ExitStack() as resources:  # closed again if anything below fails
            resources.callback(self.checkpoints.close)
            self._build(resources)
            self.refused = self._restore()
            if self.pipeline is not None:
                self.pipeline.start(self.iteration, self.serving.copy)
            self.resources = resources.pop_all()

    def _build(self, resources: ExitStack) -> None:
        """The order matters: an engine with its own memory starts and sleeps before the trainer's model takes any of
        the device's.
        """
        settings, params = self.settings, self.params
        self.environment = resources.enter_context(closing(load_environment(settings.environment)))
        self.chat = load_checked_chat(self.start, self.environment, self.problems, settings.sampling)
        if settings.engine.own.has_own_memory:
            self._start_engine(resources)
            self.engine.sleep()
        call_followers(self.start, self.ranks)
        model, adapter = load_policy(settings, self.start)
        policy = WholePolicy(model, adapter, self.ranks, in_host_memory=settings.engine.own.has_own_memory)
        self.serving = Serving(settings, policy)
        if not settings.engine.own.has_own_memory:
            self._start_engine(resources, self.serving.served)
        self.episodes = resources.enter_context(kind_of(self.environment, self.engine, self.chat, settings.sampling))
        self.collector = Collector(
            self.episodes,
            self.environment,
            max_concurrent_episodes=settings.engine.max_concurrent_episodes,
            seed=settings.seed,
            stage="train",
        )
        self.sampler = ProblemSampler(self.problems, params, seed=settings.seed, baseline=self.baseline)
        self.prefixes = load_prefixes(params, self.chat, seed=settings.seed)
        options: dict[str, Any] = {"rewards": settings.reward, "explore": self._explore}
        self.stream = GroupStream.of(self.collector, self.sampler, params, **options)
        whole = group_collector(self.collector, self.sampler, prefixes=self.prefixes, **options)
        collect = self.stopwatch.timed("collect_seconds", self.stream.collect if self.stream else whole)
        self.collect = refuse_stale(collect, None if self.stream else params.max_staleness)
        self.trainer = build_trainer(settings, model, adapter, self.ranks)
        self.serving.connect(self.trainer, self.engine, self._probe() if self.engine.has_own_memory else [])
        self.snapshots = Snapshots(self.checkpoints, self.trainer, policy, self.chat.tokenizer, base=self.start)
        self.pipeline = self._build_pipeline() if params.max_staleness else None
        for collecting in (self.stream, self.pipeline):
            if collecting is not None:
                resources.callback(collecting.close)

    def _start_engine(self, resources: ExitStack, model: PreTrainedModel | None = None) -> None:
        settings = self.settings
        self.engine = load_engine(
            self.start,
            self.chat,
            engine=settings.engine,
            sampling=settings.sampling,
            compute=settings.compute,
            model=model,
            lora=self.params.lora,
        )
        resources.callback(self.engine.close)

    def _probe(self) -> list[list[int]]:
        max_tokens = self.settings.sampling.max_tokens_per_episode
        return probe_sequences(self.chat, self.environment, self.problems, max_tokens=max_tokens)

    def _explore(self, iteration: int) -> int:
        """Before a batch is collected: set the engine's distribution, and return the samples per problem."""
        if draws_by_schedule(self.params):
            usual, top_p = self.settings.sampling.temperature, top_p_at(self.params, iteration)
            temperature = temperature_at(self.params, iteration, otherwise=usual)
            cast(AdjustableEngine, self.engine).set_distribution(temperature=temperature, top_p=top_p)
        return samples_at(self.params, iteration)

    def _build_pipeline(self) -> Pipeline:
        return Pipeline(
            self._collect_batch,
            serve=self.serving.serve,
            abandon=self.collector.abandon,
            max_staleness=BATCHES_AHEAD if self.stream else self.params.max_staleness,
            num_iterations=self.params.num_iterations,
            num_threads=self.settings.compute.num_threads,
            **({"on_wait": self.stream.ask} if self.stream else {}),
        )

    @property
    def iteration(self) -> int:
        return self.trainer.iteration

    @property
    def is_done(self) -> bool:
        return self.iteration == self.params.num_iterations

    def iterate(self) -> tuple[Metrics, Alarm | None]:
        """One iteration and the sentinel's alarm about it; saves where that is due and there is no alarm."""
        iteration = self.iteration + 1
        with self.stopwatch.time(iteration, "iteration_seconds"):
            row = self._train_on_policy() if self.pipeline is None else self._train_pipelined(self.pipeline)
            self.metrics.append(row := row | self.sentinel.take_changed_limits())
            groups, most_lost = self.trainer.last_groups, self.settings.environment.tools.max_dropped_share
            alarm = name_unearned(self.sentinel.observe(fair_row(row, groups, most_lost=most_lost)), groups)
            if alarm is None:
                with self.stopwatch.time(iteration, "save_seconds", without="wait_seconds"):
                    self._finish_iteration()
        self.stopwatch.note_batch(iteration, self.trainer.last_groups, engine_seconds=self.episodes.clock.seconds)
        return self.metrics[-1], alarm

    def close(self) -> None:
        self.resources.close()

    def can_roll_back(self) -> bool:
        policy = self.settings.sentinel
        return policy.action == "roll_back" and self.num_rollbacks < policy.max_rollbacks

    def roll_back(self, alarm: Alarm) -> str:
        """Restore the last snapshot from before the trouble, with a smaller learning rate. A checkpoint is written at
        once, since older ones name snapshots that are deleted here.
        """
        good = self.snapshots.newest_before(max(1, alarm.since))
        step_factor, iteration = self.settings.sentinel.step_factor, number_of(good.name)
        weights = policy_weights(good, compute=self.settings.compute)
        self.trainer.roll_back(weights, step_factor=step_factor)
        if self.pipeline is not None:
            self.pipeline.discard(self.iteration)
            if self.stream:
                self.stream.discard(stored=self.iteration + 1)
            self._load_draws(self._curriculum([]))
        self.snapshots.give_up_after(iteration)
        self.sentinel.forget()
        self.num_rollbacks += 1
        self.metrics[-1] |= {"alarm": alarm.signal, "rolled_back_to": iteration}
        with self.stopwatch.time(self.iteration, "iteration_seconds"):
            self._finish_iteration(is_rolled_back=True)
        return f"{alarm.message} Rolled back to iteration {iteration}, with the learning rate times {step_factor:g}."

    def timings(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of seconds of this process: per iteration (train), per episode by turn (turns), per reply (engine)."""
        turns, engine = self.collector.clock.rows(), self.episodes.clock.rows()
        return {"train": self.stopwatch.rows(), "turns": turns, "engine": engine}

    def _train_on_policy(self) -> Metrics:
        with self.stopwatch.time(self.iteration + 1, "refresh_seconds"):
            self.serving.refresh(self.iteration)
        return {
            **self.trainer.iterate(self.collect, before_update=self._before_update),
            **self._new_counts(),
            "success_by_category": dict(self.sampler.success),
            **success_by_environment(self.trainer.last_groups, self.environment),
        }

    def _train_pipelined(self, pipeline: Pipeline) -> Metrics:
        """Train on the batch that is ready, while the thread collects the next."""
        row = self.trainer.iterate(self.stopwatch.timed("wait_seconds", pipeline), before_update=self._compare_engine)
        batch = pipeline.batch
        assert batch is not None
        return {
            **row,
            **measure_staleness(batch.groups, self.iteration, oldest_version(self.params, self.iteration)),
            **batch.counts,
            "success_by_category": dict(batch.curriculum["success"]),
            **success_by_environment(batch.groups, self.environment),
        }

    def _before_update(self) -> None:
        self.engine.sleep()
        self._compare_engine()

    def _compare_engine(self) -> None:
        drawn = {"temperature": self.trainer.temperature, "top_p": self.trainer.top_p}
        self.serving.compare(self.trainer.last_groups, version=self.iteration - 1, **drawn)

    def _collect_batch(self, iteration: int) -> Batch:
        """In the collector's thread, the only one that uses sampler, collector and environment."""
        groups, _ = self.trainer.collect_with_signal(iteration, self.collect)
        under_way = self.stream.suspend_if_stored(iteration) if self.stream else None
        return Batch(iteration, groups, self._new_counts(), self._draws(), under_way)

    def _new_counts(self) -> dict[str, float]:
        before = self.last_counts
        self.last_counts = self.collector.counts() | self.serving.counts()
        counts = add_hit_rate({name: count - before.get(name, 0) for name, count in self.last_counts.items()})
        return counts | self.serving.metrics() | self.sampler.metrics()

    def _curriculum(self, ahead: Sequence[Batch]) -> dict[str, Any]:
        """What draws problems and prefixes, after the batches of this iteration and those `ahead` of it."""
        if self.pipeline is None or self.pipeline.batch is None:
            return self._draws()
        return [self.pipeline.batch, *ahead][-1].curriculum

    def _draws(self) -> dict[str, Any]:
        own: dict[str, Any] = {"num_draws": self.stream.num_draws} if self.stream else {}
        own |= {"prefixes": self.prefixes.state()} if self.prefixes else {}
        return self.sampler.state() | own | {"faults": self.collector.faults.state()}

    def _load_draws(self, state: dict[str, Any]) -> None:
        self.sampler.load_state(state)
        self.collector.faults.load_state(state["faults"])
        if self.stream:
            self.stream.num_draws = state["num_draws"]
        if self.prefixes:
            self.prefixes.load_state(state["prefixes"])

    def _finish_iteration(self, *, is_rolled_back: bool = False) -> None:
        """Let the pipeline generate with the new weights, and save where that is due."""
        if self.pipeline is not None:
            self.pipeline.publish(self.iteration, self.serving.copy)
        self._save_if_due(is_rolled_back=is_rolled_back)

    def _save_if_due(self, *, is_rolled_back: bool = False) -> None:
        """A snapshot at its interval and at the end, then a checkpoint, which names its snapshots. What was rolled back
        has the weights of an earlier snapshot, and none of its own.
        """
        if not is_rolled_back and (self.iteration % self.params.snapshot_interval == 0 or self.is_done):
            self.snapshots.save()
        if is_rolled_back or self.iteration % self.params.checkpoint_interval == 0 or self.is_done:
            ahead: list[Batch] = []
            if self.pipeline is not None:
                ahead = self.stopwatch.timed("wait_seconds", self.pipeline.batches_ahead)(self.iteration)
            state = {
                "trainer": self.trainer.state(),
                "sampler": self._curriculum(ahead),
                "ahead": [batch.to_row() for batch in ahead],
                "sentinel": self.sentinel.state(),
                "num_rollbacks": self.num_rollbacks,
                "metrics": self.metrics,
            }
            self.checkpoints.save(self.iteration, self.trainer.tensors(), state)

    def _restore(self) -> list[str]:
        """Load the newest whole checkpoint; returns one sentence per damaged one."""
        found, refused = self.checkpoints.load()
        if found is None:
            if self.settings.sentinel.action == "roll_back":
                self.snapshots.save()
            return refused
        self.trainer.load(found.tensors, found.state["trainer"])
        self._load_draws(found.state["sampler"])
        self.sentinel.load_state(found.state["sentinel"])
        self.num_rollbacks, self.metrics = found.state["num_rollbacks"], found.state["metrics"]
        if self.pipeline is not None:
            self.pipeline.ahead.extend(map(Batch.from_row, found.state["ahead"]))
            if self.stream:
                self.stream.restore(self.pipeline.ahead)
        return refused
