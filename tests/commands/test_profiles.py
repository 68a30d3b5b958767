"""Profiles: overlays over demo.yaml, which is params.yaml; and the published recipe's has the published numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.plan.output import dollars
from tasks.commands.plan.plan import make_plan
from tasks.commands.profile import difference, merge, read_profiles
from tasks.core.progress import span, spell
from tasks.core.settings import load, parse_params, read_params
from tasks.environments.catalog import find_environment_class
from tasks.pipeline.order import check_params
from tasks.planning.hardware import amount
from tasks.planning.nearest import fits
from tasks.stages.curate.settings import CurateSections
from tasks.tools.base import Environment
from tests.conftest import ROOT
from tests.profiles import FOLDER, NAMES, profile_params, profile_text

OVERLAYS = [name for name in NAMES if name != "demo"]
MODELS = [name for name in NAMES if name.endswith(("24gb", "80gb"))]
GPU = {"24gb": "4090-24gb", "80gb": "a100-80gb"}
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
MERGES = sorted({tuple(names.split(" ")) for names in re.findall(r"tasks profile ([\w.]+(?: [\w.]+)+)", PAGE)})
WHOLE_PROFILES = [name for name in NAMES if name not in ("bfcl", "mcp", "services", "tau2", "tau2_retail")]
SOURCE = Path("infra/profiles/mine.yaml")
WHOLE = """\
seed: 1              # every random stream
train:               # of the policy
  steps: 5           # optimizer steps
  lora: null         # or {rank: 16}
  racing:            # null is off
    rounds: 4
