"""Setups to plan for: a profile's settings with some values changed, a known model and a GPU."""

from __future__ import annotations

from typing import Any

from tasks.core.settings import load
from tasks.planning.hardware import GPUS
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import known_shape
from tests.profiles import profile_params


def setup(model: str, gpu: str, *, profile: str = "my_model", **changed: Any) -> Setup:
    """`changed` are named like `train__lora`. Without another profile frozen weights are float32."""
    settings = load(PlanSections, profile_params(profile))
    whole = {"compute__frozen": "float32", "compute__weights": "float32"} if profile == "my_model" else {}
    for name, value in {**whole, **changed}.items():
        settings = settings.changed(name.replace("__", "."), value)
    return Setup(known_shape(model), settings, GPUS[gpu])
