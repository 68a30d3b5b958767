"""What a method's signature says of a call: the JSON Schema of its arguments, and how a model's JSON becomes them.

Where JSON is what the annotations mean (text, numbers, lists, objects), two things alone happen between a call and its
method: a number such as 3.0, which JSON Schema takes for an integer, becomes one, and a list or an object is copied, as
a method may keep and change it while the call is of the problem's reference. A tool with any other argument, such as an
Enum or a class of pydantic's, has each call validated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from enum import Enum, auto
from types import NoneType
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from tasks.core.json_text import json_row
from tasks.core.text import one_line
from tasks.core.user_code import place_of
from tasks.tools.layer import ToolError
from tasks.tools.schemas import MAX_REASONS, spell_faults

Method = Callable[..., Any]
Handler = Callable[[Any, Mapping[str, Any]], Any]  # (episode, arguments)
TRANSFORMS = {"strip_whitespace", "to_lower", "to_upper"}


def read_signature(method: Method) -> tuple[dict[str, Any], Handler]:
    """The JSON Schema of a method's arguments without `self`, no others being accepted, and the function that calls it.
    ValueError in one line if the signature does not say what a call has.
    """
    fields = dict(_fields(method))
    model = _model(method, fields)
    kinds = _kinds(model)
    if Kind.OTHER in kinds.values() or any(isinstance(default, FieldInfo) for _, default in fields.values()):
        return _schema(model), _validated(method, model)
    return _schema(model), _direct(method, {name: STEPS[kind] for name, kind in kinds.items() if kind in STEPS})


def _fields(method: Method) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(name, (annotation, default)) of each argument, as `create_model` takes them."""
    if isinstance(method, staticmethod | classmethod):
        kind = type(method).__name__
        raise _fault(method, f"is a {kind}, so it gets no episode. Leave @{kind} out and write self first")
    given = list(inspect.signature(method).parameters.values())
    if not given or (given[0].name != "self" and given[0].annotation is not inspect.Parameter.empty):
        raise _fault(method, "has no self, so its first argument would be the episode. Write self first")
    for item in given[1:]:
        if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
            reason = "has no names that a model could be told. Write an argument for each, or one list or dict"
            raise _fault(method, f"has {item}, which {reason}")
        if item.kind is item.POSITIONAL_ONLY:
            raise _fault(method, f"takes {item.name} by its place alone, and a model gives names. Leave the / out")
        yield item.name, (_annotation(method, item), ... if item.default is item.empty else item.default)


def _annotation(method: Method, item: inspect.Parameter) -> Any:
    if item.annotation is item.empty:
        raise _fault(
            method,
            f"has an argument {item.name} without a type, so no model could be told what to send. Annotate it, as in "
            f"{item.name}: str",
        )
    holder = type("Holder", (), {"__annotations__": {item.name: item.annotation}})
    names = getattr(inspect.unwrap(method), "__globals__", {})
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)[item.name]
    except Exception as error:  # the text of an annotation is evaluated, and may be anything
        raise _fault(method, _unreadable(item.name, error)) from None


def _model(method: Method, fields: dict[str, Any]) -> type[BaseModel]:
    """A class of pydantic's with these fields, of which there is a JSON Schema."""
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except Exception as error:  # of pydantic, or of a class of the user's
        if len(fields) > 1:
            for name, field in fields.items():  # which of them it is
                _model(method, {name: field})
        raise _fault(method, _unreadable(", ".join(fields), error)) from None
    if lost := next((name for name in fields if name not in model.model_fields), None):
        raise _fault(method, f"has an argument {lost}, a name that pydantic keeps for itself. Give it another one")
    return model


def _unreadable(name: str, error: Exception) -> str:
    reason = one_line(f"{type(error).__name__}: {error}")
    return (
        f"has an argument {name} with a type that has no JSON Schema ({reason}). Correct or import the type, or take "
        f"one that pydantic reads from JSON"
    )


