"""custom: the class that `environment.settings.object` names, in tasks/custom/, which DVC watches."""

from __future__ import annotations

from typing import Any

from tasks.core.load_object import load_object
from tasks.environments.custom.settings import CustomSettings


def load_class(settings: CustomSettings) -> type[Any]:
    found: type[Any] = load_object(settings.object)
    return found


ENVIRONMENT = load_class
