"""The client of vLLM's servers, with answers made up in a server's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.background import run
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.prompt_ids import parse_answer
from tasks.engines.vllm.server_process import ServerDown
from tests import tiny


def test_a_server_that_answers_in_a_way_of_its_own_is_down_like_one_that_does_not_answer() -> None:
    """What is asked of a server before its first turn, where the sampling is not plain."""

    class Other(VLLMClient):
        async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"choices": [{"text": "good morning"}]}

    sampling = tiny.SAMPLING.model_copy(update={"temperature": 0.7})
    client = Other(
        "http://127.0.0.1:1", model="m", sampling=sampling, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ServerDown, match="its answer lacks what was asked for"):
        run(client.check_logprobs_mode()).result()


@pytest.mark.parametrize("token", [9, -1, 2**63, True, 1.0])
def test_an_id_that_is_no_token_of_the_model_is_a_fault_of_the_server(token: Any) -> None:
    """Trained on, it would read another embedding, or end the process on a GPU."""
    choice = {
        "token_ids": [4, token], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "prompt_token_ids": [1],
        "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip

    class Answering(VLLMClient):
        async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"choices": [choice], "usage": {}}

    client = Answering(
        "unix:/nowhere", model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ServerDown, match="does not add up: ids that are none of the model's 9 tokens"):
        run(client.generate([1], max_new_tokens=2, seed=1, cache_salt=None)).result()
    choice["token_ids"] = [4, 8]
    assert run(client.generate([1], max_new_tokens=2, seed=1, cache_salt=None)).result().token_ids == [4, 8]


@pytest.mark.parametrize(("stop_reason", "more"), [(3, ()), (4, ()), (5, (5,))])
def test_any_end_id_of_the_chat_or_the_request_ends_a_turn(stop_reason: int, more: tuple[int, ...]) -> None:
    """3 and 4 are the chat's; a request for a thought names 5, where the thought ends."""
    asked: list[dict[str, Any]] = []

    class Answering(VLLMClient):
        async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append(body)
            choice = {
                "token_ids": [8, stop_reason], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "prompt_token_ids": [1],
                "finish_reason": "stop", "stop_reason": stop_reason,
            }  # fmt: skip
            return {"choices": [choice], "usage": {}}

    client = Answering(
        "unix:/nowhere", model="m", sampling=tiny.SAMPLING, end_ids=(3, 4), vocabulary_size=9, timeout_seconds=1.0
    )
    given = client.generate([1], max_new_tokens=5, seed=0, cache_salt=None, more_end_ids=more)
    assert run(given).result().finish == "end_of_turn"
    assert asked[0]["stop_token_ids"] == [3, 4, *more]
    if more:  # another request does not name it
        with pytest.raises(ServerDown, match="a reason of its own"):
            run(client.generate([1], max_new_tokens=5, seed=0, cache_salt=None)).result()


def test_a_server_that_somebody_else_started_is_told_of_every_part_of_the_distribution() -> None:
    """What a request leaves open, vLLM fills in from the model's generation_config.json: top_k 20 with Qwen's, say."""
    asked: list[dict[str, Any]] = []

    class Watched(VLLMClient):
        async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append(body)
            raise ServerDown("seen enough")

    client = Watched(
        "unix:/nowhere", model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ServerDown):
        run(client.generate([1], max_new_tokens=1, seed=0, cache_salt=None)).result()
    told = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert told.items() <= asked[0].items()


@pytest.mark.parametrize(
    ("repeated", "read"),
    [
        ("[4,5]", [4, 5]),
        ("[4, 5]", [4, 5]),  # white space: parsed as any JSON
        ("[4,5,6]", [4, 5, 6]),  # begins alike
        ("[4,6]", [4, 6]),
        ("null", None),
    ],
)
def test_a_prompt_that_is_repeated_as_it_was_sent_is_not_parsed_and_any_other_is_read_as_it_is(
    repeated: str, read: Any
) -> None:
    text = r'{"choices":[{"text":"\"prompt_token_ids\":[4,5]","prompt_token_ids":READ}],"usage":{}}'
    text = text.replace("READ", repeated)
    sent = [4, 5]
    found = parse_answer(text.encode(), sent)["choices"][0]
    assert found == {"text": '"prompt_token_ids":[4,5]', "prompt_token_ids": read}
    assert (found["prompt_token_ids"] is sent) == (repeated == "[4,5]")
    with pytest.raises(ValueError, match="nested deeper"):
        parse_answer(text.replace("{}", "[" * 99 + "]" * 99).encode(), sent)


def test_a_server_that_does_not_load_a_folder_may_serve_another_model() -> None:
    """vLLM answers with a general error where tensors have other names or shapes."""
    import httpx2

    class Answering(VLLMClient):
        async def _ask(self, *_: Any, **__: Any) -> httpx2.Response:
            request = httpx2.Request("POST", "http://a/collective_rpc")
            return httpx2.Response(500, text="EngineCore encountered an issue", request=request)

    client = Answering(
        "http://a", model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ServerDown, match=r"status 500 .*an issue; .*another model than the one that is trained.*start"):
        run(client.load_weights(Path("weights"))).result()
