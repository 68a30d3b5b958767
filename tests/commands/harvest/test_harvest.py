"""Recorded conversations as problems: what is taken, what is left out and why, and who says that one succeeded."""

from __future__ import annotations

import json
import unicodedata
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.harvest import labels
from tasks.commands.harvest.conversations import read_conversations
from tasks.commands.harvest.harvest import harvest, plain
from tasks.core.files import read_records, write_jsonl
from tasks.core.records import Problem
from tasks.core.settings import load, load_paths
from tasks.environments.catalog import load_bare_environment
from tasks.stages.curate.references import Replays
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.splitting import other_test_sets, split_and_cap
from tasks.stages.curate.stage import read_rows
from tasks.tools.judge.prompt import Judged
from tests.commands.harvest.conftest import CALL, counts, row, says
from tests.profiles import profile_params

CHECKER = '''"""A checker."""

def check(conversation):
    asked = conversation["messages"][0]["content"]
    if "tea" in asked:
        return {"success": True, "category": "shop", "level": 2, "world": {"tea": 3}}
    return {"maybe": None, "bad": False}.get(asked.split()[0], True)
'''


def test_what_succeeded_becomes_a_problem_and_every_other_says_why_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    namespace: dict[str, Any] = {}
    exec(CHECKER, namespace)
    monkeypatch.setattr(labels, "load_object", lambda path: namespace["check"])
    out = Path("tasks/custom/served.jsonl")

    found = counts(harvest(folder, out, checker="tasks.custom.shop:check"), capsys)

    assert found == {
        "taken": 2,
        "left out: another conversation asks the same": 1,
        "left out: a call was redacted": 1,
        "left out: a request was redacted": 1,
        "left out: an answer was cut off by max_tokens": 2,
        "left out: an answer was redacted": 1,
        "left out: it failed, so it shows no solution": 1,
        "left out: it has no closing message": 1,
        "left out: it is in test": 3,
        "left out: it is in train": 1,
        "left out: its row cannot be read": 1,
        "left out: nobody can say whether it succeeded": 1,
        "left out: some of its rows are missing": 1,
    }
    tea, hello = read_records(out, Problem)
    assert (tea.id, tea.category, tea.level, tea.world) == (f"served-{'a' * 24}", "shop", 2, {"tea": 3})
    assert tea.requests == ["is there tea?", "and sugar?"]
    assert [(len(turn.calls), turn.answer) for turn in tea.reference] == [(1, "Three."), (0, "None.")]
    assert (hello.requests, hello.world, hello.reference[0].calls) == (["hello"], {}, [])
    assert tea.split_group != hello.split_group

    before = out.read_bytes()  # a second time takes nothing, and loses nothing, though one conversation went on
    with (folder / "conversations.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row(1, says("bye"), "Bye.", name="b")) + "\n")
    again = counts(harvest(folder, out, checker="tasks.custom.shop:check"), capsys)
    assert again["taken"] == 0 and again["left out: it was harvested before"] == 3
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("asked", "typed"),
    [
        ("Wie komme ich nach Zürich?", unicodedata.normalize("NFD", "Wie komme ich nach  ZÜRICH?")),
        ('What\'s the fare to "Rome"?', "What’s the fare to “Rome”?"),
        ("'Rome' 1990-95, 5 o'clock...", "‘Rome’ 1990–95, 5 o´clock…"),
        ("an overnight train", "an over\u00adnight\u00a0train\u200b"),
        ("a seat for ﬁve in Ⅳ", "a seat for five in iv"),
    ],
)
def test_a_request_of_test_is_known_however_it_was_typed(asked: str, typed: str):
    assert plain(asked) == plain(typed)


@pytest.mark.parametrize(("one", "other"), [("Zürich", "Zurich"), ("from 4 to 5", "from 45"), ("a-b", "a b")])
def test_other_words_are_another_request(one: str, other: str):
    assert plain(one) != plain(other)


