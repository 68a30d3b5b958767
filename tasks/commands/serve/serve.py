"""`serve SOURCE`: a model folder or a registered model behind OpenAI's and Anthropic's protocols, on the loopback.

An alias is followed: a promotion or a rollback changes the model between two turns, and no request fails. Every reply
says which version wrote it. SIGTERM and Ctrl-C answer what came and end with status 0.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from tasks.commands.serve.serving import Keys, Serving
from tasks.commands.serve.versions import open_source
from tasks.core.child_processes import own_guardian
from tasks.core.secrets import read_secret
from tasks.core.settings import load, load_paths, read_params
from tasks.core.terminal import tell
from tasks.core.text import counted, one_line, printable
from tasks.pipeline.order import check_params, prepare_process
from tasks.pipeline.settings import ServeSettings
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.promote.record import PAGE_FILE

ROOM = "serve"
LOOK_SECONDS = 0.2  # between two looks whether the engine is alive


class ServeSections(EvaluateSections):
    serve: ServeSettings


def serve(source: str, *, record: Path | None = None, port: int | None = None, address: str | None = None) -> None:
    """Until a signal. ValueError in one line where it cannot start, or the engine dies."""
    check_params()
    params = read_params()
    prepare_process(params)
    settings, paths = load(ServeSections, params), load_paths(params)
    options = settings.serve if port is None else settings.serve.model_copy(update={"port": port})
    keys = Keys(
        _request_key(options.key_variable),
        _secret(options.webhook_secret_variable, "serve.webhook_secret_variable"),
    )
    with _folder(paths.artifacts / ROOM) as folder:
        model = open_source(source, folder, address, decision=paths.stage("promote") / PAGE_FILE)
        serving = Serving(model, settings.plays["test"], options, keys=keys, record=record)
        with ended_by_signals() as ending, serving:
            tell("\n".join(map(printable, _opening(serving, options, record))))
            while not ending.wait(LOOK_SECONDS) and serving.loop.fault is None:
                continue
            tell("ending: what came is answered, and nothing further is taken")
    if serving.loop.fault is not None:
        raise ValueError(
            f"the engine ended ({one_line(serving.loop.fault)}), so nothing is served any more. Start `serve` again."
        )
    tell(_ended(serving))


def _ended(serving: Serving) -> str:
    ended = f"ended; it answered {counted(serving.loop.num_answered, 'request')}"
    if (recorder := serving.recorder) is None:
        return ended
    return f"{ended}, {recorder.num_recorded:,} of them recorded and {recorder.num_not_recorded:,} not recorded"


@contextmanager
def ended_by_signals() -> Iterator[threading.Event]:
    """SIGTERM and Ctrl-C set the event."""
    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _folder(room: Path) -> Iterator[Path]:
    """For the files of versions; gone with this process, even after `kill -9`."""
    room.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=room, prefix="versions-", ignore_cleanup_errors=True) as folder:
        own_guardian().remove(Path(folder))
        yield Path(folder)


def _request_key(variable: str | None) -> str | None:
    """ValueError for a key that no header can carry: whoever has it would be refused."""
    key = _secret(variable, "serve.key_variable")
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(
            f"serve.key_variable: the value of {variable} has letters beyond ASCII, a line end, or a space around it, "
            f"which no HTTP header carries whole, so every request would be refused. Choose another key."
        )
    return key


def _secret(variable: str | None, setting: str) -> str | None:
    return None if variable is None else read_secret(variable, setting=setting)


def _opening(serving: Serving, options: ServeSettings, record: Path | None) -> Iterator[str]:
    url, model, key = serving.gateway.url, serving.loop.name, options.key_variable
    yield f"serving {serving.loop.served.version} as {model}"
    if serving.source.is_followed:
        yield f"  follows its alias, looked up every {options.poll_seconds:g} s and after POST {url}/reload"
    yield f"  OpenAI     {serving.gateway.openai_url}   (chat/completions, responses)"
    yield f"  Anthropic  {url}   (v1/messages)"
    yield f"  key        {f'the value of {key}' if key else 'none: anybody on this machine may ask'}"
    yield f"  health     {url}/health"
    if record is not None:
        yield f"  RECORDING  every conversation is written to {record}, redacted by serve.record.redact"
    header = f' -H "Authorization: Bearer ${key}"' if key else ""
    yield ""
    yield f"curl {serving.gateway.openai_url}/chat/completions{header} -H 'Content-Type: application/json' \\"
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    yield f"  -d {shlex.quote(json.dumps(asked))}"
    yield ""
