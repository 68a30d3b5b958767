"""Curation row by row: duplicates, replays, expert episodes, and what a file of problems may hold."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tasks.core.files import read_jsonl
from tasks.core.records import Demonstration, Problem, ReferenceTurn, ToolCall
from tasks.core.settings import Paths, load, read_params
from tasks.core.tool_calls import call_text
from tasks.drift.leaks import MOST_PROBLEMS
from tasks.stages.curate.demonstrations import expert_episodes, replay_demonstrations
from tasks.stages.curate.references import Replay, Replays, Row, first_of_each, problem_table, replay_references
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.sources import read_problems
from tasks.stages.curate.splitting import SPLITS
from tasks.stages.curate.stage import curate, run, warn_of_undemonstrated
from tasks.tools.authoring import tool
from tasks.tools.base import Tool, Verdict
from tests.conftest import ROOT
from tests.sums import SumEpisode, Sums, SumsWithExpert, curate_settings, many, problem, worlds, write_rows
from tests.worlds import add_environment, cache_settings, environment_settings

__all__ = ["worlds"]


def test_the_same_content_under_another_id_is_a_duplicate_and_the_first_stays() -> None:
    same, other = problem("a"), problem("c", marker=1)
    rows = [Row(i, "", p, Replay(1, "", "")) for i, p in enumerate([same, problem("b"), other, problem("d", marker=1)])]
    assert [kept.problem.id for kept in first_of_each(rows)] == ["a", "c"]


def test_a_reference_that_reaches_the_target_scores_1() -> None:
    assert replay_references(Replays(Sums()), [problem(target=4)]) == [Replay(1, "", "")]


def test_a_reference_that_misses_says_which_check_failed() -> None:
    turn = ReferenceTurn(calls=[ToolCall(name="add", arguments={"amount": 2})], answer="3")
    missed = problem(reference=[turn.model_dump()])
    assert replay_references(Replays(Sums()), [missed]) == [Replay(0, "", "failed checks: total")]


def test_a_call_the_world_turns_down_is_kept_word_for_word() -> None:
    turn = {"calls": [{"name": "add", "arguments": {"amount": -1}}, {"name": "add", "arguments": {"amount": 3}}]}
    (replay,) = replay_references(Replays(Sums()), [problem(reference=[{**turn, "answer": "3"}])])
    assert replay.score == 1
    assert '"amount": -1' in replay.invalid_call


def test_a_world_that_trips_over_a_row_makes_the_row_score_0_and_does_not_stop_the_program() -> None:
    assert replay_references(Replays(Sums()), [problem(world={})]) == [Replay(0, "", "KeyError: 'target'")]


# ---- demonstrations


def test_expert_episodes_cycle_over_the_problems_until_there_are_enough() -> None:
    episodes = expert_episodes(Replays(SumsWithExpert()), [problem("a"), problem("b")], num=5, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "b", "a", "b", "a"]


def test_each_cycle_draws_anew_and_the_same_seed_draws_the_same() -> None:
    def texts(seed: int) -> list[int]:
        episodes = expert_episodes(Replays(SumsWithExpert()), [problem("a")], num=20, seed=seed)
        return [len(demonstration.assistant_texts) for _, demonstration in episodes]

    assert set(texts(0)) == {2, 4}  # one call of 3 or three calls of 1, and the answer
    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def test_a_random_stream_is_made_for_the_episodes_that_are_played_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes 2.6 kB, and there may be a hundred thousand rows of level 3."""
    streams = list[str]()

    def stream(name: str) -> random.Random:
        streams.append(name)
        return random.SystemRandom()

    monkeypatch.setattr(random, "Random", stream)
    problems = [problem(f"p{number}", level=3) for number in range(50)]
    assert len(expert_episodes(Replays(SumsWithExpert()), problems, num=4, seed=7)) == 4
    assert streams == [f"7/curate/0/{place}" for place in range(4)]


def test_problems_the_expert_refuses_are_passed_over_and_with_no_other_there_are_none() -> None:
    easy, hard = problem("a"), problem("b", category="hard")
    episodes = expert_episodes(Replays(SumsWithExpert()), [hard, easy], num=3, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "a", "a"]
    assert expert_episodes(Replays(SumsWithExpert()), [hard], num=3, seed=0) == []


