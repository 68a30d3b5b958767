"""Known solutions played for curation, each distinct one once; where that takes long, with a time beforehand and a bar.

A demonstration that shows a reference is the same script as that reference, and a warm start shows the same problems
over and over: 2,000 demonstrations may be 300 scripts. In a world in memory that hardly matters; where an episode
starts a server it is minutes. Playing the same script twice would say nothing that `environments/leaks.py` does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tasks.core.files import json_hash
from tasks.core.progress import progress_bar, spell
from tasks.core.terminal import tell
from tasks.tools.base import Environment
from tasks.tools.replay import Played, Script, play

SAMPLE = 8  # scripts that are timed, side by side, to estimate the rest
WORTH_TELLING_SECONDS = 5


class Replays:
    """What scripts got in one environment, played when they are first asked for."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self._played: dict[str, Played] = {}

    def play(self, scripts: Sequence[Script], *, label: str) -> list[Played]:
        """What each script got, in order. `label` says what they are, for the bar and the estimate."""
        keys = [_key(script) for script in scripts]
        new = {key: script for key, script in zip(keys, scripts, strict=True) if key not in self._played}
        if new:
            self._played |= zip(new, self._play(list(new.values()), label), strict=True)
        return [self._played[key] for key in keys]

    def _play(self, scripts: Sequence[Script], label: str) -> list[Played]:
        """The first few start what starts but once, such as servers that are kept; the next few are timed."""
        first, timed, rest = scripts[:SAMPLE], scripts[SAMPLE : 2 * SAMPLE], scripts[2 * SAMPLE :]
        played = play(self.environment, first)
        started = time.monotonic()
        played += play(self.environment, timed)
        seconds = (time.monotonic() - started) / SAMPLE * len(rest)
        if seconds < WORTH_TELLING_SECONDS:
            return played + play(self.environment, rest)
        tell(f"curate: {len(rest):,} more {label} to play, which takes about {spell(seconds)}")
        with progress_bar(label, total=len(scripts), done=len(played)) as bar:
            return played + play(self.environment, rest, after_each=bar.advance)


def _key(script: Script) -> str:
    """Equal for what plays the same: the whole problem, and what is done in it."""
    turns = [([call and call.model_dump() for call in calls], answer) for calls, answer in script.turns]
    return json_hash([script.problem.model_dump(), turns])
