"""Strict settings: every value is in `params.yaml`, checked by a frozen pydantic class beside the code it configures.

No default hides in code, since DVC could not see it change. An unknown, missing or invalid key gives one line that
names it, says why and suggests the nearest names. Secrets are refused and never printed: params are copied into git,
dvc.lock, MLflow and every lineage.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tasks.core.mistakes import Place, explain_kind, join_alternatives
from tasks.core.secrets import hide_in_urls
from tasks.core.text import one_line
from tasks.core.urls import refuse_home
from tasks.core.yaml_text import Dialect

PARAMS_FILE = Path("params.yaml")
# Where to put the secret instead, by section.
WAY_OUT = {
    "tracking": "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (PGPASSWORD for Postgres)",
    "environment": "name the variable that has it under environment.settings.environment or headers",
    "evaluate": "name the variable that has it as api_key_variable",
}
MAX_REPEATED = 100  # characters of a refused value
LocalFolder = Annotated[str, Field(min_length=1), AfterValidator(refuse_home)]


class Settings(BaseModel):
    """Base of every settings class: frozen, strict types, no unknown keys, no URL with a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    examples_page: ClassVar[str] = ""  # what shows such settings, if infra/profiles/ does not
    may_be_null: ClassVar[bool] = False  # as the own settings of a folder
    operational: ClassVar[set[str]] = set()  # fields that change no answer: the tool cache serves what others recorded

    @model_validator(mode="before")
    @classmethod
    def _refuse_secret_in_url(cls, given: Any) -> Any:
        for place, text in _texts(given, ""):
            if _has_secret(text):
                remedy = WAY_OUT.get(place.partition(".")[0], "give it by the environment")
                raise ValueError(
                    f"{place} is a URL with a user name or password (or key) in it, which would be copied into "
                    f"dvc.lock, MLflow and logs. Leave it out, and {remedy}"
                )
        return given

    def unwatched_folders(self) -> list[str]:
        """Of a stage's sections: folders of code it runs that dvc.yaml cannot name, relative to the root."""
        return []

    def resume_key(self) -> dict[str, Any]:
        """Of a stage's sections: what a killed run goes on under only if it is the same."""
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, given: Any) -> Settings:
        """For classes found by name inside a validator: `load` then reports mistakes under the full key."""
        return validate_inside(cls, given)


def validate_inside(cls: type[Settings], given: Any) -> Settings:
    if isinstance(given, cls):
        return given
    try:
        return cls.model_validate(given)
    except ValidationError as error:
        raise MistakesInside(cls, error) from None


class MistakesInside(ValueError):
    def __init__(self, cls: type[Settings], error: ValidationError):
        super().__init__(str(error))
        self.cls, self.error = cls, error


def read_own_settings(room: str, name: str, given: Any) -> Settings | None:
    """The settings of one folder of a room, by the class that the folder's `settings.py` assigns to SETTINGS; None for
    a folder without, or where they may be null. Imported when params are checked, so it must import nothing heavy.
    """
    module = f"{room}.{name}.settings"
    try:
        settings_class: type[Settings] = importlib.import_module(module).SETTINGS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        if given is not None:
            raise ValueError(f"{name} has no settings, so these would have no effect. Write null") from None
        return None
    if given is None and settings_class.may_be_null:
        return None
    if given is None:
        page = settings_class.examples_page or f"{room.replace('.', '/')}/README.md"
        raise ValueError(f"it is null, and {name} needs settings: {', '.join(settings_class.model_fields)}. See {page}")
    return settings_class.read(given)


def is_variable_name(value: Any) -> bool:
    """In capitals only, since keys look like other names: ghp_…, hf_…, sk_live_…."""
    return isinstance(value, str) and re.fullmatch("[A-Z_][A-Z0-9_]*", value) is not None


def _check_variable_name(value: Any) -> Any:
    if not is_variable_name(value):
        raise ValueError(
            "it must be the name of an environment variable, in capitals such as SHOP_API_KEY. The value is not "
            "shown, in case it is the secret itself; export it as an environment variable and write the variable's name"
        )
    return value


VariableName = Annotated[str, BeforeValidator(_check_variable_name)]


SettingsT = TypeVar("SettingsT", bound=Settings)


