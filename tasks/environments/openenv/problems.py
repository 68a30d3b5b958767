"""Problems from a server: each task of its splits, or each seed, reset once to see how it begins.

A task API says which tasks there are, and not what a model reads: that is the first observation. It becomes the
request, and an episode that begins otherwise is a fault: the server would not follow its seed. A solution, which a
server does not tell, is from a function of the user's:

    def solve(task, observation) -> list[dict]  # the calls, as {"name": …, "arguments": {…}}

`task` is the server's own description, or {"seed": …}; `observation` the first one, with its metadata. Without such a
function the references are empty, and nobody claims that they score 1.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tasks.core.files import json_hash
from tasks.core.load_object import load_object
from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.core.text import one_line
from tasks.environments.openenv.discovery import Split
from tasks.environments.openenv.messages import METADATA, Observed
from tasks.environments.openenv.servers import Server, Servers
from tasks.environments.openenv.settings import OpenEnvSettings
from tasks.tools.base import EnvironmentFault, Halves, SourceCount

RESET, OBSERVED = "reset", "observed"  # keys of a problem's world
MAX_SEED = 2**31
OF_ITS_PLACE = {"index", "split"}  # names that say where a task is, not what it is; as do ids, at any depth
AN_ID = re.compile(r"(.*_)?(id|uuid|guid)")  # task_id; taskId too
A_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
Solution = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Chosen:
    """A problem to be written: `split` and `index` of a task, or a seed."""

    id: str
    category: str
    reset: dict[str, Any]


class Source:
    """`path`: of the server's task API; `splits`: by name, each with the number of its tasks."""

    def __init__(self, settings: OpenEnvSettings, servers: Servers, path: str, splits: dict[str, tuple[Split, int]]):
        self.settings, self.servers, self.path, self.splits = settings, servers, path, splits

    def count(self, num_problems: int) -> SourceCount:
        if not self.splits:
            return SourceCount(num_problems, {})
        return SourceCount(min(num_problems, sum(number for _, number in self.splits.values())), {})

    async def write(self, solution: Solution, *, seed: int, num_problems: int) -> list[Problem]:
        """ValueError if a task is none, begins with nothing to read, or has no solution."""
        chosen = self._choose(seed, num_problems)
        try:
            problems = list(await asyncio.gather(*(self._problem(item, solution) for item in chosen)))
        except EnvironmentFault as fault:
            raise ValueError(f"environment.settings: {fault.message}, so not every problem could be written") from None
        return grouped(problems)

    def _choose(self, seed: int, num_problems: int) -> list[Chosen]:
        rng = random.Random(f"{seed}/openenv")
        if not self.splits:
            return [_seeded(number) for number in rng.sample(range(MAX_SEED), num_problems)]
        found = [(name, index) for name, (_, number) in self.splits.items() for index in range(number)]
        if not found:
            raise ValueError(
                f"environment.settings.splits: {', '.join(self.splits)} have no tasks, so there is nothing to play. "
                f"Name other splits, or none, and each problem is a seed"
            )
        kept = rng.sample(range(len(found)), min(num_problems, len(found)))
        return [_task(*found[place]) for place in sorted(kept)]

    async def _problem(self, chosen: Chosen, solution: Solution) -> Problem:
        server = await self.servers.take()
        try:
            task = await self._task(server, chosen)
            observed = await self._begin(server, chosen)
        finally:
            await self.servers.give_back(server)
        calls = await asyncio.to_thread(solve, solution, task, observed.observation, chosen.id)
        return Problem(
            id=chosen.id,
            category=chosen.category,
            level=1,
            requests=[self._request(chosen.id, observed)],
            world={RESET: chosen.reset, OBSERVED: observed.text(), "task": task},
            reference=[ReferenceTurn(calls=calls, answer="Done." if calls else "")],
            split_group=group_of(task if "index" in chosen.reset else None, observed, calls),
        )

    async def _task(self, server: Server, chosen: Chosen) -> Any:
        """The server's description of a task; a seed describes itself."""
        if "index" not in chosen.reset:
            return {"seed": chosen.reset["seed"]}
        asked = {"split": chosen.reset["split"], "index": chosen.reset["index"]}
        told = await server.ask(f"{self.path}/task", body=asked)
        if not isinstance(told, dict) or "task" not in told:
            raise EnvironmentFault(f"the server answered with no task for {chosen.id}", tool="server")
        return told["task"]

    async def _begin(self, server: Server, chosen: Chosen) -> Observed:
        session, seconds = server.session(), self.settings.start_timeout_seconds
        try:
            await session.open(seconds=seconds)
            return await session.reset(chosen.reset, seconds=seconds)
        finally:
            await session.close()

    def _request(self, id: str, observed: Observed) -> str:
        name = self.settings.request
        if name is not None and name not in observed.observation:
            raise ValueError(
                f"environment.settings.request is {name!r}, which the first observation of {id} does not have, so the "
                f"model would read nothing. It has: {one_line(', '.join(observed.observation)) or 'nothing'}"
            )
        seen = observed.text() if name is None else str(observed.observation[name])
        request = "\n\n".join(part for part in (self.settings.instructions, seen) if part)
        if not request:
            raise ValueError(
                f"{id} begins with an empty observation, so the model would read nothing. Write what is to be done in "
                f"environment.settings.instructions"
            )
        return request


