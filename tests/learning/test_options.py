"""Settings that make no sense are refused with what was found, why it matters and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core.settings import Settings, load
from tasks.learning.shared.settings import GRPOSettings
from tests.learning.options import GRPO, NO_EXPLORATION

LORA = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}
HALF = [{"iteration": 1, "value": 0.5}]
PREFIXES = NO_EXPLORATION | {"prefixes": {"source": "own", "share": HALF, "depth": HALF}}


class Section(Settings):
    train: GRPOSettings


def message(**changed: Any) -> str:
    with pytest.raises(ValueError) as error:
        load(Section, {"train": {**GRPO, **changed}})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "what", "why", "remedy"),
    [
        (
            {"loss": "gspo"},
            "clip_low is 0.2 and clip_high 0.28 with loss: gspo",
            "nothing would be clipped",
            "Set train.clip_low to 3.0e-4 and train.clip_high to 4.0e-4",
        ),
        (
            {"zero_variance_groups": "keep", "max_replacement_rounds": 1},
            "max_replacement_rounds is 1 with zero_variance_groups: keep",
            "both replaced and trained on",
            "Set train.zero_variance_groups to drop",
        ),
        ({"group_size": 1}, "group_size is 1 with advantage: std", "its std is undefined", "Set train.group_size to 2"),
        (
            {"kl_weight": 0.0, "reference_interval": 10},
            "reference_interval is 10 with kl_weight 0",
            "no reference model is loaded",
            "Set train.reference_interval to null",
        ),
        (
            {"steps_per_batch": 3},
            "steps_per_batch is 3 with problems_per_iteration 2",
            "some steps would have none",
            "Set train.steps_per_batch to at most 2",
        ),
        (
            {"reference_interval": None, "reference_mix": 0.5},
            "reference_mix is 0.5 with reference_interval null",
            "the reference never moves",
            "Set train.reference_mix to 1",
        ),
        (
            {"lora": LORA, "reference_interval": 10, "reference_mix": 0.5},
            "reference_mix is 0.5 with train.lora",
            "no adapter of their rank",
            "Set train.reference_mix to 1",
        ),
        (
            {"aggregation": "constant"},
            "train.constant_length, which is null",
            "divides by",
            "such as sampling.max_tokens_per_episode",
        ),
        (
            {"constant_length": 20},
            "constant_length is 20 with aggregation: token",
            "does not read it",
            "Set train.constant_length to null, or train.aggregation to constant",
        ),
        (
            {"problems_per_iteration": 1, "exploration": PREFIXES},
            "exploration.prefixes with problems_per_iteration 1",
            "no episode would begin with one",
            "Set train.problems_per_iteration to 2 or more",
        ),
        (
            {"max_staleness": 1},
            "max_staleness is 1 with importance_correction: none",
            "as if the current policy wrote them",
            "Set train.importance_correction, such as to token_truncate",
        ),
    ],
)
def test_a_refusal_names_the_setting_the_reason_and_the_remedy(
    changed: dict[str, Any], what: str, why: str, remedy: str
) -> None:
    text = message(**changed)
    assert text.startswith("params.yaml: train: ")
    for part in (what, why, remedy):
        assert part in text
    assert text.endswith(".")


def test_prefixes_of_one_problem_are_accepted_where_replacements_can_have_them() -> None:
    section = {**GRPO, "problems_per_iteration": 1, "exploration": PREFIXES, "max_replacement_rounds": 1}
    assert load(Section, {"train": section}).train.exploration


def test_what_gspo_publishes_is_a_clip_of_the_sequence_ratio() -> None:
    section = {**GRPO, "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
    assert load(Section, {"train": section}).train.clip_high == 4e-4


def test_an_estimator_whose_loss_has_no_gradient_is_no_choice() -> None:
    assert "train.kl_estimator = 'k1' is refused" in message(kl_estimator="k1")


@pytest.mark.parametrize(
    "changed", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -1.0}, {"updates_per_batch": 0}], ids=str
)
def test_a_value_out_of_its_bounds_is_refused(changed: dict[str, Any]) -> None:
    ((name, value),) = changed.items()
    assert f"train.{name} = {value} is refused" in message(**changed)


def test_a_wrong_type_or_name_is_refused_too() -> None:
    assert "train.loss = 'grpo' is refused" in message(loss="grpo")
    assert "train.updates_per_batch = 1.5 is refused" in message(updates_per_batch=1.5)


def test_lora_has_no_dropout_which_would_enter_the_ratio() -> None:
    load(Section, {"train": {**GRPO, "lora": LORA}})
    assert "train.lora.dropout is not a setting" in message(lora={**LORA, "dropout": 0.05})
