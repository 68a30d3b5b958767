"""`python -m tasks score`: a line in, a line out; what cannot be read is told by its number and stops nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.score import FORMAT, refuse_unscored, score_lines
from tasks.core.records import Problem
from tasks.environments.bfcl.environment import BFCL
from tasks.environments.bfcl.problems import problems
from tasks.environments.travel_desk.environment import TravelDesk
from tests.conftest import ROOT
from tests.profiles import profile_text
from tests.tiny import problems as travel_problems

BASE = problems("multi_turn_base", "all")


def line_of(problem: Problem, num_turns: int | None = None, **more: Any) -> bytes:
    turns = [[call.model_dump() for call in turn.calls] for turn in problem.reference[:num_turns]]
    return json.dumps({"problem_id": problem.id, "turns": turns, **more}).encode()


def scores(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    world = BFCL()
    return list(score_lines(world, lines, world.find_problem))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "tasks", "score", *arguments]
    return subprocess.run(line, env=environment, input=stdin, capture_output=True, timeout=300)


def test_only_the_turns_given_are_scored_each_with_its_replies() -> None:
    first, whole, wrong = scores([line_of(BASE[0], 1), line_of(BASE[0]), line_of(BASE[0]).replace(b'"temp"', b'"tmp"')])

    assert first == {
        "problem_id": "multi_turn_base_0",
        "valid": True,
        "error_type": None,
        "responses": [
            [
                '{"current_working_directory": "document"}',
                "None",
                """{"result": "'final_report.pdf' moved to 'temp/final_report.pdf'"}""",
            ]
        ],
    }
    assert whole["valid"] and [len(texts) for texts in whole["responses"]] == [3, 2, 1, 4]
    assert (wrong["valid"], wrong["error_type"]) == (False, "instance_state_mismatch")


def test_an_empty_turn_is_an_answer_and_a_missing_reply_another() -> None:
    turns = json.loads(line_of(BASE[0]))["turns"]
    silent = {"problem_id": "multi_turn_base_0", "turns": [[]]}
    blind = {"problem_id": "multi_turn_base_0", "turns": [turns[0], turns[1][:1]]}
    assert [item["error_type"] for item in scores(json.dumps(row).encode() for row in (silent, blind))] == [
        "empty_turn_model_response",
        "execution_response_mismatch",
    ]


@pytest.mark.slow
def test_conversations_of_every_category_are_found_by_id() -> None:
    rows = [problems(category, "all")[5] for category in ("multi_turn_miss_func", "multi_turn_long_context")]
    assert [item["valid"] for item in scores(map(line_of, rows))] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{nope}", "not valid JSON (Expecting property name"),
        (b"[1, 2]", "the line: Input should be a valid dictionary"),
        (b'{"turns": [[]]}', "problem_id: Field required"),
        (b'{"problem_id": "multi_turn_base_0", "turns": []}', "turns: List should have at least 1 item"),
        (b'{"problem_id": "multi_turn_base_0", "turns": [[{"name": "cd"}]]}', "turns.0.0.arguments: Field required"),
        (b'{"problem_id": "multi_turn_base_0", "turns": [["cd()"]]}', "turns.0.0: Input should be"),
        (b'{"problem_id": "multi_turn_base_999", "turns": [[]]}', "there is no problem 'multi_turn_base_999'"),
        (b'{"problem_id": "multi_turn_base_0", "turns": [[], [], [], [], []]}', "5 turns for a problem of 4 requests"),
        (b'{"problem_id": "multi_turn_base_0", "turns": [[{"name": "cd", "arguments": {"folder": NaN}}]]}', "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"problem_id": "\xff"}', "not JSON in UTF-8"),
        (b'{"problem_id": 1' + b"0" * 5000 + b"}", "a number that is too long"),
    ],
)
def test_a_malformed_line_is_named_and_the_others_are_scored(text: bytes, reason: str) -> None:
    before, blank, broken, after = line_of(BASE[0], 1), b"\n", text, line_of(BASE[1], 1)

    found = scores([before, blank, broken, after])

    assert [item.get("valid") for item in found] == [True, None, True]
    assert set(found[1]) == {"error"}
    assert found[1]["error"].startswith("line 3: ") and reason in found[1]["error"]


def test_a_world_that_reads_closing_messages_finds_them_in_answers() -> None:
    quote = next(problem for problem in travel_problems(40) if problem.category == "quote/none")
    world, find = TravelDesk(), {quote.id: quote}.get
    answer = quote.reference[0].answer

    right, silent, rest, empty = score_lines(
        world,
        [line_of(quote, answers=[answer]), line_of(quote)]
        + [line_of(quote, answers=given) for given in (["It costs 10 EUR."], [])],
        find,
    )

    assert (right["valid"], right["error_type"]) == (True, None)
    assert json.loads(right["responses"][0][-1])["status"] == "ok"
    assert (silent["valid"], silent["error_type"]) == (rest["valid"], rest["error_type"]) == (False, "response")
    assert "answers" in silent["note"] and not any("note" in item for item in (right, rest, empty))


def test_a_file_of_which_no_line_can_be_scored_is_told_once_with_its_format() -> None:
    """Of 80 lines three are told. One that can be scored makes each a result of its own."""
    wrong = [{"error": f"line {number}: problem_id: Field required"} for number in range(1, 81)]
    with pytest.raises(ValueError, match=r"calls\.jsonl: .*line 3: .*and 77 more.*README\.md") as refused:
        refuse_unscored(iter(wrong), "calls.jsonl")
    assert "line 4" not in str(refused.value) and "\n" not in str(refused.value)
    page, title = FORMAT.split(", ")
    assert f"\n## {title}\n" in (ROOT / page).read_text(encoding="utf-8")
    mixed = [*wrong[:2], {"problem_id": "p"}, *wrong[2:]]
    assert list(refuse_unscored(iter(mixed), "calls.jsonl")) == mixed
    assert list(refuse_unscored(iter([]), "calls.jsonl")) == []


def test_hostile_names_and_keys_are_ordinary_replies() -> None:
    turns = [[
        {"name": "__import__('os').system('touch hacked')", "arguments": {}},
        {"name": "_load_scenario", "arguments": {"scenario": {}}},
        {"name": "cd", "arguments": {"folder=__import__('os').system('touch hacked'), x": 1}},
        {"name": "cd", "arguments": {"self": 1, "\ud800": "\ud800"}},
    ]]  # fmt: skip
    (found,) = scores([json.dumps({"problem_id": "multi_turn_base_0", "turns": turns}).encode()])
    first, second, third, fourth = found["responses"][0]
    assert json.loads(first)["error"]["type"] == json.loads(second)["error"]["type"] == "unknown_tool"
    assert "unexpected keyword argument" in third and third.startswith("Error during execution: ")
    assert fourth.startswith("Error during execution: ")
    assert not Path("hacked").exists()


@pytest.mark.slow
def test_the_command_reads_a_file_or_standard_input_and_its_status_tells_of_malformed_lines(project: Path) -> None:
    (project / "calls.jsonl").write_bytes(b"\n".join([line_of(BASE[0], 1), b"oops", line_of(BASE[1])]))

    mixed = command("--environment", "bfcl", "--calls", "calls.jsonl")
    fine = command("--environment", "bfcl", "--calls", "-", stdin=line_of(BASE[2]))

    assert mixed.returncode == 1 and mixed.stderr == b""
    assert [next(iter(json.loads(line))) for line in mixed.stdout.splitlines()] == ["problem_id", "error", "problem_id"]
    assert fine.returncode == 0
    assert json.loads(fine.stdout)["valid"] is True


@pytest.mark.slow
def test_the_command_finds_the_problems_that_curate_would_read(project: Path) -> None:
    desk = list(TravelDesk().generate(seed=7, num_problems=5, max_level=1))
    seed = next(line for line in (project / "params.yaml").read_text().splitlines() if line.startswith("seed:"))
    (project / "params.yaml").write_text((project / "params.yaml").read_text().replace(seed, "seed: 7"))

    found = command(
        "--environment", "travel_desk", "--calls", "-", stdin=line_of(desk[3], answers=[desk[3].reference[0].answer])
    )

    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["valid"] is True


@pytest.mark.slow
def test_an_unknown_world_and_a_missing_file_are_one_line(project: Path) -> None:
    for arguments, message in [
        (("--environment", "nowhere", "--calls", "-"), b"no folder 'nowhere' in tasks/environments/"),
        (("--environment", "bfcl", "--calls", "none.jsonl"), b"none.jsonl: is no file"),
    ]:
        refused = command(*arguments)
        assert refused.returncode == 1 and message in refused.stderr and refused.stderr.count(b"\n") == 1
