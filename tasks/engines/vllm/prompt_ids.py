"""A prompt's ids in a request and in its answer, thousands of them in every turn, without a Python object for each.

A server repeats the prompt that it read. Where its bytes are those of the ids that were sent, they are not parsed:
with 18,000 ids that takes 0.1 ms in the place of 2.8 ms (infra/benchmarks.md, "Turns per second"). Other bytes are
parsed as before, and compared by whoever checks the answer.
"""

from __future__ import annotations

from typing import Any

from tasks.core import json_text

REPEATED = b'"prompt_token_ids":'  # in a text of JSON the quotes would be escaped


def encode_body(body: dict[str, Any] | None) -> dict[str, Any]:
    """What a request is made with."""
    if body is None:
        return {}
    import msgspec  # of the extra vllm

    return {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def parse_answer(content: bytes, prompt: list[int] | None) -> Any:
    """The answer; ids of its first choice that repeat `prompt` byte for byte are that list. ValueError as `parse`."""
    place = -1 if prompt is None else content.find(REPEATED)
    if prompt is None or place < 0:
        return json_text.parse(content)
    import msgspec

    start, sent = place + len(REPEATED), msgspec.json.encode(prompt)
    if not content.startswith(sent, start):
        return json_text.parse(content)
    answer = json_text.parse(b"%snull%s" % (content[:start], content[start + len(sent) :]))
    if _repeats_in_its_choice(answer):
        answer["choices"][0]["prompt_token_ids"] = prompt
    return answer


def _repeats_in_its_choice(answer: Any) -> bool:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(choice, dict) and choice.get("prompt_token_ids", ...) is None
