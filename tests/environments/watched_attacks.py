"""Plays hostile calls under an audit hook and prints what it saw; a program, since such a hook cannot be taken off.

Whatever Python does that matters, it announces to the hook: code compiled or run, files opened, processes, sockets,
modules imported. Everything the worlds need is imported and played once before the hook is on, so that afterwards
there is nothing to announce. At the end one `eval` of our own shows that the hook was listening.

Each call is made twice, on two fresh episodes: as it is, and as the text of a message that is parsed first.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from tasks.core.records import Problem, ToolCall
from tasks.core.tool_calls import parse_calls
from tasks.environments.bfcl.environment import BFCL
from tasks.environments.bfcl.package import CLASSES
from tasks.environments.bfcl.problems import problems
from tasks.environments.bfcl.settings import BFCL_CATEGORIES
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.base import Environment, Episode, ToolReply, block_until
from tasks.tools.settings import IN_MEMORY
from tests.environments.hostile_calls import MESSAGES, Attack, attacks, message
from tests.worlds import answer_calls

NUM_ATTACKS, SEED, LIMIT = 1000, 5, 2000
HARMLESS = {"builtins.id", "pickle.find_class"}  # deepcopy, and the making of an episode from bytes of our own
LIMITS = IN_MEMORY.model_copy(update={"max_reply_characters": LIMIT})
events: Counter[str] = Counter()
is_watching = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if is_watching and event not in HARMLESS:
        events[f"{event} {arguments!r:.200}"] += 1


def state(episode: Any) -> bytes:
    """Everything a call could change, bit by bit; the reply aside that an episode of bfcl keeps."""
    if hasattr(episode, "model"):
        return pickle.dumps([vars(instance) for instance in episode.model.instances.values()])
    return pickle.dumps({name: value for name, value in vars(episode).items() if name not in ("layer", "problem")})


def shape(episode: Any) -> list[Any]:
    """The classes behind an episode and the names of their attributes; that none of these has become a function."""
    instances = episode.model.instances.values() if hasattr(episode, "model") else [episode]
    return [
        (type(item).__qualname__, sorted(vars(item)), any(map(callable, vars(item).values()))) for item in instances
    ]


def answered(episode: Episode, text: str) -> list[ToolReply]:
    """The replies to a message, as a rollout gets them."""
    return list(answer_calls(episode, parse_calls(text)))


class Player:
    """Plays attacks on one world and keeps what should not have happened."""

    def __init__(self, world: Environment):
        self.world = world
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_cut = 0
        self.slowest: tuple[float, str] = (0.0, "")

    def attack(self, problem: Problem, attack: Attack) -> None:
        call, episode = attack.call, self.world.start(problem)
        before, outside = state(episode), shape(episode)
        reply = self._timed(call.name, lambda: block_until(episode.call(call.name, call.arguments)))
        self.kinds[f"{attack.kind}: {reply.error or ('made' if reply.valid else 'made, and did not fit')}"] += 1
        self._check(attack, reply)
        if shape(episode) != outside or (attack.kind != "value" and state(episode) != before):
            self._note("changed the state", call)
        self._as_text(problem, call, reply)

    def _check(self, attack: Attack, reply: ToolReply) -> None:
        """A name that is no tool is unknown, a key that is none an error of the arguments; a value is only a value."""
        is_in_order = {
            "name": reply.error == "unknown_tool",
            "key": not reply.valid
            and (reply.error == "invalid_arguments" or reply.text.startswith("Error during execution: ")),
            "value": True,
        }[attack.kind]
        if not is_in_order:
            self._note(f"was answered {reply}", attack.call)
        if len(reply.text) > LIMIT:
            self.num_cut += 1
            if len(reply.text) > LIMIT + 60 or "\n[cut here: " not in reply.text[LIMIT:]:
                self._note(f"got {len(reply.text)} characters", attack.call)

    def _as_text(self, problem: Problem, call: ToolCall, reply: ToolReply) -> None:
        """The same call as a message: answered alike, or turned down as unreadable; never anything else."""
        episode = self.world.start(problem)
        calls = parse_calls(message(call))
        replies = answered(episode, message(call))
        if calls == [call]:
            if replies != [reply]:
                self._note("is answered otherwise as text", call)
        elif any(item.valid for item in replies) or not replies:
            self._note("became another call as text", call)
        else:
            self.kinds["as text: unreadable"] += 1

    def messages(self, problem: Problem) -> None:
        for text in MESSAGES:
            replies = self._timed(text[:40], partial(answered, self.world.start(problem), text))
            if not replies or any(reply.error != "invalid_arguments" for reply in replies):
                self.wrong.append(f"{text[:80]!r} was answered {replies[:1]!r:.200}")

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self.slowest = max(self.slowest, (time.process_time() - started, name[:80]))
        return result

    def _note(self, what: str, call: ToolCall) -> None:
        self.wrong.append(f"{call.name[:80]!r} {call.arguments!r:.200} {what}"[:600])

    def report(self) -> dict[str, Any]:
        return {
            "kinds": dict(sorted(self.kinds.items())),
            "wrong": self.wrong,
            "num_cut": self.num_cut,
            "slowest": list(self.slowest),
        }


def play_ordinarily(world: Environment, rows: list[Problem]) -> None:
    """Whatever is imported or read at the first call of a tool is imported and read here."""
    for problem in rows:
        episode = world.start(problem)
        for turn in problem.reference:
            for call in turn.calls:
                block_until(episode.call(call.name, call.arguments))
            episode.end_turn(turn.answer)
        block_until(episode.verdict(None))


def main() -> None:
    global is_watching
    everything = [problem for category in BFCL_CATEGORIES for problem in problems(category, "all")]
    by_class = [next(row for row in everything if name in row.world["involved_classes"]) for name in CLASSES]
    desk = list(TravelDesk().generate(seed=3, num_problems=8, max_level=3))
    worlds: dict[str, tuple[Environment, list[Problem]]] = {
        "bfcl": (BFCL(LIMITS), by_class),
        "travel_desk": (TravelDesk(LIMITS), desk),
    }
    for name, (world, rows) in worlds.items():
        play_ordinarily(world, everything if name == "bfcl" else rows)
        parse_calls("<tool_call>{}</tool_call>")
    players = {name: Player(world) for name, (world, _) in worlds.items()}
    plans = [
        (players[name], problem, list(attacks(world.tools_for(problem), NUM_ATTACKS // len(rows), seed=SEED + place)))
        for name, (world, rows) in worlds.items()
        for place, problem in enumerate(rows)
    ]

    sys.addaudithook(watch)
    is_watching = True
    for player, problem, calls in plans:
        for attack in calls:
            player.attack(problem, attack)
        player.messages(problem)
    is_watching = False
    seen = dict(events)

    is_watching = True
    eval("1")
    is_watching = False
    heard = sorted({event.split()[0] for event in events} - {event.split()[0] for event in seen})
    reports = {name: player.report() for name, player in players.items()}
    print(json.dumps({"worlds": reports, "seen": seen, "heard_of_eval": heard}))


if __name__ == "__main__":
    main()
