"""Supervised steps on a real tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.contracts.test_families import FAMILIES
from tests.learning.options import supervised
from tests.learning.rows import random_rows, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def a_trainer(folder: Path) -> SupervisedTrainer:
    return SupervisedTrainer(load_model(folder, compute=on_cpu(1)), random_rows(3, 8), supervised(), seed=1)


def test_steps_lower_the_loss_and_repeat_bitwise(folder: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = a_trainer(folder)
        losses = [trainer.step()["loss"] for _ in range(12)]
        assert losses[-1] < losses[0]
        runs.append(weights(trainer.model))
    assert torch.equal(*runs)


def test_the_loss_is_the_mean_over_assistant_tokens(folder: Path) -> None:
    """Against transformers' own loss of one row, labels −100 where nothing was sampled."""
    trainer = SupervisedTrainer(
        load_model(folder, compute=on_cpu(1)),
        random_rows(3, 1),
        supervised(batch_size=1, learning_rate=0.0),
        seed=1,
    )
    (row,) = random_rows(3, 1)
    labels = [token if m else -100 for token, m in zip(row.token_ids, row.sampled_mask, strict=True)]
    with torch.no_grad():
        expected = trainer.model(input_ids=torch.tensor([row.token_ids]), labels=torch.tensor([labels])).loss.item()
    assert trainer.step()["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_model_that_would_be_trained_on_another_distribution_is_refused_before_any_step() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        SupervisedTrainer(FAMILIES["llama, dynamic"].model(), random_rows(3, 8), supervised(), seed=1)


def test_an_epoch_sees_every_row_once(folder: Path) -> None:
    trainer = a_trainer(folder)
    seen = [id(row) for _ in range(2) for row in trainer._next_rows()]
    assert sorted(seen) == sorted(map(id, trainer.rows))


def test_a_run_written_down_and_put_back_goes_on_bitwise(folder: Path) -> None:
    whole = a_trainer(folder)
    expected = [whole.step() for _ in range(6)]
    first, second = a_trainer(folder), a_trainer(folder)
    rows = [first.step() for _ in range(3)]
    second.load(first.tensors(), first.state())
    rows += [second.step() for _ in range(3)]
    assert rows == expected
    assert torch.equal(weights(second.model), weights(whole.model))
