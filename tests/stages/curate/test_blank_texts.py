"""Requests and answers in which nothing can be read are told with their row, before a model learns from them."""

from __future__ import annotations

import pytest

from tasks.core.text import is_blank
from tasks.stages.curate.demonstrations import demonstration_table, expert_episodes
from tasks.stages.curate.references import Replay, Replays, Row, problem_table
from tasks.stages.curate.splitting import SPLITS
from tasks.tools.base import Verdict
from tests.sums import SumEpisode, Sums, problem

NO_ROWS: dict[str, list[Row]] = {name: [] for name in SPLITS}


class SilentEpisode(SumEpisode):
    """The total alone counts, whatever is said."""

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(self.total == self.target)


class Silent(Sums):
    episode_class = SilentEpisode


@pytest.mark.parametrize("text", ["", " \t\n", "\u200b", "\u200b\ufeff \u00a0", "\x00", "\u2800 \u3164"])
def test_spaces_and_invisible_characters_alone_are_blank(text: str) -> None:
    assert is_blank(text)
    asked = problem(requests=["Make 3.", text, text])
    (row,) = problem_table(Silent(), [Row(0, "line 1", asked, Replay(1, "", ""))], NO_ROWS, apart=SPLITS)
    assert row["blank_request"] == "request 2"
    call = {"name": "add", "arguments": {"amount": 3}}
    answered, replays = problem(reference=[{"calls": [call], "answer": text}]), Replays(Silent())
    episodes = expert_episodes(replays, [answered, problem("q")], num=2, seed=0)
    table = demonstration_table(replays, episodes, NO_ROWS)
    assert [(row["fault"], row["blank_answer"]) for row in table] == [("", "message 2"), ("", "")]


@pytest.mark.parametrize("text", ["0", " . ", "ö", "\u200bno", "🏝", "\U0001fa77", "\ue000"])
def test_what_can_be_read_is_not(text: str) -> None:
    assert not is_blank(text)
