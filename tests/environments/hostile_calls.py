"""A thousand calls that try to be run as code, or to break what answers them; the same every time.

They attack where a call is read: in the tool's name, in the keys of its arguments, and in the values. Whatever would
run leaves a mark: a file named CANARY in the current folder, or an event that `watched_attacks.py` sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.core.records import ToolCall
from tasks.tools.base import Tool

Kind = Literal["name", "key", "value"]
CANARY = "canary"
SYSTEM = f"__import__('os').system('touch {CANARY}')"
CODE = (
    SYSTEM,
    f"open('{CANARY}', 'w').write('x')",
    f"exec(\"open('{CANARY}', 'w')\")",
    f"eval(compile(\"{SYSTEM}\", '', 'eval'))",
    f"(lambda: {SYSTEM})()",
    f"[{SYSTEM} for _ in range(3)]",
    f"{{{SYSTEM}}}",
    f"f'{{{SYSTEM}}}'",
    "{0.__class__.__mro__}",
    "%(__class__)s",
    f"().__class__.__bases__[0].__subclasses__()[0].__init__.__globals__['__builtins__']['eval'](\"{SYSTEM}\")",
    f"subprocess.Popen(['touch', '{CANARY}'])",
    "socket.create_connection(('127.0.0.1', 9))",
    f"importlib.import_module('antigravity') or {SYSTEM}",
    f'"\'"\'"); {SYSTEM} #',
    f"'''\"\"\"{SYSTEM}\"\"\"'''",
    f"\\'); {SYSTEM}; (\\'",
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY}",
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"cos\nsystem\n(S'touch {CANARY}'\ntR.",
)
PRIVATE = (
    "_load_scenario", "__init__", "__class__", "__dict__", "__eq__", "__reduce__", "__getattribute__", "__subclasses__",
    "_api_description", "_random", "_generate_id", "_navigate_to_directory", "_current_dir", "_flight_cost_lookup",
    "_cache_flight_cost_entry", "long_context", "root", "orders", "tweets", "instances", "defaults", "answer", "make",
)  # fmt: skip
LOOK_ALIKE = str.maketrans("aceiopsxyd", "асеіорѕхуԁ")  # Cyrillic
FULL_WIDTH = {code: code + 0xFEE0 for code in range(ord("!"), ord("~") + 1)}  # what Python's identifiers fold away
KEYS = (
    "self", "args", "kwargs", "*args", "**kwargs", "__class__", "__dict__", "cls", "tool", "arguments",
    "initial_config", "scenario", "=", "", " ", "\n", "\x00", "\ud800", "ключ", "a b", "1", "None", "True",
    "lambda", "class",
)  # fmt: skip
# What is none of a world's business: text that is no JSON call at all.
MESSAGES = (
    f"<tool_call>\ncd(folder={SYSTEM})\n</tool_call>",
    f"<tool_call>\n{{'name': 'cd', 'arguments': {{'folder': {SYSTEM}}}}}\n</tool_call>",
    f'<tool_call>{{"name": "cd", "arguments": {{"folder": {SYSTEM}}}}}</tool_call>',
    f'<tool_call>{{"name": "cd", "arguments": "{{\\"folder\\": {SYSTEM}}}"}}</tool_call>',
    '<tool_call>{"name": "cd", "arguments": {"folder": NaN}}</tool_call>',
    '<tool_call>{"name": "cd", "arguments": {"folder": 1e999}}</tool_call>',
    '<tool_call>{"name": "cd", "arguments": {"folder": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": ["cd"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "cd", "arguments": [' + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "power", "arguments": {"base": 1' + "0" * 100_000 + "}}</tool_call>",
    "<tool_call>" + " " * 100_000,
    "<tool_call>" + " " * 100_000 + "x</tool_call>",
    "<tool_call>" * 20_000,
    "<tool_call></tool_call>" * 2_000,
    f"<tool_call>lambda: {SYSTEM}</tool_call>",
)


@dataclass(frozen=True)
class Attack:
    """One call, and where its malice sits."""

    kind: Kind
    call: ToolCall


def attacks(tools: Sequence[Tool], count: int, *, seed: int) -> Iterator[Attack]:
    """Calls on these tools, the kinds in turn."""
    rng = random.Random(seed)
    makers = {"name": hostile_name, "key": hostile_keys, "value": hostile_values}
    kinds: tuple[Kind, ...] = ("name", "key", "value")
    for number in range(count):
        kind = kinds[number % len(kinds)]
        name, arguments = makers[kind](rng, rng.choice(tools))
        yield Attack(kind, ToolCall.model_construct(name=name, arguments=arguments))


def hostile_name(rng: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A name of no tool, with arguments that would fit one."""
    real, code, private = tool.name, rng.choice(CODE), rng.choice(PRIVATE)
    name = rng.choice([
        code, private, f"{real}.{private}", f"{real}()", f"{real}({code})", f"{real}; {code}", f"{real} or {code}",
        f"{real}\n{code}", f"{real} ", f" {real}", f"{real}\x00", f"{real}.__func__.__globals__", f"{real}.__self__",
        f"self.{real}", f"instance.{real}", f"GorillaFileSystem.{real}", f"MathAPI.{private}", f"__main__.{real}",
        f"builtins.{rng.choice(['eval', 'exec', 'open', '__import__', 'getattr'])}", f"{{{real}.{private}}}",
        f"'{real}'", f'"{real}"', f"lambda **k: {real}(**k)", f"[{real} for _ in [{code}]]", f"getattr(x, '{real}')",
        f"{real[:-1]}{chr(ord(real[-1]) + 0xFEE0)}", real.translate(FULL_WIDTH), f"{real}\u200b",
        f"a{real.translate(LOOK_ALIKE)}",
        f"{code}</tool_call>", real * 5_000, f"{real}\ud800", "../" * 9 + real, f"{real}\u202e", real.swapcase(),
    ])  # fmt: skip
    return name, ordinary(rng, tool)