num_threads: 2
"""


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return profile_params("bfcl_qwen2.5_7b")


def leaves(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in params.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_the_demo_profile_is_params_yaml_as_committed() -> None:
    assert profile_text("demo") == (ROOT / "params.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_valid_and_keeps_every_key_of_the_demo(name: str) -> None:
    params = profile_params(name)
    check_params(params, source=FOLDER / f"{name}.yaml")
    demo = {key.rpartition(".")[0] for key in leaves(profile_params("demo"))}
    switched_off = {key for key, value in leaves(params).items() if value is None}
    assert demo - switched_off <= {key.rpartition(".")[0] for key in leaves(params)}


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["bfcl", "mcp"])
@pytest.mark.parametrize("model", MODELS)
def test_a_models_profile_takes_an_environment_over_it_and_fits_its_gpu(model: str, environment: str) -> None:
    params = profile_params(model, environment)
    check_params(params, source=FOLDER / f"{model}.yaml")
    assert params["environment"]["name"] == environment
    assert params["model"] == profile_params(model)["model"]
    plan = make_plan(gpu=GPU[model[-4:]], profiles=[model, environment])
    assert fits(plan.setup)
    section = PAGE.partition(f"## {model}\n")[2].partition("\n## ")[0]
    assert "**Not run.**" in section


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_prompt_tokens"), [("tau2", 9_500), ("tau2_retail", 5_000)])
def test_tau2_takes_a_model_with_room_for_its_prompts(name: str, num_prompt_tokens: int) -> None:
    """Beside the prompt an episode gets all of its completion tokens."""
    params = profile_params("qwen2.5_7b_lora_80gb", name)
    check_params(params, source=FOLDER / f"{name}.yaml")
    sampling = params["sampling"]
    assert sampling["max_tokens_per_episode"] > num_prompt_tokens + sampling["max_completion_tokens"]
    assert fits(make_plan(gpu=GPU["80gb"], profiles=["qwen2.5_7b_lora_80gb", name]).setup)


def test_the_page_merges_profiles_in_its_commands() -> None:
    assert {(MODELS[0], "bfcl"), (MODELS[-1], "mcp")} <= set(MERGES)


@pytest.mark.slow
@pytest.mark.parametrize("names", [*MERGES, *((name, "services") for name in WHOLE_PROFILES)], ids=" ".join)
def test_every_merge_that_the_page_names_is_valid(names: tuple[str, ...]) -> None:
    """Its commands, and the servers over each profile that runs as it is."""
    params = profile_params(*names)
    check_params(params, source=FOLDER / f"{names[0]}.yaml")
    assert leaves(read_params(FOLDER / f"{names[-1]}.yaml")).items() <= leaves(params).items()


@pytest.mark.slow
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *MERGES], ids=" ".join)
def test_only_an_environment_that_cuts_requests_is_told_in_parts(names: tuple[str, ...]) -> None:
    """Elsewhere the end of an evaluation would be that no problem of test has parts."""
    params = profile_params(*names)
    has_parts = find_environment_class(load(CurateSections, params).environment).shards is not Environment.shards
    told = [section for section in ("curate", "evaluate") if params[section]["sharded"] is not None]
    assert told == [] or has_parts


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["bfcl", "mcp"])
def test_a_thought_has_room_before_and_after_it_in_every_environment(environment: str) -> None:
    sampling = profile_params("qwen3_4b_thinking_80gb", environment)["sampling"]
    turn = sampling["max_thinking_tokens_per_turn"] + sampling["max_tokens_per_turn"]
    assert sampling["max_completion_tokens"] is None  # the recipe's 2,048 is one thought
    assert sampling["max_tokens_per_episode"] >= 7000 + 3 * turn  # the longest prompt of BFCL, and three full turns
    for model in MODELS[:3]:
        assert profile_params(model, environment)["sampling"]["max_completion_tokens"] == 2048


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "tokens"), [("bfcl", (4000, 500, 500)), ("mcp", (1000, 500, 500))])
@pytest.mark.parametrize("model", MODELS)
def test_the_page_says_of_a_models_profile_what_plan_says(
    model: str, environment: str, tokens: tuple[int, int, int]
) -> None:
    plan = make_plan(gpu=GPU[model[-4:]], profiles=[model, environment], tokens=tokens)
    memory, seconds = plan.memory, plan.seconds
    assert seconds is not None
    playing, there = amount(memory.phases["playing"]), amount(plan.setup.machine.memory)
    cost = span(dollars, *seconds.dollars(plan.setup.machine.dollars_per_hour))
    cells = (
        f"`{model}`",
        f"`{environment}`",
        f"{playing} of {there}",
        amount(memory.phases["updating"]),
        amount(memory.host),
        spell(seconds.iteration),
        f"{span(spell, seconds.total, seconds.total_most)}, {cost} dollars",
        "**not run**",
    )
    assert f"| {' | '.join(cells)} |" in PAGE
    assert f"--tokens {' '.join(map(str, tokens))}" in PAGE


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_explains_itself_and_contains_only_what_differs(name: str) -> None:
    assert (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")
    demo = leaves(profile_params("demo"))
    same = {key for key, value in leaves(read_params(FOLDER / f"{name}.yaml")).items() if demo.get(key, ...) == value}
    assert not same


def test_a_merge_replaces_lines_and_keeps_the_comments_of_the_others() -> None:
    overlay = """\
# Mine: fewer steps.
seed: 2
train:
  steps: 7  # enough
  lora:
    rank: 16
    alpha: 32  # twice the rank
  racing: null
"""
    assert (
        merge(WHOLE, overlay, source=SOURCE)
        == """\
# Mine: fewer steps.
#
seed: 2                                       # every random stream
train:               # of the policy
  steps: 7  # enough
  lora:
    rank: 16
    alpha: 32  # twice the rank
  racing: null                                # null is off