def test_what_another_adds_to_the_file_while_a_judge_is_asked_stays_and_is_not_taken_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The first has `tea` and `coffee` to label; until it is done, another takes `coffee` and `milk`."""
    out = Path("tasks/custom/served.jsonl")
    for place, asked in (("first", {"1": "tea", "2": "coffee"}), ("second", {"3": "coffee", "4": "milk"})):
        rows = [row(0, says(request), "Done.", name=name) for name, request in asked.items()]
        write_jsonl(Path(place) / "conversations.jsonl", rows)

    def check(conversation: dict[str, Any]) -> bool:
        if not out.exists():
            monkeypatch.setattr(labels, "load_object", lambda path: lambda conversation: True)
            assert counts(harvest(Path("second"), out, checker="tasks.custom.shop:check"), capsys)["taken"] == 2
        return True

    monkeypatch.setattr(labels, "load_object", lambda path: check)
    found = counts(harvest(Path("first"), out, checker="tasks.custom.shop:check"), capsys)

    assert found == {"taken": 1, "left out: it was harvested before": 1}
    assert [problem.requests for problem in read_records(out, Problem)] == [["coffee"], ["milk"], ["tea"]]
    assert [item.name for item in out.parent.iterdir()] == [out.name]


def test_a_judge_reads_calls_and_what_the_user_said_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    judged: list[Judged] = []

    class Yes:
        success = True

    def judge_all(settings: Any, episodes: list[Judged]) -> list[Any]:
        judged.extend(episodes)
        return [Yes() for _ in episodes]

    monkeypatch.setattr(labels, "judge_all", judge_all)
    with pytest.raises(ValueError, match=r"environment.judge is null.*--checker"):
        harvest(folder, Path("out.jsonl"))
    assert not Path("out.jsonl").exists()

    params = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    params["environment"]["judge"] = yaml.safe_load(JUDGE)
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    assert counts(harvest(folder, Path("out.jsonl")), capsys)["taken"] == 5
    assert judged[0].to_row() == {
        "requests": ["is there tea?", "and sugar?"],
        "events": [
            {"tool": "stock", "arguments": {"item": "tea"}, "reply": "3"},
            {"message": "Three.", "user": "and sugar?"},
        ],
        "final_message": "None.",
    }
    tea = next(read_records(Path("out.jsonl"), Problem))
    assert tea.world == {} and not any(turn.calls for turn in tea.reference)  # there is no world to replay them in

    params["environment"]["judge"]["agreement"] = yaml.safe_load(AGREEMENT)  # asked for, and never measured
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    with pytest.raises(ValueError, match=r"evidence.json does not exist.*judge-check"):
        harvest(folder, Path("other.jsonl"))


JUDGE = """
{url: "http://127.0.0.1:9/v1", model: judge, api_key_variable: null, decides: true, show_reference: false,
 rubric: tasks/tools/judge/rubric.md, structured: true, num_votes: 1, temperature: 0.0, seed: 0,
 max_output_tokens: 200, max_characters: 4000, max_attempts: 1, max_retries: 0, max_concurrent_requests: 1,
 timeout_seconds: 1.0, cache_folder: artifacts/judge, agreement: null}
"""
AGREEMENT = """
{labels: tasks/custom/labels.jsonl, evidence: tasks/custom/evidence.json, confidence: 0.95, min_agreement: 0.8,
 min_kappa: 0.6}
