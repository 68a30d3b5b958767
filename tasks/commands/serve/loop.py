"""The thread that owns the engine: it answers the gateway's requests, many in a batch, and changes models between them.

Requests wait in order of arrival. While another model is to take its place, the turns under way end with the one that
began them, those that come wait for the next, and none fails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from tasks.commands.serve.served import Install, Served
from tasks.commands.serve.turns import Conversations
from tasks.core.terminal import tell
from tasks.core.text import one_line
from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError
from tasks.rollouts.agents.answers import describe_ignored, ignored_parameters, refuse_response_schema
from tasks.rollouts.engine import EpisodeHandle
from tasks.rollouts.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Asked:
    request: CompletionRequest
    answer: Future[Completion]


class EngineLoop:
    """A gateway's Backend over one model, called `name`. `max_under_way`: turns that the engine writes at once;
    `max_waiting` bounds the requests that are not begun.
    """

    def __init__(self, served: Served, sampling: SamplingSettings, *, name: str, max_under_way: int, max_waiting: int):
        self.served, self.sampling, self.name = served, sampling, name
        self.max_under_way, self.max_waiting = max_under_way, max_waiting
        self.num_answered = self.num_ignored = 0  # `num_ignored`: requests with a parameter that is not used
        self.fault: Exception | None = None  # what ended the engine
        self._conversations = self._conversations_of(served)
        self._answers: dict[EpisodeHandle, Future[Completion]] = {}
        self._news = threading.Condition()
        self._waiting: deque[Asked] = deque()
        self._exchange: tuple[Install, Future[Served]] | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def models(self, key: str) -> Sequence[str]:
        return [self.name]

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        refuse_response_schema(request)
        answer: Future[Completion] = Future()
        with self._news:
            if self.fault is not None or self._is_ending:
                raise ProtocolError(503, "The server is ending and takes no further request.", code="server_ending")
            if len(self._waiting) >= self.max_waiting:
                self._drop_hung_up()
            if len(self._waiting) >= self.max_waiting:
                message = f"{self.max_waiting} requests wait already; ask again later."
                raise ProtocolError(429, message, code="rate_limit_exceeded")
            self._waiting.append(Asked(request, answer))
            self._news.notify()
        self._note_ignored(request)
        return answer

    def exchange(self, install: Install) -> Future[Served]:
        """Have `install` called once the turns under way have ended. One at a time."""
        done: Future[Served] = Future()
        with self._news:
            assert self._exchange is None
            if self.fault is not None or self._is_ending:
                raise ValueError("the server is ending, so it takes no other model.")
            self._exchange = install, done
            self._news.notify()
        return done

    def end(self) -> None:
        """Take no further request, answer those that came, and close the engine."""
        with self._news:
            self._is_ending = True
            self._news.notify()
        self._thread.join()

    def counts(self) -> dict[str, int]:
        with self._news:
            self._drop_hung_up()
        return {
            "answered": self.num_answered,
            "ignored": self.num_ignored,
            "under_way": len(self._answers),
            "waiting": len(self._waiting),
        }

    def _conversations_of(self, served: Served) -> Conversations:
        return Conversations(served, self.sampling, self.name, self.max_under_way)

    def _note_ignored(self, request: CompletionRequest) -> None:
        """Of a request that is taken: a line for the first that sets what is not used."""
        ignored = ignored_parameters(request, self.sampling)
        if ignored and not self.num_ignored:
            tell(
                f"a request sets {describe_ignored(request, ignored, self.sampling)}: a model is served as it was "
                f"measured. Replies say so in the header x-turnwise-ignored, and `ignored` of /health counts them"
            )
        self.num_ignored += bool(ignored)

    def _drop_hung_up(self) -> None:
        """Whoever has gone keeps nobody out."""
        self._waiting = deque(asked for asked in self._waiting if not asked.answer.cancelled())

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._change_models()
                self._begin_turns()
                self._take_replies()
        except Exception as error:  # the engine died: nobody may wait for it
            self._give_up(error)
        finally:
            self.served.engine.close()

    def _wait_for_work(self) -> bool:
        """False once all is done and nothing will come."""
        with self._news:
            while not (self._waiting or self._answers or self._exchange):
                if self._is_ending:
                    return False
                self._news.wait()
        return True

    def _change_models(self) -> None:
        if self._exchange is None or self._answers:
            return
        install, done = self._exchange
        failed: ValueError | None = None
        self._conversations.release_all()
        try:
            self.served = install(self.served)
        except ValueError as error:  # the one before goes on
            failed = error
        self._conversations = self._conversations_of(self.served)
        self._exchange = None
        if failed is None:
            done.set_result(self.served)
        else:
            done.set_exception(failed)

    def _begin_turns(self) -> None:
        while (asked := self._next()) is not None:
            if asked.answer.cancelled():
                continue
            try:
                handle = self._conversations.begin(asked.request)
            except Exception as error:
                self._refuse(asked.answer, error)
            else:
                self._answers[handle] = asked.answer

    def _next(self) -> Asked | None:
        with self._news:
            return self._waiting.popleft() if self._may_begin() else None

    def _may_begin(self) -> bool:
        """Asked between steps of the engine too: whether a request could join those under way."""
        return bool(self._waiting) and self._exchange is None and len(self._answers) < self.max_under_way

    def _take_replies(self) -> None:
        if not self._answers:
            return
        for reply in self.served.engine.poll(self._may_begin):
            answer = self._answers.pop(reply.episode)
            try:
                completion = self._conversations.end(reply)
            except Exception as error:
                self._refuse(answer, error)
                continue
            self.num_answered += 1
            with suppress(InvalidStateError):  # whoever asked has gone
                answer.set_result(completion)

    def _refuse(self, answer: Future[Completion], error: Exception) -> None:
        """A mistake of ours in one request, which the gateway logs, ends no other."""
        with suppress(InvalidStateError):
            answer.set_exception(error)

    def _give_up(self, error: Exception) -> None:
        with self._news:
            self.fault = error
            left = [*(asked.answer for asked in self._waiting), *self._answers.values()]
            self._waiting.clear()
            self._answers.clear()
        for answer in left:
            self._refuse(answer, ProtocolError(503, f"The engine ended ({one_line(error)}).", code="engine_ended"))
        if self._exchange is not None:
            self._exchange[1].set_exception(error)
