"""Setups to plan for: a profile's settings with some values changed, a known model and a GPU."""

from __future__ import annotations

from typing import Any

from tasks.core.settings import load
from tasks.planning.hardware import GPUS
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import known_shape
from tests.profiles import profile_params


def setup(model: str, gpu: str, *, profile: str = "my_model", **changed: Any) -> Setup:
    """`changed` are named like `train__lora`."""
    settings = load(PlanSections, profile_params(profile))
    for name, value in changed.items():
        settings = settings.changed(name.replace("__", "."), value)
    return Setup(known_shape(model), settings, GPUS[gpu])
