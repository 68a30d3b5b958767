"""What tau2 reads from the package inspect-evals: worlds, policies, problems, splits.

The package is written for inspect_ai, which is not installed: it would bring sixty packages for five names. Where it
is absent, stand-ins have these names while the package's modules are imported, and leave with the import. The classes
of tools keep their state in a store of inspect_ai; here their methods alone are taken, so each episode has its own
state whether inspect_ai is there or not.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_jsonable_python

from tasks.environments.tau2.settings import Domain

PACKAGE = "inspect_evals.tau2"
DATA_FILES: Mapping[Domain, tuple[str, ...]] = {
    "telecom": (
        "db.toml", "user_db.toml", "tasks.json.gz", "split_tasks.json", "main_policy_solo.txt",
        "tech_support_workflow_solo.txt",
    ),
    "retail": ("db.json.gz", "tasks.json", "split_tasks.json", "policy.txt"),
    "airline": ("db.json.gz", "tasks.json", "split_tasks.json", "policy.txt"),
}  # fmt: skip
_IMPORTS = RLock()

Task = dict[str, Any]  # the package's word for a row


class _ToolError(Exception):
    """What a tool of the package raises for a wrong call."""


class _StoreModel(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)


class _Content:
    """A message's content, which the worlds never make."""


def _as_it_is(function: Any) -> Any:
    return function


def _store_as(model: type[Any], instance: str | None = None) -> Any:
    raise AssertionError("tau2 keeps the state of an episode itself")


STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "inspect_ai": {},
    "inspect_ai.tool": {"ToolError": _ToolError, "Tool": object, "tool": _as_it_is},
    "inspect_ai.util": {"StoreModel": _StoreModel, "store_as": _store_as},
    "inspect_ai.model": {"Content": _Content, "ContentText": _Content},
}


def data_file(domain: Domain, name: str) -> Path:
    return _folder() / "data" / "domains" / domain / name


@cache
def load_module(name: str) -> ModuleType:
    """A module of the package below `inspect_evals.tau2`, such as `telecom.environment`."""
    folder = _folder()
    with _IMPORTS, _stand_ins(folder):
        return importlib.import_module(f"{PACKAGE}.{name}")


@cache
def tools_class(domain: Domain, name: str) -> type[Any]:
    """A class of tools, such as TelecomUserTools, as a plain class: its methods and properties, without a store."""
    model = getattr(load_module(f"{domain}.{name}"), name)
    kept = {key: item for key, item in vars(model).items() if inspect.isfunction(item) or isinstance(item, property)}
    return type(name, (), {key: item for key, item in kept.items() if not key.startswith("__")})


@cache
def tool_error() -> type[Exception]:
    """The error that the package's tools raise for a wrong call; any other is a slip of the package."""
    found: type[Exception] = load_module("common.tools").ToolError
    return found


@cache
def read_tasks(domain: Domain) -> tuple[Task, ...]:
    (name,) = (name for name in DATA_FILES[domain] if name.startswith("tasks.json"))
    return tuple(read_json(domain, name))


@cache
def read_splits(domain: Domain) -> Mapping[str, tuple[str, ...]]:
    """The ids of the official splits: base is train and test; telecom also has full and small."""
    return {name: tuple(ids) for name, ids in read_json(domain, "split_tasks.json").items()}


def read_json(domain: Domain, name: str) -> Any:
    """A file of JSON, which may be compressed."""
    content = data_file(domain, name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def in_text(value: Any) -> str:
    """A reply as the package writes it."""
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value))


@cache
def solo_policy() -> str:
    """What a solo agent of telecom reads of the rules, as τ²-bench arranges it."""
    main, support = (data_file("telecom", f"{name}_solo.txt") for name in ("main_policy", "tech_support_workflow"))
    return (
        f"<main_policy>\n{main.read_text(encoding='utf-8')}\n</main_policy>\n"
        f"<tech_support_policy>\n{support.read_text(encoding='utf-8')}\n</tech_support_policy>"
    )


@cache
def data_hashes(domain: Domain) -> Mapping[str, str]:
    """SHA-256 of each file that problems or replies depend on."""
    files = DATA_FILES[domain]
    return {name: hashlib.sha256(data_file(domain, name).read_bytes()).hexdigest() for name in files}


@cache
def _folder() -> Path:
    """The package's folder, found without an import; ValueError if it is not installed."""
    spec = importlib.util.find_spec("inspect_evals")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "environment.name is tau2, and the package inspect-evals is not installed, so there are neither problems "
            "nor tools. Run `make setup-demo`, or `.venv/bin/pip install --no-deps inspect-evals==0.26.0 toml`."
        )
    return Path(spec.submodule_search_locations[0]) / "tau2"


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """The names of inspect_ai that the package's modules import, for the time of an import.

    `inspect_evals.tau2` itself stays a bare package: what its `__init__` imports needs all of inspect_ai.
    """
    if "inspect_ai" in sys.modules or importlib.util.find_spec("inspect_ai") is not None:
        yield
        return
    if PACKAGE not in sys.modules:
        bare = ModuleType(PACKAGE)
        bare.__path__ = [str(folder)]
        sys.modules[PACKAGE] = bare
    for name, names in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        for name in STAND_INS:
            del sys.modules[name]
