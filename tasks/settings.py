"""Strict settings: every value lives in `params.yaml`, and a frozen pydantic class beside the code it configures
checks it.

No default hides in code, since DVC could not see it change. An unknown or misspelt key, a missing one or a value out
of range ends with one line that names the key, says why and offers the nearest names.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

PARAMS_FILE = Path("params.yaml")


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about types, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=Settings)


class _ParamsLoader(yaml.SafeLoader):
    """YAML without the two traps of settings files: a key given twice, and `5e-3` read as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key!r} is given twice {node.start_mark}, and only one of them could apply")
        return super().construct_mapping(node, deep=deep)


_ParamsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class Paths:
    """Where a run keeps its files: one folder a stage under the artifacts folder of `params.yaml`."""

    def __init__(self, artifacts: Path | str):
        self.artifacts = Path(artifacts)

    def stage(self, name: str) -> Path:
        return self.artifacts / name

    def split(self, name: str) -> Path:
        """The curated problems of one split: `train`, `select` or `test`."""
        return self.stage("curate") / f"{name}.jsonl"


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The whole of `params.yaml` as a mapping."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file, so no setting is known. Run from the project's root.")
    try:
        params = yaml.load(path.read_text(encoding="utf-8"), Loader=_ParamsLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({_one_line(error)}). Nothing was run; correct the file.") from None
    if not isinstance(params, dict):
        raise ValueError(f"{path}: expected sections like `train:`, found {type(params).__name__}. Correct the file.")
    return params


def load(cls: type[SettingsT], params: dict[str, Any], *, source: Path = PARAMS_FILE) -> SettingsT:
    """Read the sections `cls` names out of the whole `params`; ValueError with one readable line a mistake."""
    sections = {name: params[name] for name in cls.model_fields if name in params}
    try:
        return cls.model_validate(sections)
    except ValidationError as error:
        lines = [_explain(cls, item, source) for item in error.errors()]
        raise ValueError("\n".join(dict.fromkeys(lines))) from None


def load_paths(params: dict[str, Any]) -> Paths:
    paths = params.get("paths")
    if not isinstance(paths, dict) or not isinstance(paths.get("artifacts"), str) or not paths["artifacts"]:
        raise ValueError(f"{PARAMS_FILE}: paths.artifacts must name the folder results go to, such as `artifacts`.")
    return Paths(paths["artifacts"])


def check_section_names(params: dict[str, Any], known: set[str], *, source: Path = PARAMS_FILE) -> None:
    """Refuse a top-level section no stage reads: it is a typo, and the value meant would silently not apply."""
    for name in params:
        if name not in known:
            raise ValueError(
                f"{source}: {name!r} is not a section turnwise reads, so it would have no effect. "
                f"{_nearest(str(name), known)}"
            )


def _explain(cls: type[Settings], item: Any, source: Path) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = _fields_at(cls, item["loc"][:-1])
        return f"{source}: {key} is not a setting, so it would have no effect. {_nearest(str(item['loc'][-1]), names)}"
    if item["type"] == "missing":
        return f"{source}: {key} is missing, and no default hides in code. Add it; infra/profiles/ has full examples."
    if item["type"] == "value_error":  # of a validator of ours, which says why and what to do
        return ": ".join([str(source), *([key] if key else []), f"{item['ctx']['error']}."])
    return f"{source}: {key} = {item['input']!r} is refused: {item['msg']}. Correct the value and run again."


def _fields_at(cls: type[Settings], location: tuple[Any, ...]) -> set[str]:
    """The setting names valid at a nested location; the last class wins where a location passes through a list."""
    for part in location:
        annotation = cls.model_fields[part].annotation if part in cls.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, Settings)):
            return set()
        cls = annotation
    return set(cls.model_fields)


def _nearest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known names: {', '.join(sorted(names))}." if names else "Remove it."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
