"""A shop as an MCP server of one's own: the agent counts what is on the shelf, and orders what is missing.

`reset` is for the trainer, which calls it before each episode, and `shelf` is for the checker. Neither is among
`allowed_tools`, so no agent sees them. All of the state is in `stock`: one server plays one episode after another.
"""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

server = MCPServer("shop", version="1.0.0", log_level="ERROR")
stock: dict[str, int] = {}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def count(product: str) -> dict[str, int]:
    """Units of a product on the shelf."""
    if product not in stock:
        raise ToolError(f"the shop does not sell {product}")  # what the model reads; it sees no other exception
    return {"units": stock[product]}


@server.tool()
def order(product: str, units: Annotated[int, Field(ge=1)]) -> dict[str, int]:
    """Order units of a product."""
    stock[product] = count(product)["units"] + units
    return {"units": stock[product]}


@server.tool()
def reset(shelf: dict[str, int]) -> str:
    """Begin an episode with this shelf. The trainer gives what the problem's `world` has under the same name."""
    stock.clear()
    stock.update(shelf)
    return "reset"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def shelf() -> dict[str, int]:
    """All that is on the shelf."""
    return stock


if __name__ == "__main__":
    server.run()
