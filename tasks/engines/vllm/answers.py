"""What a vLLM server answers to a turn, and what is wrong with it.

An inconsistent answer (more ids than log-probs, another prompt, a finish that the ids contradict) raises ServerDown, as
no answer does, and is never trained on. A server that has no ids or log-probs to give raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.engines.vllm.server_process import ServerDown
from tasks.rollouts.engine import Finish


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish` None: the server was paused in the middle of the turn, and these are its tokens so far, if any."""

    token_ids: list[int]
    sampler_logp: list[float]
    finish: Finish | None
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a turn's answer must fit. An id of `vocabulary_size` or more is no token of the model's."""

    url: str
    prompt: list[int]
    max_new_tokens: int
    max_tokens_per_episode: int
    end_ids: Sequence[int]
    stop_strings: Sequence[str]
    vocabulary_size: int

    def check(self, answer: dict[str, Any]) -> Answer:
        """ServerDown for an answer that does not add up; ValueError where the server cannot give what was asked for, or
        its context is too short.
        """
        choice = first_choice(answer)
        finish = self._finish(choice)
        if finish is not None:
            refuse_without(choice, "token_ids", "logprobs", "prompt_token_ids", url=self.url)
            refuse_without(answer, "usage", url=self.url)
        try:
            token_ids, logps = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
            read_prompt = choice["prompt_token_ids"]
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerDown(f"its answer lacks what was asked for ({error!r})") from None
        least, most = (0, self.max_new_tokens - 1) if finish is None else (1, self.max_new_tokens)
        is_ended = bool(token_ids) and token_ids[-1] in self.end_ids
        faults = {
            "it read another prompt than was sent": read_prompt != self.prompt,
            f"{len(token_ids)} ids and {len(logps)} log-probs": len(token_ids) != len(logps),
            f"{len(token_ids)} tokens of at most {most}": not least <= len(token_ids) <= most,
            f"ids that are none of the model's {self.vocabulary_size} tokens": not all(map(self._is_token, token_ids)),
            "log-probs that are none": not all(type(logp) is float and -math.inf < logp < 1e-3 for logp in logps),
            "a number of cached tokens that is none": type(cached) is not int,
            "it ended a turn that is not ended": finish == "end_of_turn" and not is_ended,
            "it did not end a turn that is ended": finish is None and is_ended,
        }
        for fault, is_so in faults.items():
            if is_so:
                raise ServerDown(f"its answer does not add up: {fault}")
        if finish == "length" and len(token_ids) < self.max_new_tokens:
            raise ValueError(
                f"{self.url}: the server ended a turn after {len(token_ids)} of {self.max_new_tokens} tokens, where "
                f"its context of {len(self.prompt) + len(token_ids)} was full, so it would cut all long episodes. "
                f"Start it with --max-model-len of at least sampling.max_tokens_per_episode "
                f"({self.max_tokens_per_episode})."
            )
        return Answer(token_ids, [min(logp, 0.0) for logp in logps], finish, len(self.prompt), cached)

    def _is_token(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self.vocabulary_size

    def _finish(self, choice: dict[str, Any]) -> Finish | None:
        reason, stopped_by = choice.get("finish_reason"), choice.get("stop_reason")
        if reason == "length":
            return "length"
        if reason == "abort":
            return None
        if reason == "stop" and stopped_by in self.end_ids:
            return "end_of_turn"
        if reason == "stop" and stopped_by in self.stop_strings:
            return "stop_string"
        raise ServerDown(f"it ended a turn for a reason of its own ({reason!r}, {stopped_by!r})")


def first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerDown("its answer has no choice")
    return choices[0]


def refuse_without(part: dict[str, Any], *names: str, url: str) -> None:
    """ValueError where a part of an answer lacks what was asked for: an older vLLM leaves out what it does not know."""
    missing = [name for name in names if part.get(name) is None]
    if missing:
        raise ValueError(
            f"{url}: the server's answers have no {' and no '.join(missing)}, without which its turns cannot be read. "
            f"It is too old a vLLM, or another program: start vLLM 0.32, or correct engine.settings.urls."
        )
