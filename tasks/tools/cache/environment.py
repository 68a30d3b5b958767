"""The tool cache: what tools answered is kept, and served instead of asking again.

- `record`: every call goes to the tools, and what they answer is stored.
- `replay`: a stored answer is served. A call that was never recorded goes to the tools, after the episode's earlier
  calls have been made again on a fresh back end and have answered as stored; its answer is stored too.
- `strict`: the tools are switched off. A miss stops the run. Tools, description and fingerprint are those recorded; the
  world itself is made only for what plays no episode, such as `generate` of one that writes its own problems.

The key of a call is the hash of the environment's fingerprint, the problem, the calls so far (malformed ones too) and
the call; of a `stateless` tool it is tool, version and arguments, so that one answer serves every episode (the world
does not see such a call, so its verdict must not rest on it). The verdict has the key of where the episode ended and
its final message. Whatever follows from these alone is replayed byte for byte. A tool that also answers by the clock or
by chance is not: recording counts the answers that differed from what was stored under their key
(`tool_cache_changes`).

Faults are never stored: ours are raised and not answered, and those the model is meant to meet stand outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.tools.base import Environment, Tool, ToolReply, Verdict
from tasks.tools.cache.episode import CachedEpisode
from tasks.tools.cache.store import Entry, StoredEnvironment, ToolStore, cache_key, entry_of, read_frozen
from tasks.tools.settings import CacheSettings, ToolSettings

OPERATION = {"max_servers", "start_timeout_seconds"}  # of an MCP server: how it is run, not which one it is


class Answers:
    """Everything that was recorded: the frozen file, where there is one, and then the store.

    In `strict` a frozen file stands alone: it is what DVC versions, and a run must not rest on anything beside it.
    """

    def __init__(self, settings: CacheSettings):
        folder, frozen = Path(settings.folder), settings.frozen_file
        self.is_strict = settings.mode == "strict"
        self.source = str(frozen or folder)
        self._frozen = read_frozen(frozen) if frozen and settings.mode != "record" else {}
        needs_store = not self.is_strict or (frozen is None and folder.is_dir())
        self._store = ToolStore(folder) if needs_store else None

    def get(self, key: str) -> Entry | None:
        return self._frozen.get(key) or (self._store.get(key) if self._store else None)

    def put(self, key: str, entry: Entry) -> bool:
        """Keep an entry; True where it replaced another that said something else."""
        assert self._store is not None
        return self._store.put(key, entry)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class CachedEnvironment:
    """A world behind the cache. `make` builds it; `strict` does so only where an attribute of `world_class` that is
    none of an Environment's is asked for.
    """

    def __init__(
        self,
        name: str,
        environment_class: type[Any],
        make: Callable[[], Environment],
        *,
        settings: Settings | None,
        limits: ToolSettings,
        cache: CacheSettings,
    ):
        self.name, self.limits, self.mode = name, limits, cache.mode
        self.answers = Answers(cache)
        self._world_class, self._make = environment_class, make
        self._world: Environment | None = None
        self._recorded = self._recording(environment_key(name, settings))
        self._fingerprint = json_hash(self._recorded.description)
        self._tools = tuple(Tool(**tool) for tool in self._recorded.tools)
        self.stateless = {tool.name: tool for tool in self._tools if tool.stateless}
        self.num_hits = self.num_misses = 0
        self.changed: list[str] = []  # appended to from two threads; a counter could lose one

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._tools

    def start(self, problem: Problem, *, stream: str = "") -> CachedEpisode:
        return CachedEpisode(self, problem, stream)

    def describe(self) -> dict[str, Any]:
        return self._recorded.description

    def fingerprint(self) -> str:
        return self._fingerprint

    def counts(self) -> dict[str, int]:
        """Calls and verdicts served, those that went to the tools, and the answers that replaced a different one."""
        return {
            **(self._world.counts() if self._world else {}),
            "tool_cache_hits": self.num_hits,
            "tool_cache_misses": self.num_misses,
            "tool_cache_changes": len(self.changed),
        }

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
        self.answers.close()

    def world(self) -> Environment:
        if self._world is None:
            self._world = self._make()
        return self._world

    def find(self, key: str) -> Entry | None:
        """The stored answer, counted as a hit or a miss; recording asks the tools whatever is stored."""
        found = self.answers.get(key) if self.mode != "record" else None
        self.num_hits += found is not None
        self.num_misses += found is None
        return found

    def keep(self, key: str, answer: ToolReply | Verdict, source: str) -> None:
        if self.answers.put(key, entry_of(answer)):
            self.changed.append(source)

    def _recording(self, key: str) -> StoredEnvironment:
        """What the environment says of itself: recorded in `strict`, else asked for, and recorded."""
        if self.mode != "strict":
            live = StoredEnvironment.of(self.world().describe(), self.world().tools)
            self.answers.put(key, entry_of(live))
            return live
        entry = self.answers.get(key)
        if entry is None or entry.environment is None:
            raise ValueError(
                f"environment.cache.mode is strict, and {self.answers.source} holds no recording of the environment "
                f"{self.name!r}, so there is nothing to replay. Run with mode: record first."
            )
        return entry.environment

    def __getattr__(self, name: str) -> Any:
        """What the environment offers beyond its tools. It need not be made for what its class has left as it is."""
        offered = getattr(Environment, name)
        is_default = getattr(self._world_class, name) is offered
        return partial(offered, self) if is_default else getattr(self.world(), name)


def environment_key(name: str, settings: Settings | None) -> str:
    """The key of an environment's recording: its name, and which one of that name its settings ask for."""
    return cache_key("environment", name, settings.model_dump(mode="json", exclude=OPERATION) if settings else None)
