"""What a command writes where a person says: its own older output is replaced, anything else is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.commands.outputs import first_json, json_in_tar, refuse_to_replace


def refuse(out: Path, *, is_own: bool, is_folder: bool = False, reads: tuple[Path, ...] = ()) -> None:
    refuse_to_replace(
        out, kind="a list", is_own=lambda found: is_own, remedy="Name a new file.", is_folder=is_folder, reads=reads
    )


def test_what_a_command_reads_is_never_replaced_even_if_it_looks_like_an_output(tmp_path: Path):
    source = tmp_path / "made" / "rows.jsonl"
    source.parent.mkdir()
    source.write_text("{}\n")
    refuse(source, is_own=True)
    for out in (source, source.parent, source.parent / ".." / "made"):
        with pytest.raises(ValueError, match=r"would remove .*rows\.jsonl.*Name a new file"):
            refuse(out, is_own=True, reads=(source,))


def test_what_is_not_there_or_empty_is_free_and_another_file_is_not(tmp_path: Path):
    mine = tmp_path / "mine"
    refuse(mine, is_own=False)
    mine.touch()
    refuse(mine, is_own=False)
    with pytest.raises(ValueError, match="mine: exists and is not a list, so it is not replaced"):
        refuse(mine, is_own=False, is_folder=True)
    mine.write_text("thesis")
    with pytest.raises(ValueError, match="mine: exists and is not a list, so it is not replaced"):
        refuse(mine, is_own=False)
    with pytest.raises(ValueError, match="is not replaced"):
        refuse(Path("/dev/null"), is_own=False)


def test_a_folder_gets_no_name_of_a_file_and_one_that_is_there_keeps_its_own(tmp_path: Path):
    for name in ("b7.csv", "b7.JSONL", "b7.html"):
        with pytest.raises(ValueError, match=rf"{name}: is the name of a .*Name a new file\.$"):
            refuse(tmp_path / name, is_own=True, is_folder=True)
        refuse(tmp_path / name, is_own=True)
    for name in ("b7", "atif-v1.8", ".hidden"):
        refuse(tmp_path / name, is_own=True, is_folder=True)
    (tmp_path / "run.old").mkdir()
    refuse(tmp_path / "run.old", is_own=True, is_folder=True)


def test_a_file_says_what_it_is_by_its_first_line_or_as_a_whole(tmp_path: Path):
    file = tmp_path / "file"
    for text, found in (
        ('{"a": 1}\n{"b": 2}\n', {"a": 1}),
        ('{\n  "a": 1\n}\n', {"a": 1}),
        ("thesis", None),
        ("", None),
        ("[" * 200_000, None),
    ):
        file.write_text(text, encoding="utf-8")
        assert first_json(file) == found
    file.write_bytes(b"\xff\xfe\x00PK")
    assert first_json(file) is None
    assert first_json(tmp_path) is None and json_in_tar(tmp_path, "x") is None and json_in_tar(file, "x") is None
