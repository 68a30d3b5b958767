"""Curation: rows are checked one by one, what shares a split group stays together, and only whole results appear.

A small world of sums stands in for a real one: `add(amount)` until the total is the target, then say the total.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from tasks.curate import (
    CurateOptions,
    CurateSettings,
    expert_episodes,
    first_of_each,
    read_problems,
    run,
)
from tasks.demonstrations import replay_demonstrations
from tasks.environments import catalog
from tasks.environments.base import Census, Tool, Verdict, wait
from tasks.environments.tools import call_text
from tasks.environments.world import ToolEpisode, World, tool
from tasks.records import Demonstration, Problem, ReferenceTurn, ToolCall
from tasks.references import Replay, Row, problem_table, replay_references
from tasks.settings import Paths, load, read_params
from tasks.splitting import SPLITS
from tasks.validation import Check, CheckResult, checks, raise_on_failure, render_page, validate
from tests.worlds import environment_settings

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "<script>alert(1)</script>"


class SumEpisode(ToolEpisode):
    """Adds up; an amount that is no integer above 0 is an invalid call."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.target, self.total = problem.world["target"], 0

    @tool("Add an amount.")
    def add(self, amount: Annotated[int, Field(ge=1)]) -> str:
        self.total += amount
        return f"total {self.total}"

    def verdict(self, final_message: str | None) -> Verdict:
        checks = {"total": self.total == self.target, "answer": final_message == str(self.target)}
        return Verdict(all(checks.values()), checks)


class Sums(World):
    """A world without a generator or an expert."""

    name = "sums"
    episode_class = SumEpisode


class SumsWithExpert(Sums):
    """Its expert adds 1 at a time and, by chance, greets or not; it refuses problems marked as hard."""

    name = "sums_with_expert"

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        for index in range(num_problems):
            yield problem(f"s-{seed}-{index}", target=1 + index % 5, group=f"g{index // 2}", marker=index)

    def demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        if problem.category == "hard":
            return None
        target = problem.world["target"]
        parts = [1] * target if rng.random() < 0.5 else [target]
        episode = self.start(problem)
        replies = [[wait(episode.call("add", {"amount": part})).text] for part in parts]
        texts = [call_text(ToolCall(name="add", arguments={"amount": part})) for part in parts]
        return Demonstration(
            problem_id=problem.id,
            request=problem.requests[0],
            assistant_texts=[*texts, str(target)],
            replies=[*replies, []],
        )


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in (Sums, SumsWithExpert):
        monkeypatch.setitem(catalog.WORLDS, world.name, f"{__name__}:{world.__name__}")


def problem(
    id: str = "p", *, target: int = 3, category: str = "easy", group: str = "g", marker: int = 0, **changed: Any
) -> Problem:
    """Sum up to a target, solved by one call; `marker` makes the content differ."""
    row = {
        "id": id,
        "category": category,
        "level": 1,
        "requests": [f"Make {target}."],
        "world": {"target": target, "marker": marker},
        "reference": [{"calls": [{"name": "add", "arguments": {"amount": target}}], "answer": str(target)}],
        "split_group": group,
    }
    return Problem.model_validate({**row, **changed})


def many(num: int = 60, *, group_size: int = 2) -> list[dict[str, Any]]:
    """Rows of two categories in groups of two; the ids are p0, p1, …"""
    return [
        problem(
            f"p{i}", target=1 + i % 7, category=("easy", "plain")[i % 2], group=f"g{i // group_size}", marker=i
        ).model_dump()
        for i in range(num)
    ]


def options(**changed: Any) -> CurateOptions:
    values = {
        "source": "tasks/environments/travel_desk.py",
        "num_generated": 60,
        "max_level": 3,
        "split": "groups",
        "split_seed": 0,
        "train_share": 0.5,
        "max_select_problems": 10,
        "max_test_problems": 10,
        "test_rotation": 0,
        "num_demonstrations": 8,
        "num_probe_problems": 2,
    }
    return CurateOptions.model_validate({**values, **changed})


def suite_of(num_demonstrations: int) -> list[Check]:
    return checks(num_demonstrations=num_demonstrations, num_problems=None, apart=SPLITS)


