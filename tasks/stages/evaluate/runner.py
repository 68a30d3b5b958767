"""Plays several models on the same problems, in one engine where they have one shape; stores each episode, so a later
run resumes.

The split is the stage name of random streams, so all models of a split share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core import machine
from tasks.core.records import Problem, Trajectory
from tasks.rollouts.settings import PlaySettings

if TYPE_CHECKING:
    from tasks.core.progress import Bar
    from tasks.measurement.statistics import EpisodeSummary
    from tasks.rollouts.fault_log import JudgedTogether
    from tasks.rollouts.finished import EpisodeId, FinishedEpisodes
    from tasks.tools.base import Environment

Store = Callable[[str, list[Trajectory]], None]  # keep a policy's episodes under a name
Timings = dict[str, dict[str, dict[str, float]]]


class EpisodeRunner:
    """Plays models on splits with the settings in `plays`. Close it when done. `timings` has the episodes played by
    this run and their wall seconds, loading included, by split and model. A model that has played on a split, under
    whatever name, has the same episodes there again: a warm start that was not needed is the base model.
    """

    def __init__(self, environment: Environment, *, plays: Mapping[str, PlaySettings], resume: Path):
        from tasks.rollouts.kept_models import KeptModels
        from tasks.rollouts.load import Engines

        self.environment, self.plays, self.resume = environment, plays, resume
        self.kept = KeptModels(machine.available_memory)
        self.engines = Engines(next(iter(plays.values())), self.kept)
        self.timings: Timings = {split: {} for split in plays}
        self._finished: dict[Path, FinishedEpisodes] = {}  # by file: one of a split and a model
        self._spent: dict[Path, dict[str, float]] = {}
        self._played: dict[tuple[str, str], FinishedEpisodes] = {}  # by split and name
        self._summaries: dict[tuple[str, str], dict[EpisodeId, EpisodeSummary]] = {}

    def play(
        self,
        model: Path,
        problems: Sequence[Problem],
        split: str,
        name: str,
        *,
        bar: Bar | None = None,
        stage: str | None = None,
        others: JudgedTogether | None = None,
    ) -> list[Trajectory]:
        """Episodes of the model called `name`; several models may share a `bar`, and be judged by what `others` lost.
        `stage` names the random streams, None: as the split does.
        """
        from tasks.measurement.statistics import EpisodeSummary
        from tasks.rollouts.collect import sample_episodes

        finished = self._played[split, name] = self._finished_of(model, split)
        num_before, started = len(finished), time.monotonic()
        self.engines.play_as(self.plays[split])
        trajectories = sample_episodes(
            model,
            self.environment,
            problems,
            self.plays[split],
            stage=stage or split,
            label=f"{split}: {name.replace('_', ' ')}",
            engines=self.engines,
            finished=finished,
            bar=bar,
            others=others,
        )
        if num_played := len(finished) - num_before:
            spent = self._spent.setdefault(finished.file, {"seconds": 0.0, "episodes": 0})
            spent["seconds"] = round(spent["seconds"] + time.monotonic() - started, 3)
            spent["episodes"] += num_played
        if finished.file in self._spent:
            self.timings[split][name] = self._spent[finished.file]
        self._summaries.setdefault((split, name), {}).update(
            ((item.problem_id, item.sample_index), EpisodeSummary.of(item)) for item in trajectories
        )
        return trajectories

    def expect(self, models: Iterable[Path]) -> None:
        """Those that may play again, whose weights stay in memory where there is room."""
        self.kept.expect(models)

    def num_finished(self, problems: Sequence[Problem], split: str, model: Path) -> int:
        return len(self._episodes(problems, split, self._finished_of(model, split)))

    def summaries(self, problems: Sequence[Problem], split: str, name: str) -> list[EpisodeSummary]:
        """Of all episodes that `play` returned of a model, in the order of the problems."""
        found = self._summaries[split, name]
        return [found[episode] for episode in self._episodes(problems, split, found)]

    def store(self, problems: Sequence[Problem], split: str, name: str, file: Path) -> None:
        """Those episodes themselves in a file, as one trajectory a line."""
        self._played[split, name].copy(self._episodes(problems, split, self._summaries[split, name]), file)

    def close(self) -> None:
        self.engines.close()

    def _finished_of(self, model: Path, split: str) -> FinishedEpisodes:
        """Named by the model itself: the run that goes on after a kill may call another one `best`."""
        from tasks.models.folders import folder_hash
        from tasks.rollouts.finished import FinishedEpisodes

        file = self.resume / f"{split}_{folder_hash(model)[:16]}.jsonl"
        if file not in self._finished:
            self._finished[file] = FinishedEpisodes(file)
        return self._finished[file]

    def _episodes(
        self, problems: Sequence[Problem], split: str, found: FinishedEpisodes | Mapping[EpisodeId, EpisodeSummary]
    ) -> list[EpisodeId]:
        """Those of the problems that are among `found`, in order."""
        asked = [
            (problem.id, sample) for problem in problems for sample in range(self.plays[split].samples_per_problem)
        ]
        return [episode for episode in asked if episode in found]
