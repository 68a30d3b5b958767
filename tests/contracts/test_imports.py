"""The import rules of the house: downward only, and each heavy library in one place.

They are what lets `learning` and `rollouts` run on a bare GPU machine, `--help` answer at once, and a reader who opens
a file know that nothing above it matters.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tasks.core.import_graph import Import, closure, imported, imports, imports_of, module_file
from tasks.core.stages import STAGES
from tests.conftest import ROOT
from tests.contracts.import_graph import module_name, nodes, python_files

# From the top down. A room may import from any room on a lower line; never sideways.
RANKS: list[list[str]] = [
    ["flows", "__main__"],
    ["commands"],
    ["pipeline"],
    ["stages"],
    ["planning", "report"],
    ["engines", "tracking"],
    ["rollouts", "learning/grpo", "learning/sft"],
    ["learning", "learning/shared", "measurement", "drift"],
    ["environments", "custom", "rewards", "gateway"],
    ["tools"],
    ["chat"],
    ["models"],
    ["storage"],
    ["core"],
]
# Who may import these libraries; dvc is only ever run as a program, once with a fault mended.
HOMES: dict[str, tuple[str, ...]] = {
    "prefect": ("flows/",),
    "mlflow": ("tasks/tracking/",),
    "vllm": ("tasks/engines/vllm/",),
    "ray": ("tasks/pipeline/", "tasks/engines/vllm/"),
    "great_expectations": ("tasks/stages/curate/",),
    "boto3": ("tasks/storage/",),
    "botocore": ("tasks/storage/",),
    "dvc": ("tasks/pipeline/dvc_repro.py",),
}
ON_A_BARE_GPU_MACHINE = {
    "torch", "transformers", "huggingface_hub", "safetensors", "numpy", "tokenizers", "pydantic", "pydantic_core",
    "typing_extensions", "yaml", "rich",
}  # fmt: skip
# What a flow imports that finds nothing changed (`flows/__main__.py`).
UNCHANGED_RUN = ("flows/__main__.py", "flows/dead_locks.py", "tasks/pipeline/reasons.py", "tasks/report/summary.py")
FILES = python_files("flows", "tasks")
# Commands that answer from files; `doctor`, `serve` and the like load a model.
COMMANDS = [file for file in FILES if file.parent in (Path("tasks/commands"), Path("tasks/commands/plan"))]


def room_of(module: str) -> str:
    """The room of a module: `tasks.tools.layer` → `tools`; learning has three; "" for tasks itself."""
    parts = module.split(".")
    if parts[0] == "flows":
        return "flows"
    is_learning = parts[1:2] == ["learning"] and len(parts) > 3
    return "/".join(parts[1 : 3 if is_learning else 2])


def rank(room: str) -> int:
    return next(number for number, rooms in enumerate(RANKS) if room in rooms)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("flows", "tasks")


def test_tasks_holds_rooms_alone_and_every_room_has_its_rank():
    entries = {path.name for path in (ROOT / "tasks").iterdir() if path.name != "__pycache__"}
    known = {room.partition("/")[0] for rooms in RANKS for room in rooms} - {"flows", "__main__"}
    assert entries == {"__init__.py", "__main__.py", "README.md", *known}
    assert len(RANKS) <= 15


def test_a_module_imports_from_its_own_room_and_from_below_only():
    assert not [
        f"{file}:{item.line} imports {item.name}"
        for file in FILES
        for item in every_import(file)
        if is_ours(item.name) and not _is_downward(room_of(module_name(file)), room_of(item.name))
    ]


def _is_downward(importer: str, imported: str) -> bool:
    if imported in ("", "learning"):  # packages that are a docstring alone
        return True
    return importer == imported or rank(importer) < rank(imported)


def test_no_module_is_in_a_cycle_of_imports_not_even_of_types():
    edges = {file: _imported_files(file) for file in FILES}
    graph = TopologicalSorter(edges)
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(map(str, reversed(error.args[1]))))


def _imported_files(file: Path) -> set[Path]:
    """The modules a file names, for types as well; `from package import module` is the module, not the package too."""
    names = {item.name for item in every_import(file) if is_ours(item.name)}
    found = {module_file(name) for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return {other for other in found if other is not None and other != file}


def every_import(file: Path) -> list[Import]:
    """Every import of a file, those for types alone as well."""
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes(file)), f"{file}: relative"
    return [item for node in nodes(file) for item in imported(node)]


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
        "tasks/engines/vllm/in_process.py": {"vllm"},
        "tasks/engines/vllm/core_process.py": {"vllm"},
        "tasks/engines/vllm/ipc.py": {"vllm"},
        "tasks/engines/vllm/nccl.py": {"vllm"},
        "tasks/engines/vllm/client.py": {"httpx2"},
        "tasks/core/bounded_http.py": {"httpx2"},
        "tasks/engines/endpoint/client.py": {"openai"},
        "tasks/tools/patient_client.py": {"openai"},
        "tasks/gateway/server.py": {"starlette", "uvicorn"},
        "tasks/gateway/turn_endpoint.py": {"starlette"},
        "tasks/gateway/http_io.py": {"starlette"},
        "tasks/gateway/doors.py": {"starlette"},
        "tasks/gateway/tool_endpoint.py": {"starlette", "mcp"},
        "tasks/learning/grpo/solve_rates.py": {"scipy"},  # of problem_sampler: band alone
        "tasks/learning/shared/lora.py": {"peft"},
        "tasks/models/folders.py": {"peft"},
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


def test_the_gateways_interface_is_there_without_a_server():
    """Rollouts are written against it, also where starlette and uvicorn are missing."""
    files = closure([Path("tasks/gateway/completions.py")])
    libraries = {item.name.split(".")[0] for file in files for item in imports(file) if not is_ours(item.name)}
    assert libraries and not libraries & {"starlette", "uvicorn", "mcp", "openai", "anthropic", "httpx2"}


def test_what_every_command_loads_imports_heavy_libraries_inside_functions_only():
    """Stages, all that checks params.yaml and these commands stay light: a typo is told, a run planned, in a blink."""
    start = [
        Path("tasks/__main__.py"),
        Path("tasks/pipeline/order.py"),
        *map(Path, UNCHANGED_RUN),
        *COMMANDS,
        *(Path(f"tasks/stages/{stage}/stage.py") for stage in STAGES),
    ]
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
        "boto3",
        "botocore",
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
        "def run():\n    from tasks.learning.grpo import losses\n    import torch.nn\n"
    )
    names = [item.name for item in imports_of(tree)]
    assert names == ["typing", "prefect", "tasks.learning.grpo", "tasks.learning.grpo.losses", "torch.nn"]
