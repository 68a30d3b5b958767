"""params.yaml asks for the next test set: one number is another, every other character stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.rotation import raise_test_rotation
from tests.conftest import ROOT


def test_the_projects_own_params_change_in_one_number(tmp_path: Path):
    file = tmp_path / "params.yaml"
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert raise_test_rotation(file) == 1
    assert raise_test_rotation(file) == 2
    lines = list(zip(text.splitlines(), file.read_text(encoding="utf-8").splitlines(), strict=True))
    ((before, after),) = [pair for pair in lines if pair[0] != pair[1]]
    assert after == before.replace("test_rotation: 0", "test_rotation: 2")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("curate: {split: groups, test_rotation: 9}  # one line\n", "curate: {split: groups, test_rotation: 10}"),
        ("other:\n  test_rotation: 5\ncurate:\n  test_rotation:   0x1 # ä\n", "test_rotation:   2 # ä"),
        ('"curate":\r\n  "test_rotation": 3\r\n', '"test_rotation": 4\r\n'),
    ],
)
def test_layout_and_comments_stay(tmp_path: Path, text: str, changed: str):
    file = tmp_path / "params.yaml"
    file.write_bytes(text.encode())
    raise_test_rotation(file)
    assert changed in file.read_bytes().decode()


@pytest.mark.parametrize(
    "text",
    [
        "curate: {split: groups}\n",
        "other: &shared {test_rotation: 1}\ncurate: *shared\n",
        "number: &n 1\ncurate: {test_rotation: *n}\n",
    ],
)
def test_what_would_change_more_is_left_as_it_is(tmp_path: Path, text: str):
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"curate\.test_rotation.*by hand"):
        raise_test_rotation(file)
    assert file.read_text(encoding="utf-8") == text
