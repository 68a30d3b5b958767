"""One stored trajectory as the browser page shows it, and as one line of numbers for its filters.

Names of arguments, checks and tools are values here, never keys, so that no name can mean anything to JavaScript.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from tasks.core.records import Score, TokenSequence, Trajectory, Turn
from tasks.report.script_files import digest_of
from tasks.rewards.built_in import valid_call_share, well_formed_share
from tasks.rewards.stored import TurnTokens, turn_tokens

HEAD_CHARACTERS, TAIL_CHARACTERS = 8000, 2000  # of one text or reply on the page: errors are often at the end
MAX_NAME_CHARACTERS = 80  # of a tool: a model may make one up
# Calls in any format of chat/formats: between tags, or the rest of the message after a mark, or all of the message.
TOOL_CALL = re.compile(
    r"<(tool_call|tool)>.*?(</\1>|\Z)"
    r"|(<\|python_tag\|>|<\|python_start\|>|<\|tool_call_start\|>|\[TOOL_CALLS\]"
    r"|(<\|start\|>assistant)?(<\|channel\|>commentary)? to=functions\."
    r"|\A\s*(\[\s*)?\{|\A\s*\[\s*[^\W\d][\w.-]*\().*",
    re.DOTALL,
)
MALFORMED = "malformed call"
ESCAPES = re.compile(r'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')  # of JSON; a run, since two may be one character
MAX_LEVELS = 3  # of JSON in a string of JSON

Pairs = list[tuple[str, Any]]


def shown_episode(episode: Trajectory, *, line: int, score: Score | None = None) -> dict[str, Any]:
    """The data of one column of the page; `line` is its line in the file, and `score` its reward where it has parts."""
    tokens = turn_tokens(episode)
    begun = _sequence_notes(episode)
    return {
        "line": line,
        "request": shorten(episode.request),
        "outcome": episode.outcome,
        "limit": episode.limit,
        "fault": episode.fault and shorten(episode.fault),
        "checks": list(episode.checks.items()),
        "details": shorten(_json(episode.details, indent=2)) if episode.details else None,
        "reward": None if score is None else round(score.reward, 3),
        "parts": _possible_parts(episode) if score is None else _parts_of(score),
        "num_tokens": episode.num_tokens,
        "policy_version": episode.policy_version,
        "turns": [_turn(*item) for item in zip_longest(episode.turns, tokens, begun)],
    }


def tools_of(episode: Trajectory) -> set[str]:
    return {_tool(call) for turn in episode.turns for call in turn.calls}


def errors_of(episode: Trajectory) -> set[str]:
    return {error for turn in episode.turns for error in turn.errors if error is not None}


def texts_of(episode: Trajectory) -> Iterator[str]:
    """What a search may find: the problem, what was asked, written, called and replied, and what went wrong."""
    yield episode.problem_id
    yield from _as_read(episode.request)
    yield from _as_read(episode.fault or "")
    for turn in episode.turns:
        yield from _as_read(turn.thought or "")
        yield from _texts_of_calls(turn) if turn.calls else _as_read(turn.text)
        for reply in turn.replies:
            yield from _as_read(reply)
        yield from (error for error in turn.errors if error is not None)
        yield from _as_read(turn.follow_up or "")


def _texts_of_calls(turn: Turn) -> Iterator[str]:
    """The message as written, its words apart, and the arguments, which only some formats write as JSON."""
    yield from _as_read(turn.text, is_json=all((call or {}).get("name") for call in turn.calls))
    yield TOOL_CALL.sub("", turn.text)
    for call in turn.calls:
        if (arguments := (call or {}).get("arguments")) is not None:
            yield from _as_read(_json(arguments))


def _as_read(text: str, *, is_json: bool = False) -> Iterator[str]:
    r"""The text with the escapes of JSON decoded, at each level where JSON is within JSON: a reader of the text
    `one\nrefund Krak\u00f3w` looks for refund and Kraków. What is no JSON comes as it is, too.
    """
    if not (ESCAPES.search(text) and (is_json or _is_json(text))):
        yield text
    for _ in range(MAX_LEVELS):
        decoded = ESCAPES.sub(lambda found: str(json.loads(f'"{found[0]}"')), text)
        if decoded == text:
            return
        yield decoded
        text = decoded


def _is_json(text: str) -> bool:
    if not text.lstrip().startswith(("{", "[", '"')):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def shorten(text: str) -> str:
    """The two ends of a long text, with the length of the gap: a page must open whatever a tool replied."""
    missing = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if missing <= 0:
        return text
    note = f"\n\n… {missing:,} more characters are in the trajectory file …\n\n"
    return f"{text[:HEAD_CHARACTERS]}{note}{text[-TAIL_CHARACTERS:]}"


def _sequence_notes(episode: Trajectory) -> list[str | None]:
    """For each turn that is in another sequence than the turn before it, which one, and why that began."""
    if len(episode.sequences) < 2:
        return [None] * len(episode.turns)
    numbers = [turn.sequence for turn in episode.turns]
    return [
        None
        if number == before
        else _sequence_note(number, episode.sequences[number], is_new=number not in numbers[:i])
        for i, (before, number) in enumerate(zip([None, *numbers], numbers, strict=False))
    ]


def _sequence_note(number: int, sequence: TokenSequence, *, is_new: bool) -> str:
    why = f" began: {sequence.begun.replace('_', ' ')}" if is_new and sequence.begun else ""
    return f"sequence {number + 1}{why or (' begins' if is_new else ' goes on')}"


def _turn(turn: Turn, tokens: TurnTokens | None, sequence_note: str | None) -> dict[str, Any]:
    """A turn whose calls were parsed shows them apart from its words; one without calls shows its text as written."""
    return {
        "prose": shorten(TOOL_CALL.sub("", turn.text).strip() if turn.calls else turn.text),
        "raw": shorten(turn.text) if turn.calls else None,
        "calls": [_call(turn.text, *item) for item in zip_longest(turn.calls, turn.replies, turn.errors)],
        "num_tokens": tokens.num_sampled if tokens else None,
        **({} if sequence_note is None else {"sequence_note": sequence_note}),
        **({} if turn.sequence == 0 else {"sequence": turn.sequence}),
        **({} if turn.thought is None else {"thought": _thought(turn)}),
        "stopped_by": None if turn.stop_reason == "end_of_turn" else turn.stop_reason,
        "follow_up": turn.follow_up and shorten(turn.follow_up),
    }


def _thought(turn: Turn) -> dict[str, Any]:
    return {
        "text": shorten(turn.thought or ""),
        "num_tokens": turn.num_thought_tokens,
        "was_cut": turn.thought_was_cut,
    }


def _call(written: str, call: dict[str, Any] | None, reply: str | None, error: str | None) -> dict[str, Any]:
    """A call of a turn in which `written` was written; a digest tells two apart that look the same once shortened."""
    name, arguments = (call or {}).get("name"), (call or {}).get("arguments")
    named = [(str(key), _json(value)) for key, value in arguments.items()] if isinstance(arguments, dict) else []
    whole = [str(name), *(value for _, value in named)] if name else [written]
    is_shortened = len(str(name)) > MAX_NAME_CHARACTERS or any(shorten(text) != text for text in whole)
    return {
        "name": _tool(call),
        "malformed": not name,
        "arguments": [(key, shorten(value)) for key, value in named],
        **({"digest": digest_of(_json(whole))} if is_shortened else {}),
        "reply": None if reply is None else shorten(reply),
        "error": error,
    }


def _tool(call: dict[str, Any] | None) -> str:
    name = str((call or {}).get("name") or MALFORMED)
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 1]}…"


def _parts_of(score: Score) -> Pairs:
    """What each part added to the reward, as weight × value."""
    values = {name: part / score.weights[name] for name, part in score.parts.items()}
    return [
        (name, f"{round(part, 3):g} = {score.weights[name]:g} × {round(values[name], 3):g}")
        for name, part in score.parts.items()
    ]


def _possible_parts(episode: Trajectory) -> Pairs:
    """What a reward could be made of, before weights; empty where the environment was at fault."""
    if episode.is_lost:
        return []
    parts = {
        "outcome": float(episode.is_success),
        "format": well_formed_share(episode.own_turns),
        "call_validity": valid_call_share(episode),
    }
    return [(name, round(value, 3)) for name, value in parts.items()]


def _json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=indent)