def curate_settings(world: str = "sums_with_expert", **changed: Any) -> CurateSettings:
    changed = {"source": f"tasks/environments/{world}.py", **changed}
    environment = environment_settings(world)
    return CurateSettings(seed=7, environment=environment, curate=options(**changed))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- deduplication and replay


def test_the_same_content_under_another_id_is_a_duplicate_and_the_first_stays() -> None:
    same, other = problem("a"), problem("c", marker=1)
    rows = [Row(i, "", p, Replay(1, "", "")) for i, p in enumerate([same, problem("b"), other, problem("d", marker=1)])]
    assert [kept.problem.id for kept in first_of_each(rows)] == ["a", "c"]


def test_a_reference_that_reaches_the_target_scores_1() -> None:
    assert replay_references(Sums(), [problem(target=4)]) == [Replay(1, "", "")]


def test_a_reference_that_misses_says_which_check_failed() -> None:
    turn = ReferenceTurn(calls=[ToolCall(name="add", arguments={"amount": 2})], answer="3")
    missed = problem(reference=[turn.model_dump()])
    assert replay_references(Sums(), [missed]) == [Replay(0, "", "failed checks: total")]


def test_a_call_the_world_turns_down_is_kept_word_for_word() -> None:
    turn = {"calls": [{"name": "add", "arguments": {"amount": -1}}, {"name": "add", "arguments": {"amount": 3}}]}
    (replay,) = replay_references(Sums(), [problem(reference=[{**turn, "answer": "3"}])])
    assert replay.score == 1
    assert '"amount": -1' in replay.invalid_call


def test_a_world_that_trips_over_a_row_makes_the_row_score_0_and_does_not_stop_the_program() -> None:
    assert replay_references(Sums(), [problem(world={})]) == [Replay(0, "", "KeyError: 'target'")]


# ---- demonstrations


def test_expert_episodes_cycle_over_the_problems_until_there_are_enough() -> None:
    episodes = expert_episodes(SumsWithExpert(), [problem("a"), problem("b")], num=5, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "b", "a", "b", "a"]


def test_each_cycle_draws_anew_and_the_same_seed_draws_the_same() -> None:
    def texts(seed: int) -> list[int]:
        episodes = expert_episodes(SumsWithExpert(), [problem("a")], num=20, seed=seed)
        return [len(demonstration.assistant_texts) for _, demonstration in episodes]

    assert set(texts(0)) == {2, 4}  # one call of 3 or three calls of 1, and the answer
    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def test_problems_the_expert_refuses_are_passed_over_and_with_no_other_there_are_none() -> None:
    easy, hard = problem("a"), problem("b", category="hard")
    episodes = expert_episodes(SumsWithExpert(), [hard, easy], num=3, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "a", "a"]
    assert expert_episodes(SumsWithExpert(), [hard], num=3, seed=0) == []


