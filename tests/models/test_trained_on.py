"""What a model folder says it learnt from: told again as written, of ancestors too, small, refused where damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.core.files import write_json
from tasks.core.records import Problem
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.files import TRAINED_ON
from tasks.models.folders import write_pointer
from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on
from tests.sums import problem

A, B = problem("a", group="ga", marker=1), problem("b", group="gb", marker=2)


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def seen(known: TrainedOn, *problems: Problem, by_group: bool = True) -> list[str]:
    return sorted(known.seen_ids(problems, by_group=by_group))


def test_a_problem_is_known_by_its_id_its_content_and_where_asked_its_split_group() -> None:
    known = TrainedOn(digests_of([A]))
    corrected = problem("a", group="other", marker=9)
    renamed = problem("other", group="other", marker=1)
    sibling = problem("sibling", group="ga", marker=8)
    assert seen(known, corrected, renamed, sibling, B) == ["a", "other", "sibling"]
    assert seen(known, corrected, renamed, sibling, B, by_group=False) == ["a", "other"]


def test_a_question_is_known_however_it_is_spaced_and_answered_but_not_in_another_world() -> None:
    known = TrainedOn(digests_of([A]))
    answered = [A.reference[0].model_copy(update={"answer": "It is 3."})]
    given = {"requests": [" Make  3."], "reference": answered, "split_group": "other"}
    copy, elsewhere = (item.model_copy(update={**given, "id": name}) for item, name in ((A, "copy"), (B, "elsewhere")))
    assert seen(known, copy, elsewhere) == seen(known, copy, elsewhere, by_group=False) == ["copy"]


def test_a_record_of_an_earlier_version_has_no_questions_and_keeps_the_rest(tmp_path: Path) -> None:
    write_trained_on(tmp_path, TrainedOn(digests_of([A]), chosen=digests_of([B])))
    row = json.loads((tmp_path / TRAINED_ON).read_text())
    del row["trained"]["questions"], row["chosen"]["questions"]
    (tmp_path / TRAINED_ON).write_text(json.dumps(row))
    old, nothing = read_trained_on(tmp_path), frozenset[bytes]()
    assert old == TrainedOn(
        digests_of([A])._replace(questions=nothing), chosen=digests_of([B])._replace(questions=nothing)
    )
    assert (old | TrainedOn(digests_of([A]))).trained == digests_of([A])  # what is trained from it says both


def test_what_a_snapshot_was_chosen_on_counts_as_seen_and_is_kept_apart(tmp_path: Path) -> None:
    known = TrainedOn(digests_of([A]), chosen=digests_of([B]))
    assert seen(known, A, B) == ["a", "b"]
    write_trained_on(tmp_path, known)
    assert read_trained_on(tmp_path) == known
    assert read_trained_on(tmp_path).trained == digests_of([A])


def test_a_model_that_grew_from_others_has_seen_what_they_have(tmp_path: Path) -> None:
    """A pointer is the model it stands for."""
    base = model_in(tmp_path / "base")
    write_trained_on(base, TrainedOn(digests_of([A])))
    write_pointer(tmp_path / "pointer", str(base))
    assert seen(read_trained_on(tmp_path / "pointer") | TrainedOn(digests_of([B])), A, B) == ["a", "b"]


@pytest.mark.parametrize("place", ["train/snapshots/iteration-0010", "warm_start/model", "fetched", "adapter"])
def test_a_model_of_ours_without_the_file_is_unknown_and_stays_so_in_what_grows_from_it(
    tmp_path: Path, place: str
) -> None:
    """From before there was such a file, by where it is or what only ours have; it may have seen any problem."""
    base = model_in(tmp_path / place)
    if place == "fetched":
        write_json(base / "lineage" / "decision.json", {})
    if place == "adapter":
        write_json(base / "base.json", {})
    (tmp_path / "grown").mkdir()
    write_trained_on(tmp_path / "grown", read_trained_on(base) | TrainedOn(digests_of([A])))
    again = read_trained_on(tmp_path / "grown") | TrainedOn()
    assert again == TrainedOn(digests_of([A]), unknown=frozenset([base.name]))


def test_a_model_of_the_hub_is_from_elsewhere_and_a_fetched_one_says_what_its_lineage_says(tmp_path: Path) -> None:
    hub = model_in(tmp_path / "Qwen")
    assert read_trained_on(hub) == TrainedOn(elsewhere=frozenset(["Qwen"]))
    lineage = hub / "lineage" / "2"  # as promoted untrained, and registered again
    lineage.mkdir(parents=True)
    known = TrainedOn(digests_of([A]), unknown=frozenset(["old"]), elsewhere=frozenset(["Qwen"]))
    write_trained_on(lineage, known)
    assert read_trained_on(hub) == known


@pytest.mark.slow
def test_the_same_problems_in_any_order_give_the_same_bytes_and_six_thousand_stay_small(tmp_path: Path) -> None:
    problems = list(TravelDesk().generate(seed=11, num_problems=6_600, max_level=3))
    for name, order in (("one", 1), ("two", -1)):
        (tmp_path / name).mkdir()
        train, select = problems[:6_000][::order], problems[6_000:][::order]
        write_trained_on(tmp_path / name, TrainedOn(digests_of(train), chosen=digests_of(select)))
    one, two = ((tmp_path / name / TRAINED_ON).read_bytes() for name in ("one", "two"))
    assert one == two
    assert len(one) < 180_000
    assert problems[0].id.encode() not in one and problems[0].split_group.encode() not in one


@pytest.mark.parametrize("questions", ["AAAA", "?", 7, None])
def test_damaged_questions_are_refused(tmp_path: Path, questions: object) -> None:
    write_trained_on(tmp_path, TrainedOn(digests_of([A])))
    row = json.loads((tmp_path / TRAINED_ON).read_text())
    row["trained"]["questions"] = questions
    (tmp_path / TRAINED_ON).write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"{TRAINED_ON}: not the hashed ids of problems"):
        read_trained_on(tmp_path)


@pytest.mark.parametrize("ids", ["AAAA", "AAAAAAAAA", "?", 7, None])
def test_a_damaged_file_is_refused_rather_than_taken_for_nothing(tmp_path: Path, ids: object) -> None:
    """Three bytes, no base64, no text, and no such key; a hash has six."""
    write_trained_on(tmp_path, TrainedOn(digests_of([A])))
    row = json.loads((tmp_path / TRAINED_ON).read_text())
    row["trained"]["ids"] = ids
    if ids is None:
        del row["trained"]["ids"]
    (tmp_path / TRAINED_ON).write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"{TRAINED_ON}: not the hashed ids of problems"):
        read_trained_on(tmp_path)


@pytest.mark.parametrize("names", ["old", [7], None])
def test_a_file_that_does_not_say_which_ancestors_are_unknown_is_refused(tmp_path: Path, names: object) -> None:
    write_trained_on(tmp_path, TrainedOn(digests_of([A])))
    row = json.loads((tmp_path / TRAINED_ON).read_text())
    (tmp_path / TRAINED_ON).write_text(json.dumps({**row, "unknown": names}))
    with pytest.raises(ValueError, match=TRAINED_ON):
        read_trained_on(tmp_path)
