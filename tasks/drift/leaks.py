"""Finds episodes that see the state of an earlier one: plays a few problems four times, one play after another.

The plays are: no calls, the solution, no calls, the solution. If every episode starts afresh, the second pair equals
the first. Otherwise an agent is rewarded for another's work: a published server that keeps a file under `reset:
process` gave an untrained model 31%.

Live replies (time, random identifiers, changing readings) are no leak. More plays tell them apart: leaked state stays
as the first play left it, alternates or grows each time. A number that runs on may be leaked state, or a request's id
or a service's quota: where verdicts and all else are equal it is told, and nothing is refused for it.

If the problems were solved before the first play, all plays are equal. So problems are drawn anew each time, and an
environment where no calls succeed on every problem that needs a change counts as leaking.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from tasks.core.records import Problem
from tasks.core.terminal import warn
from tasks.core.text import one_line
from tasks.drift.clocks import without_now
from tasks.drift.probes import choose_probes, fields_of, is_of_now
from tasks.tools.base import Environment, ToolReply
from tasks.tools.replay import Played, Script, play

MOST_PROBLEMS = 4
MORE_PLAYS = (3, 12)  # when replies differ; when they look like a leak: a reading of two values does 1 time in 32,768
GROWTH = "+" * 6  # of a log that a server cuts or a restart empties; readings by chance do so 1 time in 5,040
MAX_SHOWN = 80  # characters of a reply
NUMBER, WORD, TIME_OF_DAY = re.compile(r"\d+"), re.compile(r"\S+"), re.compile(r"\d?\d:\d\d(:\d\d)?")
Replies = Sequence[ToolReply]  # to one call, in the order of the plays
REMEDY = (
    "Start each episode afresh. For an MCP server that is environment.settings.reset, and {scratch} in "
    "environment.settings.environment or command where the server keeps files. An environment of yours keeps all state "
    "in its Episode, none in the class or the module."
)


def find_leaks(environment: Environment, problems: Sequence[Problem]) -> list[str]:
    """One line per leaking problem. Tries a few, which use all tools if possible; skips what cannot be played."""
    candidates = [problem for problem in problems if _calls_something(problem)]
    random.SystemRandom().shuffle(candidates)
    tried = choose_probes(candidates, MOST_PROBLEMS)
    found, running, solved_by_nothing = [], [], []
    for problem in tried:
        nothing, solution = (_play(environment, script) for script in _pair(problem))
        if nothing is None or solution is None:
            continue  # at once: each play of a tool that crashes is retried with pauses
        again, once_more = (_play(environment, script) for script in _pair(problem))
        if again is None or once_more is None:
            continue
        line = _other_verdict("doing nothing", nothing, again) or _other_verdict("its solution", solution, once_more)
        if not line:
            plays = _play_differing(solution, once_more, partial(_play, environment, _pair(problem)[1]))
            line = _first_shown(plays, _shows_a_leak)
            running += [f"problem {problem.id!r}: {number}"] if (number := _first_shown(plays, _runs_on)) else []
        found += [f"problem {problem.id!r}: {line}"] if line else []
        if _changes_something(environment, problem) and solution.verdict and solution.verdict.success:
            solved_by_nothing.append(bool(nothing.verdict and nothing.verdict.success))
    if not found and solved_by_nothing and all(solved_by_nothing):
        num = len(solved_by_nothing)
        found.append(
            f"doing nothing succeeds on all problems tried ({num}): they were "
            f"solved before, or the check of success is always true"
        )
    if running and not found:
        warn(
            f"warning: a number runs on from one episode to the next: {running[0]}. The id of a request "
            f"or a quota may; if it counts what episodes left behind, an agent sees another's work. {REMEDY}"
        )
    return found


def _pair(problem: Problem) -> tuple[Script, Script]:
    return Script(problem, [([], "") for _ in problem.reference]), Script.reference(problem)


def _play(environment: Environment, script: Script) -> Played | None:
    (played,) = play(environment, [script])
    return None if played.error is not None else played


def _calls_something(problem: Problem) -> bool:
    return any(turn.calls for turn in problem.reference)


def _changes_something(environment: Environment, problem: Problem) -> bool:
    """A call of a tool that is not there changes nothing, and the replay of references names it."""
    writing = {tool.name for tool in environment.tools if not tool.read_only}
    return any(call.name in writing for turn in problem.reference for call in turn.calls)


def _other_verdict(what: str, first: Played, second: Played) -> str:
    assert first.verdict is not None
    assert second.verdict is not None
    if (first.verdict.success, first.verdict.checks) == (second.verdict.success, second.verdict.checks):
        return ""
    ends = [str(end.checks or end.success) for end in (first.verdict, second.verdict)]
    return f"{what} ends in {ends[0]}, and the second time in {ends[1]}"


def _play_differing(first: Played, second: Played, play_again: Callable[[], Played | None]) -> list[Replies]:
    """The replies to each call over several plays, which show why they differ; empty where two plays are equal. Where
    a few look like a leak there are more, since live replies of few values look like one by chance.
    """
    if [_said(reply) for reply in first.replies] == [_said(reply) for reply in second.replies]:
        return []
    plays, replies = [first, second], list[Replies]()
    for num_more in MORE_PLAYS:
        for _ in range(num_more):
            if (played := play_again()) is None:
                return replies  # what the plays before showed; each play of a tool that crashes is retried with pauses
            plays.append(played)
        replies = list(zip(*(played.replies for played in plays), strict=False))
        if not _first_shown(replies, _shows_a_leak):
            break
    return replies


def _first_shown(plays: Sequence[Replies], is_shown: Callable[[Replies], bool]) -> str:
    for replies in plays:
        if is_shown(replies):
            return f"a tool first answers {_shown(replies[0])} and then, in a later episode, {_shown(replies[1])}"
    return ""


def _said(reply: ToolReply) -> tuple[str, bool]:
    return reply.text, reply.valid


def _shown(reply: ToolReply) -> str:
    return one_line(reply.text, MAX_SHOWN) or "nothing"


def _shows_a_leak(replies: Replies) -> bool:
    return _is_kept([str(reply.valid) for reply in replies]) or any(map(_is_kept, _each_value(replies)))


def _runs_on(replies: Replies) -> bool:
    """Whether a number in them grows or falls by equal steps: `order-3`, `order-4`, `order-5`."""
    return any(len(set(values)) > 1 and _counts(values) for values in _each_value(replies))


def _each_value(replies: Replies) -> list[list[str]]:
    """What each place has in the replies, over the plays; first the places, as one text."""
    found = [_values(reply.text) for reply in replies]
    places = [" ".join(values) for values in found]
    return [places, *([values[place] for values in found] for place in found[0] if len(set(places)) == 1)]


def _values(text: str) -> dict[str, str]:
    """Each value of a JSON reply, or each word of other text, by its place."""
    fields = fields_of(text)
    if fields.keys() == {""} and fields[""]["type"] == "text":
        return {str(number): word for number, word in enumerate(WORD.findall(text))}
    return {place: _without_clock(field["value"]) for place, field in fields.items()}


def _without_clock(value: object) -> str:
    """What is left of a text still tells a log that grows, though each line begins with the date."""
    return without_now(value) if isinstance(value, str) else "" if is_of_now(value) else str(value)


def _is_kept(values: Sequence[str]) -> bool:
    """Whether a value changes over the plays as leaked state does: it stays as the first play left it, alternates, or
    grows from the second on (`nothing`, `a`, `a, a`), be it up to a size.
    """
    first, second, *later = values
    if first == second or all(TIME_OF_DAY.search(value) for value in values):
        return False
    if set(later) == {second}:
        return True
    if _counts(values) or all(map(_is_number, values)):
        return False
    is_switched = values[0::2] == [first] * len(values[0::2]) and values[1::2] == [second] * len(values[1::2])
    lengths = [len(value) for value in (second, *later)]
    grows = lengths == sorted(lengths) and len({*lengths}) > MORE_PLAYS[0]
    steps = "".join("+" if shorter < longer else "-" for shorter, longer in pairwise(lengths))
    return is_switched or grows or GROWTH in steps


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _counts(values: Sequence[str]) -> bool:
    """Whether the numbers in a text change by equal steps alone."""
    if len({NUMBER.sub("#", value) for value in values}) > 1:
        return False
    numbers = [[int(number) for number in NUMBER.findall(value)] for value in values]
    steps = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(numbers)]
    return all(step == steps[0] for step in steps)
