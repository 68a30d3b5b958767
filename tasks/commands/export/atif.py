"""A stored trajectory as a document of the Agent Trajectory Interchange Format (ATIF), which other viewers open.

Version 1.8: rfcs/0001-trajectory-format.md of harbor-framework/harbor, and the models in its package `harbor` 0.25.
Requests and turns become steps; calls that could be read are `tool_calls`, every reply is an observation. A reply to an
unreadable call has no source, and a mark under `extra`. A turn whose tokens are in another sequence than the first has
its number under `extra`, and the document why each began. A fault that ended the episode is a last step of the system.
Missing: the system prompt as text (`prompt_token_ids` has its tokens), times, and tokens after the last turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tasks.core.records import Score, Trajectory, Turn
from tasks.core.text import encodable
from tasks.rewards.stored import TurnTokens, turn_tokens

SCHEMA_VERSION = "ATIF-v1.8"
AGENT = "turnwise"
AGENT_VERSION = "0.1.0"  # as in pyproject.toml, which an installed package does not contain
MALFORMED = {"malformed": True}  # marks a call that could not be read

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose trajectories these are. `stage` and `seed`, where known, determine the episodes' random numbers."""

    model_name: str
    details: Mapping[str, Any]
    stage: str | None
    seed: int | None


def to_document(
    trajectory: Trajectory, origin: Origin, *, document_id: str, score: Score | None, with_tokens: bool
) -> Document:
    """`score`: the trajectory's reward where it could be computed. Without tokens their counts remain."""
    tokens = turn_tokens(trajectory)
    steps: list[Document] = [{"source": "user", "message": trajectory.request}]
    for number, turn in enumerate(trajectory.turns, start=1):
        metrics = _metrics(tokens[number - 1], with_tokens=with_tokens) if tokens else None
        steps.append(_agent_step(number, turn, metrics))
        if turn.follow_up is not None:
            steps.append({"source": "user", "message": turn.follow_up})
    if trajectory.fault is not None:
        steps.append({"source": "system", "message": trajectory.fault, "extra": {"outcome": trajectory.outcome}})
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": document_id,
        "trajectory_id": document_id,
        "agent": {
            "name": AGENT,
            "version": AGENT_VERSION,
            "model_name": origin.model_name,
            **({"extra": dict(origin.details)} if origin.details else {}),
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": _final_metrics(trajectory, tokens, num_steps=len(steps)),
        "extra": _extra(trajectory, origin, score),
    }


def _agent_step(number: int, turn: Turn, metrics: Document | None) -> Document:
    calls, results = [], []
    for index, (call, reply, error) in enumerate(zip_longest(turn.calls, turn.replies, turn.errors), start=1):
        call_id = f"turn-{number}-call-{index}"
        is_readable = call is not None and bool(call.get("name"))
        if is_readable:
            calls.append(
                {"tool_call_id": call_id, "function_name": call["name"], "arguments": call.get("arguments") or {}}
            )
        if reply is not None:
            notes = {**({"error": error} if error else {}), **({} if is_readable else {"call": call or MALFORMED})}
            results.append(
                {
                    **({"source_call_id": call_id} if is_readable else {}),
                    "content": reply,
                    **({"extra": notes} if notes else {}),
                }
            )
    return {
        "source": "agent",
        "message": turn.text,
        **({} if turn.thought is None else {"reasoning_content": turn.thought}),
        **({"tool_calls": calls} if calls else {}),
        **({"observation": {"results": results}} if results else {}),
        **({"metrics": metrics} if metrics else {}),
        "llm_call_count": 1,
        "extra": {
            "stop_reason": turn.stop_reason,
            "policy_version": turn.policy_version,
            **({"sequence": turn.sequence} if turn.sequence else {}),
        },
    }


def _metrics(tokens: TurnTokens, *, with_tokens: bool) -> Document:
    counts = {"prompt_tokens": tokens.num_read, "completion_tokens": tokens.num_sampled}
    if not with_tokens:
        return counts
    return {
        **counts,
        "prompt_token_ids": tokens.prompt_ids,
        "completion_token_ids": tokens.sampled_ids,
        "logprobs": tokens.sampler_logp,
    }


def _final_metrics(trajectory: Trajectory, tokens: list[TurnTokens], *, num_steps: int) -> Document:
    totals: Document = {"total_steps": num_steps}
    usage = trajectory.details.get("usage") or {}
    if trajectory.sequences:
        totals["total_completion_tokens"] = trajectory.num_sampled_tokens
        if tokens:
            totals["total_prompt_tokens"] = sum(item.num_read for item in tokens)
    else:
        names = {"total_prompt_tokens": "input_tokens", "total_completion_tokens": "output_tokens"}
        taken = {**names, "total_cost_usd": "cost"}
        totals |= {name: usage[key] for name, key in taken.items() if usage.get(key) is not None}
    counts = {"num_calls": trajectory.num_calls, "num_invalid_calls": trajectory.num_invalid_calls}
    return {**totals, "extra": counts}


def _extra(trajectory: Trajectory, origin: Origin, score: Score | None) -> Document:
    names = ("problem_id", "category", "policy_version", "environment_fingerprint", "outcome", "limit", "checks")
    reward = {"reward": {"total": score.reward, "parts": score.parts}} if score else {}
    begun = [sequence.begun for sequence in trajectory.sequences]
    return {
        **{name: getattr(trajectory, name) for name in names},
        **reward,
        **({"sequences_begun": begun} if len(begun) > 1 else {}),
        "details": trajectory.details,
        "seeds": {
            "run": origin.seed,
            "stage": origin.stage,
            "draw": trajectory.draw,
            "sample_index": trajectory.sample_index,
        },
    }


def document_text(document: Document) -> str:
    """The document as JSON; half a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD."""
    return encodable(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"
