"""Plays one model on problems of `select`, for `ablate`, `drift-check` and `evaluate-snapshot`.

Nothing here plays `test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths
from tasks.drift.pin import find_drift
from tasks.environments.catalog import load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.pipeline.reasons import listed
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate.runner import EpisodeRunner


def play_select(
    model: Path,
    problems: Sequence[Problem],
    play: PlaySettings,
    environment: EnvironmentSettings,
    *,
    stream: str,
    name: str | None = None,
    resume: Path | None = None,
) -> list[Trajectory]:
    """Episodes of `model`; `stream` names their random numbers, so `select` gives evaluate's own. `name` is what the
    model is called meanwhile, None: as its folder. `resume` keeps those that ended, for these settings, this model and
    these problems alone; the caller removes it. None keeps nothing after a kill.
    """
    with (
        nullcontext(resume) if resume else TemporaryDirectory() as folder,
        closing(load_environment(environment)) as opened,
        closing(EpisodeRunner(opened, plays={stream: play}, resume=Path(folder) / opened.fingerprint()[:16])) as runner,
    ):
        return runner.play(model, problems, stream, name or model.name)


def refuse_drift(environment: EnvironmentSettings, paths: Paths, *, what: str) -> None:
    """ValueError where the environment changed since curation and nobody accepted it."""
    drift = find_drift(environment, paths)
    if drift:
        raise ValueError(
            f"{what} would be of another environment than the one that was curated, and comparable with nothing "
            f"({listed(drift)}). Run `python -m flows run`, which curates anew; or give --accept-drift."
        )
