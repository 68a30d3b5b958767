"""A server on a node of Ray's cluster, with a host of a few lines in the actor's place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from tasks.core.background import run
from tasks.engines.vllm import on_ray, ray_transport
from tasks.engines.vllm.on_ray import HostedServer
from tasks.engines.vllm.server_process import ServerDown
from tests.engine_benches import vllm_settings

AWAY = ActorUnavailableError("it is on its way back", b"0" * 16)


class Call:
    """A method of an actor that answers in turn; an exception is raised."""

    def __init__(self, *answers: Any):
        self.answers = list(answers)

    async def remote(self, *_: Any, **__: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostedServer:
    monkeypatch.setattr(on_ray, "LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(on_ray, "host_of", lambda name: type("Host", (), {})())
    settings = vllm_settings(tmp_path, mode="server", start_timeout_seconds=3600.0)
    return HostedServer(tmp_path, settings, number=1, log_folder=tmp_path)


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ActorDiedError(), ServerDown, "ActorDiedError of Ray"),
        (RayTaskError("start", "", OSError("no such command")), ServerDown, "no such command"),
        (RayTaskError("start", "", ValueError("b does not see the folder.")), ValueError, "b does not see"),
    ],
)
def test_only_a_host_on_its_way_back_is_waited_for(
    server: HostedServer, error: Exception, kind: type[Exception], told: str
) -> None:
    """The server may take an hour to start, which nobody waits for after these."""
    server.host.start = Call(AWAY, error)
    with pytest.raises(kind, match=told):
        run(server.wait_ready()).result(120)
    server.host.start, server.host.is_ready = Call(AWAY, "node", "node"), Call(AWAY, "", None)
    assert run(server.wait_ready()).result(120) >= 0


def test_a_host_that_does_not_answer_holds_up_nothing_else(
    server: HostedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "ANSWER_SECONDS", 0.05)
    server.host.is_ready = Call(asyncio.sleep(3600), None, "it was ended by signal 9", ActorDiedError())

    async def scene() -> None:
        silent = asyncio.create_task(server.ending())
        await asyncio.sleep(0)
        assert not silent.done()
        assert await server.ending() == ""
        assert "did not answer within 0.05 s" in await silent
        assert await server.ending() == "it was ended by signal 9"
        assert "ActorDiedError" in await server.ending()

    run(scene()).result(120)


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert ray_transport.told(RuntimeError()) == "RuntimeError of Ray:"
