"""The async function that the agent's page shows: a plain loop of the openai client over the world's MCP tools."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import ToolCall
from tasks.core.tool_calls import call_text
from tasks.tools.driven import AgentTask, Endpoint
from tests import tiny
from tests.conftest import ROOT
from tests.readme import page_block
from tests.rollouts.agents.conftest import VERDICT, Imitator, agent_world, chat, collect, reference_texts
from tests.worlds import as_custom

__all__ = ["chat"]
PAGE = "tasks/environments/agent/README.md"


def test_the_plain_loop_plays_references_to_success_in_one_sequence(chat: ChatFormat) -> None:
    problems = tiny.problems(3)
    engine = Imitator(chat, {problem.requests[0]: reference_texts(problem) for problem in problems})
    world = agent_world(object=f"{as_custom('infra.examples.agents.plain_loop')}:play")
    played = collect(world, engine, chat, problems)
    assert [(item.outcome, len(item.sequences)) for item in played] == [("success", 1)] * 3


def test_a_call_that_the_model_gets_wrong_is_told_to_it_and_no_fault(chat: ChatFormat) -> None:
    (problem,) = tiny.problems(1)
    wrong = call_text(ToolCall(name="no_such_tool", arguments={}))
    engine = Imitator(chat, {problem.requests[0]: [wrong, *reference_texts(problem)]})
    world = agent_world(object=f"{as_custom('infra.examples.agents.plain_loop')}:play")
    (played,) = collect(world, engine, chat, [problem])
    assert (played.outcome, played.fault) == ("success", None)
    assert "unknown" in played.turns[0].replies[0]


def test_the_page_names_every_field_of_both_objects() -> None:
    text = (ROOT / PAGE).read_text()
    for name in (*AgentTask.model_fields, *(field.name for field in fields(Endpoint))):
        assert f"`{name}`" in text, name
    assert "plain_loop.py" in text and "(task, endpoint)" in page_block(PAGE, "yaml", "command:")


def test_an_object_that_cannot_be_imported_is_told_with_its_key() -> None:
    verdict = {**VERDICT, "by": "checker", "checker": "tasks.custom.no_such_agent:check"}
    wrong: dict[str, dict[str, Any]] = {
        "object": {"object": "tasks.custom.no_such_agent:play"},
        "verdict.checker": {"world": None, "verdict": verdict},
    }
    for key, changed in wrong.items():
        with pytest.raises(ValueError, match=rf"^environment\.settings\.{key}: importing tasks\.custom\.no_such_agent"):
            agent_world(**changed)