num_threads: 2
"""
    )


def test_an_overlay_may_be_written_on_one_line() -> None:
    merged = parse_params(merge(WHOLE, "train: {steps: 9, racing: {rounds: 2}}", source=SOURCE), SOURCE)
    assert merged["train"] == {"steps": 9, "lora": None, "racing": {"rounds": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlay", "key"),
    [
        ("train: {num_iteration: 3}", "train.num_iteration "),
        ("trian: {num_iterations: 3}", "'trian'"),
        ("train: {num_iterations: {a: 1}}", "train.num_iterations "),
        ("train: {num_iterations: three}", "train.num_iterations "),
        ("train: 3", "train "),
        ("evaluate: {racing: {num_round: 3}}", "evaluate.racing.num_round "),
    ],
)
def test_an_overlay_with_a_mistake_is_refused_in_one_line(overlay: str, key: str) -> None:
    params = parse_params(merge(profile_text("demo"), overlay, source=SOURCE), SOURCE)
    with pytest.raises(ValueError, match=rf"^{SOURCE}: {key}") as caught:
        check_params(params, source=SOURCE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overlay", ["- a list", "", "seed: 1\nseed: 2", "seed: [1"])
def test_an_overlay_that_is_no_mapping_is_refused_in_one_line(overlay: str) -> None:
    with pytest.raises(ValueError, match=r"^infra/profiles/mine.yaml: ") as caught:
        merge(WHOLE, overlay, source=SOURCE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("sampling", {"temperature": 0.9, "top_p": 1.0, "max_turns": 10, "max_completion_tokens": 2048}),
        ("train", {"problems_per_iteration": 12, "group_size": 8, "updates_per_batch": 2, "num_iterations": 800}),
        ("train", {"learning_rate": 1e-6, "schedule": "constant", "warmup_steps": 20, "betas": [0.9, 0.99]}),
        ("train", {"optimizer": "adamw", "weight_decay": 0.0, "max_grad_norm": 0.2, "lora": None}),
        ("train", {"kl_weight": 0.001, "kl_estimator": "k3", "reference_interval": 50, "reference_mix": 1.0}),
        ("train", {"clip_low": 0.2, "clip_high": 0.2, "loss": "ppo", "importance_correction": "none"}),
        (
            "train",
            {"filter_overlong": True, "zero_variance_groups": "keep", "max_replacement_rounds": 0, "advantage": "std"},
        ),
        ("train", {"problem_sampler": "uniform", "autocast": "bfloat16", "gradient_checkpointing": True}),
        ("reward", {"parts": [], "allow_undominated": False}),
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
    assert train["num_iterations"] * train["updates_per_batch"] == 1600
    assert train["reference_interval"] * train["updates_per_batch"] == 100  # M
    assert train["problems_per_iteration"] * train["group_size"] == 96 == 3 * 8 * 4  # GPUs × a device's × accumulation
    assert 100 // train["problems_per_iteration"] * 100 == train["num_iterations"]  # whole batches an epoch × epochs
    assert sampling["max_tokens_per_episode"] == 16_384 + sampling["max_completion_tokens"]


def test_the_recipe_is_of_the_first_request_of_multi_turn_base(recipe: dict[str, Any]) -> None:
    assert recipe["environment"]["name"] == "bfcl"
    assert recipe["environment"]["settings"] == {"categories": ["multi_turn_base"], "turns": "first"}
    assert recipe["model"]["path"].endswith("Qwen2.5-7B-Instruct")


def test_the_recipes_head_states_its_hardware_and_both_counts() -> None:
    text = (FOLDER / "bfcl_qwen2.5_7b.yaml").read_text(encoding="utf-8")
    head = text[: text.index("\nseed:")]
    assert "4 H200" in head and "three that train" in head and "one with vLLM" in head
    assert profile_params("bfcl_qwen2.5_7b")["launch"]["num_trainers"] == 3
    assert "= 1,600 optimizer steps" in text and "M is 100 optimizer steps" in text


def test_a_difference_is_in_the_words_of_yaml() -> None:
    before = {"train": {"lora": None, "seed": 3, "old": True, "name": "a"}}
    after = {"train": {"lora": 0.5, "seed": 3, "new": [1], "name": "absent"}}
    assert difference(before, after) == [
        "  train.lora: null → 0.5",
        "  train.old: true (removed)",
        "  train.name: a → absent",
        "  train.new: [1] (new)",
    ]


def test_a_profile_given_as_a_path_names_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"Write memory\."):
        read_profiles(["infra/profiles/memory.yaml"], FOLDER)
