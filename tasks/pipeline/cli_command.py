"""Turns a function into a command of `python -m tasks`: `--debug`, one-line errors, its result printed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from tasks.core.terminal import tell
from tasks.pipeline.cli_errors import DEBUG, one_line_errors

Debug = Annotated[bool, typer.Option(DEBUG, help="Show the traceback where something fails.")]


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """The function returns the lines to print, or False for exit status 1. A parameter `debug` is passed on. `name`:
    another than the function's.
    """

    def register(function: Callable[..., Any]) -> Callable[..., None]:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        wants_debug = "debug" in parameters
        last = inspect.Parameter.KEYWORD_ONLY
        parameters["debug"] = inspect.Parameter("debug", last, default=False, annotation=Debug)

        @wraps(function)
        def run(*, debug: bool, **options: Any) -> None:
            with one_line_errors(debug=debug):
                result = function(**options, debug=debug) if wants_debug else function(**options)
                if result is False:
                    raise SystemExit(1)
                for line in [result] if isinstance(result, str) else [] if result in (None, True) else result:
                    tell(line)

        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return group.command(name=name or function.__name__)(run)

    return register