def grouped(problems: list[Problem]) -> list[Problem]:
    """Each its own split group where all would be of one: how they begin then tells nothing of what is to be done."""
    if len({problem.split_group for problem in problems}) > 1:
        return problems
    return [problem.model_copy(update={"split_group": problem.id}) for problem in problems]


def group_of(task: Any, observed: Observed, calls: list[ToolCall]) -> str:
    """Equal for tasks that are described, begin and are solved alike, whatever their ids. `task` None: it is a seed."""
    told = _without_place(task) or task
    seen = {name: value for name, value in _without_place(observed.observation).items() if name != METADATA}
    return f"task {json_hash([told, seen, [call.model_dump() for call in calls]])[:16]}"


def _without_place(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: item for name, item in _without_ids(value).items() if name not in OF_ITS_PLACE}


def _without_ids(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_ids(item) for name, item in value.items() if not _is_id(name)}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def _is_id(name: str) -> bool:
    return AN_ID.fullmatch(A_NEW_WORD.sub("_", name).lower()) is not None


def halves_of(splits: Mapping[str, tuple[Split, int]]) -> Halves | None:
    """The ids of the splits that the server calls train, and of those it calls test; None unless it has both."""
    train, test = (
        frozenset(
            _task(name, index).id
            for name, (split, number) in splits.items()
            if split.type == kind
            for index in range(number)
        )
        for kind in ("train", "test")
    )
    return (train, test) if train and test else None


def load_solution(path: str) -> Solution:
    """The function at an import path in tasks/custom. ValueError if there is none."""
    try:
        found = load_object(path)
    except ValueError as error:
        raise ValueError(f"environment.settings.solution: {error}. Without it no problem could be written.") from None
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(
            f"environment.settings.solution: {path} is not a plain function, so no problem could be written. Define it "
            f"as {path.rpartition(':')[2]}(task, observation)."
        )
    solution: Solution = found
    return solution


def no_solution(task: Any, observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    return []


def solve(solution: Solution, task: Any, observation: Mapping[str, Any], id: str) -> list[ToolCall]:
    """The calls that solve a task. ValueError if the function fails or returns others."""
    try:
        return [ToolCall.model_validate(call) for call in solution(task, observation)]
    except ValidationError:
        raise ValueError(
            f"environment.settings.solution: what it returned for {id} are no calls, so nothing could be played. "
            f'Return a list of {{"name": …, "arguments": {{…}}}}'
        ) from None
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"environment.settings.solution failed for {id} ({type(error).__name__}: {one_line(error)}), so no "
            f"solution is known. Correct the function"
        ) from None


def _seeded(seed: int) -> Chosen:
    id = f"seed-{seed:010d}"
    return Chosen(id, "seed", {"seed": seed, "episode_id": id})


def _task(split: str, index: int) -> Chosen:
    id = f"{split}-{index:06d}"
    return Chosen(id, split, {"split": split, "index": index, "episode_id": id})