def test_few_demonstrations_are_spread_over_the_categories() -> None:
    problems = [problem(f"a{i}", category="a") for i in range(10)] + [problem("b0", category="b")]
    episodes = expert_episodes(Replays(SumsWithExpert()), problems, num=3, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a0", "b0", "a1"]


def test_a_world_without_an_expert_replays_references_that_have_no_error_and_one_request() -> None:
    bad_call = {"calls": [{"name": "add", "arguments": {"amount": 0}}], "answer": "3"}
    two_turns = problem("c", requests=["Make 3.", "And 4."])
    problems = [problem("a"), problem("b", reference=[bad_call]), two_turns]
    episodes = expert_episodes(Replays(Sums()), problems, num=2, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "a"]
    call = '<tool_call>\n{"name": "add", "arguments": {"amount": 3}}\n</tool_call>'
    assert episodes[0][1].assistant_texts == [call, "3"]
    assert episodes[0][1].replies == [["total 3"], []]


def test_a_world_that_trips_while_demonstrating_is_one_line_that_names_the_problem() -> None:
    with pytest.raises(ValueError, match=r"problem 'a': the environment cannot demonstrate it \(KeyError: 'target'\)"):
        expert_episodes(Replays(SumsWithExpert()), [problem("a", world={})], num=1, seed=0)


def test_a_demonstration_must_get_the_recorded_replies_make_valid_calls_and_end_in_success() -> None:
    def fault(texts: list[str], replies: list[list[str]]) -> str:
        demonstration = Demonstration(problem_id="p", request="", assistant_texts=texts, replies=replies)
        return replay_demonstrations(Replays(Sums()), [(problem(target=3), demonstration)])[0]

    refusal = '{"error": {"type": "invalid_arguments", "message": "amount: 0 is less than the minimum of 1"}}'
    add_3, add_0 = (call_text(ToolCall(name="add", arguments={"amount": amount})) for amount in (3, 0))
    assert fault([add_3, "3"], [["total 3"], []]) == ""
    assert fault([add_3, "3"], [["total 4"], []]).endswith("replies differ from the recorded ones")
    assert fault([add_0, "3"], [[refusal], []]).endswith("an invalid call")
    assert fault(["no call", "3"], [[], []]).endswith("an invalid call")
    assert fault([add_3, "4"], [["total 3"], []]) == "the episode does not end in success"
    assert fault([add_3, add_3], [["total 3"], []]).endswith("a call as the closing message, which nothing answers")


def test_a_generated_problem_whose_answer_is_a_call_is_refused_with_its_row() -> None:
    class Careless(SumsWithExpert):
        def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
            yield problem("fine")
            yield problem("p1", reference=[{"calls": [], "answer": "<tool_call>{}</tool_call>"}])

    with pytest.raises(ValueError, match=r"row 2 \(p1\): reference.0.answer contains a tool call.* Correct generate"):
        read_problems(curate_settings("sums_with_expert"), Careless())


@pytest.mark.slow
def test_a_solution_is_played_once_however_often_it_is_shown(
    worlds: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 rows, 300 demonstrations, four problems tried for leaks, two probes played twice."""
    played: list[str] = []

    class Counted(Sums):
        def start(self, problem: Problem, *, stream: str = "") -> Any:
            played.append(problem.id)
            return super().start(problem, stream=stream)

    settings = curate_settings("sums", source=write_rows(tmp_path / "rows.jsonl", many(40)), num_demonstrations=300)
    curate(settings, Paths(tmp_path), Counted())
    assert len(list(read_jsonl(tmp_path / "curate" / "demonstrations.jsonl"))) == 300
    num_shown = len({row["problem_id"] for _, row in read_jsonl(tmp_path / "curate" / "demonstrations.jsonl")})
    assert num_shown <= 40 and f"300 demonstrations of {num_shown} problems; " in capsys.readouterr().out
    assert set(Counter(played).values()) <= {1, 5}  # each reference, and four plays of what was tried for leaks
    assert len(played) <= 40 + 4 * MOST_PROBLEMS


def test_plays_that_take_long_say_how_long_beforehand_and_show_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [problem(f"{n}", marker=n) for n in range(18)]
    replay_references(Replays(Sums()), problems)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("tasks.stages.curate.references.WORTH_TELLING_SECONDS", 0.0)
    replay_references(Replays(Sums()), problems)
    said = capsys.readouterr()
    assert "2 more reference solutions to play, which takes about 1 s" in said.out
    assert "18/18" in said.err


# ---- leaks


class LeakyEpisode(SumEpisode):
    """Its total is everybody's."""

    shared: ClassVar[list[int]] = []

    @tool("Add an amount.")
    def add(self, amount: int) -> str:
        self.shared.append(amount)
        return "added"

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(self.target in self.shared)


class Leaky(Sums):
    name = "leaky"
    episode_class = LeakyEpisode


@pytest.mark.parametrize("mode", ["off", "record", "replay"])
def test_a_world_that_leaks_is_refused_and_nothing_is_curated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """A cache that would answer for the world is not asked."""
    add_environment(monkeypatch, "leaky", Leaky)
    monkeypatch.setattr(LeakyEpisode, "shared", [])
    settings = curate_settings("sums", source=write_rows(tmp_path / "rows.jsonl", many(40)))
    cache = cache_settings(mode, tmp_path / "cache")
    environment = environment_settings("leaky", cache=cache)
    with pytest.raises(ValueError, match=r"environment\.settings\.reset") as refusal:
        run(settings.model_copy(update={"environment": environment}), Paths(tmp_path))
    assert "doing nothing ends in False, and the second time in True" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "curate").exists()


# ---- reading


def read_error(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_problems(curate_settings(source=str(tmp_path / "mine.jsonl")), Sums())
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path) + "/", "")


