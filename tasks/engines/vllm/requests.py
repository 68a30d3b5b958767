"""What vLLM in process is asked for a turn or for the log-probs of given tokens, and how its answer is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.engines.vllm.partial_turn import PartialTurn
from tasks.engines.vllm.shared import seed_for_vllm
from tasks.rollouts.engine import Finish
from tasks.rollouts.settings import SamplingSettings

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def turn_params(turn: PartialTurn, sampling: SamplingSettings, end_ids: list[int]) -> SamplingParams:
    """For what is left of the turn."""
    return _params(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed_for_vllm(turn.seed),
        max_tokens=turn.num_left,
        logprobs=0,
        stop=sampling.stop_strings,
        include_stop_str_in_output=True,
        stop_token_ids=end_ids,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop_strings),
    )


def score_params() -> SamplingParams:
    return _params(temperature=1.0, max_tokens=1, prompt_logprobs=0)


def _params(**named: Any) -> SamplingParams:
    """`ignore_eos`: only an end id ends a turn, whatever else the model's config names."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    fixed = {"ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**{"detokenize": False} | named | fixed)


def read_finish(token_ids: list[int], reason: str | None, end_ids: list[int]) -> Finish | None:
    """None where the request was ended by us; ValueError for what is neither that nor a stop nor a limit."""
    if reason == "abort":
        return None
    if token_ids[-1] in end_ids:
        return "end_of_turn"
    if reason not in ("stop", "length"):
        raise ValueError(
            f"vLLM ended a turn after {len(token_ids)} tokens for the reason {reason!r}, which is neither a stop "
            f"nor a limit, so the turn is not what the policy wrote. See vLLM's log above."
        )
    return "stop_string" if reason == "stop" else "length"


def prompt_logp(output: RequestOutput) -> list[float]:
    token_ids = list(output.prompt_token_ids or [])
    return [
        entry[token].logprob for token, entry in zip(token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    ]
