"""What the flow's fork server (`tasks/core/fork_server.py`) loads for a command, at the first that needs it: the
libraries, each after those that it imports itself, so that no step takes long. Turnwise's own modules come along, and a
fork imports them anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from tasks.core.files import read_json

DVC = ("dvc.cli.parser", "dvc.repo", "dvc.commands.repro")
COMMANDS = ("tasks.__main__", "tasks.pipeline.order")
VALIDATION = ("pandas", "sqlalchemy.orm", "scipy.stats", "altair", "great_expectations")
MODEL = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "transformers.utils", "transformers.modeling_utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("tasks.learning.grpo.trainer", "tasks.rollouts.load"),
)
REGISTRY = ("tasks.tracking.registry", "mlflow.store.tracking.sqlalchemy_store")
NEEDED = {
    "curate": ("tasks.stages.curate.stage", *VALIDATION),
    "assess": MODEL,
    "warm_start": MODEL,
    "doctor": ("tasks.commands.doctor.doctor",),
    "train": (*MODEL, *REGISTRY),
    "evaluate": MODEL,
    "promote": REGISTRY,
    "report": ("tasks.report.summary", "matplotlib.figure"),
}
_LOADED_FOR: list[int] = []  # none, or the number of threads that libraries were told when they were loaded


def load(command: Sequence[str]) -> Generator[None, None, bool]:
    """Gives whether a fork of this process suits the command: it gains by that, and what is loaded has as many threads
    as it may use.
    """
    match command:
        case ["dvc" | "tasks.pipeline.dvc_repro", *_]:
            yield from _import(DVC)
            return True
        case ["tasks", name, *_] if name in NEEDED:
            return (yield from _load_for(name))
    return False


def _load_for(name: str) -> Generator[None, None, bool]:
    from tasks.core.settings import read_params
    from tasks.models.torch_setup import leave_out_sklearn
    from tasks.pipeline.order import prepare_process

    params = read_params()
    num_threads = params["compute"]["num_threads"]
    if not _LOADED_FOR:
        prepare_process(params)
        _LOADED_FOR.append(num_threads)
    if num_threads not in _LOADED_FOR:
        return False
    yield from _import(COMMANDS)
    if needs_model := set(MODEL) <= set(NEEDED[name]):
        leave_out_sklearn()
    yield from _import(NEEDED[name])
    if needs_model:
        _load_family(params["model"]["path"])
    return True


def _load_family(model: str) -> None:
    """The code of the model's family. A model that is no folder of this machine is the embedded one, or on S3."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = Path(model) / "config.json"
    family = read_json(config)["model_type"] if config.is_file() else "qwen3"
    if family in CONFIG_MAPPING:
        MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[family], None)


def _import(names: Sequence[str]) -> Iterator[None]:
    for name in names:
        importlib.import_module(name)
        yield