GOOD = json.dumps(problem().model_dump())


def changed(**values: Any) -> str:
    return json.dumps({**problem().model_dump(), **values})


def test_rows_of_a_file_are_known_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(f"{GOOD}\n\n{changed(id='q')}\n")
    found = read_problems(curate_settings(source=str(tmp_path / "mine.jsonl")), Sums())
    assert [(where, problem.id) for where, problem in found] == [("line 1", "p"), ("line 3", "q")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (changed(level=0), "level: Input should be greater than or equal to 1"),
        (changed(level=10**9), "level: Input should be less than or equal to 100"),
        (changed(level="1"), "level: Input should be a valid integer"),
        (changed(level=True), "level: Input should be a valid integer"),
        (changed(id=""), "id: String should have at least 1 character"),
        (changed(requests=[]), "requests: List should have at least 1 item"),
        (changed(extra=1), "extra: Extra inputs are not permitted"),
        (
            changed(reference=[{"calls": [{"name": "add"}], "answer": ""}]),
            "reference.0.calls.0.arguments: Field required",
        ),
        (
            changed(reference=[{"calls": [], "answer": call_text(ToolCall(name="add", arguments={"amount": 3}))}]),
            "reference.0.answer contains a tool call, which is not played and would be taught",
        ),
        (changed(reference=[{"calls": [], "answer": "<tool_call> add 3"}]), "reference.0.answer contains a tool call"),
        (changed(world={"x": float("nan")}), "NaN, Infinity"),
        (changed(category="\ud800"), "category: Input should be a valid string"),
        (changed(world={"x": "\ud800"}), "half a surrogate pair"),
        ("{}", "id: Field required"),
        (GOOD[:-1] + ', "level": 2}', "the key 'level' is there twice"),
        (changed().replace('{"target": 3', '{"target": 4, "target": 3'), "the key 'target' is there twice"),
        ("[]", "expected one JSON object"),
        ('{"world": ' + '{"a":' * 490 + "1" + "}" * 491, "nested deeper than 80 levels"),
        ('{"id": 1' + "0" * 5000 + "}", "a number that no file can hold"),
        ('{"id": 1e999}', "a number that no file can hold"),
        ('{"id": "p"', "not valid JSON"),
    ],
)
def test_a_malformed_row_is_named_by_its_line_with_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    text = read_error(tmp_path, f"{GOOD}\n{line}\n")
    assert text.startswith("mine.jsonl, line 2: ")
    assert said in text
    assert "Correct or remove it" in text


def test_a_byte_order_mark_before_the_first_row_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(f"{GOOD}\n", encoding="utf-8-sig")
    found = read_problems(curate_settings(source=str(tmp_path / "mine.jsonl")), Sums())
    assert [(where, problem.id) for where, problem in found] == [("line 1", "p")]


def test_several_malformed_rows_are_counted_in_the_same_line(tmp_path: Path) -> None:
    text = read_error(tmp_path, f"{changed(level=0)}\n{GOOD}\n{{}}\n{{}}\n")
    assert "line 1: not a valid problem (so are 2 more, from line 3 on): level:" in text


@pytest.mark.parametrize("array", [f"[{GOOD}]", "\ufeff\n [\n {\n"])
def test_an_array_of_problems_is_to_be_one_object_per_line(tmp_path: Path, array: str) -> None:
    assert "mine.jsonl: a JSON array" in read_error(tmp_path, array)
    assert "one object per line, not an array" in read_error(tmp_path, array)


def test_an_empty_file_a_missing_file_and_a_misspelt_source_each_say_what_to_do(tmp_path: Path) -> None:
    assert "contains no problem" in read_error(tmp_path, "\n\n")
    for source in (tmp_path / "missing.jsonl", tmp_path, "generatd"):
        with pytest.raises(
            ValueError, match=r"is no file.*Give the path of a JSONL file, or tasks/environments/<name>"
        ):
            read_problems(curate_settings(source=str(source)), Sums())


