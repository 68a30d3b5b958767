"""The client of vLLM's servers, with answers made up in a server's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.background import run
from tasks.engines.vllm.answers import Answer
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.prompt_ids import parse_answer
from tasks.engines.vllm.server_process import ServerDown
from tasks.rollouts.settings import SamplingSettings
from tests import tiny

CHOICE = {
    "token_ids": [4, 8], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "prompt_token_ids": [1],
    "finish_reason": "length", "stop_reason": None,
}  # fmt: skip


class Answering(VLLMClient):
    """Gets `answer` to whatever it asks."""

    def __init__(self, answer: dict[str, Any], sampling: SamplingSettings = tiny.SAMPLING):
        super().__init__(
            "http://a:1", model="m", sampling=sampling, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
        )
        self.answer = answer

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.answer

    def turn(self) -> Answer:
        return run(self.generate([1], max_new_tokens=2, seed=1, cache_salt=None)).result()


def test_a_server_that_has_no_ids_or_log_probs_to_give_is_refused_by_name_before_its_first_turn() -> None:
    """What is asked of a server before its first turn, where the sampling is not plain."""
    client = Answering({"choices": [{"text": "good morning"}]}, tiny.SAMPLING.model_copy(update={"temperature": 0.7}))
    with pytest.raises(ValueError, match=r"^http://a:1: .* no token_ids and no logprobs, .* too old .*urls"):
        run(client.check_logprobs_mode()).result()
    with pytest.raises(ValueError, match=r"^http://a:1: .* no prompt_logprobs, .* too old a vLLM"):
        run(client.token_logp([1, 2])).result()


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "prompt_token_ids", "usage"])
@pytest.mark.parametrize("is_null", [True, False])
def test_an_answer_without_what_every_turn_needs_is_of_too_old_a_server_and_not_asked_for_again(
    name: str, is_null: bool
) -> None:
    choice, answer = dict(CHOICE), dict[str, Any](usage={})
    assert Answering({"choices": [dict(CHOICE)], "usage": {}}).turn().token_ids == [4, 8]
    part: dict[str, Any] = answer if name == "usage" else choice
    part[name] = None
    if not is_null:
        del part[name]
    with pytest.raises(ValueError, match=rf"no {name}, .* too old a vLLM, or another program") as error:
        Answering({"choices": [choice], **answer}).turn()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "usage"),
    [
        ({"token_ids": [[7], [8]]}, {}),
        ({"token_ids": 7}, {}),
        ({"logprobs": [-1.0, -1.0]}, {}),
        ({"finish_reason": None}, {}),
        ({"finish_reason": "abort", "logprobs": None}, {}),  # the server is shut down
        ({}, {"prompt_tokens_details": {"cached_tokens": "x"}}),
        ({}, {"prompt_tokens_details": [1]}),
        ({}, "none"),
    ],
)
def test_an_answer_of_other_types_is_a_fault_of_the_server_and_none_of_ours(
    changed: dict[str, Any], usage: Any
) -> None:
    with pytest.raises(ServerDown):
        Answering({"choices": [CHOICE | changed], "usage": usage}).turn()
    for choices in (None, [], ["text"]):
        with pytest.raises(ServerDown, match="no choice"):
            Answering({"choices": choices, "usage": {}}).turn()


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_key_is_told_as_that(status: int) -> None:
    import httpx2

    class Guarded(VLLMClient):
        async def _ask(self, method: str, route: str, *_: Any, **__: Any) -> httpx2.Response:
            return httpx2.Response(status, text="Unauthorized", request=httpx2.Request(method, f"http://a{route}"))

    client = Guarded(
        "http://a", model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ValueError, match=rf"/v1/models: the server wants a key \(status {status}\).*--api-key.*urls"):
        run(client.served_model()).result()


@pytest.mark.parametrize("token", [9, -1, 2**63, True, 1.0])
def test_an_id_that_is_no_token_of_the_model_is_a_fault_of_the_server(token: Any) -> None:
    """Trained on, it would read another embedding, or end the process on a GPU."""
    with pytest.raises(ServerDown, match="does not add up: ids that are none of the model's 9 tokens"):
        Answering({"choices": [CHOICE | {"token_ids": [4, token]}], "usage": {}}).turn()


@pytest.mark.parametrize(("stop_reason", "more"), [(3, ()), (4, ()), (5, (5,))])
def test_any_end_id_of_the_chat_or_the_request_ends_a_turn(stop_reason: int, more: tuple[int, ...]) -> None:
    """3 and 4 are the chat's; a request for a thought names 5, where the thought ends."""
    asked: list[dict[str, Any]] = []

    class Stopping(VLLMClient):
        async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append(body)
            choice = {
                "token_ids": [8, stop_reason], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "prompt_token_ids": [1],
                "finish_reason": "stop", "stop_reason": stop_reason,
            }  # fmt: skip
            return {"choices": [choice], "usage": {}}

    client = Stopping(
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

    class Failing(VLLMClient):
        async def _ask(self, *_: Any, **__: Any) -> httpx2.Response:
            request = httpx2.Request("POST", "http://a/collective_rpc")
            return httpx2.Response(500, text="EngineCore encountered an issue", request=request)

    client = Failing(
        "http://a", model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=1.0
    )
    with pytest.raises(ServerDown, match=r"status 500 .*an issue; .*another model than the one that is trained.*start"):
        run(client.load_weights(Path("weights"))).result()