def _fault(method: Method, reason: str) -> ValueError:
    return ValueError(f"{place_of(method)}: the tool {method.__name__} {reason}.")


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    for item in schema.get("properties", {}).values():
        item.pop("title", None)  # pydantic repeats the name
    return {key: value for key, value in schema.items() if key != "title"}


def _direct(method: Method, steps: Mapping[str, Callable[[Any], Any]]) -> Handler:
    """`steps` are what makes an argument's value of JSON, for the arguments that need one."""
    if not steps:
        return lambda episode, arguments: method(episode, **arguments)

    def call(episode: Any, arguments: Mapping[str, Any]) -> Any:
        given = {name: steps[name](value) if name in steps else value for name, value in arguments.items()}
        return method(episode, **given)

    return call


def _validated(method: Method, model: type[BaseModel]) -> Handler:
    """What pydantic refuses and the schema could not express blames the call, as an invalid argument does."""

    def call(episode: Any, arguments: Mapping[str, Any]) -> Any:
        try:
            values = model.model_validate_json(json_row(arguments))
        except ValidationError as error:
            faults = [(fault["loc"], fault["msg"]) for fault in error.errors(include_url=False)[:MAX_REASONS]]
            reasons = spell_faults(faults, num_faults=error.error_count())
            raise ToolError("invalid_arguments", reasons) from None
        except ValueError:
            raise ToolError("invalid_arguments", "they hold what JSON cannot") from None
        return method(episode, **values.__dict__)

    return call


class Kind(Enum):
    """Of an argument: how its value comes from JSON."""

    AS_IT_IS = auto()
    INTEGER = auto()  # the same, but for 3.0
    CONTAINER = auto()  # the same, but copied
    OTHER = auto()


def _as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


STEPS: Mapping[Kind, Callable[[Any], Any]] = {Kind.INTEGER: _as_integer, Kind.CONTAINER: deepcopy}


def _kinds(model: type[BaseModel]) -> dict[str, Kind]:
    """Of each argument, by name. What is not known to be as JSON has it is of another kind."""
    core: Any = model.__pydantic_core_schema__
    if core["type"] != "model" or core["schema"]["type"] != "model-fields":  # some have definitions around them
        return dict.fromkeys(model.model_fields, Kind.OTHER)
    fields = core["schema"]["fields"]
    return {
        name: Kind.OTHER if "validation_alias" in field else _kind(field["schema"]) for name, field in fields.items()
    }


def _kind(core: Mapping[str, Any]) -> Kind:
    match core["type"]:
        case "any":
            return Kind.CONTAINER  # it may be one
        case "none" | "bool" | "float":
            return Kind.AS_IT_IS
        case "int":
            return Kind.INTEGER
        case "str":
            return Kind.OTHER if TRANSFORMS & core.keys() else Kind.AS_IT_IS
        case "literal":
            types = set(map(type, core["expected"]))
            if not types <= {str, bool, NoneType, int}:
                return Kind.OTHER
            return Kind.INTEGER if int in types else Kind.AS_IT_IS
        case "nullable" | "default":
            return _kind(core["schema"])
        case "union":
            return _kind_of_union([item[0] if isinstance(item, tuple) else item for item in core["choices"]])
        case "list" | "dict":
            inner = [core[name] for name in ("items_schema", "keys_schema", "values_schema") if name in core]
            return Kind.CONTAINER if {_kind(item) for item in inner} <= {Kind.AS_IT_IS, Kind.CONTAINER} else Kind.OTHER
    return Kind.OTHER


def _kind_of_union(choices: list[Mapping[str, Any]]) -> Kind:
    kinds = {_kind(item) for item in choices} - {Kind.AS_IT_IS}
    if any(item["type"] in ("float", "any") for item in choices):
        kinds.discard(Kind.INTEGER)
    if len(kinds) > 1:
        return Kind.OTHER
    return kinds.pop() if kinds else Kind.AS_IT_IS
