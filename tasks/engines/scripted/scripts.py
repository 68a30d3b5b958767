"""An engine that writes given texts: for tests, baselines and replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest, never

if TYPE_CHECKING:
    from tasks.models.policy_weights import PolicyWeights


class ScriptedEngine:
    """The n-th episode opened writes the n-th script (its turns' ids without end-of-turn), cyclically. All log-probs
    are 0.
    """

    policy_version = 0
    has_own_memory, knows_its_weights, remedy = False, True, ""

    def __init__(self, scripts: Sequence[Sequence[list[int]]], *, end_of_turn: int):
        self.scripts, self.end_of_turn = scripts, end_of_turn
        self.turns_left: dict[EpisodeHandle, list[list[int]]] = {}
        self.num_opened = 0
        self.requests: list[TurnRequest] = []

    def submit(self, request: TurnRequest) -> None:
        if request.episode not in self.turns_left:
            self.turns_left[request.episode] = list(self.scripts[self.num_opened % len(self.scripts)])
            self.num_opened += 1
        self.requests.append(request)

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        replies = [self._write(request) for request in self.requests]
        self.requests.clear()
        return replies

    def release(self, episode: EpisodeHandle) -> None:
        del self.turns_left[episode]

    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        self.policy_version = policy_version

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return [[0.0] * (len(token_ids) - 1) for token_ids in sequences]

    def sleep(self) -> None:
        """Nothing to free."""

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to free."""

    def _write(self, request: TurnRequest) -> TurnReply:
        turns = self.turns_left[request.episode]
        text = [*turns.pop(0), self.end_of_turn]
        cut = next((place for place, token in enumerate(text, 1) if token in request.end_ids), len(text))
        if rest := text[cut:-1]:  # for the request that goes on from there
            turns.insert(0, rest)
        token_ids = text[:cut][: request.max_new_tokens]
        is_ended = token_ids[-1] in (self.end_of_turn, *request.end_ids)
        finish: Finish = "end_of_turn" if is_ended else "length"
        return TurnReply(
            request.episode, token_ids, [0.0] * len(token_ids), finish, [self.policy_version] * len(token_ids)
        )
