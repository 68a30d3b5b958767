"""What the wire protocols share: strict requests, the tables of what is ignored and refused, one-sentence errors.

What a request asks for and no policy here can do is an error, never ignored. The exceptions are parameters that change
no token, or whose given value asks for what happens anyway: each protocol lists them with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError


class Strict(BaseModel):
    """What is null was not given, as clients write it who send all that their types have. A required value may be
    null where its own type reads that.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


Given = TypeVar("Given", bound=Strict)
Names = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Empty = Annotated[list[None], Field(max_length=0)] | None
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Clients send back what they were sent, and what they made of it.
EXTRAS_OF_PARTS = {"annotations", "cache_control", "citations", "logprobs", "parsed"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its protocol reads it: the turn to write, and `given`, which says how the answer is written."""

    request: CompletionRequest
    given: Any
    stream: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; without a name where the protocol has none."""

    data: Mapping[str, Any] | str
    name: str = ""

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return f"{f'event: {self.name}' + chr(10) if self.name else ''}data: {data}\n\n".encode()


class WireProtocol(Protocol):
    """One protocol; a module of `protocols/` is one."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """ProtocolError where the request is wrong, or asks for what cannot be done."""
        ...

    def write(self, asked: Asked, completion: Completion) -> dict[str, Any]: ...

    def events(self, asked: Asked, completion: Completion) -> Iterator[Event]:
        """The same answer as a stream."""
        ...

    def error(self, error: ProtocolError) -> dict[str, Any]: ...

    def error_event(self, error: ProtocolError) -> Event:
        """An error after the stream began."""
        ...


@dataclass(frozen=True, slots=True)
class Ignored:
    """A parameter that is accepted and changes no token, and why; with `values`, only these may be given."""

    why: str
    values: tuple[Any, ...] | None = None


COMMON_IGNORED = {
    "metadata": Ignored("a label of the caller's own"),
    "service_tier": Ignored("there is one tier", ("auto", "default", "standard_only")),
    "parallel_tool_calls": Ignored("a turn may always make several calls", (True,)),
}


def check(
    model: type[Given], body: Mapping[str, Any], *, ignored: Mapping[str, Ignored], refused: Mapping[str, str]
) -> Given:
    """The request without what is ignored. A parameter that is null, or has nulls alone, was not given."""
    given = {name: value for name, value in body.items() if not _is_null(value)}
    for name, value in given.items():
        if name in refused:
            message = f"{name} cannot be honoured, since {refused[name]}; leave it out."
            raise ProtocolError(400, message, parameter=name, code="unsupported_parameter")
        allowed = ignored[name].values if name in ignored else None
        if allowed is not None and value not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            message = f"{name} may only be {values} ({ignored[name].why}); leave it out."
            raise ProtocolError(400, message, parameter=name, code="unsupported_value")
    try:
        return model.model_validate({name: value for name, value in given.items() if name not in ignored})
    except ValidationError as error:
        raise _first_mistake(error) from None


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and bool(value) and all(item is None for item in value.values()))


def _first_mistake(error: ValidationError) -> ProtocolError:
    mistake = error.errors(include_url=False, include_input=False)[0]
    parameter = ".".join(map(str, mistake["loc"]))
    match mistake["type"]:
        case "extra_forbidden":
            message = f"Unknown parameter: {parameter}. It cannot be honoured here, so leave it out."
            return ProtocolError(400, message, parameter=parameter, code="unknown_parameter")
        case "missing":
            message = f"Missing required parameter: {parameter}."
            return ProtocolError(400, message, parameter=parameter, code="missing_required_parameter")
    message = f"{parameter}: {mistake['msg'].removeprefix('Value error, ')}"
    return ProtocolError(400, f"{message.rstrip('.')}.", parameter=parameter, code="invalid_value")


def plain_text(content: Any) -> Any:
    """Content as one string: parts of text are lines, null is empty. ValueError for images, sound and files."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise ValueError(f"a part of type {kind!r:.40} cannot be honoured, since the model reads text alone")
    text = part.get("refusal" if kind == "refusal" else "text")
    given = {name for name, value in part.items() if value is not None}
    unknown = given - {"type", "text", "refusal"} - EXTRAS_OF_PARTS
    if unknown or not isinstance(text, str):
        raise ValueError(f"a part of type {kind} has text and nothing else, not {', '.join(sorted(unknown)) or 'none'}")
    return text


Text = Annotated[str, BeforeValidator(plain_text)]


def tool_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    function = {"name": name, "description": description or "", "parameters": dict(parameters or NO_ARGUMENTS)}
    return {"type": "function", "function": function}