def test_few_demonstrations_are_spread_over_the_categories() -> None:
    problems = [problem(f"a{i}", category="a") for i in range(10)] + [problem("b0", category="b")]
    episodes = expert_episodes(SumsWithExpert(), problems, num=3, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a0", "b0", "a1"]


def test_a_world_without_an_expert_replays_references_that_have_no_error_and_one_request() -> None:
    bad_call = {"calls": [{"name": "add", "arguments": {"amount": 0}}], "answer": "3"}
    two_turns = problem("c", requests=["Make 3.", "And 4."])
    problems = [problem("a"), problem("b", reference=[bad_call]), two_turns]
    episodes = expert_episodes(Sums(), problems, num=2, seed=0)
    assert [demonstration.problem_id for _, demonstration in episodes] == ["a", "a"]
    call = '<tool_call>\n{"name": "add", "arguments": {"amount": 3}}\n</tool_call>'
    assert episodes[0][1].assistant_texts == [call, "3"]
    assert episodes[0][1].replies == [["total 3"], []]


def test_a_world_that_trips_while_demonstrating_is_one_line_that_names_the_problem() -> None:
    with pytest.raises(ValueError, match=r"problem 'a': the environment cannot demonstrate it \(KeyError: 'target'\)"):
        expert_episodes(SumsWithExpert(), [problem("a", world={})], num=1, seed=0)


def test_a_demonstration_must_get_the_recorded_replies_make_valid_calls_and_end_in_success() -> None:
    def fault(texts: list[str], replies: list[list[str]]) -> str:
        demonstration = Demonstration(problem_id="p", request="", assistant_texts=texts, replies=replies)
        return replay_demonstrations(Sums(), [(problem(target=3), demonstration)])[0]

    refusal = '{"error": {"type": "invalid_arguments", "message": "amount: 0 is less than the minimum of 1"}}'
    add_3, add_0 = (call_text(ToolCall(name="add", arguments={"amount": amount})) for amount in (3, 0))
    assert fault([add_3, "3"], [["total 3"], []]) == ""
    assert fault([add_3, "3"], [["total 4"], []]).endswith("other replies than recorded")
    assert fault([add_0, "3"], [[refusal], []]).endswith("an invalid call")
    assert fault(["no call", "3"], [[], []]).endswith("an invalid call")
    assert fault([add_3, "4"], [["total 3"], []]) == "the episode does not end in success"


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
        (changed(level="1"), "level: Input should be a valid integer"),
        (changed(level=True), "level: Input should be a valid integer"),
        (changed(id=""), "id: String should have at least 1 character"),
        (changed(requests=[]), "requests: List should have at least 1 item"),
        (changed(extra=1), "extra: Extra inputs are not permitted"),
        (
            changed(reference=[{"calls": [{"name": "add"}], "answer": ""}]),
            "reference.0.calls.0.arguments: Field required",
        ),
        (changed(world={"x": float("nan")}), "NaN, Infinity"),
        (changed(category="\ud800"), "category: Input should be a valid string"),
        (changed(world={"x": "\ud800"}), "half a surrogate pair"),
        ("{}", "id: Field required"),
        ("[]", "expected one JSON object"),
        ('{"id": "p"', "not valid JSON"),
    ],
)
def test_a_malformed_row_is_named_by_its_line_with_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    text = read_error(tmp_path, f"{GOOD}\n{line}\n")
    assert text.startswith("mine.jsonl, line 2: ")
    assert said in text
    assert "Correct or remove it" in text


def test_several_malformed_rows_are_counted_in_the_same_line(tmp_path: Path) -> None:
    text = read_error(tmp_path, f"{changed(level=0)}\n{GOOD}\n{{}}\n{{}}\n")
    assert "line 1: not a valid problem (so are 2 more, from line 3 on): level:" in text


def test_an_empty_file_a_missing_file_and_a_misspelt_source_each_say_what_to_do(tmp_path: Path) -> None:
    assert "holds no problem" in read_error(tmp_path, "\n\n")
    for source in (tmp_path / "missing.jsonl", tmp_path, "generatd"):
        with pytest.raises(
            ValueError, match=r"is no file.*Give the path of a JSONL file, or tasks/environments/<world>.py"
        ):
            read_problems(curate_settings(source=str(source)), Sums())


def test_a_world_that_writes_no_problems_asks_for_a_file() -> None:
    with pytest.raises(ValueError, match=r"'sums' writes no problems of its own. Set curate.source"):
        read_problems(curate_settings("sums"), Sums())


def test_a_world_without_published_halves_cannot_be_split_as_published(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing was published on the problems of .*Set curate\.split to groups"):
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
    assert load(CurateSettings, params).curate.num_generated == 8800
    with pytest.raises(ValueError, match=r"curate.train_shar is not a setting.*Did you mean train_share"):
        load(CurateSettings, {**params, "curate": {**params["curate"], "train_shar": 0.5}})
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"curate.train_share = "):
            load(CurateSettings, {**params, "curate": {**params["curate"], "train_share": share}})


def test_importing_the_stage_loads_nothing_heavy() -> None:
    code = "import sys, tasks.curate; print({'great_expectations', 'pandas', 'torch', 'jinja2'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


# ---- failures in words, and the page


def result(name: str, success: bool, rows: list[str]) -> CheckResult:
    check = Check(name, "problems", "", {}, "It matters.", "Do this.")
    return CheckResult(check, success, f"{len(rows)} of 9 rows break it", rows)


