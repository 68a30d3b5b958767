"""Snapshots of one architecture play in one engine: a copy of weights each, and the rows that an engine of its own
would give.
"""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.engines.transformers.engine import TransformersEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.folders import load_model, write_pointer
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import sample_episodes
from tasks.rollouts.kept_models import KeptModels
from tasks.rollouts.kept_weights import KeptWeights
from tasks.rollouts.load import Engines
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate.runner import EpisodeRunner
from tests import tiny
from tests.stages.evaluate.stage_folder import play_settings

PROBLEMS = tiny.problems(3)
WEIGHTS = "model.safetensors"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sixteen; number n has the weights of the first times 1 + n/16."""
    place = tmp_path_factory.mktemp("snapshots")
    first = tiny.model_folder(place / "0")
    tensors = safetensors.torch.load_file(first / WEIGHTS)
    folders = [first]
    for number in range(1, 16):
        folder = Path(shutil.copytree(first, place / str(number)))
        scaled = {name: tensor * (1 + number / 16) for name, tensor in tensors.items()}
        safetensors.torch.save_file(scaled, folder / WEIGHTS, metadata={"format": "pt"})
        folders.append(folder)
    return folders


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Models built, each with its folder, and engines opened."""
    found: Counter[str] = Counter()
    build = transformers.AutoModelForCausalLM.from_pretrained
    open_engine = TransformersEngine.__init__

    def note_build(folder: Path, **options: Any) -> Any:
        found.update(["models", str(folder)])
        return build(folder, **options)

    def note_engine(self: TransformersEngine, *given: Any, **named: Any) -> None:
        found["engines"] += 1
        open_engine(self, *given, **named)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", note_build)
    monkeypatch.setattr(TransformersEngine, "__init__", note_engine)
    return found


def rows(folder: Path, engines: Engines | None = None, play: PlaySettings | None = None) -> Rows:
    played = sample_episodes(
        folder, TravelDesk(), PROBLEMS, play or play_settings(), stage="test", label="test", engines=engines
    )
    return [trajectory.to_row() for trajectory in played]


def shared(folders: list[Path], *, room: float = float("inf")) -> Engines:
    kept = KeptModels(lambda: room)
    kept.expect(folders)
    return Engines(play_settings(), kept)


@pytest.mark.slow
def test_sixteen_snapshots_build_one_model_and_open_one_engine(snapshots: list[Path], counted: Counter[str]) -> None:
    with closing(shared(snapshots)) as engines:
        rounds = [[rows(folder, engines) for folder in snapshots] for _ in range(2)]
    assert counted == {"models": 1, "engines": 1, str(snapshots[0]): 1}
    assert rounds[0] == rounds[1] == [rows(folder) for folder in snapshots]
    assert rounds[0][0] != rounds[0][15]


@pytest.mark.slow
def test_a_model_under_another_name_is_played_once_and_has_the_same_episodes(
    snapshots: list[Path], counted: Counter[str], tmp_path: Path
) -> None:
    """A warm start that was not needed is a pointer to the base model; `skip_rl` makes one of the best."""
    write_pointer(tmp_path / "pointer", str(snapshots[0]))
    plays = {"test": play_settings(), "greedy": play_settings()}
    with closing(EpisodeRunner(TravelDesk(), plays=plays, resume=tmp_path / "resume")) as runner:
        base, warm_start, other = (
            [item.to_row() for item in runner.play(model, PROBLEMS, "test", name)]
            for name, model in (("base", snapshots[0]), ("warm_start", tmp_path / "pointer"), ("best", snapshots[9]))
        )
        assert base == warm_start != other
        assert counted == {"models": 1, "engines": 1, str(snapshots[0]): 1}
        assert len([*(tmp_path / "resume").iterdir()]) == 2
        assert runner.timings["test"]["warm_start"] == runner.timings["test"]["base"]
        assert runner.summaries(PROBLEMS, "test", "warm_start") == runner.summaries(PROBLEMS, "test", "base")
        for name in ("base", "warm_start"):
            runner.store(PROBLEMS, "test", name, tmp_path / name)
        assert (tmp_path / "base").read_bytes() == (tmp_path / "warm_start").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, float("inf")])
