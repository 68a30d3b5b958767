"""A real vLLM server on loopback, with a tiny model that has learnt to cancel a booking, for tests of the chat API."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.chat.format import load_chat
from tasks.engines.vllm import shared as vllm_shared
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.models.embedded import build_model
from tasks.models.folders import load_model, save_snapshot
from tasks.models.settings import on_cpu
from tasks.stages.warm_start.rows import demonstration_row
from tests import tiny
from tests.learning.options import supervised

MODEL = "cancels-bookings"
START_SECONDS = 480  # 30 where nothing else runs
SHAPE = tiny.EMBEDDED.model_copy(update={"num_attention_heads": 2})  # heads of 32: vLLM on CPU has none of 16
# The embedded tokenizer's template, with calls of past turns written as the model wrote them.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained_model(folder: Path) -> Path:
    """A tiny model after some seconds of demonstrations, all of one kind: cancel a booking, name the refund."""
    words = tiny.tokenizer()
    save_snapshot(folder, build_model(len(words), SHAPE, seed=0, end_of_turn=words.eos_token_id), words)
    chat, world = load_chat(folder), TravelDesk()
    problems = tiny.problems(300, seed=11, max_level=1)
    demonstrations = [world.demonstrate(problem, random.Random(i)) for i, problem in enumerate(problems)]
    rows = [demonstration_row(item, chat, []) for item in demonstrations if item]
    options = supervised(batch_size=8, num_steps=250, learning_rate=5e-3)
    trainer = SupervisedTrainer(load_model(folder, compute=on_cpu(1)), rows, options, seed=1)
    for _ in range(options.num_steps):
        trainer.step()
    save_snapshot(folder, trainer.model, chat.tokenizer)
    return folder


@contextmanager
def serving(folder: Path, *, key: str, log: Path) -> Iterator[tuple[str, int]]:
    """The URL and the process group of a server for the model in `folder` that wants `key`, while it is needed."""
    template = log.with_name("template.jinja")
    template.write_text(TEMPLATE, encoding="utf-8")
    place = socket.socket()  # kept, so that nobody else is given the port before the server is up
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
    arguments = {
        "--model": folder, "--served-model-name": MODEL, "--host": "127.0.0.1", "--port": port, "--dtype": "float32",
        "--max-model-len": 160, "--chat-template": template, "--tool-call-parser": "hermes",
        "--distributed-executor-backend": vllm_shared.CPU_EXECUTOR,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--enable-auto-tool-choice",
    ]
    command += [str(part) for pair in arguments.items() for part in pair]
    # The key in the environment: an argument could be read in the list of processes.
    chosen = {"VLLM_API_KEY": key, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **vllm_shared.CPU_ENVIRONMENT, **chosen}
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_until_up(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1", server.pid
    finally:
        kill(server.pid)
        server.wait()
        place.close()


def kill(group: int) -> None:
    """kill -9 of a server and its engine, which is a process of its own."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server is not up after {START_SECONDS} s:\n{log.read_text(errors='replace')[-3000:]}")