def test_the_first_failed_expectation_is_told_in_one_line_and_the_others_are_counted(tmp_path: Path) -> None:
    failed = [
        result("a", True, []),
        result("b", False, [f"'p{i}' (line {i})" for i in range(5)]),
        result("c", False, []),
    ]
    with pytest.raises(ValueError) as caught:
        raise_on_failure(failed, source="mine.jsonl", page=Path("v/index.html"))
    assert str(caught.value) == (
        "mine.jsonl: the expectation 'b' failed: 'p0' (line 0), 'p1' (line 1), 'p2' (line 2) and 2 more. It matters. "
        "Do this. (1 later expectations failed too, perhaps for this reason.) "
        "Nothing was curated; all results: v/index.html."
    )
    raise_on_failure(failed[:1], source="", page=Path())


def test_the_page_shows_every_expectation_escapes_what_rows_hold_and_needs_no_network() -> None:
    page = render_page([result("ids are unique", True, []), result("tools exist", False, [SCRIPT] * 102)])
    assert "1 of 2 expectations hold" in page
    assert "ids are unique" in page
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;alert(1)") == 100
    assert "and 2 more" in page
    assert 'href="data_docs/index.html"' in page
    assert not any(word in page for word in ("http://", "https://", "<script", "src="))


def test_expectations_have_distinct_names_and_say_why_and_what_to_do() -> None:
    suite = suite_of(3)
    assert len({check.name for check in suite}) == len(suite) == 18
    assert all(check.why and check.remedy.endswith(".") for check in suite)


# ---- the whole stage, with Great Expectations


@pytest.mark.slow
def test_a_run_leaves_three_splits_demonstrations_a_card_and_a_page(tmp_path: Path) -> None:
    run(curate_settings(), Paths(tmp_path))
    out = tmp_path / "curate"
    assert sorted(path.name for path in out.iterdir()) == [
        *("card.html", "card.json", "demonstrations.jsonl", "environment.json"),
        *("select.jsonl", "test.jsonl", "train.jsonl"),
    ]
    card = json.loads((out / "card.json").read_text())
    # 30 groups of two at a share of 0.5: 15 train, 8 and 7 held out, capped to 10 problems each.
    assert card["num_problems"] == {"train": 30, "select": 10, "test": 10}
    assert card["by_category"]["test"] == {"easy": 10}
    assert (card["environment"], card["fingerprint"]) == ("sums_with_expert", SumsWithExpert().fingerprint())
    assert (card["num_duplicates_removed"], card["num_demonstrations"]) == (0, 8)
    assert len(card["expectations"]) == 18
    assert all(expectation["success"] for expectation in card["expectations"])
    for name, digest in card["hashes"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    for name in ("train", "select", "test"):
        assert (
            len([Problem.model_validate(row) for row in rows_of(out / f"{name}.jsonl")]) == card["num_problems"][name]
        )
    demonstrations = [Demonstration.model_validate(row) for row in rows_of(out / "demonstrations.jsonl")]
    assert {item.problem_id for item in demonstrations} <= {row["id"] for row in rows_of(out / "train.jsonl")}
    (capped,) = card["left_out"]
    assert capped["reason"].startswith("more than curate.max_select_problems") and capped["num_problems"] == 10
    assert card["shared_split_groups"]["num_groups"] > card["shared_split_groups"]["num_shared"] == 0
    page = (tmp_path / "validation" / "index.html").read_text()
    assert "18 of 18 expectations hold" in page
    assert (tmp_path / "validation" / "data_docs" / "index.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curate", "validation"]


RUN = """
import sys
from pathlib import Path
from tasks.curate import CurateSettings, run
from tasks.settings import Paths, load, read_params
params = read_params(Path(sys.argv[1]) / "params.yaml")
params["curate"] |= {"num_generated": 600, "max_select_problems": 33, "max_test_problems": 33, "num_demonstrations": 50}
run(load(CurateSettings, params), Paths(sys.argv[2]))
"""


@pytest.mark.slow
def test_the_same_params_give_the_same_bytes_in_another_folder_and_nothing_is_left_elsewhere(tmp_path: Path) -> None:
    for place in ("one", "two"):
        for name in ("home", "tmp", "cwd"):
            (tmp_path / place / name).mkdir(parents=True)
        environment = {**os.environ, "PYTHONHASHSEED": str(len(place) + (place == "two")), "PYTHONPATH": str(ROOT)}
        environment |= {"HOME": str(tmp_path / place / "home"), "TMPDIR": str(tmp_path / place / "tmp")}
        subprocess.run(
            [sys.executable, "-c", RUN, str(ROOT), "artifacts"],
            cwd=tmp_path / place / "cwd", env=environment, check=True, timeout=600,
        )  # fmt: skip
        assert list((tmp_path / place / "home").iterdir()) == []
        assert list((tmp_path / place / "tmp").iterdir()) == []
        assert [path.name for path in (tmp_path / place / "cwd").iterdir()] == ["artifacts"]
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / place / "cwd/artifacts/curate").iterdir()}
                for place in ("one", "two"))  # fmt: skip
    assert one.keys() == two.keys()
    assert one == two
    assert not any(str(tmp_path).encode() in content for content in one.values())
    assert json.loads(one["card.json"])["by_category"]["test"].keys() >= {"cancel/none", "book/declined"}
    assert set(json.loads(one["card.json"])["by_category"]["test"].values()) == {3}