def test_weights_go_from_their_file_into_the_model_and_no_tensor_is_copied_beside_it(
    snapshots: list[Path], room: float
) -> None:
    class Copies(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
                self.num_bytes += made.nbytes
            return made

    kept = KeptWeights(lambda: room)
    kept.expect(snapshots[:2])
    model = kept.load(snapshots[0], compute=on_cpu(1))
    with Copies() as copies:
        for folder in (snapshots[1], snapshots[0], snapshots[1]):
            assert kept.fill(model, folder)
    assert copies.num_bytes == 0
    for folder in snapshots[:2]:
        assert kept.fill(model, folder)
        fresh = load_model(folder, compute=on_cpu(1)).state_dict()
        torch.testing.assert_close(model.state_dict(), fresh, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, float("inf")])
def test_a_tied_head_and_a_head_of_its_own_under_one_config_are_never_filled_into_one_another(
    snapshots: list[Path], tmp_path: Path, room: float
) -> None:
    """The tiny model's head is tied; beside it the same files with a head of twice the embedding."""
    tied, untied = snapshots[0], Path(shutil.copytree(snapshots[0], tmp_path / "untied"))
    tensors = safetensors.torch.load_file(tied / WEIGHTS)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    safetensors.torch.save_file(tensors, untied / WEIGHTS, metadata={"format": "pt"})
    kept = KeptWeights(lambda: room)
    kept.expect([tied, untied])
    models = {folder: kept.load(folder, compute=on_cpu(1)) for folder in (tied, untied)}
    assert not kept.fill(models[tied], untied)
    assert not kept.fill(models[untied], tied)
    with closing(shared([tied, untied], room=room)) as engines:
        found = [rows(folder, engines) for folder in (tied, untied, tied)]
    assert found == [rows(tied), rows(untied), rows(tied)]
    assert found[0] != found[1]


@pytest.mark.slow
def test_a_snapshot_that_cannot_be_read_leaves_no_half_loaded_engine(snapshots: list[Path], tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(snapshots[1], tmp_path / "damaged"))
    content = (damaged / WEIGHTS).read_bytes()
    (damaged / WEIGHTS).write_bytes(content[: len(content) // 2])
    with closing(shared([*snapshots[:3], damaged])) as engines:
        first = rows(snapshots[0], engines)
        with pytest.raises(ValueError, match=r"damaged: model\.safetensors could not be loaded") as refused:
            rows(damaged, engines)
        assert "\n" not in str(refused.value)
        assert rows(snapshots[2], engines) == rows(snapshots[2])
        assert rows(snapshots[0], engines) == first


@pytest.mark.slow
def test_a_file_that_is_written_over_in_place_is_not_taken_for_its_twin(snapshots: list[Path], tmp_path: Path) -> None:
    first, twin = (Path(shutil.copytree(snapshots[1], tmp_path / name)) for name in ("first", "twin"))
    kept = KeptWeights(lambda: float("inf"))
    kept.expect([first, twin])
    model = kept.load(snapshots[0], compute=on_cpu(1))
    assert kept.fill(model, first)
    (first / WEIGHTS).write_bytes((snapshots[9] / WEIGHTS).read_bytes())  # the same inode
    assert kept.fill(model, twin)
    torch.testing.assert_close(model.state_dict(), load_model(twin, compute=on_cpu(1)).state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_another_architecture_gets_an_engine_of_its_own(
    snapshots: list[Path], counted: Counter[str], tmp_path: Path
) -> None:
    other = tiny.model_folder(tmp_path / "llama", "llama")
    with closing(shared([snapshots[0], other])) as engines:
        found = [rows(folder, engines) for folder in (snapshots[0], other)]
    assert (counted["models"], counted["engines"]) == (2, 2)
    assert found == [rows(snapshots[0]), rows(other)]


@pytest.mark.slow
def test_the_likeliest_tokens_are_played_by_the_same_engine(snapshots: list[Path], counted: Counter[str]) -> None:
    play = play_settings()
    greedy = play.model_copy(update={"sampling": play.sampling.model_copy(update={"temperature": 0.0})})
    shorter = play.model_copy(update={"sampling": play.sampling.model_copy(update={"max_tokens_per_episode": 150})})
    with closing(shared(snapshots[:2])) as engines:
        sampled = rows(snapshots[0], engines)
        engines.play_as(greedy)
        likeliest = rows(snapshots[1], engines, greedy)
        assert counted["engines"] == 1
        engines.play_as(shorter)
        cut = rows(snapshots[0], engines, shorter)
        assert counted["engines"] == 2
    assert likeliest == rows(snapshots[1], play=greedy)
    assert cut == rows(snapshots[0], play=shorter)
    assert sampled == rows(snapshots[0])
