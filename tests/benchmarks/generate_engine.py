"""transformers' own `generate`, a call a turn: what an agent trainer without an engine of its own does.

Every episode that waits is a row of one left-padded batch, and its whole conversation is computed again each turn. The
yardstick of the engine table; nothing trains with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest, never


class GenerateEngine:
    """The protocol of an engine over `model.generate`; random numbers are torch's, not an episode's own."""

    policy_version = 0
    has_own_memory, knows_its_weights, remedy = False, True, ""

    def __init__(self, model: PreTrainedModel, *, end_of_turn: int, temperature: float, top_p: float):
        model.set_attn_implementation("sdpa")  # ours is told what a position may see; `generate` leaves that to masks
        self.model, self.end_of_turn = model, end_of_turn
        self.temperature, self.top_p = temperature, top_p
        self.held: dict[EpisodeHandle, list[int]] = {}
        self.requests: list[TurnRequest] = []

    def submit(self, request: TurnRequest) -> None:
        self.held[request.episode] = [*self.held.get(request.episode, []), *request.token_ids]
        self.requests.append(request)

    def release(self, episode: EpisodeHandle) -> None:
        del self.held[episode]

    @torch.no_grad()
    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        """One call for all turns, which nothing ends early."""
        requests, self.requests = self.requests, []
        prompts = [self.held[request.episode] for request in requests]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=0,
            max_new_tokens=max(request.max_new_tokens for request in requests), eos_token_id=self.end_of_turn,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        written = output.sequences[:, width:]
        scores = torch.log_softmax(torch.stack(output.scores, dim=1).float(), dim=-1)
        logps = scores.gather(-1, written[..., None])[..., 0]
        return [
            self._reply(request, ids, logp)
            for request, ids, logp in zip(requests, written.tolist(), logps.tolist(), strict=True)
        ]

    def _reply(self, request: TurnRequest, written: list[int], logp: list[float]) -> TurnReply:
        is_closed = self.end_of_turn in written[: request.max_new_tokens]
        length = written.index(self.end_of_turn) + 1 if is_closed else min(len(written), request.max_new_tokens)
        finish: Finish = "end_of_turn" if is_closed else "length"
        self.held[request.episode] += written[:length]
        return TurnReply(request.episode, written[:length], logp[:length], finish, [0] * length)

    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        assert weights.model is self.model

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        raise NotImplementedError("the yardstick is not trained with")

    def sleep(self) -> None:
        """It has no memory of its own."""

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held beyond this object."""
