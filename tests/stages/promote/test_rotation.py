"""params.yaml asks for the next test set: one number is another, every other character stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.stages.promote.allowance import raise_test_rotation
from tests.conftest import ROOT

KEPT = "curate:\n  num_test_sets: 20\n"


def test_the_projects_own_params_change_in_one_number(tmp_path: Path):
    file = tmp_path / "params.yaml"
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert raise_test_rotation(file, curated=0) == 1
    assert raise_test_rotation(file, curated=0) == 1  # asked for already
    lines = list(zip(text.splitlines(), file.read_text(encoding="utf-8").splitlines(), strict=True))
    ((before, after),) = [pair for pair in lines if pair[0] != pair[1]]
    assert after == before.replace("test_rotation: 0", "test_rotation: 1")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (
            "curate: {num_test_sets: 20, test_rotation: 9}  # one line\n",
            "{num_test_sets: 20, test_rotation: 10}  # one",
        ),
        (f"other:\n  test_rotation: 5\n{KEPT}  test_rotation:   0x9 # ä\n", "test_rotation:   10 # ä"),
        ('"curate":\r\n  "test_rotation": 9\r\n  num_test_sets: 20\r\n', '"test_rotation": 10\r\n'),
    ],
)
def test_layout_and_comments_stay(tmp_path: Path, text: str, changed: str):
    file = tmp_path / "params.yaml"
    file.write_bytes(text.encode())
    raise_test_rotation(file, curated=9)
    assert changed in file.read_bytes().decode()


@pytest.mark.parametrize(
    "text",
    [
        KEPT,
        "other: &shared {test_rotation: 9, num_test_sets: 20}\ncurate: *shared\n",
        f"number: &n 9\n{KEPT}  test_rotation: *n\n",
    ],
)
def test_what_would_change_more_is_left_as_it_is(tmp_path: Path, text: str):
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"curate\.test_rotation.*by hand"):
        raise_test_rotation(file, curated=9)
    assert file.read_text(encoding="utf-8") == text


def test_where_no_further_test_set_is_kept_it_says_what_to_bring(tmp_path: Path):
    file = tmp_path / "params.yaml"
    file.write_text(f"{KEPT}  test_rotation: 19\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"curate\.num_test_sets: 20.*new split groups to curate\.source"):
        raise_test_rotation(file, curated=19)
