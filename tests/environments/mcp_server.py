"""A real MCP server for tests, written with the official SDK: a small hotel in sqlite. And problems to play on it.

`python mcp_server.py` speaks over stdio; with `--http` it serves streamable HTTP on a free port of this machine and
prints the URL on its first line. Each session has a hotel of its own, as a server that many use must have. `--trouble`
adds tools that fail in every way a server can.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, EmbeddedResource, TextContent, TextResourceContents, ToolAnnotations

if TYPE_CHECKING:
    from tasks.core.records import Problem
    from tasks.environments.mcp.environment import MCPEnvironment
    from tasks.environments.mcp.settings import MCPSettings
    from tasks.environments.settings import EnvironmentSettings

FILE = Path(__file__).resolve()
ROOMS = {"attic": 40, "cellar": 30, "garden": 70, "library": 90, "mansard": 60, "tower": 120}
GUESTS = ("Ada", "Ben", "Cleo", "Dina", "Emil", "Fay")
READ_ONLY, IDEMPOTENT = ToolAnnotations(read_only_hint=True), ToolAnnotations(idempotent_hint=True)

server = MCPServer("hotel", version="1.4.0", log_level="CRITICAL")
hotels: dict[str, sqlite3.Connection] = {}


def visitor(context: Context) -> Mapping[str, str]:
    """The headers of an HTTP request, which name its session; none over stdio, where the process is the session."""
    request = context.request_context.request
    return request.headers if request is not None else {}


def hotel(context: Context) -> sqlite3.Connection:
    """The database of the caller's session."""
    session = visitor(context).get("mcp-session-id", "stdio")
    if session not in hotels:
        hotels[session] = sqlite3.connect(":memory:", check_same_thread=False)
        hotels[session].execute("create table bookings (id integer primary key, guest text, room text unique)")
        hotels[session].execute("create table calls (number integer)")
        hotels[session].execute("insert into calls values (0)")
    return hotels[session]


@server.tool(annotations=READ_ONLY)
def price(room: str) -> dict[str, Any]:
    """What a room costs a night."""
    if room not in ROOMS:
        raise ToolError(f"there is no room called {room}")
    return {"room": room, "price": ROOMS[room]}


@server.tool()
def book(guest: str, room: str, ctx: Context) -> dict[str, Any]:
    """Book a room for a guest."""
    if room not in ROOMS:
        raise ToolError(f"there is no room called {room}")
    try:
        row = hotel(ctx).execute("insert into bookings (guest, room) values (?, ?)", (guest, room))
    except sqlite3.IntegrityError:
        raise ToolError(f"{room} is taken") from None
    return {"booking": row.lastrowid, "price": ROOMS[room]}


@server.tool(annotations=IDEMPOTENT)
def cancel(booking: int, ctx: Context) -> str:
    """Cancel a booking."""
    hotel(ctx).execute("delete from bookings where id = ?", (booking,))
    return "cancelled"


@server.tool(annotations=READ_ONLY)
def bookings(ctx: Context) -> str:
    """All bookings as a JSON object, guest by room."""
    return json.dumps(dict(hotel(ctx).execute("select room, guest from bookings order by room").fetchall()))


@server.tool()
def reset(ctx: Context, taken: list[str] | None = None) -> str:
    """Empty the hotel, but for the rooms that are taken."""
    hotel(ctx).execute("delete from bookings")
    hotel(ctx).executemany("insert into bookings (guest, room) values ('Zoe', ?)", [(room,) for room in taken or []])
    return "reset"


@server.tool(annotations=READ_ONLY)
def rooms(cheaper_than: int) -> list[dict[str, Any]]:
    """The rooms that cost less; the SDK sends a text block for each, and all of them as structured content."""
    return [{"room": room, "price": price} for room, price in ROOMS.items() if price < cheaper_than]


async def hang(there: str = "") -> str:
    """Never answers; a file called `there` says that it has been asked."""
    if there:
        Path(there).touch()
    await anyio.sleep(3600)
    return "late"


async def hang_once(ctx: Context) -> str:
    """The first call of a session is never answered."""
    return await _slow_once(ctx)


async def hang_once_unannotated(ctx: Context) -> str:
    """The same for a tool that may not be repeated."""
    return await _slow_once(ctx)


async def _slow_once(context: Context) -> str:
    calls = hotel(context).execute("update calls set number = number + 1 returning number").fetchone()[0]
    if calls == 1:
        await anyio.sleep(3600)
    return f"answer {calls}"


def die() -> str:
    """The server is killed in mid-call."""
    os.kill(os.getpid(), 9)
    return "unreachable"


def flood(megabytes: int) -> str:
    """A reply without end."""
    return "x" * (megabytes << 20)


def whisper(ctx: Context) -> str:
    """Repeats whatever secret it was given, plain and as JSON."""
    secret = os.environ.get("HOTEL_KEY") or visitor(ctx).get("authorization", "none")
    print(f"the key is {secret}", file=sys.stderr, flush=True)
    return f"{secret} and {json.dumps({secret: [secret]})}"


