"""The whole of curation, with Great Expectations: results appear whole, and the card tells what became of each row."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Demonstration, Problem
from tasks.core.settings import Paths, load, read_params
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.stage import run
from tasks.tools.base import SourceCount
from tests.conftest import ROOT
from tests.sums import SumsWithExpert, curate_settings, many, options, rows_of, worlds, write_rows
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow

__all__ = ["worlds"]


def test_a_run_leaves_three_splits_demonstrations_a_card_and_a_page(tmp_path: Path) -> None:
    run(curate_settings(), Paths(tmp_path))
    out = tmp_path / "curate"
    assert sorted(path.name for path in out.iterdir()) == [
        *("card.html", "card.json", "demonstrations.jsonl", "environment.json", "references.jsonl"),
        *("select.jsonl", "test.jsonl", "train.jsonl", "validation.json"),
    ]
    card = json.loads((out / "card.json").read_text())
    # 30 groups of two at a share of 0.5: by their hashes 16 train, 6 and 8 held out, capped to 10 problems each.
    assert card["num_problems"] == {"train": 32, "select": 10, "test": 10}
    assert card["by_category"]["test"] == {"easy": 10}
    assert (card["environment"], card["fingerprint"]) == ("sums_with_expert", SumsWithExpert().fingerprint())
    assert (card["num_duplicates_removed"], card["num_demonstrations"]) == (0, 8)
    assert len(card["expectations"]) == 22
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
    assert capped["reason"].startswith("more than curate.max_select_problems") and capped["num_problems"] == 8
    assert card["shared_split_groups"]["num_groups"] > card["shared_split_groups"]["num_shared"] == 0
    page = (tmp_path / "validation" / "index.html").read_text()
    assert "22 of 22 expectations passed" in page
    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["index.html", "validation.json"]
    document = (tmp_path / "validation" / "validation.json").read_bytes()
    assert document == (out / "validation.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curate", "validation"]


RUN = """
import sys
from pathlib import Path
from tasks.stages.curate.stage import CurateSections, run
from tasks.core.settings import Paths, load, read_params
params = read_params(Path(sys.argv[1]) / "params.yaml")
params["curate"] |= {"num_generated": 600, "max_select_problems": 33, "max_test_problems": 33, "num_demonstrations": 50}
params["curate"]["num_test_sets"] = 1
run(load(CurateSections, params), Paths(sys.argv[2]))
"""


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


def test_a_source_that_gives_fewer_problems_than_it_must_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_source(self: SumsWithExpert, *, seed: int, num_problems: int, max_level: int) -> SourceCount:
        return SourceCount(61, {"too hard": ["s-x"]})

    monkeypatch.setattr(SumsWithExpert, "count_source", count_source)
    with pytest.raises(ValueError, match=r"contains as many problems as were published' failed: found 60\."):
        run(curate_settings(), Paths(tmp_path))
    assert not (tmp_path / "curate").exists()


def bfcl_settings(category: str, **changed: Any) -> CurateSections:
    """The first requests of a category of the package."""
    environment = environment_settings("bfcl", settings={"categories": [category], "turns": "first"})
    source = {
        "source": "tasks/environments/bfcl",
        "num_generated": 1000,
        "max_level": 99,
        "num_demonstrations": 0,
    }
    return CurateSections(seed=7, environment=environment, curate=options(**{**source, **changed}))


@pytest.mark.parametrize(
    ("split", "num_shared"),
    [("groups", 0), ("published", 11)],
)
def test_bfcl_is_curated_whole_and_the_card_says_what_its_splits_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, num_shared: int
) -> None:
    run(bfcl_settings("multi_turn_base", split=split, max_select_problems=99, max_test_problems=99), Paths(tmp_path))
    card, said = json.loads((tmp_path / "curate" / "card.json").read_text()), capsys.readouterr()
    assert sum(card["num_problems"].values()) == 200 and card["left_out"] == []
    assert card["shared_split_groups"]["num_groups"] == 162
    assert card["shared_split_groups"]["num_shared"] == num_shared
    shared, *missing = said.err.splitlines() if num_shared else ["", *said.err.splitlines()]
    assert ("'no split group is in several splits' failed: " in shared) == bool(num_shared)
    # Of 20 categories, sets of classes, some have one ground truth, which is on one side.
    assert missing and all(line.startswith("warning: no split group of ") for line in missing)
    assert all("curate.split_seed" in line for line in missing)
    assert f"curate: the data card is {tmp_path / 'curate' / 'card.html'}" in said.out
    held = {item["name"] for item in card["expectations"] if item["success"]}
    assert held >= {"no split group is on two sides", "the source contains as many problems as were published"}
    assert (len(held), len(card["expectations"])) == (22 if num_shared else 23, 23)
    characters = card["distributions"]["train"]["prompt_characters"]
    assert 8_000 < characters["min"] < 15_000 < characters["median"] < 17_000 < characters["max"] < 21_000


def test_what_bfcl_leaves_out_is_on_the_card_with_the_reason(tmp_path: Path) -> None:
    run(bfcl_settings("multi_turn_miss_func", num_generated=60, max_level=3), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    left_out = {item["reason"]: item["num_problems"] for item in card["left_out"]}
    assert left_out["no call is judged, so the problem cannot fail"] == 94
    assert left_out.keys() >= {"more than 3 calls (curate.max_level)", "not among the 60 drawn (curate.num_generated)"}
    assert sum(left_out.values()) + sum(card["num_problems"].values()) == 200


def test_the_default_params_give_550_problems_a_split_50_of_each_category(tmp_path: Path) -> None:
    run(load(CurateSections, read_params(ROOT / "params.yaml")), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    assert card["num_problems"]["select"] == card["num_problems"]["test"] == 550
    assert set(card["by_category"]["test"].values()) == set(card["by_category"]["select"].values()) == {50}
    assert 5500 < card["num_problems"]["train"] < 6700


def test_two_hundred_rows_of_ones_own_work_though_one_category_has_a_single_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = many(200)
    for index in (4, 5):
        rows[index]["category"] = "rare"
    rows.append({**rows[0], "id": "copy of p0"})
    source = write_rows(tmp_path / "mine.jsonl", rows)
    run(curate_settings("sums", source=source, max_select_problems=30, max_test_problems=30), Paths(tmp_path / "a"))
    card = json.loads((tmp_path / "a" / "curate" / "card.json").read_text())
    assert card["num_problems"] == {"train": 120, "select": 30, "test": 30}
    assert card["num_duplicates_removed"] == 1
    assert card["by_category"]["train"]["rare"] == 2
    assert card["by_category"]["test"] == {"easy": 15, "plain": 15}
    warnings = [line.partition(", so ")[0] for line in capsys.readouterr().err.splitlines()]
    assert warnings == [f"warning: no split group of rare is in {name}" for name in ("select", "test")]
    kept = [row["id"] for name in ("train", "select", "test") for row in rows_of(tmp_path / f"a/curate/{name}.jsonl")]
    assert "copy of p0" not in kept


def test_a_question_of_train_is_left_out_of_test_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the groups g0 is in train and g1 in test; the first row of g1 is that of g0 with a space after it."""
    rows = many(60)
    rows[2] |= {name: rows[0][name] for name in ("requests", "world", "reference")}
    rows[2]["requests"] = [f"{rows[0]['requests'][0]} "]
    run(curate_settings("sums", source=write_rows(tmp_path / "mine.jsonl", rows)), Paths(tmp_path))
    card = json.loads((tmp_path / "curate" / "card.json").read_text())
    assert {"reason": "asks what an earlier split asks in the same world", "num_problems": 1, "ids": ["p2"]} in card[
        "left_out"
    ]
    assert card["num_duplicates_removed"] == 0
    assert "warning: left out of select and test" in (told := capsys.readouterr().err) and "p2 (line 3)" in told
    assert "remove these copies, not the earlier ones" in told


