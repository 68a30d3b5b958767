"""Exported weights and the probe, without an engine: heads of their own, whole or not at all, and what a gap says."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tasks.chat.format import load_chat
from tasks.core.background import run
from tasks.core.files import read_json, write_json
from tasks.core.processes import this_process
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.engines.vllm import weights_folder
from tasks.engines.vllm.served_tensors import describe_tensors, served_tensors
from tasks.engines.vllm.server import Server, Weights
from tasks.engines.vllm.weights_folder import WeightsFolder, has_tied_head, read_record
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.learning.shared.lora import Adapter
from tasks.models import saving
from tasks.models.architecture import model_logp
from tasks.models.differences import tolerance_of
from tasks.models.empty_model import streamed_weights
from tasks.models.folders import load_model, load_tokenizer, save_adapter
from tasks.models.policy_weights import PolicyWeights
from tasks.models.saving import write_shards
from tasks.models.settings import LoRASettings, on_cpu
from tasks.rollouts.probe import check_weights, compare_logp, probe_sequences
from tests import tiny

LORA = LoRASettings(rank=2, alpha=4, target_modules="all-linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def weights(folder: Path, tmp_path: Path) -> WeightsFolder:
    return WeightsFolder(tmp_path / "weights", load_tokenizer(folder), dtype="float32")


def test_the_copy_has_an_output_head_of_its_own_and_computes_the_same(folder: Path, weights: WeightsFolder) -> None:
    model = load_model(folder, compute=on_cpu(1))
    copy = AutoModelForCausalLM.from_pretrained(weights.export(PolicyWeights.of(model), 3))
    assert copy.lm_head.weight.data_ptr() != copy.model.embed_tokens.weight.data_ptr()
    assert read_json(weights.folder / "version-000003-1" / "config.json")["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is True
    ids = [list(range(20, 60))]
    assert model_logp(copy, ids)[0] == pytest.approx(model_logp(model, ids)[0], abs=1e-6)


def test_weights_leave_in_the_engines_dtype_and_the_config_says_which(folder: Path, tmp_path: Path) -> None:
    """16 bits are half of what a float32 trainer has; nothing is rounded where both have the same."""
    model, sizes = load_model(folder, compute=on_cpu(1)), {}
    for dtype in ("float32", "bfloat16", "auto"):
        weights = WeightsFolder(tmp_path / dtype, load_tokenizer(folder), dtype=dtype)
        copy = weights.export(PolicyWeights.of(model), 1)
        sizes[dtype] = sum(tensor.nbytes for tensor in load_file(copy / "model.safetensors").values())
        assert read_json(copy / "config.json")["dtype"] == {"auto": "float32"}.get(dtype, dtype)
    assert sizes["float32"] == sizes["auto"] == 2 * sizes["bfloat16"]


def test_tensors_are_written_a_file_at_a_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the layers, at most 64 kB a file. A merged tensor exists only until its file is written."""
    model = load_model(folder, compute=on_cpu(1))
    layers = {name: tensor for name, tensor in PolicyWeights.of(model).tensors() if ".layers." in name}
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in layers.items():
            made = tensor.clone()
            alive.append(weakref.ref(made))
            most = max(most, sum(item.nbytes for ref in alive if (item := ref()) is not None))
            yield name, made

    monkeypatch.setattr(saving, "MAX_SHARD_BYTES", 64_000)
    served = served_tensors(PolicyWeights(model, merged), torch.float32)
    write_shards(tmp_path, served, torch.float32)
    sizes = [tensor.nbytes for tensor in layers.values()]
    assert most <= 64_000 + 3 * max(sizes) < sum(sizes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == layers.keys()
    assert all(torch.equal(written[name], layers[name]) for name in layers)
    assert read_json(tmp_path / "model.safetensors.index.json")["weight_map"].keys() == layers.keys()


def test_a_copy_of_the_tensors_shares_no_memory_with_the_trainer(folder: Path) -> None:
    model = load_model(folder, compute=on_cpu(1))
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for dtype in (None, torch.float32, torch.bfloat16):
        copies = dict(served_tensors(PolicyWeights.of(model), dtype, copy_to=model.device))
        assert not own & {tensor.data_ptr() for tensor in copies.values()}
        assert {tensor.dtype for tensor in copies.values()} == {dtype or torch.float32}


class Casts(TorchDispatchMode):
    """Where tensors were cast or copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if function._schema.name in ("aten::_to_copy", "aten::clone", "aten::copy_"):
            self.devices.append(result.device.type)
        return result


def test_tensors_are_described_as_they_are_served_and_none_is_cast_for_it(folder: Path) -> None:
    weights = PolicyWeights.of(load_model(folder, compute=on_cpu(1)))
    with Casts() as casts:
        described = describe_tensors(weights, torch.bfloat16)
    assert set(casts.devices) == {"meta"}, "no numbers"
    served = [*served_tensors(weights, torch.bfloat16)]
    assert [(item.name, item.dtype, item.shape) for item in described] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in served
    ]
    assert [item.num_bytes for item in described] == [tensor.nbytes for _, tensor in served]


def test_the_last_two_adapters_are_kept_beside_the_weights_below_them(folder: Path, weights: WeightsFolder) -> None:
    def save(place: Path) -> None:
        (place / "adapter_config.json").write_text("{}", encoding="utf-8")

    weights.open_model(folder)
    for version in (1, 2, 3):
        weights.export_adapter(save, version)
    assert names(weights) == ["adapter-000002-3", "adapter-000003-4", "version-000000-1"]


def test_an_untied_model_is_served_from_where_it_lies(folder: Path, weights: WeightsFolder) -> None:
    copied = weights.open_model(folder)
    assert copied.name == "version-000000-1"
    assert weights.open_model(copied) == copied


def test_a_tied_model_and_an_adapter_are_opened_from_their_files_and_never_loaded(
    folder: Path, weights: WeightsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is the embedding; the adapter's matrices are W + scale·B·A."""
    adapter = Adapter(load_model(folder, compute=on_cpu(1)), LORA, weights="float32")
    for tensor in adapter.tensors("default").values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    save_adapter(tmp_path / "adapter", adapter.save, load_tokenizer(folder), base=folder)
    expected = {
        place: dict(served_tensors(PolicyWeights.of(load_model(place, compute=on_cpu(1))), None))
        for place in (folder, tmp_path / "adapter")
    }
    monkeypatch.setattr(weights_folder, "load_model", None)
    for place, tensors in expected.items():
        opened = weights.open_model(place)
        found = load_file(opened / "model.safetensors")
        assert found.keys() == tensors.keys() and "lm_head.weight" in found
        assert all(torch.equal(found[name], tensors[name]) for name in found)
        assert read_record(opened).num_tensors == 25


def test_a_model_whose_files_name_tensors_otherwise_is_opened_all_the_same(
    folder: Path, weights: WeightsFolder, tmp_path: Path
) -> None:
    """With a head of its own in the files, though it is tied: loading takes the embedding."""
    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | more, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert streamed_weights(tmp_path / "m") is None
    assert load_file(weights.open_model(tmp_path / "m") / "model.safetensors").keys() == (tensors | more).keys()


def test_weights_lie_where_no_other_user_can_look_and_never_in_another_users_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name such as /dev/shm/turnwise can be foreseen: whoever makes it first could swap what is served from it."""
    (tmp_path / "weights").mkdir(mode=0o777)
    made = WeightsFolder(tmp_path / "weights", load_tokenizer(folder), dtype="float32").folder
    assert {place.stat().st_mode & 0o777 for place in (made, made.parent, made.parent.parent)} == {0o700}

    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    link.symlink_to(theirs)
    if os.geteuid() == 0:
        os.chown(theirs, 4321, 4321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    for place in (theirs, link):
        with pytest.raises(ValueError, match=r"belongs to another user of this machine .* Name a folder of your own"):
            WeightsFolder(place, load_tokenizer(folder), dtype="float32")
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3"])
def test_a_head_that_is_tied_without_a_word_in_the_config_is_known(tmp_path: Path, family: str) -> None:
    """Gemma's default is tied, Qwen3's is not."""
    write_json(tmp_path / "config.json", {"model_type": family})
    assert has_tied_head(tmp_path) == family.startswith("gemma")


def test_a_config_transformers_does_not_know_is_refused_in_one_line(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "no_such_model"})
    with pytest.raises(
        ValueError, match=r"its config\.json could not be loaded .*not support its architecture"
    ) as error:
        has_tied_head(tmp_path)
    assert "\n" not in str(error.value)


def test_the_last_two_exports_are_kept_and_none_after_closing(folder: Path, weights: WeightsFolder) -> None:
    """Versions 7, 8, 9, and 8 once more after a rollback, which overwrites nothing."""
    model = load_model(folder, compute=on_cpu(1))
    for version in (7, 8, 9, 8):
        assert weights.export(PolicyWeights.of(model), version).exists()
    assert names(weights) == ["version-000008-4", "version-000009-3"]
    weights.close()
    assert not weights.folder.exists()


def test_never_more_than_two_versions_are_on_the_disk(folder: Path, weights: WeightsFolder) -> None:
    """While the fifth is written, too: the fourth, from which an engine that dies is started again, and its own."""
    model, most = load_model(folder, compute=on_cpu(1)), []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from PolicyWeights.of(model).tensors()
        most.append(len(names(weights)))

    def save(place: Path) -> None:
        most.append(len([name for name in names(weights) if "adapter" in name]))

    for version in range(5):
        weights.export(PolicyWeights(model, counted), version)
    assert most == [1, 2, 2, 2, 2], "the one being written is a folder already"
    most.clear()
    for version in range(5):
        weights.export_adapter(save, version)
    assert most == [1, 2, 2, 2, 2]


def test_a_copy_that_is_read_outlasts_any_number_of_exports(folder: Path, weights: WeightsFolder) -> None:
    """Two servers start from the first copy; it is there until both are done, and goes with the export after that."""
    model = load_model(folder, compute=on_cpu(1))
    first = weights.export(PolicyWeights.of(model), 0)
    with weights.reading(first):
        with weights.reading(first):
            for version in (1, 2, 3):
                weights.export(PolicyWeights.of(model), version)
        weights.export(PolicyWeights.of(model), 4)
        assert names(weights) == ["version-000000-1", "version-000003-4", "version-000004-5"]
    weights.export(PolicyWeights.of(model), 5)
    assert names(weights) == ["version-000004-5", "version-000005-6"]


def test_the_folder_a_server_was_given_stays_until_it_is_ready(folder: Path, weights: WeightsFolder) -> None:
    """Three refreshes come while it starts, as they do when another server is ready."""
    model = load_model(folder, compute=on_cpu(1))
    first = weights.export(PolicyWeights.of(model), 0)

    class Starting:
        url = ""

        async def wait_ready(self) -> None:
            for version in (1, 2, 3):
                weights.export(PolicyWeights.of(model), version)
            assert first.exists()

    process: Any = Starting()

    async def move(url: str) -> None:
        """Wherever it is now."""

    client: Any = SimpleNamespace(move=move)
    given = Weights(first, None, 0)
    run(Server(1, client, weights.reading).start(lambda: given, lambda folder, number: process)).result()
    weights.export(PolicyWeights.of(model), 4)
    assert not first.exists()


def names(weights: WeightsFolder) -> list[str]:
    return sorted(item.name for item in weights.folder.iterdir())


def left_by(root: Path, name: str, **differs: Any) -> Path:
    """What a process that is like this one but for what `differs` left in `root`."""
    (root / name / "weights").mkdir(parents=True)
    write_json(root / name / "owner.json", this_process() | differs)
    return root / name


def test_what_a_process_left_that_has_certainly_ended_is_removed_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    """Pods and nodes that share a folder number their processes alike: process 4,194,999, above the largest number
    that Linux gives, may run on another host or in another container.
    """
    gone = left_by(tmp_path, "gone", pid=4194999)
    kept = [
        left_by(tmp_path, "live"),
        left_by(tmp_path, "host", pid=4194999, host="another"),
        left_by(tmp_path, "container", pid=4194999, namespace="pid:[1]"),
        left_by(tmp_path, "torn"),
        tmp_path / "not-ours",
    ]
    (tmp_path / "torn" / "owner.json").write_text("{", encoding="utf-8")
    (tmp_path / "not-ours").mkdir()
    weights = WeightsFolder(tmp_path, load_tokenizer(folder), dtype="float32")
    assert not gone.exists()
    assert set(tmp_path.iterdir()) == {*kept, weights.home}


def test_two_processes_of_one_number_have_folders_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container that was killed and started again every process has its number of before."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(weights_folder, "this_process", lambda: {"pid": 7})
    both = [WeightsFolder(tmp_path, load_tokenizer(folder), dtype="float32") for _ in range(2)]
    assert both[0].home != both[1].home and all(one.folder.is_dir() for one in both)


def test_logs_outlast_the_engine_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    logged, other = (WeightsFolder(tmp_path, load_tokenizer(folder), dtype="float32") for _ in range(2))
    logged.logs.mkdir()
    for weights in (logged, other):
        weights.close()
    assert {item.name for item in logged.home.iterdir()} == {"logs", "owner.json"}
    assert not other.home.exists()


def test_a_torn_copy_is_told_by_its_record(folder: Path, weights: WeightsFolder) -> None:
    copy = weights.export(PolicyWeights.of(load_model(folder, compute=on_cpu(1))), 5)
    record = read_record(copy)
    assert (record.policy_version, record.num_tensors) == (5, 25)  # 2 layers of 11, embedding, norm, head
    small = tiny.model_folder(weights.folder / "other", "llama") / "model.safetensors"
    (copy / "model.safetensors").write_bytes(small.read_bytes())
    with pytest.raises(ValueError, match=r"contains 20 tensors in .* says 25"):
        read_record(copy)


def test_the_greatest_difference_names_its_token() -> None:
    """Sequence 1, second log-prob: the token at position 2 of that sequence, 0.5 apart."""
    found = compare_logp([[-1.0], [-2.0, -3.0]], [[-1.1], [-2.0, -3.5]])
    assert (found.sequence, found.position, found.differences.max) == (1, 2, 0.5)
    assert found.differences.mean == pytest.approx(0.2)  # (0.1 + 0 + 0.5) / 3
    assert compare_logp([[-1.0, float("nan")]], [[-9.0, -2.0]]).differences.mean == float("inf")


class Shifted(ScriptedEngine):
    """Log-probs of a model, one of them moved."""

    def __init__(self, rows: list[list[float]], *, by: float):
        super().__init__([], end_of_turn=0)
        self.rows = [list(row) for row in rows]
        self.rows[2][4] += by
        self.policy_version = 9

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return self.rows


def test_training_stops_with_one_line_that_says_where_engine_and_trainer_part(folder: Path) -> None:
    model, chat = load_model(folder, compute=on_cpu(1)), load_chat(folder)
    probe = probe_sequences(chat, TravelDesk(), tiny.problems(40), max_tokens=30)
    assert len(probe) == 4 and max(map(len, probe)) == 29, "one token less than an episode may have, for vLLM's own"
    rows = model_logp(model, probe)
    check_weights(Shifted(rows, by=0.0009), rows, probe, tolerance=tolerance_of("float32"))
    with pytest.raises(ValueError) as error:
        check_weights(Shifted(rows, by=0.25), rows, probe, tolerance=tolerance_of("float32"))
    message = str(error.value)
    assert message.startswith("after the refresh to policy version 9 the engine does not have the trainer's weights. ")
    assert f"at token 5 of probe sequence 2 its log-prob is {rows[2][4] + 0.25:.5f}" in message
    assert f"largest 0.25 over {sum(map(len, rows))} tokens" in message
    assert "engine.probe_tolerance allows mean 0.0001" in message
    assert "\n" not in message
