"""plain_grpo.py against the trainer on the same batch, and the loop of plain_grpo.py on a game of two turns."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.core.records import Group, Problem
from tasks.learning import plain_grpo
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.plain_grpo import Sample, group_advantages, grpo_loss, sampled_logps
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.options import grpo
from tests.learning.rows import a_group, in_sequences

# float32: the trainer packs the trajectories of a group as a tree, so sums are in another order.
TOLERANCE = 1e-6  # absolute; the gradient differs by 1e-7 where it is 0.2
GROUPS = [a_group(1, [1.0, 0.0, 0.0, 1.0]), a_group(2, [0.5, 0.5, 0.5]), a_group(3, [0.0, 0.25, 1.0, 0.5, 0.0])]

# The first two episodes with each turn in one of three sequences, and the others as they are.
IN_SEQUENCES = replace(
    GROUPS[0],
    trajectories=[
        *(in_sequences(item, [0, 1, 0, 2, 1, 2, 0, 1] * 4) for item in GROUPS[0].trajectories[:2]),
        *GROUPS[0].trajectories[2:],
    ],
)


def move(model: torch.nn.Module, *, seed: int, size: float) -> None:
    """Add noise to every weight, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])


def by_the_trainer(folder: Path, groups: list[Group], **changed: Any) -> tuple[float, Tensor, dict[str, Any]]:
    """Loss, gradient and metrics of a second pass, the weights having moved since the first. One step is one pass."""
    options = grpo(
        steps_per_batch=1, kl_weight=0.1, learning_rate=0.0, packing="tree", micro_batch_tokens=100, **changed
    )
    trainer = GRPOTrainer(
        load_model(folder, compute=on_cpu(1)), options, compute=on_cpu(1), temperature=1.0, max_tokens=200
    )
    move(trainer.model, seed=1, size=0.01)  # away from the reference
    seen: list[Tensor] = []
    take_step = trainer.optimizer.step

    def spy(**arguments: Any) -> Any:
        seen.append(gradient(trainer.model))
        step = take_step(**arguments)
        move(trainer.model, seed=2, size=0.02)
        return step

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    row = trainer.iterate(lambda iteration, round_number, num_problems: groups)
    return row["loss"], seen[1], row


def by_hand(folder: Path, groups: list[Group], **options: float) -> tuple[float, Tensor]:
    reference, model = (load_model(folder, compute=on_cpu(1)) for _ in range(2))
    move(model, seed=1, size=0.01)

    def policy(ids_T: Tensor) -> Tensor:
        return model(input_ids=ids_T[None]).logits[0]

    with torch.no_grad():
        samples = [
            Sample(
                trajectory,
                advantage,
                sampled_logps(policy, trajectory),
                sampled_logps(lambda ids_T: reference(input_ids=ids_T[None]).logits[0], trajectory),
            )
            for group in groups
            for trajectory, advantage in zip(
                group.trajectories, group_advantages([score.reward for score in group.scores]), strict=True
            )
        ]
    move(model, seed=2, size=0.02)
    loss = grpo_loss(policy, samples, kl_weight=0.1, **options)
    loss.backward()
    return loss.item(), gradient(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing_groups", [GROUPS, [IN_SEQUENCES]], ids=["with a group of equal rewards", "episodes in several sequences"]
)
def test_loss_and_gradient_are_the_trainers_off_policy_and_with_tool_replies(
    tmp_path: Path, packing_groups: list[Group]
) -> None:
    folder = tiny.model_folder(tmp_path / "m")
    loss, expected, row = by_the_trainer(folder, packing_groups, zero_variance_groups="keep")
    mine, found = by_hand(folder, packing_groups)

    assert row["clip_share"] > 0 and row["ratio_max"] > 1.3  # the weights moved: some ratios are clipped
    assert row["kl"] > 0
    assert mine == pytest.approx(loss, abs=TOLERANCE)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert expected.abs().max() > 0.01


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0, 0.0]) == pytest.approx([0.5**0.5, -(0.5**0.5)])


DIGITS, END = range(3, 6), 0


class Echo:
    """The policy asks (any turn), a tool replies with the problem's digit, and the policy has to repeat it."""

    def prompt(self, problem: Problem) -> list[int]:
        return [1]

    def reply(self, problem: Problem, turns: list[list[int]]) -> list[int] | None:
        return [2, problem.world["digit"]] if len(turns) == 1 else None

    def is_solved(self, problem: Problem, turns: list[list[int]]) -> bool:
        return len(turns) == 2 and turns[1] == [problem.world["digit"], END]


class TinyModel(torch.nn.Module):
    """Token ids [T] → logits [T, V], each from what is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(7, 32), torch.nn.GRU(32, 32)
        self.head = torch.nn.Linear(32, 7)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(ids_T))[0])


@pytest.mark.slow
def test_the_loop_learns_what_only_a_tools_reply_says() -> None:
    torch.manual_seed(2)
    model = TinyModel()
    turn = {"calls": [], "answer": ""}
    problems = [
        Problem.model_validate(
            {"id": str(digit), "category": "echo", "level": 1, "requests": ["?"], "world": {"digit": digit},
             "reference": [turn], "split_group": str(digit)}
        )
        for digit in DIGITS
    ]  # fmt: skip
    success = list(
        plain_grpo.train(
            model, Echo(), problems, end_of_turn=END, max_tokens=10, num_iterations=35, learning_rate=1e-2, seed=2
        )
    )  # fmt: skip
    assert mean(success[:5]) < 0.2
    assert mean(success[-5:]) > 0.75  # a policy that does not read the reply solves a third


def test_it_needs_torch_and_the_records_alone_and_is_short() -> None:
    source = Path(plain_grpo.__file__).read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
    standard = {"__future__", "collections.abc", "copy", "dataclasses", "random", "typing"}
    assert modules <= standard | {"torch", "tasks.core.records"}
    assert len(source.splitlines()) <= 150
