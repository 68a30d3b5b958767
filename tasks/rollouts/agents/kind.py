"""Episodes of agents over an engine: the EpisodeKind, and what the gateway asks on behalf of the agents.

One gateway serves all episodes, from the first to `close`; one whose server died is started again, and the episodes of
the agents that talked to it end with faults. Each attempt at an episode has a key of its own, which is worth nothing
once it has ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.core.terminal import tell
from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError
from tasks.rollouts.agents.answers import describe_ignored, ignored_parameters
from tasks.rollouts.agents.episode import AgentRun
from tasks.rollouts.agents.inbox import Asked, Called, Ended, unknown_key
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.episode import EngineEpisodes
from tasks.tools.base import Environment, EnvironmentFault, Tool, ToolReply
from tasks.tools.driven import AgentEnd, Endpoint

if TYPE_CHECKING:
    from tasks.gateway.server import Gateway


class AgentEpisodes(EngineEpisodes):
    """Also the gateway's Backend and ToolHost, whose methods its thread calls. A stage, which plays with many of these,
    says once what it does not take of requests.
    """

    has_told_ignored: ClassVar[bool] = False

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.by_key: dict[str, AgentRun] = {}
        self._gateway: Gateway | None = None
        self.num_unheard = 0

    def open(self, key: EpisodeKey, environment: Environment, *, seed: int, stage: str, attempt: int) -> AgentRun:
        if key.prefix:
            raise ValueError(
                "episodes of environment.name: agent cannot begin in the middle, since no agent can be brought there. "
                "Set train.exploration.prefixes to null"
            )
        self.num_opened += 1
        gateway = self._serving()
        run = AgentRun(
            key,
            self.num_opened,
            environment=environment,
            chat=self.chat,
            sampling=self._open_problem(key.problem, environment).sampling,
            seed=seed,
            stage=stage,
            attempt=attempt,
            endpoint=Endpoint(gateway.openai_url, gateway.url, gateway.mcp_url, secrets.token_urlsafe(24), model=""),
            by_key=self.by_key,
        )
        self.running[run.handle] = run
        return run

    def submit(self, run: AgentRun) -> None:  # type: ignore[override]  # it opens no others
        if run.is_elsewhere:
            self.withdraw(run)
        super().submit(run)

    def release(self, run: AgentRun) -> None:  # type: ignore[override]  # it opens no others
        self.num_unheard += len(run.unheard)
        super().release(run)

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.close()
        if self.num_unheard:
            tell(
                f"turns that no agent heard, since its client gave up before they were written: {self.num_unheard}. "
                f"They count as any other; raise the client's timeout"
            )

    def models(self, key: str) -> Sequence[str]:
        return self._of(key).episode.models

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        asked = Asked(request)
        self._put(key, asked)
        self._tell_ignored(request)
        return asked.answer

    def tools(self, key: str) -> Sequence[Tool]:
        return self._of(key).offered

    def call(self, key: str, name: str, arguments: Mapping[str, Any]) -> Future[ToolReply]:
        called = Called(name, arguments)
        self._put(key, called)
        return called.answer

    def _put(self, key: str, event: Asked | Called) -> None:
        """The agent's time stands still until it is answered: whoever collects may be away."""
        run = self._of(key)
        clock = run.episode.clock
        clock.hold()
        event.answer.add_done_callback(lambda _: clock.go())
        try:
            run.inbox.put(event)
        except ProtocolError:
            event.answer.cancel()
            raise

    def _of(self, key: str) -> AgentRun:
        run = self.by_key.get(key)
        if run is None:
            raise unknown_key()
        return run

    def _serving(self) -> Gateway:
        from tasks.gateway.server import Gateway

        if self._gateway is None or not self._gateway.is_alive:
            self._gateway = Gateway(self, tools=self)
            self._gateway.start()
            threading.Thread(target=self._watch, args=(self._gateway,), name="gateway watch", daemon=True).start()
        return self._gateway

    def _watch(self, gateway: Gateway) -> None:
        """An agent whose endpoint is gone need not come to its deadline."""
        gateway.wait()
        for run in [*self.by_key.values()]:
            if run.endpoint.openai_url == gateway.openai_url:
                lost: Future[AgentEnd] = Future()
                lost.set_exception(EnvironmentFault("its endpoint ended before it did", tool="gateway"))
                run.inbox.put(Ended(lost))

    def _tell_ignored(self, request: CompletionRequest) -> None:
        ignored = ignored_parameters(request, self.sampling, has_seed=True)
        if ignored and not AgentEpisodes.has_told_ignored:
            AgentEpisodes.has_told_ignored = True
            used = describe_ignored(request, ignored, self.sampling)
            tell(f"agents set {used}: log-probs are of the run's own distribution")
