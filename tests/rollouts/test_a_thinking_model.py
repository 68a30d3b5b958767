"""The embedded model learns to think: a short warm start, then episodes of the real engine under a thinking budget."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tasks.chat.format import load_chat
from tasks.core.records import Trajectory
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.models.architecture import model_logp
from tasks.models.folders import load_model, save_snapshot
from tasks.models.settings import on_cpu
from tasks.pipeline.order import load
from tasks.rollouts.episode import EpisodeKey
from tasks.stages.warm_start.rows import demonstration_row
from tasks.stages.warm_start.settings import WarmStartSections
from tests import tiny
from tests.profiles import profile_params

pytestmark = pytest.mark.slow
NUM_STEPS = 150
SAMPLING = tiny.ROOMY.model_copy(update={"max_turns": 4, "max_tokens_per_turn": 40, "max_thinking_tokens_per_turn": 6})


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-started to cancel bookings: `cancel: cancel B42` is thought, then the call is made."""
    folder, world = tmp_path_factory.mktemp("thinker"), TravelDesk()
    base = tiny.model_folder(folder / "base", embedded=tiny.THINKING)
    chat, rows = load_chat(base), []
    for number, problem in enumerate(tiny.problems(200, max_level=1)):
        shown = world.demonstrate(problem, random.Random(number))
        assert shown is not None
        rows.append(demonstration_row(shown, chat, [], world.thoughts(shown)))
    options = load(WarmStartSections, profile_params("test")).warm_start
    trainer = SupervisedTrainer(load_model(base, compute=on_cpu(1)), rows, options, seed=7)
    for _ in range(NUM_STEPS):
        trainer.step()
    save_snapshot(folder / "model", trainer.model, chat.tokenizer)
    return folder / "model"


def play(model: Path, budget: int | None, *, concurrency: int = 32) -> list[Trajectory]:
    sampling = SAMPLING.model_copy(update={"max_thinking_tokens_per_turn": budget})
    problems = tiny.problems(16, seed=9, max_level=1)
    return tiny.collector(model, sampling=sampling, concurrency=concurrency).collect(
        [EpisodeKey(problem, 0, sample) for problem in problems for sample in range(2)]
    )


def test_it_thinks_before_it_acts(thinker: Path) -> None:
    played = play(thinker, 24)
    thoughts = [turn.thought for item in played for turn in item.turns]
    assert sum(thought is not None for thought in thoughts) > 0.9 * len(thoughts)
    assert sum(str(item.turns[0].thought).startswith("cancel: cancel ") for item in played) > 0.8 * len(played)
    assert sum(bool(item.turns[0].calls) for item in played) > 0.8 * len(played)


def test_a_short_budget_cuts_thoughts_and_the_loss_sees_only_what_the_engine_sampled(thinker: Path) -> None:
    """Six tokens are less than any first thought has; log-probs of what was sampled are those of the model itself."""
    played = play(thinker, 6)
    cut = [item for item in played if item.turns[0].thought_was_cut]
    assert len(cut) > 0.8 * len(played) and any(item.turns[0].calls for item in cut)
    assert all(turn.num_thought_tokens <= 6 for item in played for turn in item.turns)
    model, closing = load_model(thinker, compute=on_cpu(1)), load_chat(thinker).thought_closing_ids
    item = cut[0]
    expected = [0.0, *model_logp(model, [item.sequences[0].token_ids])[0]]
    runs = zip(item.sequences[0].sampled_mask, item.sequences[0].sampler_logp, expected, strict=True)
    assert all(abs(ours - theirs) < 1e-4 if is_sampled else ours == 0 for is_sampled, ours, theirs in runs)
    first = item.sequences[0].sampled_mask.index(True) + 6
    assert item.sequences[0].token_ids[first : first + len(closing)] == closing
    assert not any(item.sequences[0].sampled_mask[first : first + len(closing)])


def test_requests_in_two_parts_depend_on_nothing_but_the_episode(thinker: Path) -> None:
    all_at_once, few_at_once = play(thinker, 6), play(thinker, 6, concurrency=3)
    assert [item.sequences[0].token_ids for item in all_at_once] == [
        item.sequences[0].token_ids for item in few_at_once
    ]
