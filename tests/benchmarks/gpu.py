"""What has to be seen on a GPU before anything is claimed of one: `make bench-gpu`. infra/gpu_checklist.md explains it.

Without a GPU it says so in one line, exits 0 and claims nothing. Random weights in the shapes of known models are made
on the spot, so nothing is downloaded. A row that fails is told, the next one runs, and the exit status is 1. **Never
run on a GPU.**
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.files import write_json
from tests.conftest import ROOT

FILE = ROOT / "artifacts" / "bench" / "gpu.json"
NO_GPU = "no GPU: torch finds no CUDA device here, so nothing was measured and nothing is claimed."
WITHIN = 0.15  # of the memory that plan said
GOAL_MFU, GOAL_TRL = 0.5, 4.0
Row = dict[str, Any]
ITERATIONS: dict[str, dict[str, Any]] = {
    "iteration, 0.5B in full": {"model": "Qwen2.5-0.5B", "has_lora": False},
    "iteration, 1.5B in full": {"model": "Qwen2.5-1.5B", "has_lora": False},
    "iteration, 1.5B, optimizer offloaded": {"model": "Qwen2.5-1.5B", "has_lora": False, "offload": "optimizer"},
    "iteration, 1.5B, vLLM on the same GPU": {"model": "Qwen2.5-1.5B", "has_lora": False, "engine": "vllm"},
    "iteration, 7B with LoRA": {"model": "Qwen2.5-7B", "has_lora": True},
}
# One turn of this length by every episode, which a random model never ends; so both trainers sample and train the same.
TRL_TOKENS, TRL_ROWS = 256, 8


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU)
        return
    card = torch.cuda.get_device_name()
    head = {"date": date.today().isoformat(), "commit": _commit(), "card": card, "torch": torch.__version__}
    print(f"{card}, {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB")
    rows: dict[str, Row] = {}
    for name, check in CHECKS.items():
        rows[name] = run_check(check)
        print(name, rows[name], flush=True)
        write_json(FILE, {**head, "rows": rows})
    print(FILE)
    failed = [name for name, row in rows.items() if has_failed(row)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def has_failed(row: Row) -> bool:
    """Whether it could not be measured, or its own checks did not hold; a goal that is not reached is a figure."""
    return "failed" in row or row.get("status", 0) != 0 or not row.get("is_resumed", True)


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "not a git checkout"


def run_check(check: Callable[[], Row]) -> Row:
    """What it found, or why it could not. The next check has the GPU's memory."""
    import torch

    try:
        return check()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def train_step() -> Row:
    """A packed update at 1.5B through FlexAttention: MFU on distinct tokens, against rows one by one. In a process of
    its own, which gives its GPU memory back.
    """
    command = [sys.executable, "-m", "tests.benchmarks.on_cuda"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"left_out": found} if isinstance(found, str) else {**found, "goal_mfu": GOAL_MFU}


def vllm_checks() -> Row:
    """Start, sleep, wake, weights by disk, IPC, NCCL and adapter; whether log-probs are the trainer's after each."""
    with small_model() as folder:
        return run_module("tests.benchmarks.gpu_vllm", str(folder))


def iteration(**chosen: Any) -> Row:
    """Seconds and peak of each phase, tokens per second, MFU of the update, and memory against plan."""
    from tests.benchmarks.at_size import GROUP_SIZE, GROUPS, SAMPLED, TURNS, Variant, in_a_process, planned

    variant = Variant(dtype="bfloat16", device="cuda", num_threads=8, **chosen)
    with tempfile.TemporaryDirectory() as folder:
        in_a_process("build", Path(folder), variant)
        done = in_a_process("iterate", Path(folder), variant)
        again = in_a_process("resume", Path(folder), variant)
    told = planned(variant)
    sampled = GROUPS * GROUP_SIZE * TURNS * SAMPLED
    return {
        **asdict(variant), **done, "planned": told, "memory_ratio": done["peak"] / told["peak"], "within": WITHIN,
        "is_resumed": again["sum"] == done["sum"], "sampled_tokens_per_second": sampled / done["seconds"]["rollout"],
        **update_mfu(variant, done["seconds"]["update"]),
    }  # fmt: skip


