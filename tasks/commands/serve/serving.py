"""One server: gateway, engine's loop, watcher of the alias and recorder, begun and ended together."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.commands.serve.loop import EngineLoop
from tasks.commands.serve.recorder import Recorder, RowFile
from tasks.commands.serve.served import ModelHouse, Served
from tasks.commands.serve.versions import Source
from tasks.commands.serve.watcher import Watcher
from tasks.commands.serve.webhook import is_signed
from tasks.core.secrets import hide_known_secrets
from tasks.gateway.completions import Backend, Completion, CompletionRequest, ProtocolError
from tasks.pipeline.settings import ServeSettings
from tasks.rollouts.settings import PlaySettings

MOVING_SECONDS = 0.2  # between two looks while a promotion moves the aliases


@dataclass(frozen=True, slots=True)
class Keys:
    """What a request and a webhook must show; None: anybody on this machine may ask."""

    request: str | None = None
    webhook: str | None = None

    @property
    def values(self) -> list[str]:
        return [value for value in (self.request, self.webhook) if value]

    def check(self, key: str) -> None:
        if self.request is not None and not hmac.compare_digest(key.encode(), self.request.encode()):
            raise ProtocolError(401, "This is not the server's key.", code="invalid_api_key")


class Locked:
    """A Backend for whoever has the key."""

    def __init__(self, inner: Backend, keys: Keys):
        self.inner, self.keys = inner, keys

    def models(self, key: str) -> Sequence[str]:
        self.keys.check(key)
        return self.inner.models(key)

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        self.keys.check(key)
        return self.inner.complete(key, request)


class Serving:
    """Starts with `with`; its end answers all that came. ValueError where nothing can be written in `record`, before
    the model is loaded, the model cannot be served, or the port is taken.
    """

    def __init__(self, source: Source, play: PlaySettings, settings: ServeSettings, *, keys: Keys, record: Path | None):
        from tasks.gateway.server import Gateway

        rows = None if record is None else RowFile(record, max_bytes=settings.record.max_file_mib << 20)
        try:
            house = ModelHouse(play)
            served = _first(source, house)
        except BaseException:
            if rows is not None:
                rows.close()
            raise
        self.source, self.keys = source, keys
        self.loop = EngineLoop(
            served,
            play.sampling,
            name=source.name,
            max_under_way=play.engine.max_concurrent_episodes,
            max_waiting=settings.max_waiting,
        )
        self.watcher = Watcher(source, house, self.loop, poll_seconds=settings.poll_seconds)
        self.recorder = None if rows is None else Recorder(self.loop, rows, settings.record, secret_values=keys.values)
        backend = Locked(self.recorder or self.loop, keys)
        hooks = {"/reload": self.reload}
        self.gateway = Gateway(
            backend, port=settings.port, health=self.health, hooks=hooks, is_keyless=keys.request is None
        )

    def __enter__(self) -> Serving:
        self.loop.start()
        try:
            self.gateway.start()
        except BaseException:
            self.__exit__()
            raise
        if self.source.is_followed:
            self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.end()
        self.loop.end()
        self.gateway.close()
        if self.recorder is not None:
            self.recorder.close()

    def health(self) -> dict[str, Any]:
        """For GET /health."""
        recorder = self.recorder
        troubles = [self.watcher.trouble, recorder.trouble if recorder else None]
        return {
            "status": "ok" if self.loop.fault is None else "failed",
            "model": self.loop.name,
            "version": self.loop.served.version,
            "changes": self.watcher.num_changes,
            "trouble": " ".join(hide_known_secrets(trouble) for trouble in troubles if trouble) or None,
            **self.loop.counts(),
            "refused": self.gateway.refusals.num,
            "last_refusal": self.gateway.refusals.last,
            **({"recorded": recorder.num_recorded, "not_recorded": recorder.num_not_recorded} if recorder else {}),
        }

    def reload(self, headers: Mapping[str, str], body: bytes) -> tuple[int, Mapping[str, Any]]:
        """POST /reload, by MLflow's webhook with its signature or whoever has the key: look where the alias leads."""
        is_webhook = self.keys.webhook is not None and is_signed(headers, body, self.keys.webhook, now=time.time())
        if not is_webhook:
            self.keys.check(_key_of(headers))
        if not self.source.is_followed:
            raise ProtocolError(409, "What is served is no alias, so there is nothing to follow.")
        if _concerns(body, self.source.name):
            self.watcher.look_again()
        return 202, {"version": self.loop.served.version}


def _first(source: Source, house: ModelHouse) -> Served:
    found = source.now()
    while found is None:
        time.sleep(MOVING_SECONDS)
        found = source.now()
    return house.open(found.version, found.fetch())


def _key_of(headers: Mapping[str, str]) -> str:
    """As clients of the protocols send it, or as the password of http://any:KEY@host: a webhook of Prefect's has an
    address alone.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return headers.get("x-api-key", "")


def _concerns(body: bytes, model: str) -> bool:
    """False where the body of a webhook names another model: one server's webhook tells of all."""
    with suppress(ValueError, AttributeError):
        told = json.loads(body).get("data", {}).get("name")
        return told is None or told == model
    return True
