"""The sentinel against numbers checked by hand: each signal, what it must forgive, its messages, its state."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.core.settings import Settings
from tasks.learning.shared.settings import GRPOSettings
from tasks.rollouts.settings import SamplingSettings
from tasks.stages.train.alarms import ADVICE, Alarm
from tasks.stages.train.sentinel import OF_EPISODES, Sentinel, fair_row, fitted_ends, level
from tasks.stages.train.settings import SentinelSettings
from tests.conftest import ROOT
from tests.learning.rows import a_group

Row = dict[str, Any]
# A window of 12: levels are medians of 3, growth is judged from 6 iterations on.
THRESHOLDS: dict[str, Any] = {
    "action": "stop", "step_factor": 0.5, "max_rollbacks": 2, "window": 12, "low_success": 0.3,
    "max_length_growth": 2.0, "max_overlong_rise": 0.2, "max_entropy_rise": 0.75, "max_repetition_rise": 0.3,
    "max_mean_mismatch": 0.3, "max_mismatch_weight": 100.0, "max_ratio": 100.0, "max_kl": 1.0, "max_clip_share": 0.25,
    "min_entropy": 0.01, "max_zero_variance_share": 0.9, "max_unearned_rise": 0.1, "confidence": 0.99,
}  # fmt: skip
HEALTHY: Row = {
    "success_rate": 0.5, "mean_sampled_tokens": 100.0, "overlong_share": 0.0, "entropy": 0.3,
    "repetition": 0.1, "informative_group_share": 0.6, "loss": 0.01, "kl": 0.02, "clip_share": 0.01, "ratio_max": 2.0,
    "grad_norm": 0.1, "mismatch_mean": 0.02, "mismatch_weight_max": 1.0, "non_finite": False,
    "success_by_category": {"book": 0.5},
}  # fmt: skip
OF_THE_STEPS = (
    "loss", "kl", "clip_share", "ratio_max", "grad_norm", "mismatch_mean", "mismatch_weight_max", "non_finite",
)  # fmt: skip


def limits(**changed: Any) -> SentinelSettings:
    return SentinelSettings.model_validate({**THRESHOLDS, **changed})


def rows(**columns: Sequence[Any]) -> list[Row]:
    """One healthy row for each value of the columns, which replace what is healthy."""
    (length,) = {len(values) for values in columns.values()}
    success = columns.get("success_rate", [HEALTHY["success_rate"]] * length)  # the reward is success alone
    return [
        {
            "iteration": i + 1,
            **HEALTHY,
            "mean_reward": success[i],
            **{key: values[i] for key, values in columns.items()},
        }
        for i in range(length)
    ]


def watch(watched: Iterable[Row], settings: SentinelSettings | None = None) -> list[Alarm]:
    sentinel = Sentinel(settings or limits())
    return [alarm for row in watched if (alarm := sentinel.observe(row)) is not None]


def only(signal: str, alarms: Sequence[Alarm]) -> Alarm:
    """The first alarm, which must be there and of this signal."""
    assert alarms and alarms[0].signal == signal, alarms
    return alarms[0]


# How numbers are read


def test_a_level_is_the_median_of_the_newest_rows_and_unknown_where_they_are_few_or_lack_it():
    seen = [{"kl": 9.0}, {"kl": 1.0}, {"kl": 3.0}, {"kl": 2.0}]
    assert level(seen, "kl", of=3) == 2.0
    assert level(seen, "kl", of=5) is None
    assert level([{"kl": 1.0}, {}, {"kl": 3.0}], "kl", of=3) == 2.0
    assert level([{"kl": 1.0}, {}, {}], "kl", of=3) is None


def test_the_fitted_ends_of_an_exponential_curve_are_its_ends():
    seen = [{"iteration": float(i), "tokens": 100.0 * 2**i} for i in range(4)]
    assert fitted_ends(seen, "tokens", least=1.0) == pytest.approx((100.0, 800.0))
    assert fitted_ends([{**row, "tokens": 0.0} for row in seen], "tokens", least=0.05) == pytest.approx((0.05, 0.05))


# Length


def test_completions_that_triple_while_success_stands_still_raise_the_alarm():
    alarm = only("completion_length", watch(rows(mean_sampled_tokens=[100 * 3 ** (i / 5) for i in range(6)])))
    assert (alarm.iteration, alarm.since) == (6, 1)
    assert alarm.values == pytest.approx(
        {"length_growth": 3.0, "success_growth": 1.0, "mean_sampled_tokens": 300.0, "limit": 2.0}
    )
    assert "completions grew from 100 to 300 tokens (×3.00) in 6 iterations" in alarm.message


def test_growth_is_not_judged_before_half_a_window():
    assert not watch(rows(mean_sampled_tokens=[100 * 2**i for i in range(5)]))


def test_completions_may_grow_by_twice_the_factor_success_grows_by():
    """Success ×2, so the limit is ×4: ×3.9 passes, ×4.1 does not. In a decline of success nothing is explained."""
    success = [0.2 * 2 ** (i / 5) for i in range(6)]
    lengths = {factor: [100 * factor ** (i / 5) for i in range(6)] for factor in (1.9, 2.1, 3.9, 4.1)}
    assert not watch(rows(mean_sampled_tokens=lengths[3.9], success_rate=success))
    only("completion_length", watch(rows(mean_sampled_tokens=lengths[4.1], success_rate=success)))
    assert not watch(rows(mean_sampled_tokens=lengths[1.9], success_rate=success[::-1]))
    only("completion_length", watch(rows(mean_sampled_tokens=lengths[2.1], success_rate=success[::-1])))


def test_success_that_is_hardly_there_explains_no_growth():
    """From 0.1% to 4% is a factor of 40, and one lucky trajectory."""
    success = [0.001 * 40 ** (i / 5) for i in range(6)]
    alarms = watch(rows(mean_sampled_tokens=[100 * 3 ** (i / 5) for i in range(6)], success_rate=success))
    assert only("completion_length", alarms).values["success_growth"] == 1.0


def test_one_batch_thrice_as_long_is_no_alarm_wherever_it_comes():
    """At worst as the tenth of ten, where it tilts the line by ln 3 · 4.5/82.5 · 9: a factor of 1.71."""
    for place in range(30):
        lengths = [300.0 if i == place else 100.0 for i in range(30)]
        assert not watch(rows(mean_sampled_tokens=lengths), limits(window=20))


def test_growth_is_measured_over_the_window_and_not_over_the_run():
    """2% an iteration is ×1.24 in 12, and ×7 in 100: an agent may become thorough slowly."""
    assert not watch(rows(mean_sampled_tokens=[60 * 1.02**i for i in range(100)]))


# Levels and rises

BEYOND = [
    # signal, key, what it is at the start, what it is from then on, the same just within the limit
    ("overlong", "overlong_share", 0.1, 0.31, 0.29),
    ("entropy_explosion", "entropy", 0.3, 1.06, 1.04),
    ("repetition", "repetition", 0.1, 0.41, 0.39),
    ("mean_mismatch", "mismatch_mean", 0.02, 0.31, 0.29),
    ("mismatch", "mismatch_weight_max", 1.0, 101.0, 99.0),
    ("ratio", "ratio_max", 2.0, 101.0, 99.0),
    ("kl", "kl", 0.02, 1.01, 0.99),
    ("clip", "clip_share", 0.01, 0.26, 0.24),
]


@pytest.mark.parametrize(("signal", "key", "start", "beyond", "within"), BEYOND)
def test_a_level_beyond_its_threshold_alarms_at_the_second_of_three_iterations(
    signal: str, key: str, start: float, beyond: float, within: float
):
    alarm = only(signal, watch(rows(**{key: [start] * 9 + [beyond] * 2})))
    assert (alarm.iteration, alarm.values[key]) == (11, beyond)
    assert alarm.since == (1 if "first" in alarm.values else 9)
    assert not watch(rows(**{key: [start] * 9 + [within] * 20}))


@pytest.mark.parametrize(("signal", "key", "start", "beyond", "within"), BEYOND)
def test_one_odd_batch_in_three_is_no_alarm(signal: str, key: str, start: float, beyond: float, within: float):
    """The demo, which ends at 95%, has iterations with a KL of 1.3 and 5.3."""
    assert not watch(rows(**{key: [start] * 9 + [5 * beyond, start, start] * 3}))


@pytest.mark.parametrize(("signal", "key", "start", "beyond", "within"), BEYOND)
def test_null_leaves_a_signal_unwatched(signal: str, key: str, start: float, beyond: float, within: float):
    names = {"overlong": "max_overlong_rise", "entropy_explosion": "max_entropy_rise", "clip": "max_clip_share",
             "repetition": "max_repetition_rise", "mean_mismatch": "max_mean_mismatch",
             "mismatch": "max_mismatch_weight", "ratio": "max_ratio", "kl": "max_kl"}  # fmt: skip
    assert not watch(rows(**{key: [start] * 9 + [beyond] * 20}), limits(**{names[signal]: None}))


def test_a_policy_that_always_repeated_itself_is_not_blamed_for_it():
    """Tool calls of one form share their 4-grams; only what is added to the start counts."""
    assert not watch(rows(repetition=[0.65] * 30, overlong_share=[0.5] * 30, entropy=[2.5] * 30))


def test_iterations_without_signal_lack_the_numbers_of_their_steps():
    seen = rows(kl=[0.02] * 9 + [1.5] * 3)
    for key in OF_THE_STEPS:
        del seen[10][key]
    alarms = watch(seen)  # of the last three, two have a KL: (1.5, lacking, 1.5)
    assert [alarm.iteration for alarm in alarms] == [12]
    for key in OF_THE_STEPS:
        del seen[11][key]
    assert not watch(seen)


def test_iterations_that_lost_their_episodes_are_no_fall_to_zero():
    """What they lack is in no median; a rise is measured from the first iterations that have episodes."""
    seen = rows(entropy=[0.3] * 20)
    for row in [*seen[:3], *seen[9:12]]:
        for key in OF_EPISODES:
            del row[key]
    assert not watch(seen)
    sentinel = Sentinel(limits())
    for row in seen:
        sentinel.observe(row)
    assert [row["iteration"] for row in sentinel.first_rows] == [4, 5, 6]


@pytest.mark.parametrize(("num_lost", "is_read"), [(0, True), (2, True), (3, False)])
def test_of_an_iteration_that_lost_more_than_the_environment_may_only_the_steps_are_read(num_lost: int, is_read: bool):
    """18 episodes are left: 2 of 20 is a tenth, 3 of 21 is more."""
    (row,) = rows(kl=[0.02])
    row["episodes_dropped"] = num_lost
    read = fair_row(row, [a_group(number, [1.0] * 6) for number in range(3)], most_lost=0.1)
    assert ("success_rate" in read, "entropy" in read, "kl" in read) == (is_read, is_read, True)


# Low entropy and equal rewards


def test_little_entropy_is_collapse_while_success_is_low_and_mastery_while_it_is_high():
    low = [0.3] * 6 + [0.009] * 6
    alarm = only("entropy_collapse", watch(rows(entropy=low, success_rate=[0.2] * 12)))
    assert (alarm.iteration, alarm.since) == (8, 6)
    assert not watch(rows(entropy=low, success_rate=[0.31] * 12))
    assert not watch(rows(entropy=low, success_rate=[0.2] * 12), limits(min_entropy=None))


def test_groups_without_signal_alarm_after_a_whole_window_of_little_success():
    alarm = only("zero_variance", watch(rows(informative_group_share=[0.05] * 12, success_rate=[0.02] * 12)))
    assert (alarm.iteration, alarm.since) == (12, 1)
    assert alarm.values == pytest.approx({"zero_variance_share": 0.95, "success_rate": 0.02, "limit": 0.9})
    assert not watch(rows(informative_group_share=[0.05] * 11, success_rate=[0.02] * 11))
    assert not watch(rows(informative_group_share=[0.05] * 40, success_rate=[0.98] * 40))
    assert not watch(
        rows(informative_group_share=[0.05] * 12, success_rate=[0.02] * 12), limits(max_zero_variance_share=None)
    )


# What is not finite


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("grad_norm", None, "grad_norm"),
        ("loss", None, "loss"),
        ("loss", math.nan, "loss"),
        ("kl", None, "kl"),
        ("ratio_max", math.inf, "ratio_max"),
        ("mean_reward", math.nan, "mean_reward"),
        ("non_finite", True, "loss or gradient"),
    ],
)
def test_what_is_not_finite_alarms_at_once_and_whatever_is_watched(key: str, value: Any, named: str):
    thresholds = [name for name in THRESHOLDS if name.startswith(("max_", "min_")) and name != "max_rollbacks"]
    alarm = only("non_finite", watch(rows(**{key: [value]}), limits(**dict.fromkeys(thresholds))))
    assert (alarm.iteration, alarm.since) == (1, 1)
    assert f"iteration 1: {named}: not a finite number" in alarm.message


def test_what_is_not_finite_never_reaches_the_state_so_it_stays_json():
    sentinel = Sentinel(limits())
    for row in rows(kl=[math.nan, math.inf, None], ratio_max=[math.inf, 2.0, 2.0]):
        assert sentinel.observe(row)
    json.dumps(sentinel.state(), allow_nan=False)


def test_a_whole_window_that_is_not_finite_can_still_be_judged():
    broken = rows(mean_sampled_tokens=[math.nan] * 14, success_rate=[math.inf] * 14, entropy=[math.nan] * 14)
    assert [alarm.signal for alarm in watch(broken)] == ["non_finite"] * 14


# Alarms


def test_of_several_signals_the_gravest_is_the_alarm_and_the_others_are_told():
    alarm = watch(rows(kl=[0.02] * 9 + [2.0] * 2, entropy=[0.3] * 9 + [2.0] * 2))[0]
    assert (alarm.iteration, alarm.signal) == (11, "entropy_explosion")
    assert alarm.message.endswith(
        "Also seen: the policy is 2.00 nats per token from its reference; sentinel.max_kl is 1."
    )


def test_a_collapse_within_the_first_iterations_is_seen_against_the_model_that_training_started_from():
    """A quarter of 20 is 5 rows, whose median is 0.74: the collapse was in what a rise was measured from."""
    collapsing = rows(overlong_share=[0.20, 0.40, 0.84, 0.80, 0.74, 0.75, 0.70])
    assert watch(collapsing, limits(window=20)) == []
    sentinel = Sentinel(limits(window=20))
    sentinel.start = {"overlong_share": 0.05}
    alarms = [alarm for row in collapsing if (alarm := sentinel.observe(row))]
    assert alarms[0].iteration == collapsing[4]["iteration"]
    message = only("overlong", alarms).message
    assert "74% of trajectories reach a token limit, 5% did at the start of the run" in message
    sentinel = Sentinel(limits(window=20))
    sentinel.start = {"overlong_share": 0.9}  # RL that begins below it is measured from where it begins
    assert [sentinel.observe(row) for row in rows(overlong_share=[0.1] * 5 + [0.5] * 5)][-1] is not None


def test_forgetting_starts_the_window_anew_but_not_what_a_rise_is_measured_from():
    grown = rows(mean_sampled_tokens=[100 * 3 ** (i / 5) for i in range(6)])
    sentinel = Sentinel(limits())
    for row in grown[:5]:
        sentinel.observe(row)
    sentinel.forget()
    assert sentinel.observe(grown[5]) is None
    noisy = [sentinel.observe({**row, "iteration": 10 + row["iteration"]}) for row in rows(entropy=[2.0] * 3)]
    assert noisy[-1] is not None and noisy[-1].values["first"] == 0.3


def test_messages_name_settings_that_exist_and_the_threshold_that_was_passed():
    known: dict[str, type[Settings]] = {
        "sentinel": SentinelSettings,
        "train": GRPOSettings,
        "sampling": SamplingSettings,
    }
    spoken = [*ADVICE.values(), (ROOT / "tasks/stages/train/sentinel.py").read_text(encoding="utf-8")]
    named = {match for text in spoken for match in re.findall(r"(?<!\.)\b(sentinel|train|sampling)\.([a-z_]+)\b", text)}
    assert named and not [f"{section}.{name}" for section, name in named if name not in known[section].model_fields]
    for signal, key, start, beyond, _ in BEYOND:
        message = only(signal, watch(rows(**{key: [start] * 9 + [beyond] * 3}))).message
        assert re.search(r"; sentinel\.max_\w+ is [\d.]+%?\. [A-Z]", message) and ADVICE[signal] in message


def test_a_roll_back_that_can_never_happen_is_refused():
    with pytest.raises(ValidationError, match=r"Set sentinel\.action to stop, or sentinel\.max_rollbacks to 1 or more"):
        limits(action="roll_back", max_rollbacks=0)
    assert limits(action="stop", max_rollbacks=0)


@pytest.mark.parametrize("changed", [{"window": 7}, {"step_factor": 1.0}, {"max_length_growth": 1.0}, {"max_kl": 0.0}])
def test_a_threshold_that_means_nothing_is_refused(changed: dict[str, Any]):
    with pytest.raises(ValidationError):
        limits(**changed)


numbers = st.floats(0, 1)
any_row = st.fixed_dictionaries(
    {
        "success_rate": numbers, "mean_sampled_tokens": st.floats(0, 500), "overlong_share": numbers,
        "entropy": st.floats(0, 5), "repetition": numbers, "informative_group_share": numbers,
    },
    optional={
        "kl": st.floats(-1, 5) | st.none(), "clip_share": numbers, "ratio_max": st.floats(0, 500),
        "mismatch_weight_max": st.floats(0, 500), "grad_norm": st.floats(0, 5) | st.none(), "non_finite": st.booleans(),
    },
)  # fmt: skip


@given(
    seen=st.lists(any_row, min_size=1, max_size=30), killed_after=st.integers(0, 30), forgets_after=st.integers(0, 30)
)
def test_a_sentinel_restored_from_its_state_raises_the_same_alarms(
    seen: list[Row], killed_after: int, forgets_after: int
):
    def watched(kill: bool) -> list[Alarm | None]:
        sentinel, alarms = Sentinel(limits(window=8)), []
        for iteration, row in enumerate(seen, start=1):
            if kill and iteration - 1 == killed_after:
                state = json.loads(json.dumps(sentinel.state()))
                sentinel = Sentinel(limits(window=8))
                sentinel.load_state(state)
            alarms.append(sentinel.observe({"iteration": iteration, **row}))
            if iteration == forgets_after:
                sentinel.forget()
        return [*alarms, sentinel.state()]  # type: ignore[list-item]

    assert watched(kill=True) == watched(kill=False)