def variables() -> str:
    """The names of the server's environment variables."""
    return " ".join(sorted(os.environ))


def photo() -> Any:
    """A picture and a word."""
    return [Image(data=b"\x89PNG" + bytes(996), format="png"), "the tower"]


def download() -> Any:
    """Two files as GitHub's server returns them: a text that they came, and each as a resource; one is no text."""
    text = TextResourceContents(uri="repo://hotel/list.txt", mime_type="text/plain", text="\n".join(["tower 12"] * 8))
    blob = BlobResourceContents(uri="repo://hotel/plan.png", mime_type="image/png", blob="iVBORw==")
    files = [EmbeddedResource(type="resource", resource=resource) for resource in (text, blob)]
    return [TextContent(type="text", text="downloaded"), *files]


async def rebuild(ctx: Context) -> str:
    """From now on `price` takes another argument; connected clients are told."""
    server.remove_tool("price")

    @server.tool(name="price", annotations=READ_ONLY)
    def new_price(chamber: str) -> str:
        """What a room costs a night."""
        return chamber

    await ctx.session.send_tool_list_changed()
    return "rebuilt"


TROUBLE: dict[Callable[..., Any], ToolAnnotations | None] = {
    hang: READ_ONLY, hang_once: READ_ONLY, hang_once_unannotated: None, die: None, flood: READ_ONLY, whisper: READ_ONLY,
    variables: READ_ONLY, photo: READ_ONLY, download: READ_ONLY, rebuild: None,
}  # fmt: skip


def check(
    problem: Problem, calls: Sequence[Mapping[str, Any]], final_message: str | None, call_tool: Callable[..., str]
) -> dict[str, bool]:
    """The hotel's bookings are those the problem expects, and the price it expects is named."""
    return {
        "bookings": json.loads(call_tool("bookings", {})) == problem.world["expected"],
        "answer": str(problem.world["price"]) in (final_message or "").split(),
    }


def problems(count: int) -> list[Problem]:
    """Book a room; where it is taken, another one. Every second problem has its first room taken."""
    from tasks.core.records import Problem, ReferenceTurn, ToolCall

    made = []
    for number in range(count):
        guest, first = GUESTS[number % 6], list(ROOMS)[number // 2 % 6]
        second = list(ROOMS)[(number // 2 + 1 + number % 5) % 6]
        taken = [first] if number % 2 else []
        rooms = [first, second] if taken else [first]
        made.append(
            Problem(
                id=f"hotel-{number}",
                category="taken" if taken else "free",
                level=1 + len(taken),
                requests=[f"Book {first} or else {second} for {guest} and name the price."],
                world={
                    "taken": taken,
                    "expected": dict(sorted({**dict.fromkeys(taken, "Zoe"), rooms[-1]: guest}.items())),
                    "price": ROOMS[rooms[-1]],
                },
                reference=[
                    ReferenceTurn(
                        calls=[ToolCall(name="book", arguments={"guest": guest, "room": room}) for room in rooms],
                        answer=f"It costs {ROOMS[rooms[-1]]} a night.",
                    )
                ],
                split_group=f"hotel {number}",
            )
        )
    return made


def environment_settings(folder: Path | None = None, *, trouble: bool = False, **changed: Any) -> EnvironmentSettings:
    """The hotel over stdio, reset by its tool; `changed` replaces parts of the `mcp` section, or of `tools`."""
    from tasks.tools.settings import ToolSettings
    from tests import worlds

    tools = {key: changed.pop(key) for key in list(changed) if key in ToolSettings.model_fields}
    judge = changed.pop("judge", None)
    section: dict[str, Any] = {
        "command": [sys.executable, str(FILE), *(["--trouble"] if trouble else [])],
        "url": None,
        "environment": {},
        "headers": {},
        "allowed_tools": None if trouble else ["price", "book", "cancel"],
        "reset": "tool",
        "reset_tool": "reset",
        "checker": f"{worlds.as_custom('tests.environments.mcp_server')}:check",
        "max_servers": 8,
        "start_timeout_seconds": 120.0,
    }
    limits = worlds.QUICK.model_copy(update=tools)
    return worlds.environment_settings("mcp", settings=section | changed, tools=limits.model_dump(), judge=judge)


def make_environment(**changed: Any) -> MCPEnvironment:
    """The hotel's server as an environment, with nothing around it."""
    from tasks.environments.mcp.environment import MCPEnvironment

    settings = environment_settings(**changed)
    return MCPEnvironment.from_settings(cast("MCPSettings", settings.settings), settings.tools)


async def serve_http() -> None:
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).serve([listener])


def main() -> None:
    if "--trouble" in sys.argv:
        for function, annotations in TROUBLE.items():
            server.tool(annotations=annotations)(function)
    if "--http" in sys.argv:
        asyncio.run(serve_http())
    else:
        server.run()


if __name__ == "__main__":
    main()
