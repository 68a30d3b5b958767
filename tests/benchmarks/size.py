"""What a snapshot, its registration and its fetch hold in memory.

`python -m tests.benchmarks.size FOLDER STEP…` prints, per step, the peak of resident memory above that before it, in
bytes. Pages of mapped files count too, though the kernel may drop them. Linux alone resets the peak, through
/proc/self/clear_refs.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.models.settings import on_cpu

RANK = 16
# Of Qwen2.5-1.5B: 1.54 billion parameters, 3.1 GB in bfloat16.
SHAPE_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in a Qwen2 model's files."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    narrow = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", narrow), ("v", narrow)):
            yield f"{place}.self_attn.{name}_proj.weight", (rows, width)
            yield f"{place}.self_attn.{name}_proj.bias", (rows,)
        yield f"{place}.self_attn.o_proj.weight", (width, width)
        yield f"{place}.mlp.gate_proj.weight", (inner, width)
        yield f"{place}.mlp.up_proj.weight", (inner, width)
        yield f"{place}.mlp.down_proj.weight", (width, inner)
        yield f"{place}.input_layernorm.weight", (width,)
        yield f"{place}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)


def write_base(folder: Path, shape: Mapping[str, Any], *, shard_bytes: int) -> None:
    """A random bfloat16 model in shards of about `shard_bytes`, written one by one, with the tests' tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    from tests import tiny

    config = Qwen2Config(**shape, **HEADS, dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = shard_bytes
    for name, dims in tensor_shapes({**shape, **HEADS}):
        size = 2 * math.prod(dims)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, dims))
        room -= size
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.empty(dims, dtype=torch.bfloat16).normal_(0, 0.02) for name, dims in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_adapter(folder: Path, base: Path, shape: Mapping[str, Any]) -> None:
    """A random adapter of all linear layers, as `train` leaves it."""
    import torch
    from safetensors.torch import save_file

    from tasks.models.folders import load_tokenizer, save_adapter

    linear = [(name, dims) for name, dims in tensor_shapes({**shape, **HEADS}) if name.endswith("_proj.weight")]
    targets = sorted({name.split(".")[-2] for name, _ in linear})

    def save(place: Path) -> None:
        tensors = {}
        for name, (rows, columns) in linear:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns) / columns
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK) / RANK
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets, "bias": "none"}
        (place / "adapter_config.json").write_text(json.dumps(config))

    save_adapter(folder, save, load_tokenizer(base), base=base)


def merge(folder: Path) -> None:
    from tasks.models.folders import folder_hash, merged_snapshot
    from tasks.tracking.model_files import protect_weights

    merged = merged_snapshot(folder / "snapshot", folder / "merged", compute=on_cpu(2))
    protect_weights(merged)
    folder_hash(merged)


def registry_of(folder: Path) -> Any:
    from tasks.tracking.registry import Registry
    from tasks.tracking.settings import TrackingSettings

    place = folder / "mlflow"
    place.mkdir(exist_ok=True)
    settings = TrackingSettings(
        uri=f"sqlite:///{place}/mlflow.db", artifact_location=str(place / "artifacts"), experiment="size", num_traces=0
    )
    return Registry(settings, "agent")


def register(folder: Path) -> None:
    from tasks.models.folders import folder_hash, weights_hash
    from tasks.tracking.aliases import lock_registry, make_champion

    registry, merged = registry_of(folder), folder / "merged"
    registry.make_model()
    hashes = {"weights": weights_hash(merged), "folder_hash": folder_hash(merged)}
    version = registry.register(merged, **hashes, tags={}, run_id=None, check=lambda: None)
    with lock_registry(registry) as lock:
        make_champion(registry, lock, version, {"event": "promotion"})


def fetch(folder: Path) -> None:
    registry = registry_of(folder)
    registry.fetch(registry.champion(), folder / "fetched")


def save(folder: Path) -> None:
    """In shards of the base's size; the peak is above the model itself, which is in memory before the step."""
    from tasks.models import saving
    from tasks.models.folders import stored_dtype

    (folder / "saved").mkdir()
    saving.MAX_SHARD_BYTES = max(shard_sizes(folder / "base"))
    saving.save_model(folder / "saved", _MODEL[0], stored_dtype(folder / "base"))


_MODEL: list[Any] = []


def _prepare(steps: list[str], folder: Path) -> None:
    """Imports, and for `save` a model in float32, as one that is trained."""
    import mlflow  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    from tasks.models.folders import load_model, load_tokenizer

    torch.set_num_threads(2)
    load_tokenizer(folder / "base")
    if "save" in steps:
        _MODEL.append(load_model(folder / "base", compute=on_cpu(2)))
    if "register" in steps:
        registry_of(folder).champion()


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def peaks_of(folder: Path, *steps: str) -> dict[str, int]:
    """Bytes per step, measured in a process of their own."""
    command = [sys.executable, "-m", "tests.benchmarks.size", str(folder), *steps]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def shard_sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]


def main(folder: Path, names: list[str]) -> None:
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", HF_HUB_OFFLINE="1")
    steps: dict[str, Callable[[Path], None]] = {"merge": merge, "register": register, "fetch": fetch, "save": save}
    _prepare(names, folder)
    peaks = {}
    for name in names:
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        steps[name](folder)
        peaks[name] = _memory("VmHWM") - before
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
