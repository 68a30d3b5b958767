"""The tokens that a policy chose, with their log-probs, for the page's colours.

The texts come from the tokenizer beside a model. A wrong tokenizer would give other words and no error, so they are
compared with the turn; without the right one, the page shows ids.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json
from tasks.core.records import Trajectory
from tasks.models.files import POINTER
from tasks.rewards.stored import TurnTokens, turn_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST = 9999  # hundredths of a nat: of a token that could not be chosen, or whose log-prob is no number

HeatOfTurn = tuple[list[int], list[int]]  # numbers of the texts, and minus the log-prob in hundredths of a nat


class Numbers:
    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        return list(self._numbers)


class TokenReader:
    def __init__(self, model: Path | None, texts: Numbers):
        self._tokenizer = load_tokenizer(model) if model else None
        self._texts, self._numbers, self._ids = texts, dict[int, int](), dict[int, int]()

    def turns(self, episode: Trajectory) -> list[HeatOfTurn] | None:
        """None where the episode has no tokens (a model behind an endpoint), or they are not one run per turn."""
        turns = turn_tokens(episode)
        if not turns:
            return None
        is_own = self._wrote(episode, turns[0])
        numbers, number_of = (self._numbers, self._number_of) if is_own else (self._ids, self._number_of_id)
        for token in chain.from_iterable(turn.sampled_ids for turn in turns):
            if token not in numbers:
                numbers[token] = number_of(token)
        return [
            ([numbers[token] for token in turn.sampled_ids], [_hundredths(logp) for logp in turn.sampler_logp])
            for turn in turns
        ]

    def _wrote(self, episode: Trajectory, first: TurnTokens) -> bool:
        """Whether this tokenizer decodes the first turn's tokens to the first turn's text."""
        if self._tokenizer is None:
            return False
        said = self._tokenizer.decode(first.sampled_ids, skip_special_tokens=False)
        return episode.turns[0].text.strip() in said

    def _number_of(self, token: int) -> int:
        assert self._tokenizer is not None
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._texts.of(text) if text else self._number_of_id(token)

    def _number_of_id(self, token: int) -> int:
        return self._texts.of(f"#{token}")


def load_tokenizer(model: Path) -> Tokenizer | None:
    """None where there is no tokenizer to read. tokenizers alone loads it in a hundredth of transformers' time."""
    pointer = model / POINTER
    file = (Path(read_json(pointer)["path"]) if pointer.exists() else model) / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing narrower; a report without token texts is still a report
        return None


def _hundredths(logp: float) -> int:
    return round(-100 * logp) if logp > -MOST / 100 else MOST
