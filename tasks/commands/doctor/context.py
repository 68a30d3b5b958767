"""What the doctor examines: settings, curated problems, the environment, the tokenizer, and references played as text.

Each part is made when a check first needs it. No weights are loaded and torch is not imported: of the model only the
tokenizer, config.json and the sizes in the safetensors headers are read (`model.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from tasks.chat.format import ChatFormat
from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.hermes import HERMES
from tasks.commands.doctor.findings import NotCheckable, Skipped
from tasks.commands.doctor.model import Model, assessed_folder
from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths, Settings
from tasks.core.splits import read_split
from tasks.core.urls import local_path
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.shared.settings import GRPOSettings, SupervisedSettings
from tasks.models.embedded import build_tokenizer, is_embedded
from tasks.models.folders import (
    load_fast_tokenizer,
    load_tokenizer,
    model_config,
    resolve_model,
)
from tasks.models.missing import check_model_path
from tasks.models.settings import ComputeSettings, LaunchSettings, ModelSettings
from tasks.models.template import state_template
from tasks.planning.shapes import config_shape, count_parameters
from tasks.rewards.settings import RewardSettings
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import TurnReply, TurnRequest
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.kinds import kind_of
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tasks.stages.assess.base_model import embedded_texts
from tasks.stages.assess.settings import AssessSettings
from tasks.stages.curate.settings import CurateSettings
from tasks.stages.curate.splitting import SPLITS, in_turn
from tasks.stages.evaluate.settings import EvaluateSettings
from tasks.stages.promote.settings import PromoteSettings
from tasks.stages.train.settings import SentinelSettings
from tasks.storage.settings import PathsSettings, StorageSettings
from tasks.tools.base import Environment
from tasks.tracking.settings import TrackingSettings

PLAY_SECONDS = 3.0  # references are played until then, at least the first batch
BATCH = 16  # references at once
MOST_REFERENCES = 1024
REPEAT_SECONDS = 2.0  # single episodes are repeated until then, at least one
MOST_REPEATED = 24
LONGEST_PAUSE_SECONDS = 0.02
SWITCH_ON = "Set environment.cache.mode to replay or off to have the environment examined."
# Limits that no reference meets: another check is about the limits of params.yaml.
MOST_TURNS = 50  # of an agent
NO_LIMITS = SamplingSettings(
    temperature=1.0,
    top_p=1.0,
    max_turns=10_000,
    max_tokens_per_turn=10**7,
    max_thinking_tokens_per_turn=None,
    max_tokens_per_episode=10**8,
    max_completion_tokens=None,
    stop_strings=[],
)

T = TypeVar("T")


class RepeatingEngine(ScriptedEngine):
    """Writes the last text of a script again and again."""

    def _write(self, request: TurnRequest) -> TurnReply:
        turns = self.turns_left[request.episode]
        turns += turns if len(turns) == 1 else []
        return super()._write(request)


class DoctorSections(Settings):
    seed: int
    paths: PathsSettings
    storage: StorageSettings
    tracking: TrackingSettings
    compute: ComputeSettings
    launch: LaunchSettings
    model: ModelSettings
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    curate: CurateSettings
    assess: AssessSettings
    reward: RewardSettings
    warm_start: SupervisedSettings
    train: GRPOSettings
    sentinel: SentinelSettings
    evaluate: EvaluateSettings
    promote: PromoteSettings


@dataclass(frozen=True, slots=True)
class PlayedReference:
    split: str
    problem: Problem
    texts: list[str]
    trajectory: Trajectory


class DoctorContext:
    """One project as training would start it now; `is_fresh`: ignore the results of earlier runs."""

    def __init__(self, settings: DoctorSections, paths: Paths, *, is_fresh: bool = False):
        self.settings, self.paths, self.is_fresh = settings, paths, is_fresh
        self.agent_seconds: float | None = None  # of the shortest episode that the agent has played itself

    @cached_property
    def problems(self) -> dict[str, list[Problem]]:
        return {split: read_split(self.paths, split) for split in SPLITS}

    @cached_property
    def environment(self) -> Environment:
        """Without injected faults or long pauses; episodes are played once. A `strict` cache replaces the tools."""
        settings = self.settings.environment
        pause = min(settings.tools.backoff_seconds, LONGEST_PAUSE_SECONDS)
        quick = {"backoff_seconds": pause, "max_attempts": 1, "max_dropped_share": 1.0}
        tools = settings.tools.model_copy(update=quick)
        return load_bare_environment(
            settings.model_copy(update={"tools": tools}), with_cache=settings.cache.mode == "strict"
        )

    @cached_property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.environment.tools]

    @cached_property
    def model(self) -> Model:
        """The base model of `assess`, else what `model` in params names."""
        path, embedded = self.settings.model.path, is_embedded(self.settings.model.path)
        folder = None if self.is_fresh else assessed_folder(self.paths, path)
        if folder is None and embedded:
            return self._unbuilt_model()
        if folder is None:
            check_model_path(path)
        folder = resolve_model(folder or local_path(path))
        tokenizer = load_fast_tokenizer(folder) if embedded else load_tokenizer(folder)
        state_template(tokenizer, self.settings.model.template)
        config = model_config(folder)
        return Model(str(folder), tokenizer, config.get("text_config", config), count_parameters(folder))

    def _unbuilt_model(self) -> Model:
        embedded, environment = self.settings.model.embedded, self.environment
        texts = embedded_texts(embedded, self.paths, environment)
        tokenizer = build_tokenizer(texts, environment.vocabulary(), embedded)
        state_template(tokenizer, self.settings.model.template)
        config = {**embedded.model_dump(), "vocab_size": len(tokenizer), "tie_word_embeddings": True}
        name = "the embedded model, not built yet"
        return Model(name, tokenizer, config, config_shape(name, config).num_parameters)

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat(self.model.tokenizer, source=self.model.source)

    @cached_property
    def played_references(self) -> list[PlayedReference]:
        """References played side by side: the most important first, then the categories of each split in turn."""
        if self.settings.environment.cache.mode == "strict":
            raise NotCheckable("the tools are switched off, so nothing could be played", SWITCH_ON)
        played = list[PlayedReference]()
        chosen = choose(self.problems, tools=[tool.name for tool in self.environment.tools])
        for batch in batches_for(PLAY_SECONDS, chosen, BATCH):
            scripts = [(problem, reference_texts(problem, self.chat.call_format)) for _, problem in batch]
            played += [
                PlayedReference(split, problem, texts, trajectory)
                for (split, problem), (_, texts), trajectory in zip(batch, scripts, self.play(scripts), strict=True)
            ]
        return played

    @property
    def references(self) -> list[PlayedReference]:
        """The references that met no fault of the environment; at least one."""
        played = [reference for reference in self.played_references if reference.trajectory.fault is None]
        if not played:
            raise Skipped("lost episodes")
        return played

    @cached_property
    def alone(self) -> list[tuple[PlayedReference, list[Trajectory]]]:
        """References of each category, played twice more with the same key, one at a time."""
        one_of_each = {reference.problem.category: reference for reference in reversed(self.references)}
        chosen = {id(reference): reference for reference in (*one_of_each.values(), *self.references)}
        return [
            (reference, self.play([(reference.problem, reference.texts)] * 2, concurrency=1))
            for (reference,) in batches_for(REPEAT_SECONDS, list(chosen.values())[:MOST_REPEATED], 1)
        ]

    def play(self, scripts: Sequence[tuple[Problem, list[str]]], *, concurrency: int = BATCH) -> list[Trajectory]:
        """Trajectories in which the model writes exactly these texts; the same key and seed each time."""
        ids = [self._script(texts) for _, texts in scripts]
        kind = EngineEpisodes(ScriptedEngine(ids, end_of_turn=self.chat.end_of_turn), self.chat, NO_LIMITS)
        return self._collector(kind, concurrency).collect([EpisodeKey(problem, 0, 0) for problem, _ in scripts])

    def play_by_agent(self, reference: PlayedReference) -> Trajectory:
        """The policy writes the reference's texts, and the last of them again to whoever asks further."""
        engine = RepeatingEngine([self._script(reference.texts)], end_of_turn=self.chat.end_of_turn)
        sampling = NO_LIMITS.model_copy(update={"max_turns": MOST_TURNS})
        started = time.monotonic()
        with kind_of(self.environment, engine, self.chat, sampling) as kind:
            played = self._collector(kind, 1).collect([EpisodeKey(reference.problem, 0, 0)])[0]
        seconds = time.monotonic() - started  # all the agent's: this policy takes no time
        self.agent_seconds = seconds if self.agent_seconds is None else min(seconds, self.agent_seconds)
        return played

    def _script(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*given, *written] for given, written in map(self.chat.written_ids, texts)]

    def _collector(self, kind: EngineEpisodes, concurrency: int) -> Collector:
        return Collector(
            kind,
            self.environment,
            max_concurrent_episodes=concurrency,
            seed=self.settings.seed,
            stage="doctor",
        )

    def close(self) -> None:
        if "environment" in vars(self):  # it was used
            self.environment.close()


