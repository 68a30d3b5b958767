"""An MCP server without a checker: `environment.judge` decides, and no session is taken for that."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.environments.catalog import load_environment
from tasks.tools.base import Verdict, block_until
from tests.environments import mcp_server
from tests.tools.judge.endpoint import Endpoint, judge_row, opinion, serve


@pytest.mark.slow
def test_a_server_without_a_checker_is_judged_and_needs_a_judge_that_decides(mcp_url: str, tmp_path: Path) -> None:
    (problem,) = mcp_server.problems(1)
    changed: dict[str, Any] = {"command": None, "url": mcp_url, "checker": None}
    with serve(Endpoint()) as endpoint:
        row = judge_row(endpoint.url, tmp_path)
        with closing(load_environment(mcp_server.environment_settings(**changed, judge=row))) as environment:
            episode = environment.start(problem)
            (call,) = problem.reference[0].calls
            reply = block_until(episode.call(call.name, call.arguments))
            vote = json.loads(opinion())
            numbers = {name: vote[name] for name in ("success", "score", "soundness")}
            expected = Verdict(True, {"judge": True}, {"judge": {**numbers, "votes": [vote]}})
            assert block_until(episode.verdict("It costs 40.")) == expected
            episode.close()
            assert json.dumps(reply.text) in endpoint.asked[0]["messages"][1]["content"]
            idle = environment.start(problem)
            assert block_until(idle.verdict("Done.")).success
            assert not block_until(idle.verdict(None)).success
    for judge in (None, {**row, "decides": False}):
        with pytest.raises(ValueError, match="only a judge can say whether an episode succeeded"):
            mcp_server.environment_settings(**changed, judge=judge)
