"""What a model or a tool may write to break a page, for the tests of the page's text and of the page in a browser."""

from __future__ import annotations

import json

from tasks.core.files import read_jsonl
from tasks.core.records import Turn
from tasks.core.settings import Paths
from tests.measurement.synthetic import trajectory

SCRIPT = "<script>document.title = 'owned'</script>"
CLOSING = "</pre></script></style></details><h1>owned</h1>"
HANDLER = '<img src="https://example.com/x.png" onerror="document.title=\'owned\'">'
ATTRIBUTE = '" onmouseover="document.title=\'owned\'" x="'
TEMPLATE = "{{ 7 * 7 }}{% raw %}"
REVERSED = "card\u202e8_drac\u202c ends here"
TAGS = "".join(chr(0xE0000 + ord(letter)) for letter in "pay me")  # text that no screen shows
SURROGATE = "half a pair: \ud83d."
NO_UTF_8, NO_UTF_8_BYTES, NO_UTF_8_SHOWN = "<<bytes>>", b"\xff\xe9", "\N{REPLACEMENT CHARACTER}" * 2
CONTROL = "nul \x00, escape \x1b[31m, bell \x07"
HUGE = "x" * 1_000_000
PROBLEM = "td-hostile"


def write_hostile_episodes(paths: Paths) -> None:
    """Put one hostile episode of each policy first in its file, in a category of its own that only the best fails."""
    for policy in ("base", "best"):
        file = paths.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"
        row = _hostile_row()
        # Escaped, as JSON from a tool can be: a lone surrogate has no UTF-8 of its own.
        lines = [json.dumps(row), *(json.dumps(other) for _, other in read_jsonl(file))]
        text = "\n".join(lines) + "\n"
        file.write_bytes(text.encode().replace(NO_UTF_8.encode(), NO_UTF_8_BYTES))


def _hostile_row() -> dict:
    turns = [
        Turn(
            text=f"{SCRIPT} {CLOSING} {TEMPLATE}<tool_call>{{}}</tool_call>",
            calls=[{"name": HANDLER, "arguments": {ATTRIBUTE: SCRIPT, "list": [REVERSED, {"deep": SURROGATE}]}}],
            replies=[HANDLER + CONTROL + REVERSED + SURROGATE + TAGS],
        ),
        Turn(
            text="<tool_call>not json</tool_call>",
            calls=[{"name": "read_log", "arguments": {}}, {}],
            replies=[HUGE, f"no text: {NO_UTF_8}"],
        ),
        Turn(text=CLOSING, thought=f"{SCRIPT}{HANDLER}{CLOSING}", num_thought_tokens=7, thought_was_cut=True),
    ]
    row = trajectory(PROBLEM, False, category="book/declined", turns=turns, num_invalid_calls=1).to_row()
    return {**row, "request": f"{SCRIPT}{CLOSING} مرحبا {REVERSED}"}