def batches_for(seconds: float, items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Batches of the items until the time is over; at least the first one."""
    started = time.monotonic()
    for start in range(0, len(items), size):
        if start and time.monotonic() - started >= seconds:
            return
        yield items[start : start + size]


def choose(problems: dict[str, list[Problem]], *, tools: Sequence[str]) -> list[tuple[str, Problem]]:
    """One reference per tool, the longest requests and references, then all categories in turn."""
    everything = [(split, item) for split in SPLITS for item in problems[split]]
    users = {call.name: pair for pair in reversed(everything) for turn in pair[1].reference for call in turn.calls}
    longest_request = sorted(everything, key=lambda pair: -sum(map(len, pair[1].requests)))[:3]
    longest_reference = sorted(everything, key=lambda pair: -sum(map(len, reference_texts(pair[1], HERMES))))[:3]
    first = [*(users[name] for name in tools if name in users), *longest_request, *longest_reference]
    in_order = [*first, *in_turn(everything, category=lambda pair: f"{pair[1].category} of {pair[0]}")]
    return list({(split, item.id): (split, item) for split, item in in_order}.values())[:MOST_REFERENCES]


def reference_texts(problem: Problem, call_format: CallFormat) -> list[str]:
    texts = ([*(call_format.text([call]) for call in turn.calls), turn.answer] for turn in problem.reference)
    return [text for (*calls, answer) in texts for text in (*calls, call_format.closing(answer))]
