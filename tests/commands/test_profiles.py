"""Profiles: each is a whole params.yaml, and the published recipe's has the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import read_params
from tasks.pipeline.order import check_params
from tests.conftest import ROOT

PROFILES = sorted((ROOT / "infra" / "profiles").glob("*.yaml"))
RECIPE = ROOT / "infra" / "profiles" / "bfcl_qwen2.5_7b.yaml"


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return read_params(RECIPE)


def keys(params: dict[str, Any], prefix: str = "") -> set[str]:
    """The settings by name; what is null in one profile and a section in another counts by its first name."""
    found = set()
    for name, value in params.items():
        is_section = isinstance(value, dict) and f"{prefix}{name}" not in (
            "environment.settings",
            "engine.vllm",
        )
        found |= keys(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}"}
    return found


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_loads_strictly_and_has_the_keys_of_params(profile: Path) -> None:
    params = read_params(profile)
    check_params(params, source=profile)
    assert keys(params) == keys(read_params(ROOT / "params.yaml"))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_explains_itself_at_its_head(profile: Path) -> None:
    assert profile.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("sampling", {"temperature": 0.9, "top_p": 1.0, "max_turns": 10, "max_completion_tokens": 2048}),
        ("train", {"problems_per_iteration": 12, "group_size": 8, "mu": 2, "num_iterations": 800}),
        ("train", {"learning_rate": 1e-6, "schedule": "constant", "warmup_steps": 20, "betas": [0.9, 0.99]}),
        ("train", {"optimizer": "adamw", "weight_decay": 0.0, "max_grad_norm": 0.2, "lora": None}),
        ("train", {"kl_weight": 0.001, "kl_estimator": "k3", "reference_interval": 50, "reference_mix": 1.0}),
        ("train", {"clip_low": 0.2, "clip_high": 0.2, "ratio": "token", "importance_correction": "none"}),
        (
            "train",
            {"filter_overlong": True, "zero_variance_groups": "keep", "max_replacement_rounds": 0, "advantage": "std"},
        ),
        ("train", {"problem_sampler": "uniform", "autocast": "bfloat16", "gradient_checkpointing": True}),
        ("reward", {"format_weight": 0.0, "execution_weight": 0.0}),
        ("curate", {"split": "published", "num_generated": 200, "train_share": 0.5, "num_demonstrations": 0}),
        ("assess", {"warm_start_below": 0.0}),
    ],
)
def test_the_recipes_profile_has_the_published_values(
    recipe: dict[str, Any], section: str, values: dict[str, Any]
) -> None:
    assert {name: recipe[section][name] for name in values} == values


def test_the_recipes_counts_agree_in_iterations_and_in_optimizer_steps(recipe: dict[str, Any]) -> None:
    train, sampling = recipe["train"], recipe["sampling"]
    assert train["num_iterations"] * train["mu"] == 1600
    assert train["reference_interval"] * train["mu"] == 100  # M
    assert train["problems_per_iteration"] * train["group_size"] == 96 == 3 * 8 * 4  # GPUs × a device's × accumulation
    assert 100 // train["problems_per_iteration"] * 100 == train["num_iterations"]  # whole batches an epoch × epochs
    assert sampling["max_tokens_per_episode"] == 16_384 + sampling["max_completion_tokens"]


def test_the_recipe_is_of_the_first_request_of_multi_turn_base(recipe: dict[str, Any]) -> None:
    assert recipe["environment"]["name"] == "bfcl"
    assert recipe["environment"]["settings"] == {"categories": ["multi_turn_base"], "turns": "first"}
    assert recipe["model"]["path"].endswith("Qwen2.5-7B-Instruct")


def test_the_recipes_head_states_its_hardware_and_both_counts(recipe: dict[str, Any]) -> None:
    text = RECIPE.read_text(encoding="utf-8")
    head = text[: text.index("paths:")]
    assert "4 H200" in head and "three that train" in head and "one with vLLM" in head
    assert "Not expressed yet" in head
    assert "× mu 2 = 1,600 optimizer steps" in text and "M is 100 optimizer steps" in text
