"""Turns whose asker hung up while they were written, as a client does whose timeout is shorter than a turn.

Clients ask again by themselves. An equal request gets the turn that is there: another would be trained on and counted
though the agent asked once.
"""

from __future__ import annotations

from tasks.gateway.completions import Completion, CompletionRequest
from tasks.rollouts.agents.inbox import Asked


class Unheard:
    def __init__(self) -> None:
        self._turns: list[tuple[CompletionRequest, Completion]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def tell(self, asked: Asked, turn: Completion) -> None:
        """The turn to whoever asked; keep it if nobody waits for it any more."""
        asked.answer.set_result(turn)
        if asked.answer.is_left:
            self._turns.append((asked.request, turn))

    def answers(self, asked: Asked) -> bool:
        """Whether a kept turn was told to an equal request."""
        found = next((number for number, (request, _) in enumerate(self._turns) if request == asked.request), None)
        if found is None:
            return False
        self.tell(asked, self._turns.pop(found)[1])
        return True
