"""Which episodes the report shows, and each in the shape the page needs: base on the left, best snapshot on the right.

Both sides met the same test problem with the same random stream. What a model or a tool wrote is made printable here
(`printable`) and cut to a length a browser bears (`shorten`); that it is never taken for markup is up to the template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tasks.measurement.results import StoredResults
from tasks.records import Trajectory, Turn
from tasks.settings import Paths
from tasks.storage import read_jsonl

NUM_PAIRS = 10
NUM_FAILURES = 2  # of the best snapshot, where it has any: a page of successes alone would flatter it
MAX_CHARACTERS = 4000  # of one text or reply on the page
# Calls as any family writes them (rollouts/call_formats.py): between tags, or JSON that is the rest of the message.
TOOL_CALL = re.compile(r"<(tool_call|tool)>.*?(</\1>|\Z)|(<\|python_tag\|>|\A\s*(?:\[\s*)?\{).*", re.DOTALL)
# Controls (C0 but tab and newline, DEL, C1) and the marks that reorder text to the eye (bidirectional formatting).
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SURROGATE = re.compile("[\ud800-\udfff]")

Key = tuple[str, int]  # problem id, sample index


@dataclass(frozen=True, slots=True)
class CallView:
    """One call as a reader sees it: `name` is empty where it was malformed, `reply` None where none came."""

    name: str
    arguments: list[tuple[str, str]]
    reply: str | None


@dataclass(frozen=True, slots=True)
class TurnView:
    """One assistant turn: what it said beside its calls, the calls, and why it stopped if not by itself."""

    number: int
    prose: str
    calls: list[CallView]
    raw: str
    stopped_by: str | None


@dataclass(frozen=True, slots=True)
class SideView:
    """One policy's episode."""

    policy: str
    episode: Trajectory
    turns: list[TurnView]
    failed_checks: list[str]


@dataclass(frozen=True, slots=True)
class PairView:
    """One problem and sample, met by two policies."""

    anchor: str
    problem_id: str
    sample_index: int
    category: str
    request: str
    sides: list[SideView]

    @property
    def num_rows(self) -> int:
        """Rows that keep the two sides level: a heading, the turns, the verdict."""
        return 2 + max(len(side.turns) for side in self.sides)


def read_pairs(paths: Paths, results: StoredResults) -> list[PairView]:
    """The chosen episodes of base and best; ValueError where evaluation left no such trajectories."""
    folder = paths.stage("evaluate") / "trajectories"
    base, best = (
        {(row["problem_id"], row["sample_index"]): row for _, row in read_jsonl(folder / f"test_{policy}.jsonl")}
        for policy in ("base", "best")
    )
    chosen = choose({key: row for key, row in best.items() if key in base}, _weakest_first(results))
    if not chosen:
        raise ValueError(
            f"{folder}: base and best share no problem, so nothing can stand side by side. "
            f"Run `python -m tasks evaluate` again."
        )
    return [_pair(number, base[key], best[key]) for number, key in enumerate(chosen, start=1)]


def choose(best: dict[Key, dict[str, Any]], categories: list[str]) -> list[Key]:
    """Ten keys by a rule that no taste enters: up to two failures of the best snapshot, then the first of each type.

    Failures come from its weakest types, one a type. After that every other type, weakest first, gives the first
    episode in the file, whatever its outcome; where types are fewer than ten, their next episodes follow. Result is in
    order of category.
    """
    queues = {category: [key for key, row in best.items() if row["category"] == category] for category in categories}
    failures = {
        category: next((key for key in keys if best[key]["outcome"] != "success"), None)
        for category, keys in queues.items()
    }
    chosen = [key for key in failures.values() if key is not None][:NUM_FAILURES]
    covered = {best[key]["category"] for key in chosen}
    firsts = [keys[0] for category, keys in queues.items() if keys and category not in covered]
    rounds = [key for row in zip_longest(*queues.values()) for key in row if key is not None]
    ranked = list(dict.fromkeys([*chosen, *firsts, *rounds]))[:NUM_PAIRS]
    return sorted(ranked, key=lambda key: (best[key]["category"], key))


def printable(text: str) -> str:
    """`text` with lone surrogates, control characters and reordering marks replaced by what shows they were there."""
    text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
    return UNPRINTABLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def shorten(text: str) -> str:
    """The first MAX_CHARACTERS of a text, and how much is missing: a page must open whatever a tool replied."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… {len(text) - MAX_CHARACTERS:,} more characters are in the trajectory file"


def _weakest_first(results: StoredResults) -> list[str]:
    by_type = results.test["best"]["by_type"]
    return sorted(by_type, key=lambda category: (by_type[category]["success_rate"], category))


def _pair(number: int, base: dict[str, Any], best: dict[str, Any]) -> PairView:
    episodes = {"base": Trajectory.from_row(base), "best": Trajectory.from_row(best)}
    shared = episodes["best"]
    return PairView(
        anchor=f"episode-{number}",
        problem_id=shared.problem_id,
        sample_index=shared.sample_index,
        category=shared.category,
        request=shorten(shared.request),
        sides=[_side(policy, episode) for policy, episode in episodes.items()],
    )


def _side(policy: str, episode: Trajectory) -> SideView:
    return SideView(
        policy=policy,
        episode=episode,
        turns=[_turn(number, turn) for number, turn in enumerate(episode.turns, start=1)],
        failed_checks=[name for name, passed in episode.checks.items() if not passed],
    )


def _turn(number: int, turn: Turn) -> TurnView:
    """A turn whose calls were parsed shows them apart from its words; one without calls shows its text as written."""
    prose = TOOL_CALL.sub("", turn.text).strip() if turn.calls else turn.text
    return TurnView(
        number=number,
        prose=shorten(prose),
        calls=[_call(call, reply) for call, reply in zip_longest(turn.calls, turn.replies)],
        raw=shorten(turn.text),
        stopped_by=None if turn.stop_reason == "end_of_turn" else turn.stop_reason.replace("_", " "),
    )


def _call(call: dict[str, Any] | None, reply: str | None) -> CallView:
    arguments = (call or {}).get("arguments") or {}
    return CallView(
        name=(call or {}).get("name") or "",
        arguments=[(name, shorten(json.dumps(value, ensure_ascii=False))) for name, value in arguments.items()],
        reply=None if reply is None else shorten(reply),
    )