class _RefusesKeysGivenTwice:
    def construct_mapping(self: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, (node_of_key, _) in enumerate(node.value):
            if keys[number] in keys[:number]:
                raise yaml.MarkedYAMLError(
                    problem=f"{keys[number]!r} is given twice, and only one can apply",
                    problem_mark=node_of_key.start_mark,
                )
        return super().construct_mapping(node, deep=deep)  # type: ignore[misc]  # of the loader beside it


# Without two traps: duplicate keys, and `5e-3` read as text.
PARAMS = Dialect(
    _RefusesKeysGivenTwice,
    resolvers=[("float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")],
)


class Paths:
    """One folder per stage in the artifacts folder of `params.yaml`."""

    def __init__(self, artifacts: Path | str):
        self.artifacts = Path(artifacts)
        self.base_model = self.stage("assess") / "base_model"
        self.start_model = self.stage("warm_start") / "model"  # without a warm start it leads to the base model

    def stage(self, name: str) -> Path:
        return self.artifacts / name

    def split(self, name: str) -> Path:
        return self.stage("curate") / f"{name}.jsonl"

    def test_episodes(self, policy: str) -> Path:
        return self.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file, so no setting is known. Run from the project's root.")
    return parse_params(path.read_bytes(), path)


def parse_params(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        params = copy.deepcopy(_load_yaml(text if isinstance(text, str) else text.decode("utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({_reason(error)}). Nothing was run; correct the file.") from None
    if params is None:
        raise ValueError(f"{path}: the file is empty, so no setting is known. infra/profiles/ has full examples.")
    if not isinstance(params, dict):
        raise ValueError(f"{path}: expected sections like `train:`, found {_repeated(params)}. Correct the file.")
    return params


@lru_cache(maxsize=16)
def _load_yaml(text: str) -> Any:
    """A process reads the same file again and again."""
    return PARAMS.load(text)


def load(cls: type[SettingsT], params: dict[str, Any], *, source: Path = PARAMS_FILE) -> SettingsT:
    """The sections that `cls` names, from all of `params`; ValueError with one line per mistake."""
    sections = {name: params[name] for name in cls.model_fields if name in params}
    try:
        return cls.model_validate(sections)
    except ValidationError as error:
        lines = list(_explain_all(cls, error, source))
        raise ValueError("\n".join(dict.fromkeys(lines))) from None


def load_paths(params: dict[str, Any]) -> Paths:
    paths = params.get("paths")
    if not isinstance(paths, dict) or not isinstance(paths.get("artifacts"), str) or not paths["artifacts"]:
        raise ValueError(f"{PARAMS_FILE}: paths.artifacts must name the folder results go to, such as `artifacts`.")
    return Paths(paths["artifacts"])


def check_section_names(params: dict[str, Any], known: set[str], *, source: Path = PARAMS_FILE) -> None:
    """Refuse a top-level section that no stage reads: a typo whose values would have no effect."""
    for name in params:
        if name not in known:
            raise ValueError(
                f"{source}: {name!r} is not a section turnwise reads, so it would have no effect. "
                f"{_nearest(str(name), known)}"
            )


def _explain_all(cls: type[Settings], error: ValidationError, source: Path, place: str = "") -> Iterator[str]:
    """One line per mistake; `place` is the key of the settings of `cls`, with a dot."""
    items = join_alternatives(error.errors())
    missing = {item["loc"] for item in items if item["type"] == "missing"}
    meant = {name for item in items if item["type"] == "extra_forbidden" for name in _meant(cls, item["loc"], missing)}
    for item in items:
        if item["type"] == "missing" and item["loc"] in meant:
            continue  # the line about the misspelt key names it
        inside = item.get("ctx", {}).get("error")
        key = place + ".".join(str(part) for part in item["loc"])
        if isinstance(inside, MistakesInside):
            yield from _explain_all(inside.cls, inside.error, source, f"{key}.")
        else:
            yield _explain(cls, item, source, key.removesuffix("."), missing)


def _explain(cls: type[Settings], item: Any, source: Path, key: str, missing: set[Place]) -> str:
    if item["type"] == "extra_forbidden":
        names = {str(place[-1]) for place in _meant(cls, item["loc"], missing)} or _fields_at(cls, item["loc"][:-1])
        return f"{source}: {key} is not a setting, so it would have no effect. {_nearest(str(item['loc'][-1]), names)}"
    if item["type"] == "missing":
        examples = f"{cls.examples_page} has an example" if cls.examples_page else "infra/profiles/ has full examples"
        return f"{source}: {key} is missing, and no default hides in code. Add it; {examples}."
    if item["type"] == "model_type":
        return f"{source}: {key} must be a section with keys, and is {_repeated(item['input'])}. Correct the file."
    if item["type"] == "value_error":  # from our validators, which say why and what to do
        return ": ".join([str(source), *([key] if key else []), f"{item['ctx']['error']}."])
    value = _repeated(item["input"], may_be_secret=_may_be_secret(item))
    return f"{source}: {key} = {value} is refused: {explain_kind(item)}. Correct the value and run again."


def _meant(cls: type[Settings], place: Place, missing: set[Place]) -> list[Place]:
    """The missing keys that a misspelt key is near to."""
    near = difflib.get_close_matches(str(place[-1]), sorted(_fields_at(cls, place[:-1])), n=3, cutoff=0.5)
    return [(*place[:-1], name) for name in near if (*place[:-1], name) in missing]


def _may_be_secret(item: Any) -> bool:
    """A text where a section belongs."""
    return not item["type"].startswith(("int", "float", "bool", "literal", "string"))


def _repeated(value: Any, *, may_be_secret: bool = True) -> str:
    """The refused value in YAML's words; of a table, a list or what may be a secret only the kind."""
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, str) and may_be_secret:
        return "a text"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if len(repr(value)) <= MAX_REPEATED else f"{repr(value)[:MAX_REPEATED]}…"


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(setting, text) for every text inside, such as `environment.settings.command`."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, place)


def _has_secret(text: str) -> bool:
    return hide_in_urls(text) != text


def _fields_at(cls: type[Settings], location: tuple[Any, ...]) -> set[str]:
    """The setting names at a nested location; for a list, those of the last class."""
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


def _reason(error: Exception) -> str:
    """What is wrong and where, without the line itself: it may contain a secret."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        parts = [part for part in (error.context, error.problem) if part]
        return f"{', '.join(parts)}{f', line {mark.line + 1}' if mark else ''}"
    return one_line(error)
