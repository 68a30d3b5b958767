"""Who says whether an agent without a world succeeded: its result, a function of the user's, or whoever answers a URL.

    def check(problem, result, final_message) -> bool | dict[str, bool]

`result` is what the agent said at its end, an object. Whoever fails to say it is a fault of the environment.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tasks.core import background, json_text
from tasks.core.load_object import load_object_of
from tasks.core.records import Problem
from tasks.core.text import one_line
from tasks.environments.agent.programs import Result, checked_result
from tasks.environments.agent.settings import VerdictSettings
from tasks.tools.base import EnvironmentFault, Verdict
from tasks.tools.checks import read_verdict

NUM_WORKERS = 8  # for checkers
MAX_ANSWER_BYTES = 1 << 20


class VerdictGiver:
    def __init__(self, settings: VerdictSettings):
        self.settings = settings
        self.workers = background.Workers(NUM_WORKERS)
        self.checker = (
            None
            if settings.checker is None
            else load_object_of("environment.settings.verdict.checker", settings.checker)
        )

    async def judge(self, problem: Problem, result: Result, final_message: str | None) -> Verdict:
        """EnvironmentFault where nobody says."""
        if self.checker is not None:
            return await self._ask_checker(problem, result, final_message)
        if self.settings.url is not None:
            said = {"problem": problem.model_dump(mode="json"), "result": result, "final_message": final_message}
            return _verdict_of(await self._ask_url(self.settings.url, said), "the answer of verdict.url")
        return _verdict_of(result, "the agent's result")

    async def _ask_checker(self, problem: Problem, result: Result, final_message: str | None) -> Verdict:
        seconds = self.settings.timeout_seconds
        assert self.checker is not None
        try:
            work = partial(self.checker, problem, result, final_message)
            return read_verdict(await self.workers.run(work, timeout_seconds=seconds))
        except (TimeoutError, background.AllWorkersLost):
            raise EnvironmentFault(f"no verdict in {seconds:g} s", tool="checker", type="timeout") from None
        except EnvironmentFault:
            raise
        except Exception as error:
            told = f"problem {problem.id!r}: it raised {type(error).__name__}: {one_line(error)}"
            raise EnvironmentFault(told, tool="checker") from error

    async def _ask_url(self, url: str, said: dict[str, Any]) -> Any:
        import httpx2

        from tasks.core.bounded_http import BoundedClient

        seconds = self.settings.timeout_seconds
        try:
            async with BoundedClient(max_bytes=MAX_ANSWER_BYTES, total_seconds=seconds) as client:
                answer = await client.post(url, json=said)
                answer.raise_for_status()
                return json_text.parse(answer.content)
        except (httpx2.HTTPError, ValueError) as error:
            raise EnvironmentFault(f"verdict.url gave none: {one_line(error)}", tool="verdict") from None


def _verdict_of(said: Any, what: str) -> Verdict:
    result = checked_result(said)
    if "success" not in result:
        raise EnvironmentFault(f"{what} does not say whether it succeeded: it has no success", tool="verdict")
    return Verdict(result["success"], {"success": result["success"]}, result.get("details", {}))