@pytest.mark.slow
def test_a_source_that_gives_fewer_problems_than_it_must_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def census(self: SumsWithExpert, *, seed: int, num_problems: int, max_level: int) -> Census:
        return Census(61, {"too hard": ["s-x"]})

    monkeypatch.setattr(SumsWithExpert, "census", census, raising=False)
    with pytest.raises(ValueError, match=r"holds as many problems as were published' failed: found 60\."):
        run(curate_settings(), Paths(tmp_path))
    assert not (tmp_path / "curate").exists()


def bfcl_settings(category: str, **changed: Any) -> CurateSettings:
    """The first requests of a category of the package."""
    environment = environment_settings("bfcl", bfcl={"categories": [category], "turns": "first"})
    source = {"source": "tasks/environments/bfcl.py", "num_generated": 1000, "max_level": 99, "num_demonstrations": 0}
    return CurateSettings(seed=7, environment=environment, curate=options(**{**source, **changed}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "num_shared", "check"),
    [("groups", 0, "on two sides"), ("published", 11, "on two sides of select and test")],
)
def test_bfcl_is_curated_whole_and_the_card_says_what_its_splits_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, num_shared: int, check: str
) -> None:
    run(bfcl_settings("multi_turn_base", split=split, max_select_problems=99, max_test_problems=99), Paths(tmp_path))
    card, said = json.loads((tmp_path / "curate" / "card.json").read_text()), capsys.readouterr()
    assert sum(card["num_problems"].values()) == 200 and card["left_out"] == []
    assert card["shared_split_groups"]["num_groups"] == 162
    assert card["shared_split_groups"]["num_shared"] == num_shared
    warning = "warning: 11 of 162 split groups (44 problems) are in several splits"
    assert said.err.startswith(warning) if num_shared else said.err == ""
    assert f"curate: the data card is {tmp_path / 'curate' / 'card.html'}" in said.out
    held = {item["name"] for item in card["expectations"] if item["success"]}
    assert held >= {f"no split group is {check}", "the source holds as many problems as were published"}
    assert len(held) == len(card["expectations"]) == 19
    characters = card["distributions"]["train"]["prompt_characters"]
    assert 8_000 < characters["min"] < 15_000 < characters["median"] < 17_000 < characters["max"] < 21_000


