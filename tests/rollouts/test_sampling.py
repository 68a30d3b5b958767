"""Random streams and the sampler: numbers one can check by hand."""

from __future__ import annotations

import json
import math
from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.seeds import SeedStream, stream_seed
from tasks.rollouts.sampling import sample_tokens
from tasks.rollouts.seeds import uniforms

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))


@pytest.mark.parametrize(("noise", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.999999, 2)])
def test_a_uniform_number_picks_the_token_whose_share_it_falls_into(noise: float, token: int) -> None:
    tokens, logps = sample_tokens(LOGITS, torch.tensor([noise]), temperature=1.0, top_p=1.0)
    assert tokens.tolist() == [token]
    assert logps.item() == pytest.approx(math.log([0.5, 0.3, 0.2][token]))


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises() -> None:
    """At 0.6 the first two stay, 0.5 and 0.3 of 0.8: 0.7 falls behind 0.625, into the second."""
    tokens, logps = sample_tokens(LOGITS, torch.tensor([0.7]), temperature=1.0, top_p=0.6)
    assert tokens.tolist() == [1]
    assert logps.item() == pytest.approx(math.log(0.3 / 0.8))


def test_temperature_sharpens_before_sampling() -> None:
    """At temperature ½ probabilities go as squares: .25 .09 .04 of .38."""
    _, logps = sample_tokens(LOGITS, torch.tensor([0.0]), temperature=0.5, top_p=1.0)
    assert logps.item() == pytest.approx(math.log(0.25 / 0.38))


def test_a_stream_depends_on_each_part_of_its_key() -> None:
    key: tuple[str | int, ...] = (0, "train", 1, "p", 0, 0)
    others: tuple[str | int, ...] = (1, "test", 2, "q", 1, 1)
    changed = [(*key[:part], others[part], *key[part + 1 :]) for part in range(len(key))]
    assert len({stream_seed(*item) for item in [key, *changed]}) == 1 + len(key)


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert stream_seed(7, "test", 0, "td-7-000000", 0, 0) == 17124779662677357821
    assert uniforms(1, 3).tolist() == pytest.approx([0.5118216247002567, 0.9504636963259353, 0.14415961271963373])


@pytest.mark.slow
@given(st.lists(st.integers() | st.text(), min_size=1), st.lists(st.integers()))
def test_seeds_of_keys_that_begin_alike_are_those_of_the_whole_keys(start: list[int | str], rest: list[int]):
    begun = SeedStream(*start)
    assert begun.seed(*rest) == begun.seed(*rest) == stream_seed(*start, *rest)
    assert stream_seed(*start) == int.from_bytes(blake2b(json.dumps(start).encode(), digest_size=8).digest(), "big")


def test_a_longer_limit_only_extends_a_stream() -> None:
    assert uniforms(9, 40)[:8].tolist() == uniforms(9, 8).tolist()


def test_temperature_0_takes_the_likeliest_token_and_calls_it_certain():
    logits_NV = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 2.9]])
    tokens_N, logp_N = sample_tokens(logits_NV, torch.tensor([0.99, 0.99]), temperature=0, top_p=1)
    assert tokens_N.tolist() == [1, 0]
    assert logp_N.tolist() == [0.0, 0.0]
