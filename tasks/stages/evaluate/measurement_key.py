"""The key of test episodes: everything that decides their tokens, by name.

Episodes are compared only where their keys differ in the model alone; `promote` measures again where today's key
differs. Plain JSON without a time or a path, so the same run has the same key. Left out: code that reads episodes, and
the processor, whose rounding changes a draw here and there and favours nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.custom_code import custom_data, custom_folder
from tasks.core.files import content_hash, file_hash, json_hash
from tasks.core.import_graph import ROOT, closure, python_files
from tasks.core.provenance import package_versions
from tasks.core.settings import Paths
from tasks.core.text import first_few
from tasks.drift.fall import last_fall
from tasks.drift.pin import DriftCheck
from tasks.environments.settings import EnvironmentSettings, folder_of
from tasks.models.native.compiled import sources_in_c
from tasks.rollouts.settings import EngineSettings, PlaySettings
from tasks.tools.user.environment import describe_user

# Where the code of an episode begins: playing models and building environments.
ROOTS = (Path("tasks/rollouts/collect.py"), Path("tasks/environments/catalog.py"))
# What writes a prompt, computes log-probs, draws from them and merges an adapter.
PACKAGES = ("jinja2", "numpy", "peft", "safetensors", "tokenizers", "torch", "transformers")
MAX_NAMED = 6

Parts = dict[str, Any]


def key_parts(play: PlaySettings, paths: Paths, environment: EnvironmentSettings, drift: DriftCheck) -> Parts:
    """Every part of the key but the model. `drift` has hashes of the environment's description and of its answers."""
    parts, fall = play_parts(play, environment), last_fall(paths)
    found = {"fingerprint": drift.fingerprint, "pin": drift.pin, **({"fall": fall} if fall else {})}
    return {**parts, "test": file_hash(paths.split("test")), "environment": {**parts["environment"], **found}}


def play_parts(play: PlaySettings, environment: EnvironmentSettings) -> Parts:
    """What params.yaml, the code and this machine decide: the key without problems, model and what the tools answer."""
    frozen = environment.cache.frozen_file
    return {
        **play.model_dump(mode="json"),
        "environment": {
            **environment.model_dump(mode="json"),
            "user": describe_user(environment.user),  # the pin and its fingerprint have none
            "frozen_replies": content_hash(frozen) if frozen else None,
        },
        "code": {
            file.as_posix(): file_hash(ROOT / file)[:16]
            for file in sorted(code_of_episodes(play.engine.name, environment))
        },
        "packages": packages_of_episodes(play.engine),
        "python": ".".join(map(str, sys.version_info[:2])),
        "device": play.engine.own.device(play.compute),
    }


def key_of(parts: Mapping[str, Any], model: str) -> str:
    """The key of one model's episodes; `model` is the hash of its whole folder."""
    return json_hash({**parts, "model": model})


def differing_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted names of what differs, such as `packages.torch` or `code.tasks/core/records.py`; sorted."""
    found = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{name}.{part}" for part in differing_parts(old, new)]
        elif old != new:
            found.append(name)
    return found


def list_parts(differing: list[str]) -> str:
    return first_few(differing, MAX_NAMED)


def packages_of_episodes(engine: EngineSettings) -> dict[str, str]:
    """Name → version of what the project's own code needs for an episode with this engine."""
    installed = package_versions()
    return {name: installed[name] for name in (*PACKAGES, *engine.own.packages) if name in installed}


def code_of_episodes(engine: str, environment: EnvironmentSettings) -> set[Path]:
    """Our files that an episode with this engine and environment depends on, relative to the root."""
    named = (f"tasks/engines/{engine}", folder_of(environment.name), *environment.further_code())
    folders = (*map(Path, named), custom_folder())
    code = closure([*ROOTS, *(file for folder in folders for file in python_files(folder))])
    return code | custom_data() | {file for file in sources_in_c() if file.with_name("compiled.py") in code}
