"""Makes the environment that params name: ENVIRONMENT in `<environment.name>/environment.py`.

A class with `compose(section, load)` is made of other environments (`mixture`), each with wrappers of its own.
"""

from __future__ import annotations

import importlib
import random
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.files import read_records, require
from tasks.core.records import Problem
from tasks.core.terminal import warn
from tasks.environments.settings import ROOM, EnvironmentSettings, OtherEnvironmentSettings
from tasks.tools.base import Environment


def find_environment_class(settings: EnvironmentSettings) -> type[Any]:
    """ENVIRONMENT of the folder: a class, or a function of the settings that returns one."""
    found = importlib.import_module(f"{ROOM}.{settings.name}.environment").ENVIRONMENT
    found_class: type[Any] = found if isinstance(found, type) else found(settings.settings)
    return found_class


def load_environment(settings: EnvironmentSettings, *, asks_judge: bool = True) -> Environment:
    """From the inside out: injected infrastructure faults, retries, worker processes, the tool cache, errors for the
    model, the user, the judge.

    Without `asks_judge` a judge whose opinion decides nothing is described and not asked.
    """
    settings.refuse_no_verdict()
    environment_class = find_environment_class(settings)
    environment: Environment
    if hasattr(environment_class, "compose"):
        environment = environment_class.compose(settings, partial(load_environment, asks_judge=asks_judge))
        return environment
    if settings.cache.mode == "off":
        environment = _make_playable(environment_class, settings)
    else:
        from tasks.tools.cache.environment import CachedEnvironment

        environment = CachedEnvironment(
            settings.name,
            environment_class,
            lambda: _make_playable(environment_class, settings),
            settings=settings.settings,
            limits=settings.tools,
            cache=settings.cache,
        )
    if settings.faults is not None:
        from tasks.tools.faults import DegradedEnvironment

        environment = DegradedEnvironment(environment, settings.faults)
    if settings.user is not None:
        from tasks.tools.user.environment import UserEnvironment

        environment = UserEnvironment(environment, settings.user)
    if settings.judge is not None:
        from tasks.tools.judge.environment import JudgedEnvironment

        environment = JudgedEnvironment(environment, settings.judge, is_asked=asks_judge)
    return environment


def load_bare_environment(settings: EnvironmentSettings, *, with_cache: bool = False) -> Environment:
    """The environment without injected faults and simulated user, for curation and drift probes."""
    cache = settings.cache if with_cache else settings.cache.model_copy(update={"mode": "off"})
    bare = {"faults": None, "user": None, "cache": cache, "pool": None}
    return load_environment(settings.model_copy(update=bare), asks_judge=False)


def read_problems_of(
    environment: Environment, other: OtherEnvironmentSettings, *, seed: int, num_problems: int, max_level: int
) -> list[Problem]:
    """At most `num_problems` of its source, in its order; a random sample from the seed where there are more."""
    level = other.max_level or max_level
    if other.source is not None:
        file = require(Path(other.source))
        found = [problem for problem in read_records(file, Problem) if problem.level <= level]
    else:
        written = environment.generate(seed=seed, num_problems=num_problems, max_level=level)
        if written is None:
            raise ValueError(
                f"the environment {other.name} writes no problems of its own, so there is nothing to play in it. Set "
                f"its `source` to a JSONL file of problems in tasks/custom/"
            )
        found = list(written)
    kept = random.Random(f"{seed}/{other.name}").sample(range(len(found)), min(num_problems, len(found)))
    return [found[place] for place in sorted(kept)]


def load_in_worker(section: dict[str, Any]) -> Environment:
    """What a worker of `environment.pool` plays; the other wrappers are around the pool."""
    settings = EnvironmentSettings.model_validate(section)
    return _make_reliable(find_environment_class(settings), settings)


def _make_playable(environment_class: type[Any], settings: EnvironmentSettings) -> Environment:
    environment = _make_reliable(environment_class, settings)
    if settings.pool is None:
        return environment
    from tasks.tools.pool.environment import PooledEnvironment, why_it_stays

    reason = why_it_stays(environment_class)
    if reason is not None:  # no refusal: other members of a mixture may be played in workers
        warn(f"environment.pool has no effect on {settings.name}: {reason}. Set it to null to be rid of this line.")
        return environment
    make = f"{load_in_worker.__module__}:{load_in_worker.__name__}"
    return PooledEnvironment(environment, settings, settings.pool, make=make)


def _make_reliable(environment_class: type[Any], settings: EnvironmentSettings) -> Environment:
    environment: Environment = environment_class.from_settings(settings.settings, settings.tools)
    if settings.faults is not None:
        from tasks.tools.faults import FailingEnvironment

        environment = FailingEnvironment(environment, settings.faults)
    if settings.tools.max_retries:
        from tasks.tools.retries import RetryingEnvironment

        environment = RetryingEnvironment(environment, settings.tools)
    return environment