"""


def test_curate_takes_what_was_harvested_and_what_it_put_into_test_is_never_harvested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(labels, "load_object", lambda path: lambda conversation: True)
    params = profile_params("demo")
    params["environment"] |= {"name": "agent", "settings": yaml.safe_load(AGENT)}
    params["curate"] |= {"source": "served.jsonl", "num_demonstrations": 0, "sharded": None}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    asked = [f"what does article {number} cost?" for number in range(40)]

    def serve_all(name: str) -> None:
        given = [row(0, says(text), "It costs 4.", name="a") for text in asked]
        named = [one | {"conversation": f"{name}{number:023x}"} for number, one in enumerate(given)]
        write_jsonl(Path("served/conversations.jsonl"), named)

    serve_all("a")
    assert counts(harvest(Path("served"), Path("served.jsonl"), checker="x"), capsys)["taken"] == 40
    settings = load(CurateSections, params)
    with closing(load_bare_environment(settings.environment)) as environment:
        rows = read_rows(settings, Replays(environment))
    assert len(rows) == 40 and all(row.replay.score == 1 for row in rows)  # each reference solves its problem
    splits = split_and_cap(rows, settings.curate)
    for name, found in splits.items():
        write_jsonl(load_paths(params).split(name), (row.problem.model_dump() for row in found))

    serve_all("b")
    capsys.readouterr()
    again = counts(harvest(Path("served"), Path("other.jsonl"), checker="x"), capsys)
    in_tests = [*splits["test"], *chain(*other_test_sets(rows, settings.curate))]
    assert again["left out: it is in test"] == len(in_tests) > len(splits["test"]) > 0
    assert again["left out: it is in train"] == len(splits["train"]) > 0 == again["taken"]


AGENT = """
{command: [python3, agent.py], object: null, environment: {}, models: [policy], deadline_seconds: 60.0, world: null,
 verdict: {by: result, checker: null, url: null, timeout_seconds: 60.0}}
"""


@pytest.mark.parametrize("ids", [("call_1", "call_1"), ("x", "y")])
def test_a_call_has_its_own_reply_though_ids_come_again_or_are_the_clients(ids: tuple[str, str], tmp_path: Path):
    def reply(id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": text}

    other = CALL | {"id": "call_2"}
    rows = [
        row(0, says("tea?"), "", name="a", calls=[CALL], finish="tool_calls"),
        row(1, [reply(ids[0], "3")], "", name="a", calls=[CALL], finish="tool_calls"),
        row(2, [reply(ids[1], "2")], "", name="a", calls=[CALL, other], finish="tool_calls"),
        row(3, [reply("call_2", "0"), reply("call_1", "1")], "", name="a", calls=[CALL, other], finish="tool_calls"),
        row(4, [reply("call_2", "5")], "None.", name="a"),
    ]
    write_jsonl(tmp_path / "conversations.jsonl", rows)
    (conversation,) = read_conversations(tmp_path).conversations
    ((_, calls, _),) = conversation.turns
    assert [text for _, text in calls] == ["3", "2", "1", "0", "", "5"]


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("step", ["open", "glob"])
def test_a_file_that_gets_its_number_while_harvest_reads_is_read_once(
    step: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    current = tmp_path / "conversations.jsonl"
    write_jsonl(tmp_path / "conversations-000001.jsonl", [row(0, says("tea?"), "Yes.", name="a")])
    write_jsonl(current, [row(1, says("milk?"), "No.", name="a"), row(0, says("hello"), "Hello.", name="b")])
    meant = getattr(Path, step)

    def rotate_first(path: Path, *given: Any) -> Any:
        """`step` looks, and the server gives the file a number before what it found is used."""
        found = meant(path, *given)
        found = list(found) if step == "glob" else found
        if not (tmp_path / "conversations-000002.jsonl").exists():
            current.rename(tmp_path / "conversations-000002.jsonl")
            if goes_on:
                write_jsonl(current, [row(0, says("later"), "Hello.", name="c")])
        return found

    monkeypatch.setattr(Path, step, rotate_first)
    found = read_conversations(tmp_path)
    assert [one.requests for one in found.conversations][:2] == [["tea?", "milk?"], ["hello"]]
    assert found.num_unreadable == 0 and all(one.fault is None for one in found.conversations)


def test_a_folder_without_conversations_says_how_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(profile_params("demo")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"nothing to harvest.*serve SOURCE --record"):
        harvest(tmp_path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