def update_mfu(variant: Any, seconds: float) -> Row:
    """Operations of the weights over time and the card's own matrix rate, on distinct tokens and on padded ones."""
    import torch

    from tasks.planning.shapes import known_shape
    from tests.benchmarks.at_size import GROUP_SIZE, GROUPS, REPLY, SAMPLED, TURNS
    from tests.benchmarks.floor import matrix_rate

    rate = matrix_rate(torch.bfloat16, sizes=(4096, 8192), device="cuda")
    own = TURNS * SAMPLED + (TURNS - 1) * REPLY
    distinct = GROUPS * (variant.prompt + GROUP_SIZE * own)
    padded = GROUPS * GROUP_SIZE * (variant.prompt + own)
    a_token = operations_of_a_weight(has_lora=variant.has_lora) * known_shape(variant.model).matrix_parameters
    return {
        "matrix_rate": rate,
        "mfu_distinct": a_token * distinct / seconds / rate,
        "mfu_padded": a_token * padded / seconds / rate,
        "goal_mfu": GOAL_MFU,
    }


def operations_of_a_weight(*, has_lora: bool) -> int:
    """Per token of an update, of one weight in a layer's matrices.

    A product of matrices multiplies and adds once per weight and token: 2 operations. The policy's forward is one
    product, backward is one for the gradient of the input and one for that of the weight, and the reference's forward
    is one more: 2·4. Under LoRA the base is frozen, so no gradient of its weights is computed: 2·3; the adapter's own
    products (rank 16: below 1% of the base's) are left out. Checkpointing computes the forward again, which is no
    progress and so not counted.
    """
    return 2 * (3 if has_lora else 4)


def against_trl() -> Row:
    """One GRPO batch of each on the same problems in the same process. The model is the demo's, of 0.4 million weights:
    what the loop costs, and not yet what a large model does.
    """
    from tasks.core.splits import read_split
    from tests.benchmarks import trl_step
    from tests.benchmarks.demo import demo_artifacts, demo_params

    paths, params = demo_artifacts(), demo_params()
    params["compute"] |= {"device": "cuda"}
    found = trl_step.measure(paths.start_model, read_split(paths, "train"), params, num_threads=8, rounds=3)
    return {**found, "goal": GOAL_TRL}


def against_trl_at_size() -> Row:
    """The same of a model of 1.5 billion random weights, in float32 under bfloat16 autocast: one turn of 256 tokens,
    two problems of eight episodes, one step, no reference, so that both trainers fit on 80 GB.
    """
    from tests import tiny
    from tests.benchmarks import trl_step
    from tests.benchmarks.at_size import Variant, in_a_process
    from tests.benchmarks.demo import demo_params

    variant = Variant("Qwen2.5-1.5B", "float32", has_lora=False, device="cuda", num_threads=8)
    with tempfile.TemporaryDirectory() as folder:
        in_a_process("build", Path(folder), variant)
        found = trl_step.measure_large(
            Path(folder) / "model",
            tiny.problems(32),
            one_long_turn(demo_params(), device="cuda"),
            num_threads=8,
            rounds=3,
            their_rows=TRL_ROWS,
        )
    return {**asdict(variant), **found, "goal": GOAL_TRL}


def one_long_turn(params: dict[str, Any], *, device: str) -> dict[str, Any]:
    """params.yaml with episodes of one turn that nothing but its length ends."""
    changed = {
        "compute": {"device": device},
        "engine": {"max_concurrent_episodes": 2 * TRL_ROWS},
        "sampling": {"max_turns": 1, "max_tokens_per_turn": TRL_TOKENS, "max_tokens_per_episode": 3 * TRL_TOKENS},
        "train": {
            "problems_per_iteration": 2, "group_size": TRL_ROWS, "updates_per_batch": 1, "kl_weight": 0.0,
            "autocast": "bfloat16", "gradient_checkpointing": False, "filter_overlong": False,
            "micro_batch_tokens": TRL_ROWS * 2 * TRL_TOKENS, "learning_rate": 1e-6,
        },
    }  # fmt: skip
    return params | {section: params[section] | values for section, values in changed.items()}


def run_module(module: str, *arguments: str) -> Row:
    """In a process of its own, which gives its GPU memory back."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    return {"status": done.returncode, "told": (done.stdout or done.stderr).splitlines()[-40:]}


@contextmanager
def small_model() -> Iterator[Path]:
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        yield tiny.model_folder(Path(folder) / "model")


CHECKS: dict[str, Callable[[], Row]] = {
    "update at 1.5B": train_step,
    "vLLM on the trainer's GPU": vllm_checks,
    **{name: partial(iteration, **chosen) for name, chosen in ITERATIONS.items()},
    "against TRL": against_trl,
    "against TRL, 1.5B": against_trl_at_size,
}

if __name__ == "__main__":
    main()
