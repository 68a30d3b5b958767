"""Episodes that begin with given messages: the environment's state is right, and no loss sees what was given."""

from __future__ import annotations

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.references import reference_messages
from tasks.rollouts.settings import SamplingSettings
from tests import tiny

PROBLEMS = tiny.problems(34, max_level=4)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def played(
    chat: ChatFormat,
    problem: Problem,
    num_replayed: int,
    *,
    written: list[list[int]] | None = None,
    sampling: SamplingSettings = tiny.ROOMY,
) -> Trajectory:
    """The reference's first messages are given, and the engine writes the others, or `written`."""
    messages = reference_messages(chat, problem)
    left = [ids[:-1] for ids in messages[num_replayed:]] if written is None else written
    engine = ScriptedEngine([left], end_of_turn=chat.end_of_turn)
    collector = Collector(
        EngineEpisodes(engine, chat, sampling), TravelDesk(), max_concurrent_episodes=1, seed=0, stage="test"
    )
    (found,) = collector.collect([EpisodeKey(problem, 1, 0, tuple(map(tuple, messages[:num_replayed])))])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_from_every_turn_of_a_reference_the_rest_of_it_solves_the_problem(chat: ChatFormat, problem: Problem) -> None:
    """The same tokens as where the policy writes all of it; only what it wrote itself is in the loss."""
    whole = played(chat, problem, 0)
    assert whole.is_success and whole.num_replayed_turns == 0
    for count in range(1, len(whole.turns)):
        found = played(chat, problem, count)
        assert (found.sequences[0].token_ids, found.turns, found.outcome) == (
            whole.sequences[0].token_ids,
            whole.turns,
            "success",
        )
        assert found.num_calls == sum(len(turn.calls) for turn in whole.turns[count:])
        assert found.num_replayed_turns == count
        own = sum(len(ids) for ids in reference_messages(chat, problem)[count:])
        assert found.num_sampled_tokens == own
        first = found.sequences[0].sampled_mask.index(True)
        assert found.sequences[0].sampled_mask[first:] == whole.sequences[0].sampled_mask[first:]


def test_a_replayed_start_leaves_the_policy_a_turn(chat: ChatFormat) -> None:
    """Of two turns one is given, whatever the key names; where the first message fills the episode, none is."""
    problem = next(problem for problem in PROBLEMS if len(problem.reference[0].calls) > 1)
    two_turns = tiny.ROOMY.model_copy(update={"max_turns": 2})
    found = played(chat, problem, 2, written=[chat.encode("Done.")], sampling=two_turns)
    assert (found.num_replayed_turns, len(found.own_turns), found.outcome) == (1, 1, "failure")

    prompt_length = played(chat, problem, 0).sequences[0].sampled_mask.index(True)
    first = reference_messages(chat, problem)[0]
    full = tiny.ROOMY.model_copy(update={"max_tokens_per_episode": prompt_length + len(first)})
    found = played(chat, problem, 2, written=[chat.encode("Done.")], sampling=full)
    assert found.num_replayed_turns == 0 and found.own_turns


def test_a_replayed_start_counts_in_the_budgets_and_its_failure_is_its_own(chat: ChatFormat) -> None:
    problem = next(problem for problem in PROBLEMS if len(problem.reference[0].calls) > 1)
    found = played(chat, problem, 1, written=[chat.encode("Done.")])
    assert found.outcome == "failure" and len(found.turns) == 2
    assert chat.decode(
        [t for t, is_own in zip(found.sequences[0].token_ids, found.sequences[0].sampled_mask, strict=True) if is_own]
    ).startswith("Done.")
