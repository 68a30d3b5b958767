"""Episodes of several sequences: one reward, one advantage, and every sampled token once in every denominator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import Group, TokenSequence, Trajectory, Turn
from tasks.learning.grpo.metrics import repetition, rollout_metrics
from tasks.learning.grpo.mini_batches import divide, mini_batches
from tasks.learning.grpo.prefixes import _row as messages_of
from tasks.learning.grpo.step_loss import loss_batches
from tasks.learning.grpo.turn_credit import turn_advantages
from tasks.learning.shared.batching import share_of
from tasks.learning.shared.settings import Aggregation, Packing
from tasks.measurement.statistics import summarise
from tests.learning.options import grpo
from tests.learning.rows import a_group, in_sequences

PROMPT = 1  # the first token of every episode; each other token is of one place of one episode alone
Weights = dict[int, tuple[float, float]]  # by sampled token: its weight in the loss, and its advantage


def numbered(group: Group, number: int) -> Group:
    """Its episodes with token ids that no other episode has, so that a token says where it is from."""
    episodes = []
    for index, item in enumerate(group.trajectories):
        (tokens,) = item.sequences
        ids = [
            PROMPT,
            *range(1000 * (10 * number + index + 1), 1000 * (10 * number + index + 1) + len(tokens.token_ids) - 1),
        ]
        episodes.append(replace(item, sequences=[replace(tokens, token_ids=ids)]))
    return replace(group, trajectories=episodes)


def by_hand(groups: list[Group], aggregation: Aggregation, constant: int) -> Weights:
    """What each sampled token of whole episodes weighs, straight from the formulas."""
    lengths = [item.num_sampled_tokens for group in groups for item in group.trajectories]
    found: Weights = {}
    for group in groups:
        mean = sum(score.reward for score in group.scores) / len(group.scores)
        if len({score.reward for score in group.scores}) == 1:
            continue  # dropped: it counts in the denominators alone
        for item, score in zip(group.trajectories, group.scores, strict=True):
            weight = {
                "token": 1 / sum(lengths),
                "sequence": 1 / (len(lengths) * item.num_sampled_tokens),
                "constant": 1 / (len(lengths) * constant),
            }[aggregation]
            found |= dict.fromkeys(item.sequences[0].sampled_ids, (weight, score.reward - mean))
    return found


def by_the_trainer(groups: list[Group], options: Any, *, num_ranks: int, iteration: int = 1) -> Weights:
    """What the micro-batches of all ranks say of each sampled token; none may be in two."""
    (step,) = mini_batches(*divide(groups, options, iteration=iteration), num_steps=1)
    found: Weights = {}
    for rank in range(num_ranks):
        share = share_of(
            step.rows,
            packing=options.packing,
            max_tokens=60,
            device=torch.device("cpu"),
            rank=rank,
            num_ranks=num_ranks,
        )
        for batch in loss_batches(share, options, dropped_lengths=step.dropped_lengths):
            tensors = batch.tensors
            tokens = zip(tensors.target_M.tolist(), batch.weight_M.tolist(), tensors.advantage_M.tolist(), strict=True)
            for token, weight, advantage in tokens:
                assert token not in found, "a sampled token is counted twice"
                found[token] = weight, advantage
    return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    numbers=st.lists(st.lists(st.integers(0, 3), min_size=16, max_size=16), min_size=11, max_size=11),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    packing=st.sampled_from(["tree", "none"]),
    num_ranks=st.integers(1, 2),
)
def test_an_episode_in_several_sequences_has_the_weights_of_the_whole(
    seed: int, numbers: list[list[int]], aggregation: Aggregation, packing: Packing, num_ranks: int
) -> None:
    """Three groups, one of them of equal rewards: each turn of each episode in any of four sequences."""
    rewards = [[1.0, 0.0, 0.5, 0.25], [0.5, 0.5, 0.5], [0.0, 1.0, 0.0, 0.75]]
    whole = [numbered(a_group(seed + number, given), number) for number, given in enumerate(rewards)]
    choices = iter(numbers)
    cut = [
        replace(group, trajectories=[in_sequences(item, next(choices)) for item in group.trajectories])
        for group in whole
    ]
    constant = 50 if aggregation == "constant" else None
    options = grpo(aggregation=aggregation, constant_length=constant, packing=packing, advantage="mean")
    expected = by_hand(whole, aggregation, 50)
    for groups in (whole, cut):
        found = by_the_trainer(groups, options, num_ranks=num_ranks)
        assert found.keys() == expected.keys()
        for token, pair in expected.items():
            assert found[token] == pytest.approx(pair, rel=1e-6, abs=1e-9)
    assert sum(weight for weight, _ in found.values()) == pytest.approx(sum(w for w, _ in expected.values()), abs=1e-6)


def of(*sequences: TokenSequence, turns: int = 0) -> Trajectory:
    (found,) = a_group(0, [0.0]).trajectories
    return replace(found, sequences=[*sequences], turns=[Turn("") for _ in range(turns)])


def tokens(given: list[int], *sampled: int, versions: list[int] | None = None) -> TokenSequence:
    found = TokenSequence()
    found.append_given(given)
    found.append_sampled(sampled, [-0.5] * len(sampled), versions or [1] * len(sampled))
    return found if versions else replace(found, token_versions=[])


def a_pair(*episodes: Trajectory) -> Group:
    """The first solved, the other not."""
    return replace(a_group(0, [1.0, 0.0]), trajectories=[*episodes])


def streamed(aggregation: Aggregation) -> Any:
    """Iteration 8 takes versions from 4 on; a constant length of 20."""
    return grpo(
        aggregation=aggregation, constant_length=20 if aggregation == "constant" else None, advantage="mean",
        max_staleness=3, importance_correction="token_truncate",
        streaming={"groups_under_way": 2, "batch_deadline_seconds": None, "least_batch_share": 0.5},
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "sequences",
    [[[3] * 19 + [5]], [[3] * 12, [3] * 7 + [5]], [[3] * 9 + [5], [3] * 10], [[5], [5] + [3] * 18]],
    ids=["one sequence", "fresh in the last", "fresh in the first", "fresh in both"],
)
def test_tokens_too_old_leave_the_others_the_weight_they_had(
    sequences: list[list[int]], aggregation: Aggregation, num_ranks: int
) -> None:
    """Two episodes of 20 tokens: each token is a 40th of the batch, however many of the 40 are too old, and in however
    many sequences they are.
    """
    versions = [version for of_sequence in sequences for version in of_sequence]
    ids = iter(range(100, 120))
    several = of(*(tokens([PROMPT], *(next(ids) for _ in row), versions=row) for row in sequences))
    several.policy_version = 3
    fresh = of(tokens([PROMPT], *range(200, 220)))
    fresh.policy_version = 5
    found = by_the_trainer([a_pair(several, fresh)], streamed(aggregation), num_ranks=num_ranks, iteration=8)
    left = [100 + number for number, version in enumerate(versions) if version == 5]
    assert {token: weight for token, (weight, _) in found.items()} == pytest.approx(
        dict.fromkeys([*left, *range(200, 220)], 0.025)
    )


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("token", 1 / 22), ("sequence", 0.025), ("constant", 0.025)], ids=str
)
def test_an_episode_too_old_is_one_of_the_batch_with_all_its_tokens(aggregation: Aggregation, weight: float) -> None:
    """Of 20 tokens and of 2, by `sequence` and `constant` 1 / (2 episodes · 20 tokens) for each of the 20."""
    fresh, old = of(tokens([PROMPT], *range(200, 220))), of(tokens([PROMPT], 6, 7))
    fresh.policy_version = 5
    found = by_the_trainer([a_pair(fresh, old)], streamed(aggregation), num_ranks=1, iteration=8)
    weights = {token: weight for token, (weight, _) in found.items()}
    assert weights == pytest.approx(dict.fromkeys(range(200, 220), weight))


def test_a_turn_is_compared_with_those_that_have_a_sequence_with_the_same_beginning() -> None:
    """Both asked a helper the same in a second sequence; only one of them was answered 9 in the first."""
    asked, one, other = [7, 7], tokens([1], 9, 2), tokens([1], 8, 2)
    group = [of(one, tokens(asked, 3)), of(other, tokens(asked, 4)), of(tokens([1], 8, 2))]
    credit = turn_advantages(group, [1.0, 0.0, 0.25], [True] * 3)
    assert credit[0] == pytest.approx([0.875, 0.875, 1.0])  # less (0 + .25) / 2; the helper's turn less 0
    assert credit[2] == pytest.approx([-0.25, -0.25])


def test_what_is_counted_of_an_episode_is_of_all_its_sequences() -> None:
    """5 sampled tokens at −0.5 nats; four words that repeat count only where they follow each other."""
    episode = of(tokens([1], 2, 3), tokens([1, 2, 3], 2, 3, 2), turns=3)
    group = replace(a_group(0, [1.0]), trajectories=[episode])
    row = rollout_metrics([group], grpo(), None)
    assert (episode.num_tokens, row["mean_sampled_tokens"], row["entropy"]) == (9, 5, 0.5)
    assert (
        row["mean_sequences"] == summarise([episode, of(tokens([1], 2))], confidence=0.9)["mean_sequences"] + 0.5 == 2
    )
    assert "mean_sequences" not in rollout_metrics([a_group(0, [1.0])], grpo(), None)
    assert repetition(episode) == 0.0 and repetition(of(tokens([1], 2, 3, 2, 3, 2, 3))) == pytest.approx(1 / 3)


def test_an_episode_of_several_sequences_is_no_start_that_can_be_replayed() -> None:
    """Its agent asked in an order of its own, and only the agent could ask again."""
    assert messages_of(of(tokens([1], 2), turns=1)) == {"messages": [[2]], "num_turns": 1}
    assert messages_of(of(tokens([1], 2), tokens([1], 3), turns=2)) == {"messages": [], "num_turns": 0}
