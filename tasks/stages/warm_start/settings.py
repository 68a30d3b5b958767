"""Settings of warm_start."""

from __future__ import annotations

from pydantic import Field

from tasks.core.settings import Settings
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.shared.settings import SupervisedSettings


class WarmStartSections(Settings):
    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    warm_start: SupervisedSettings