def test_the_file_of_another_world_asks_for_this_worlds_own(tmp_path: Path) -> None:
    """Who changes environment.name alone."""
    with pytest.raises(ValueError, match=r"Set curate.source to tasks/environments/sums") as error:
        read_problems(curate_settings(source="tasks/environments/travel_desk"), Sums())
    assert "environment.name is sums" in str(error.value)


def test_a_world_that_writes_no_problems_asks_for_a_file() -> None:
    with pytest.raises(ValueError, match=r"'sums' generates no problems. Set curate.source"):
        read_problems(curate_settings("sums"), Sums())


def test_a_world_without_published_halves_cannot_be_split_as_published(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"but the problems of .* have no published halves. Set curate\.split to groups"
    ):
        run(curate_settings(split="published"), Paths(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_reference_names_tools_that_are_shown_for_its_request_or_that_a_later_request_brings() -> None:
    class Shown(Sums):
        """Shows nothing for a problem with a marker, as one does that holds its tools out."""

        def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
            return () if problem.world["marker"] else self.tools

    def unknown(problem: Problem) -> str:
        rows = [Row(0, "line 1", problem, Replay(1, "", ""))]
        (line,) = problem_table(Shown(), rows, {name: [] for name in SPLITS}, apart=SPLITS)
        return str(line["unknown_tools"])

    call = {"calls": [{"name": "add", "arguments": {"amount": 3}}], "answer": "3"}
    assert unknown(problem()) == ""
    assert unknown(problem(marker=1)) == "add"  # the world has it, and this problem does not
    later = problem(marker=1, requests=["Hello.", "Make 3."], reference=[{"calls": [], "answer": "Hi."}, call])
    assert unknown(later) == ""
    assert unknown(problem(world={})) == ""  # the world trips over the row, which its replay tells
    teleport = {"calls": [{"name": "teleport", "arguments": {}}], "answer": "3"}
    assert unknown(problem(requests=["Hello.", "Go."], reference=[call, teleport])) == "teleport"


def test_the_params_of_the_repository_are_valid_and_a_misspelt_one_names_the_nearest() -> None:
    params = read_params(ROOT / "params.yaml")
    assert load(CurateSections, params).curate.num_generated == 8800
    with pytest.raises(ValueError, match=r"curate.train_shar is not a setting.*Did you mean train_share"):
        load(CurateSections, {**params, "curate": {**params["curate"], "train_shar": 0.5}})
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"curate.train_share = "):
            load(CurateSections, {**params, "curate": {**params["curate"], "train_share": share}})


@pytest.mark.slow
def test_importing_the_stage_loads_nothing_heavy() -> None:
    code = "import sys, tasks.stages.curate.stage;"
    code += "print({'great_expectations', 'pandas', 'torch', 'jinja2'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


class BrokenEpisode(SumEpisode):
    @tool("Add an amount.", idempotent=True)
    def add(self, amount: int) -> str:
        return str(amount // 0)


class Broken(Sums):
    name, episode_class = "broken", BrokenEpisode


def test_a_tool_that_crashes_in_each_of_the_first_references_ends_curation_at_its_line() -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "amount // 0" in text)
    problems = [problem(f"p{number}", target=number + 1) for number in range(9)]
    with pytest.raises(ValueError, match=rf"the tool add crashed .*test_curate\.py:{line} \(ZeroDivisionError: "):
        replay_references(Replays(Broken()), problems)
    assert [replay.score for replay in replay_references(Replays(Broken()), problems[:7])] == [0] * 7


class Unstartable(Sums):
    def make_episode(self, problem: Problem) -> SumEpisode:
        raise KeyError("no such shelf")


class NumberEpisode(SumEpisode):
    def verdict(self, final_message: str | None) -> Any:
        return 1


class Numbered(Sums):
    episode_class = NumberEpisode


def test_an_environment_that_crashes_in_each_of_the_first_references_is_blamed_and_no_row() -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if 'raise KeyError("no' in text)
    problems = [problem(f"p{number}", target=number + 1) for number in range(9)]
    with pytest.raises(ValueError, match=rf"the environment crashed .*test_curate\.py:{line} \(KeyError: 'no such"):
        replay_references(Replays(Unstartable()), problems)
    with pytest.raises(ValueError, match=r"TypeError: NumberEpisode.verdict returned int, not a Verdict"):
        replay_references(Replays(Numbered()), problems)


def test_a_category_that_no_reference_demonstrates_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    shown, hard = problem("a"), problem("b", category="hard")
    warn_of_undemonstrated(Replays(Sums()), [shown, hard, hard], [shown])
    told = capsys.readouterr().err
    assert (
        "no demonstration of hard (2 problems of train), so the warm start never sees it: a reference is shown" in told
    )
    warn_of_undemonstrated(Replays(Sums()), [shown, hard], [shown, hard])
    assert capsys.readouterr().err == ""
