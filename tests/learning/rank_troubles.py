"""What goes wrong on several ranks, and a supervised training on them, for `test_ranks_in_trouble.py`.

Rank 0 writes what it saw, to compare with that of one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.files import write_json
from tasks.core.records import Group
from tasks.learning.sft.trainer import NotFinite, SupervisedTrainer
from tasks.learning.shared.ranks import END, Ranks
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests.learning.options import supervised
from tests.learning.rank_cases import BFLOAT16, SIGNAL, a_trainer, groups_of
from tests.learning.rows import a_group, random_rows

SUPERVISED: dict[str, dict[str, Any]] = {
    "padded rows": {"packing": "none"},
    "packed rows": {"micro_batch_tokens": 60},
    "a row per step, so that only one rank has work": {"batch_size": 1},
    "bfloat16": {},
    "dropout in the model, and layers computed again": {"gradient_checkpointing": True},
}
NUM_STEPS = 12
COMPARED, LOSSES = ("num_replaced_groups", "non_finite", "learning_rate"), ("loss", "kl", "grad_norm")


def meet_troubles(ranks: Ranks, folder: str) -> None:
    """Five iterations: a replaced group in each, in the third a gradient that is not finite on one rank, in the fourth
    a `collect` that fails at first, and before the fifth a roll back to the weights of before the second.
    """
    trainer = a_trainer(Path(folder) / "model", ranks, max_replacement_rounds=1, problems_per_iteration=4)
    if not ranks.leads:
        trainer.follow()
        return

    def collect(iteration: int, round_number: int, num_problems: int) -> Sequence[Group]:
        if round_number:
            assert num_problems == 1
            return [a_group(100 + iteration, SIGNAL, round_number=1)]
        groups = groups_of("packed trees", iteration)
        return [a_group(7, [float("inf"), 0.0, 0.0]), *groups[1:]] if iteration == 3 else groups

    def fail(iteration: int, round_number: int, num_problems: int) -> Sequence[Group]:
        raise ValueError("the tool is broken")

    def policy() -> torch.Tensor:
        return torch.cat([tensor.detach().flatten().clone() for tensor in trainer.policy_tensors().values()])

    rows = [trainer.iterate(collect)]
    good = {name: tensor.detach().clone() for name, tensor in trainer.policy_tensors().items()}
    rows.append(trainer.iterate(collect))
    before = policy()
    rows.append(trainer.iterate(collect))
    assert torch.equal(policy(), before)
    with pytest.raises(ValueError, match="the tool is broken"):
        trainer.iterate(fail)
    trainer.iteration -= 1  # it is collected again
    rows.append(trainer.iterate(collect))
    trainer.roll_back(good, step_factor=0.5)
    assert torch.equal(policy(), torch.cat([tensor.flatten() for tensor in good.values()]))
    rows.append(trainer.iterate(collect))
    told = [{key: row[key] for key in (COMPARED if row["non_finite"] else (*COMPARED, *LOSSES))} for row in rows]
    write_json(Path(folder) / f"{ranks.size}-troubles.json", told)
    ranks.announce(END)


def fine_tune(ranks: Ranks, folder: str) -> None:
    """Each case at once and, of the first, in two halves; and a step that would destroy the weights."""
    for case, changed in SUPERVISED.items():
        whole = _supervised(ranks, folder, case, **changed)
        if whole is None:
            continue
        rows = [whole.step() for _ in range(NUM_STEPS)]
        write_json(Path(folder) / f"{ranks.size}-{case}.json", {"rows": rows, "held_out": whole.held_out_loss()})
        ranks.announce(END)
    _fine_tune_in_halves(ranks, folder)
    _destroy(ranks, folder)


def _fine_tune_in_halves(ranks: Ranks, folder: str) -> None:
    """On as many ranks the end is bitwise that of a run at once."""
    case = next(iter(SUPERVISED))
    first = _supervised(ranks, folder, case, **SUPERVISED[case])
    saved: Any = None
    if first is not None:
        rows = [first.step() for _ in range(NUM_STEPS // 2)]
        saved = {part: {key: item.clone() for key, item in named.items()} for part, named in first.tensors().items()}
        ranks.announce(END)
    second = _supervised(ranks, folder, case, **SUPERVISED[case])
    if first is not None and second is not None:
        second.load(saved, first.state())
        rows += [second.step() for _ in range(NUM_STEPS // 2)]
        write_json(Path(folder) / f"{ranks.size}-halves.json", {"rows": rows, "held_out": second.held_out_loss()})
        ranks.announce(END)


def _destroy(ranks: Ranks, folder: str) -> None:
    trainer = _supervised(ranks, folder, "padded rows")
    if trainer is not None:
        parameter = next(iter(trainer.model.parameters()))
        with torch.no_grad():
            parameter.mul_(float("nan"))  # what rank 0 has of it
        with pytest.raises(NotFinite):
            trainer.step()
        assert not ranks.is_stepping
        ranks.announce(END)


def _supervised(ranks: Ranks, folder: str, case: str, **changed: Any) -> SupervisedTrainer | None:
    """On rank 0; the others have followed it to its end."""
    model = load_model(Path(folder) / "model", compute=BFLOAT16 if case == "bfloat16" else on_cpu(1))
    if case.startswith("dropout"):
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    settings = supervised(**{"num_steps": NUM_STEPS, "learning_rate": 1e-3, "max_grad_norm": 0.5, **changed})
    trainer = SupervisedTrainer(model, random_rows(3, 9), settings, seed=1, held_out=random_rows(4, 3), ranks=ranks)
    if ranks.leads:
        return trainer
    before = torch.get_rng_state()
    trainer.follow()
    assert torch.equal(torch.get_rng_state(), before), "a checkpoint has the random state of rank 0 alone"
    return None
