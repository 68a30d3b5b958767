"""What every flow does around its work: it notes its process, waits for its turn, closes dead runs, and says how it
ended.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from prefect.client.schemas.objects import State

from flows.approval import close_answered_runs
from flows.events import emit_alarm
from flows.labels import model_name
from flows.prefect_runs import close_dead_runs, note_process
from flows.steps import Stages
from flows.turn import Busy, take_turn
from flows.verdict import SKIPPED, end
from tasks.core.settings import load, load_paths
from tasks.core.surroundings import exempt_loopback
from tasks.pipeline.order import check_params
from tasks.pipeline.settings import PipelineSections

OUR_PACKAGES = ("flows", "tasks")
RAISE = dis.opmap["RAISE_VARARGS"]
LOGS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def _is_news(record: logging.LogRecord) -> bool:
    """Not so an error for people with a traceback: the line of the state in which the run or task ends has it whole.

    A bug can be a ValueError too, of json, pydantic or a list, so only one that our own `raise` made is for people.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, ValueError) and _is_raised_by_us(error))


def _is_raised_by_us(error: ValueError) -> bool:
    """The innermost frame is of our packages, and at a `raise`: what C code raises has no frame of its own."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    package, code = str(last.tb_frame.f_globals.get("__name__")).partition(".")[0], last.tb_frame.f_code.co_code
    return package in OUR_PACKAGES and code[last.tb_lasti] == RAISE


@contextmanager
def begin_flow() -> Iterator[None]:
    """Around the body of every flow. An error is also an alarm."""
    for name in LOGS:
        logging.getLogger(name).addFilter(_is_news)
    exempt_loopback()  # a Prefect worker did not run our command line
    try:
        note_process()
        yield
    except Exception as error:
        emit_alarm(model_name(), "failed", str(error))
        raise


def run_alone(params: dict[str, Any], work: Callable[[Stages], State[None]], *, is_shown: bool) -> State[None]:
    """Do `work` with the workspace to itself; its state, or that it was skipped."""
    check_params(params)
    settings, model = load(PipelineSections, params).pipeline, params["promote"]["model_name"]
    try:
        with take_turn(load_paths(params).artifacts, settings, model=model) as guardian:
            close_dead_runs(params)
            close_answered_runs(params)
            with closing(Stages(guardian, settings, model=model, is_shown=is_shown)) as stages:
                return work(stages)
    except Busy as busy:
        return end(SKIPPED, str(busy))
