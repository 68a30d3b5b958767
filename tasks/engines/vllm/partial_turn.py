"""A turn that vLLM writes in one piece, or in several where new weights come in the middle of it.

What old weights wrote is kept, and the rest is asked for as a request whose prompt ends with it: so the new weights
compute the whole conversation anew. vLLM's random generators cannot be set forward: the rest has a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.chat.format import ChatFormat
from tasks.core.seeds import stream_seed
from tasks.rollouts.engine import Finish, TurnReply, TurnRequest


@dataclass(slots=True)
class PartialTurn:
    """What is written of `request` so far; the policy version is per token."""

    request: TurnRequest
    token_ids: list[int] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return self.request.max_new_tokens - len(self.token_ids)

    @property
    def seed(self) -> int:
        """Of what is left."""
        num_written = len(self.token_ids)
        return stream_seed(self.request.seed, num_written) if num_written else self.request.seed

    def add(
        self,
        token_ids: list[int],
        sampler_logp: list[float],
        version: int,
        finish: Finish | None,
        *,
        stop_strings: list[str],
        chat: ChatFormat,
    ) -> TurnReply | None:
        """Take the next piece, and give the reply if it ends the turn (`finish` None: it was cut short).

        vLLM sees a stop string in the piece alone. One that begins before the piece ends the turn where it is complete,
        and what follows is left out.
        """
        num_before = len(self.token_ids)
        self.token_ids += token_ids
        self.sampler_logp += sampler_logp
        self.token_versions += [version] * len(token_ids)
        if num_before and stop_strings:
            num_kept = self._first_stop(num_before, stop_strings, chat)
            if num_kept is not None and (finish is None or num_kept < len(self.token_ids)):
                for row in (self.token_ids, self.sampler_logp, self.token_versions):
                    del row[num_kept:]
                finish = "stop_string"
        if finish is None:
            return None
        return TurnReply(self.request.episode, self.token_ids, self.sampler_logp, finish, self.token_versions)

    def _first_stop(self, num_before: int, stop_strings: list[str], chat: ChatFormat) -> int | None:
        """The number of tokens, more than `num_before`, of which the last completes a stop string."""
        from tasks.rollouts.sampling import StopStrings

        stop = StopStrings(stop_strings, chat)
        lengths = range(num_before + 1, len(self.token_ids) + 1)
        return next((length for length in lengths if stop.found(self.token_ids[:length])), None)
