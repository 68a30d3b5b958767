"""Settings of warm_start."""

from __future__ import annotations

from tasks.core.settings import Settings
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.shared.settings import SupervisedSettings
from tasks.models.settings import ComputeSettings


class WarmStartSections(Settings):
    seed: int
    compute: ComputeSettings
    environment: EnvironmentSettings
    warm_start: SupervisedSettings