@pytest.mark.slow
def test_what_bfcl_leaves_out_is_on_the_card_with_the_reason(tmp_path: Path) -> None:
    run(bfcl_settings("multi_turn_miss_func", num_generated=60, max_level=3), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    left_out = {item["reason"]: item["num_problems"] for item in card["left_out"]}
    assert left_out["no call is judged there, so nothing could be failed"] == 94
    assert left_out.keys() >= {"more than 3 calls (curate.max_level)", "not among the 60 drawn (curate.num_generated)"}
    assert sum(left_out.values()) + sum(card["num_problems"].values()) == 200


@pytest.mark.slow
def test_the_default_params_give_550_problems_a_split_50_of_each_category(tmp_path: Path) -> None:
    run(load(CurateSettings, read_params(ROOT / "params.yaml")), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    assert card["num_problems"]["select"] == card["num_problems"]["test"] == 550
    assert set(card["by_category"]["test"].values()) == set(card["by_category"]["select"].values()) == {50}
    assert 5500 < card["num_problems"]["train"] < 6700


@pytest.mark.slow
def test_two_hundred_rows_of_ones_own_work_though_one_category_has_a_single_group(tmp_path: Path) -> None:
    rows = many(200)
    for index in (4, 5):
        rows[index]["category"] = "rare"
    rows.append({**rows[0], "id": "copy of p0"})
    source = write_rows(tmp_path / "mine.jsonl", rows)
    run(curate_settings("sums", source=source, max_select_problems=40, max_test_problems=40), Paths(tmp_path / "a"))
    card = json.loads((tmp_path / "a" / "curate" / "card.json").read_text())
    assert card["num_problems"] == {"train": 100, "select": 40, "test": 40}
    assert card["num_duplicates_removed"] == 1
    assert card["by_category"]["train"]["rare"] == 2
    assert card["by_category"]["test"] == {"easy": 20, "plain": 20}
    kept = [row["id"] for name in ("train", "select", "test") for row in rows_of(tmp_path / f"a/curate/{name}.jsonl")]
    assert "copy of p0" not in kept


@pytest.mark.slow
def test_the_card_names_the_problems_an_earlier_test_set_used_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "mine.jsonl", many(60))
    run(curate_settings("sums", source=source, test_rotation=1), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    assert card["test_rotation"] == 1
    (used_up,) = [item for item in card["left_out"] if item["reason"] == "in a test set before curate.test_rotation"]
    test = {row["id"] for row in rows_of(tmp_path / "curate" / "test.jsonl")}
    assert used_up["num_problems"] == len(used_up["ids"]) == 10
    assert len(test) == 4 and not test & set(used_up["ids"])
    assert "warning: only 4 of curate.max_test_problems (10) are left" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rotation_changes_nothing_that_training_reads(tmp_path: Path) -> None:
    """DVC runs a stage again where a file that it reads has other bytes (dvc.yaml)."""
    source = write_rows(tmp_path / "mine.jsonl", many(60))
    for number in (0, 1):
        run(curate_settings("sums", source=source, test_rotation=number), Paths(tmp_path / str(number)))
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / number / "curate").iterdir()} for number in "01"
    )
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"test.jsonl", "card.json", "card.html"}
    assert len(first) == len(second) == 7


def with_row(index: int, **values: Any) -> list[dict[str, Any]]:
    rows = many()
    rows[index] |= values
    return rows


def solved_by(name: str, amount: object, answer: str = "1") -> list[dict[str, Any]]:
    return [{"calls": [{"name": name, "arguments": {"amount": amount}}], "answer": answer}]


