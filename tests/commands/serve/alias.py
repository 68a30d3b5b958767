"""What an alias of a registry would lead to, without one: a folder that the test names."""

from __future__ import annotations

from pathlib import Path

from tasks.commands.serve.versions import Found, OneFolder

NAME = "agent"


class Alias(OneFolder):
    """`trouble` is why it cannot be looked up."""

    is_followed = True

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.name, self.trouble = NAME, ""

    def now(self) -> Found:
        if self.trouble:
            raise ValueError(self.trouble)
        return super().now()
