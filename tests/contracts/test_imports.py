"""The import rules of the house: downward only, and each heavy library in one place.

They are what lets `learning` and `rollouts` run on a bare GPU machine, `--help` answer at once, and a reader who opens
a file know that nothing above it matters.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tasks.import_graph import Import, closure, imports, imports_of, module_file
from tasks.stages import STAGES
from tests.conftest import ROOT
from tests.contracts.import_graph import module_name, python_files

# From the top down. A module may import from its own entry and from any entry on a lower line; never sideways.
LAYERS: list[list[str]] = [
    ["flows"],
    ["tasks.__main__"],
    ["tasks.ablate", "tasks.doctor", "tasks.outlook"],
    ["tasks.checkup", "tasks.variants"],
    ["tasks.profiles", "tasks.cache", "tasks.score", "tasks.export", "tasks.compare"],
    ["tasks.registry", "tasks.rebuild"],
    ["tasks.approvals", "tasks.rollback", "tasks.lineage", "tasks.fetch"],
    ["tasks.stages"],
    ["tasks.curate", "tasks.assess", "tasks.warm_start", "tasks.train", "tasks.evaluate", "tasks.promote"],
    ["tasks.judgement"],
    [
        "tasks.challenger",
        "tasks.crown",
        "tasks.allowance",
        "tasks.reproduction",
        "tasks.decision_files",
        "tasks.detectable",
    ],
    ["tasks.champion", "tasks.decision", "tasks.anchor", "tasks.training", "tasks.rotation"],
    ["tasks.episodes"],
    ["tasks.grouping", "tasks.snapshots", "tasks.unseen"],
    ["tasks.pinning", "tasks.references", "tasks.baselines", "tasks.trained_on", "tasks.origin"],
    ["tasks.playing", "tasks.racing", "tasks.frontier", "tasks.measurement_key", "tasks.evaluated"],
    ["tasks.demonstrations", "tasks.sources", "tasks.atif", "tasks.raw_problems"],
    ["tasks.rollouts", "tasks.learning", "tasks.measurement", "tasks.tracking", "tasks.validation", "tasks.data_card"],
    ["tasks.models", "tasks.stored", "tasks.replays"],
    ["tasks.model_files"],
    [
        "tasks.architecture",
        "tasks.attention",
        "tasks.runtime",
        "tasks.progress",
        "tasks.problems",
        "tasks.splitting",
        "tasks.pipelining",
    ],
    ["tasks.expectations"],
    ["tasks.environments", "tasks.rewards"],
    ["tasks.provenance"],
    ["tasks.command_line", "tasks.orders", "tasks.resume", "tasks.evaluations"],
    ["tasks.records", "tasks.storage", "tasks.folder_lock", "tasks.console", "tasks.databases"],
    ["tasks.terminal", "tasks.surroundings", "tasks.json_text", "tasks.kept_files"],
    ["tasks.settings", "tasks.file_shapes", "tasks.import_graph"],
    ["tasks"],  # the docstring with the map
]
# Who may import these libraries; dvc is only ever run as a program.
HOMES: dict[str, tuple[str, ...]] = {
    "prefect": ("flows/",),
    "mlflow": ("tasks/tracking/",),
    "vllm": tuple(f"tasks/rollouts/vllm_{part}.py" for part in ("engine", "core", "transfer", "nccl")),
    "great_expectations": ("tasks/curate.py", "tasks/validation.py"),
    "dvc": (),
}
ON_A_BARE_GPU_MACHINE = {
    "torch", "transformers", "safetensors", "numpy", "tokenizers", "pydantic", "typing_extensions", "yaml", "rich",
}  # fmt: skip
FILES = python_files("flows", "tasks")


def entry_of(module: str) -> str:
    """The most specific entry of LAYERS that holds a module."""
    entries = [entry for layer in LAYERS for entry in layer if module == entry or module.startswith(f"{entry}.")]
    return max(entries, key=len)


def depth(entry: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if entry in layer)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("flows", "tasks")


def test_every_module_has_its_place_in_the_layers():
    assert not [str(file) for file in FILES if entry_of(module_name(file)) == "tasks" and file.name != "__init__.py"]


def test_a_module_imports_from_its_own_package_and_from_below_only():
    assert not [
        f"{file}:{item.line} imports {item.name}"
        for file in FILES
        for item in imports(file)
        if is_ours(item.name) and not _is_downward(entry_of(module_name(file)), entry_of(item.name))
    ]


def _is_downward(importer: str, imported: str) -> bool:
    return importer == imported or depth(importer) < depth(imported)


def test_a_heavy_library_is_imported_in_its_one_place():
    assert not [
        f"{file}:{item.line} imports {item.name}"
        for file in FILES
        for item in imports(file)
        if (home := HOMES.get(item.name.split(".")[0])) is not None and not file.as_posix().startswith(home)
    ]


def test_learning_never_sees_an_environment_and_rollouts_never_see_a_loss():
    learning = {module_name(file) for file in closure(python_files("tasks/learning"))}
    rollouts = {module_name(file) for file in closure(python_files("tasks/rollouts"))}

    assert not {name for name in learning if name.startswith(("tasks.environments.", "tasks.rollouts."))}
    assert not {name for name in rollouts if name.startswith("tasks.learning.")}


@pytest.mark.parametrize("package", ["tasks/learning", "tasks/rollouts"])
def test_learning_and_rollouts_need_nothing_a_bare_gpu_machine_lacks(package: str):
    libraries_of_their_own = {
        "tasks/rollouts/vllm_engine.py": {"vllm"},
        "tasks/rollouts/vllm_core.py": {"vllm"},
        "tasks/rollouts/vllm_transfer.py": {"vllm"},
        "tasks/rollouts/vllm_nccl.py": {"vllm"},
        "tasks/rollouts/vllm_client.py": {"httpx2"},
        "tasks/environments/bounded_http.py": {"httpx2"},
        "tasks/rollouts/openai_engine.py": {"openai"},
        "tasks/learning/lora.py": {"peft"},
        "tasks/models.py": {"peft"},
    }
    lacking = [
        f"{file}:{item.line} imports {item.name}"
        for file in sorted(closure(python_files(package)))
        for item in imports(file)
        if not is_ours(item.name)
        and (library := item.name.split(".")[0]) not in sys.stdlib_module_names | ON_A_BARE_GPU_MACHINE
        and library not in libraries_of_their_own.get(file.as_posix(), set())
    ]
    assert not lacking


def test_what_every_command_loads_imports_heavy_libraries_inside_functions_only():
    """Stage files and all that checks params.yaml stay light, so that a typo is told in a blink."""
    start = [Path("tasks/__main__.py"), Path("tasks/stages.py"), *(Path(f"tasks/{stage}.py") for stage in STAGES)]
    files, waiting = set(), start
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += [found for item in imports_at_the_top(file) if (found := module_file(item.name))]
    heavy = {
        "torch",
        "transformers",
        "great_expectations",
        "mlflow",
        "prefect",
        "pandas",
        "numpy",
        "scipy",
        "matplotlib",
    }
    assert not [
        f"{file}:{item.line} imports {item.name}"
        for file in sorted(files)
        for item in imports_at_the_top(file)
        if item.name.split(".")[0] in heavy
    ]


def imports_at_the_top(file: Path) -> list[Import]:
    """What importing the file imports: its top-level statements, definitions left out."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    code = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return list(imports_of(ast.Module(code, [])))


def test_the_walk_sees_imports_inside_functions_and_not_those_for_types_alone():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import mlflow\n"
        "else:\n    import prefect\n"
        "def run():\n    from tasks.learning import losses\n    import torch.nn\n"
    )
    names = [item.name for item in imports_of(tree)]
    assert names == ["typing", "prefect", "tasks.learning", "tasks.learning.losses", "torch.nn"]