def test_a_rotation_changes_nothing_that_training_reads_and_the_card_names_the_other_test_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC runs a stage again where a file that it reads has other bytes (dvc.yaml). Of the 8 groups of test's side 3
    are in set 0 and 5 in set 1.
    """
    source = write_rows(tmp_path / "mine.jsonl", many(60))
    for number in (0, 1):
        rotated = curate_settings("sums", source=source, num_test_sets=2, test_rotation=number, max_test_problems=12)
        run(rotated, Paths(tmp_path / str(number)))
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / number / "curate").iterdir()} for number in "01"
    )
    assert {name for name in first if first[name] != second[name]} == {
        "test.jsonl",
        "card.json",
        "card.html",
        "validation.json",
    }
    assert len(first) == len(second) == 9
    tests = [{row["id"] for row in rows_of(tmp_path / number / "curate" / "test.jsonl")} for number in "01"]
    assert (len(tests[0]), len(tests[1])) == (6, 10) and not tests[0] & tests[1]
    for card, reason, others in (
        (first, "kept for a test set after curate.test_rotation", tests[1]),
        (second, "in a test set before curate.test_rotation", tests[0]),
    ):
        (kept,) = [item for item in json.loads(card["card.json"])["left_out"] if item["reason"] == reason]
        assert set(kept["ids"]) == others
    assert json.loads(second["card.json"])["test_rotation"] == 1
    assert "'a rotated test set is as large as asked for' failed: 'test' (10 problems: 2)" in capsys.readouterr().err


def test_train_problems_nobody_can_demonstrate_are_told_and_no_demonstration_may_be_asked_for(tmp_path: Path) -> None:
    rows = [{**row, "category": "hard"} for row in many()]
    source = write_rows(tmp_path / "mine.jsonl", rows)
    with pytest.raises(ValueError, match=r"'demonstrations are as many as asked for' failed: found 0\..*to 0"):
        run(curate_settings(source=source), Paths(tmp_path / "a"))
    run(curate_settings(source=source, num_demonstrations=0), Paths(tmp_path / "a"))
    assert (tmp_path / "a" / "curate" / "demonstrations.jsonl").read_bytes() == b""