BROKEN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "duplicate id": (with_row(7, id="p3"), "'each id is unique' failed: 'p3' (line 4), 'p3' (line 8)."),
    "row written twice": ([*many(), many()[0]], "'each id is unique' failed: 'p0' (line 1), 'p0' (line 61)."),
    "unknown tool": (
        with_row(2, reference=solved_by("teleport", 3)),
        "'each tool named by a reference exists' failed: 'p2' (line 3: teleport).",
    ),
    "invalid call": (
        with_row(2, reference=solved_by("add", "3")),
        "'each call of a reference is valid' failed: 'p2' (line 3: <tool_call> {",
    ),
    "unsolvable": (
        with_row(2, reference=solved_by("add", 99)),
        "'each reference solution scores 1' failed: 'p2' (line 3: failed checks: total, answer).",
    ),
    "foreign world": (
        with_row(2, world={}),
        "'each reference solution scores 1' failed: 'p2' (line 3: KeyError: 'target').",
    ),
    "unequal turns": (
        with_row(2, requests=["a", "b"]),
        "'each request has one turn of the reference' failed: 'p2' (line 3).",
    ),
    "one group": (many(group_size=60), "'no split is empty' failed: 'select' (0 problems), 'test' (0 problems)."),
    "hostile id": (
        with_row(2, id=SCRIPT, world={}),
        f"'each reference solution scores 1' failed: '{SCRIPT}' (line 3: KeyError: 'target').",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_expectation_names_its_rows_and_leaves_the_old_result_untouched(tmp_path: Path, what: str) -> None:
    rows, said = BROKEN[what]
    (tmp_path / "out" / "curate").mkdir(parents=True)
    (tmp_path / "out" / "curate" / "old").write_text("old")
    source = write_rows(tmp_path / "mine.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        run(curate_settings("sums", source=source), Paths(tmp_path / "out"))
    text = str(caught.value)
    assert text.startswith(f"{source}: the expectation {said}")
    assert "\n" not in text
    assert [path.name for path in (tmp_path / "out" / "curate").iterdir()] == ["old"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curate", "validation"]
    page = (tmp_path / "out" / "validation" / "index.html").read_text()
    assert "Nothing was curated" in page
    for html in (tmp_path / "out" / "validation").rglob("*.html"):
        assert SCRIPT not in html.read_text()


def good_tables() -> dict[str, list[dict[str, Any]]]:
    """Two rows that meet every expectation, and the places of both."""
    problems = [
        {
            "id": f"p{i}", "where": f"line {i}", "category": "easy", "level": 1, "split_group": "g", "split": "train",
            "num_sides": 1, "num_requests": 1, "num_reference_turns": 1, "unknown_tools": "", "invalid_call": "",
            "reference_score": 1, "fault": "",
        }
        for i in range(2)
    ]  # fmt: skip
    splits = [{"id": name, "where": "2 problems", "num_problems": 2} for name in ("train", "select", "test")]
    demonstrations = [{"id": f"p{i}", "where": f"demonstration {i}", "split": "train", "fault": ""} for i in range(2)]
    return {"problems": problems, "splits": splits, "demonstrations": demonstrations}


BREAKS: dict[str, tuple[str, str, object]] = {
    "each id is of type str": ("problems", "id", 1),
    "each category is of type str": ("problems", "category", 1),
    "each split_group is of type str": ("problems", "split_group", 1),
    "each level is of type int": ("problems", "level", 1.5),
    "no id is empty": ("problems", "id", ""),
    "no category is empty": ("problems", "category", ""),
    "no split_group is empty": ("problems", "split_group", ""),
    "each level is at least 1": ("problems", "level", 0),
    "each id is unique": ("problems", "id", "p0"),
    "each request has one turn of the reference": ("problems", "num_requests", 2),
    "each tool named by a reference exists": ("problems", "unknown_tools", "teleport"),
    "each call of a reference is valid": ("problems", "invalid_call", "add"),
    "each reference solution scores 1": ("problems", "reference_score", 0),
    "no split is empty": ("splits", "num_problems", 0),
    "no split group is on two sides": ("problems", "num_sides", 2),
    "each demonstration is of a train problem": ("demonstrations", "split", "test"),
    "each demonstration scores 1 without an invalid call": ("demonstrations", "fault", "failed"),
}


@pytest.mark.slow
def test_every_expectation_holds_of_good_rows_and_fails_for_the_one_row_that_breaks_it(tmp_path: Path) -> None:
    suite = suite_of(2)
    assert all(result.success for result in validate(suite, good_tables(), tmp_path / "validation"))
    for name, (table, column, value) in BREAKS.items():
        tables = good_tables()
        tables[table][1][column] = value
        members = [check for check in suite if check.name == name]
        (failed,) = validate(members, tables, tmp_path / "validation")
        assert not failed.success, name
        assert tables[table][1]["where"] in failed.rows[-1], name
        assert len(failed.rows) == (2 if name == "each id is unique" else 1), name
    (failed,) = validate([c for c in suite_of(3) if "as many" in c.name], good_tables(), tmp_path / "v")
    assert (failed.success, failed.observed) == (False, "found 2")
    assert len(BREAKS) + 1 == len(suite)


@pytest.mark.slow
def test_train_problems_nobody_can_demonstrate_are_told_and_no_demonstration_may_be_asked_for(tmp_path: Path) -> None:
    rows = [{**row, "category": "hard"} for row in many()]
    source = write_rows(tmp_path / "mine.jsonl", rows)
    with pytest.raises(ValueError, match=r"'demonstrations are as many as asked for' failed: found 0\..*to 0"):
        run(curate_settings(source=source), Paths(tmp_path / "a"))
    run(curate_settings(source=source, num_demonstrations=0), Paths(tmp_path / "a"))
    assert (tmp_path / "a" / "curate" / "demonstrations.jsonl").read_bytes() == b""
