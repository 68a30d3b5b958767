"""Requests to one vLLM server over HTTP: turns as token ids, log-probs of given ids, new weights.

A server is at a URL, at `unix:` and a socket's path, or at `ray:` and the name of its host. No text is ever turned into
ids. No answer raises ServerDown, as one that does not add up does (`answers.py`). A refused request (4xx) is our
mistake: ValueError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.text import one_line
from tasks.engines.vllm.answers import Answer, Asked, first_choice, refuse_without
from tasks.engines.vllm.prompt_ids import encode_body, parse_answer
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.settings import UNIX
from tasks.engines.vllm.shared import seed_for_vllm
from tasks.rollouts.settings import SamplingSettings

if TYPE_CHECKING:
    import httpx2

    from tasks.core.bounded_http import BoundedClient

KEY_REFUSED = (401, 403)
BUSY = (408, 425, 429)  # asked to retry later: the server's fault, not the request's
CERTAIN_NATS = 0.05
# Sent explicitly: an external server takes missing values from the model's generation_config.json.
NOTHING_ELSE: dict[str, float] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MAX_ANSWER_BYTES = 64 << 20  # log-probs of a given token take 100 bytes
RAY = "ray:"
ADAPTER = "adapter"  # the policy's, to the server
HEALTH_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0  # the server closes idle ones after 5, which looks like a crash


class ConnectionLost(ServerDown):
    """The connection broke or was refused: the server may be gone, or only have closed an idle connection."""


class VLLMClient:
    """The routes of the server at `url`. An id of `vocabulary_size` or more is no token of the model's."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        sampling: SamplingSettings,
        end_ids: Sequence[int],
        vocabulary_size: int,
        timeout_seconds: float,
    ):
        self.model, self.sampling, self.end_ids = model, sampling, tuple(end_ids)
        self.adapter: str | None = None  # the name of the one to compute with
        self.vocabulary_size, self.timeout_seconds = vocabulary_size, timeout_seconds
        self.url, self._http = url.rstrip("/"), connect(url)

    async def move(self, url: str) -> None:
        """To a server that was started again, and has no adapter yet."""
        self.adapter = None
        await self._http.aclose()
        self.url, self._http = url.rstrip("/"), connect(url)

    async def generate(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int,
        seed: int,
        cache_salt: str | None,
        more_end_ids: tuple[int, ...] = (),
    ) -> Answer:
        end_ids = [*self.end_ids, *more_end_ids]
        body = {
            "model": self.adapter or self.model,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            **NOTHING_ELSE,
            "seed": seed_for_vllm(seed),
            "stop_token_ids": end_ids,
            "ignore_eos": True,  # only an end id ends a turn, no other token of the model's config
            "stop": self.sampling.stop_strings,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # a stop string may be one
            "spaces_between_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }
        asked = Asked(
            self.url,
            prompt,
            max_new_tokens,
            self.sampling.max_tokens_per_episode,
            end_ids,
            self.sampling.stop_strings,
            self.vocabulary_size,
        )
        return asked.check(
            await self.post("/v1/completions", body | ({"cache_salt": cache_salt} if cache_salt else {}))
        )

    async def token_logp(self, token_ids: list[int]) -> list[float]:
        """Log-prob (nats, temperature 1, no top-p) of every token but the first."""
        body = {
            "model": self.adapter or self.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer = await self.post("/v1/completions", body)
        choice = first_choice(answer)
        refuse_without(choice, "prompt_logprobs", url=self.url)
        try:
            rows = choice["prompt_logprobs"][1:]
            return [float(row[str(token)]["logprob"]) for token, row in zip(token_ids[1:], rows, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerDown(f"its log-probs of {len(token_ids)} given tokens do not add up ({error!r})") from None

    async def pause(self) -> None:
        """End each turn under way, which is then answered with its tokens so far; what comes later waits."""
        await self.post("/pause?mode=abort", {})

    async def resume(self) -> None:
        await self.post("/resume", {})

    async def load_weights(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        response = await self._ask("POST", "/collective_rpc", body)
        if (status := response.status_code) >= 500:
            raise ServerDown(
                f"status {status} at /collective_rpc: {one_line(response.text)}; it does not load {folder}, "
                f"perhaps as it serves another model than the one that is trained, or does not see that folder: start "
                f"it on that model, where the folder is"
            )
        self._read(response)
        self.adapter = None

    async def load_adapter(self, folder: Path) -> None:
        """Put a LoRA adapter in the place of the one before; requests then name it."""
        body = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
        self._refuse_status(await self._ask("POST", "/v1/load_lora_adapter", body))
        self.adapter = ADAPTER

    async def serve_loaded(self, label: str) -> None:
        """The server is paused, so no request uses its prefix cache."""
        answer = await self.post("/reset_prefix_cache", {})
        if not answer.get("success", True):
            raise ServerDown("its prefix cache was not reset, so that old keys and values could meet new weights")
        await self.set_label(label)

    async def set_label(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})

    async def label(self) -> str | None:
        """The server's name for its weights; None where it has no such route."""
        response = await self._ask("GET", "/weight_info")
        if response.status_code == 404:
            return None
        return str(self._read(response).get("weight_version"))

    async def num_workers(self) -> int:
        return int(self._read(await self._ask("GET", "/get_world_size"))["world_size"])

    async def vllm_version(self) -> str | None:
        """None where it does not say."""
        response = await self._ask("GET", "/version")
        return None if response.status_code == 404 else str(self._read(response).get("version"))

    async def served_model(self) -> str:
        try:
            return str(self._read(await self._ask("GET", "/v1/models"))["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerDown("it names no model") from None

    async def check_logprobs_mode(self) -> None:
        """ValueError for raw log-probs: near temperature 0 the chosen token is certain, so only a raw one is not
        near 0.
        """
        if self.sampling.temperature == 1.0 and self.sampling.top_p == 1.0:
            return
        prompt = [self.end_ids[0]]
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "seed": 0, "logprobs": 0}
        answer = await self.post("/v1/completions", body | {"temperature": 0.01, "return_token_ids": True})
        choice = first_choice(answer)
        refuse_without(choice, "token_ids", "logprobs", url=self.url)
        try:
            token, logp = choice["token_ids"][0], float(choice["logprobs"]["token_logprobs"][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerDown(f"its answer lacks what was asked for ({error!r})") from None
        (raw,) = await self.token_logp([*prompt, token])
        if raw < -CERTAIN_NATS and abs(logp - raw) < CERTAIN_NATS:
            raise ValueError(
                f"{self.url}: the server gives log-probs from before temperature and top-p, and importance ratios need "
                f"those of the distribution it samples from. Start it with --logprobs-mode processed_logprobs."
            )

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._read(await self._ask("POST", route, body), body.get("prompt"))

    async def health(self) -> int:
        """The status that it answers /health with."""
        return (await self._ask("GET", "/health", timeout_seconds=HEALTH_SECONDS)).status_code

    async def is_healthy(self) -> bool:
        try:
            return await self.health() == 200
        except ServerDown:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, timeout_seconds: float | None = None
    ) -> httpx2.Response:
        import httpx2

        from tasks.core.bounded_http import RefusedAnswer

        seconds = timeout_seconds or self.timeout_seconds
        setting = "" if timeout_seconds else " (engine.settings.request_timeout_seconds)"
        try:
            async with asyncio.timeout(seconds):
                return await self._http.request(method, route, **encode_body(body))
        except TimeoutError:
            raise ServerDown(f"no answer to {route} within {seconds:g} s{setting}") from None
        except RefusedAnswer as refused:
            raise ServerDown(f"at {route} it {refused}") from None
        except httpx2.TransportError as error:
            raise ConnectionLost(f"{type(error).__name__} at {route}: {one_line(error)}") from None

    def _refuse_status(self, response: httpx2.Response) -> None:
        status, route = response.status_code, response.request.url.path
        if status >= 500 or status in BUSY or 300 <= status < 400:
            raise ServerDown(f"status {status} at {route}: {one_line(response.text)}")
        if status in KEY_REFUSED:
            raise ValueError(
                f"{self.url}{route}: the server wants a key (status {status}), and turnwise sends none to vLLM, so it "
                f"gets no turn. Start it without --api-key and VLLM_API_KEY, in a network of your own, or correct "
                f"engine.settings.urls."
            )
        if status >= 400:
            raise ValueError(
                f"{self.url}{route}: the server refuses the request (status {status}: {one_line(response.text)}), and "
                f"would refuse it again. It may serve another model or a shorter context than sampling asks for."
            )

    def _read(self, response: httpx2.Response, prompt: list[int] | None = None) -> dict[str, Any]:
        self._refuse_status(response)
        route = response.request.url.path
        try:
            answer = parse_answer(response.content, prompt)
        except ValueError:
            raise ServerDown(f"its answer at {route} is no JSON: {one_line(response.text)}") from None
        if not isinstance(answer, dict):
            raise ServerDown(f"its answer at {route} is a {type(answer).__name__}, not an object")
        return answer


def connect(url: str) -> BoundedClient:
    """To the server at `url`."""
    import httpx2

    from tasks.core.bounded_http import BoundedClient

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
    transport: httpx2.AsyncBaseTransport | None = None
    if url.startswith(UNIX):
        transport = httpx2.AsyncHTTPTransport(uds=url.removeprefix(UNIX), limits=limits)
    elif url.startswith(RAY):
        from tasks.engines.vllm.ray_transport import HostTransport

        transport = HostTransport(url.removeprefix(RAY))
    return BoundedClient(
        max_bytes=MAX_ANSWER_BYTES,
        total_seconds=None,  # each request has a limit of its own
        base_url="http://localhost" if transport else url.rstrip("/"),
        transport=transport,
        limits=limits,
        timeout=None,
        trust_env=False,
    )
