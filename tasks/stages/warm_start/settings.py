"""Settings of warm_start."""

from __future__ import annotations

from tasks.learning.shared.settings import SupervisedSettings
from tasks.rollouts.settings import PlaySections


class WarmStartSections(PlaySections):
    warm_start: SupervisedSettings