def hostile_keys(rng: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A real tool with what it takes, and at least one key that it does not."""
    known = list(tool.parameters["properties"])
    strange = [
        rng.choice(KEYS),
        rng.choice(CODE),
        rng.choice(PRIVATE),
        *(f"{name}={rng.choice(CODE)}, x" for name in known[:1]),
        *(f"{name} " for name in known[:1]),
    ]
    keys = rng.sample(strange, rng.randint(1, len(strange)))
    return tool.name, {**ordinary(rng, tool), **dict.fromkeys(keys, rng.choice([1, "x", rng.choice(CODE), None]))}


def hostile_values(rng: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A real tool with its own keys; some values are code, of another type, huge or deep."""
    return tool.name, {name: value(rng) for name in tool.parameters["properties"] if rng.random() < 0.9}


def value(rng: random.Random) -> Any:
    """Something that JSON can hold; at most 100 kB of it."""
    huge = rng.choice(["x", "9", "\n", "{}", "%s", "ж", rng.choice(CODE)])
    return rng.choice([
        rng.choice(CODE), rng.choice(CODE), rng.choice(PRIVATE), huge * (100_000 // len(huge.encode())),
        [rng.choice(CODE)], {rng.choice(KEYS[:-8]): rng.choice(CODE)}, [1, "a", None], {}, [], None, True, "",
        "NaN", "inf", "-Infinity", "1e999999999", "1_000_000", 10**4000, -(10**4000), 10**7, 10**6, 1e308, 5e-324,
        -1, 0.5,
        [10**4000] * 20, ["x" * 1000] * 90, [1.5] * 20_000, deep(rng.choice([50, 300, 900])), "..", "/", "a/" * 50_000,
    ])  # fmt: skip


def deep(levels: int) -> Any:
    """Lists in dicts in lists."""
    found: Any = 1
    for level in range(levels):
        found = [found] if level % 2 else {"a": found}
    return found


def ordinary(rng: random.Random, tool: Tool) -> dict[str, Any]:
    """Arguments of the types the tool asks for."""
    examples = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return {
        name: examples.get(schema.get("type", "string"), "a") for name, schema in tool.parameters["properties"].items()
    }


def message(call: ToolCall) -> str:
    """The assistant message that makes a call, halves of surrogate pairs included."""
    return "<tool_call>\n" + json.dumps({"name": call.name, "arguments": call.arguments}) + "\n</tool_call>"
