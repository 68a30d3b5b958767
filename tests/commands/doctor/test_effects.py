"""Settings that are accepted and change little or nothing; the test profile has 16 iterations of 2 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.effects import settings_take_effect
from tasks.core.settings import Paths, load
from tests.commands.doctor.project import found, look
from tests.profiles import NAMES, profile_params

NO_REFERENCE = {"train__kl_weight": 0.0, "train__reference_interval": None}


@pytest.mark.parametrize(
    ("changed", "text", "remedy"),
    [
        (
            {"train__warmup_steps": 40},
            "train.warmup_steps is 40, of 32 optimizer steps in all, so the highest rate is at most 80% of train",
            "Lower train.warmup_steps, such as to 3.",
        ),
        (
            {"warm_start__num_steps": 30, "warm_start__warmup_steps": 100},
            "at most 30% of warm_start.learning_rate",
            "Lower warm_start.warmup_steps, such as to 3.",
        ),
        (
            {"train__reference_interval": 16},
            "train.reference_interval is 16 and train.num_iterations 16, so no update sees the reference move",
            "Set train.reference_interval below train.num_iterations, or to null.",
        ),
        (
            {"train__band__levels": {"by": "calls", "open_at": 0.5, "confidence": 0.9}},
            "train.band.levels is set and train.problem_sampler adaptive, so problems of all levels are drawn",
            "Set train.problem_sampler to band, or train.band.levels to null.",
        ),
        (
            NO_REFERENCE,
            "sentinel.max_kl is 2 and train.kl_weight 0, so KL is not measured",
            "Set sentinel.max_kl to null, or train.kl_weight above 0.",
        ),
    ],
    ids=["warm-up", "warm start", "reference", "levels", "max_kl"],
)
def test_what_has_no_effect_is_told_with_its_remedy(
    tmp_path: Path, changed: dict[str, Any], text: str, remedy: str
) -> None:
    found(look("settings", tmp_path, **changed), "warn", text, remedy)


@pytest.mark.parametrize(
    "changed",
    [
        {"train__warmup_steps": 32},  # the last step has the whole rate
        {"train__reference_interval": 15},
        {"warm_start__warmup_steps": 1000, "assess__warm_start_below": 0.0},  # there is no warm start
        {**NO_REFERENCE, "sentinel__max_kl": None},
    ],
    ids=str,
)
def test_what_is_reached_at_the_very_end_or_switched_off_is_not_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert look("settings", tmp_path, **changed).result == "pass"


def test_several_are_told_in_one_finding(tmp_path: Path) -> None:
    examined = look("settings", tmp_path, **NO_REFERENCE, train__warmup_steps=64)
    found(examined, "warn", "at most 50% of train.learning_rate; sentinel.max_kl is 2", "such as to 3. Set sentinel.")


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_profile_has_an_effect(tmp_path: Path, name: str) -> None:
    context = DoctorContext(load(DoctorSections, profile_params(name)), Paths(tmp_path))
    assert settings_take_effect(context).result == "pass"
