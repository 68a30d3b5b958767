"""What changed between two values, in lines a person reads: on one line each, cut, and without control characters."""

from __future__ import annotations

from tasks.core.json_diff import arrow, changes
from tasks.core.text import printable


def test_what_a_server_wrote_is_printed_on_one_line_without_control_characters():
    hostile = "red\x1b[31m\nfake line\u202e\u2028\x9b"
    (line,) = changes({"description": "calm"}, {"description": hostile})
    assert line.isprintable()
    assert "\\u001b[31m\\nfake line\\u202e\\u2028\\u009b" in line
    (line,) = changes({}, {f"\x1b]0;{'x' * 500}": 1})
    assert line.isprintable()
    assert len(line) < 200
    assert printable("é → 漢\x00") == "é → 漢\\x00"


def test_long_texts_are_cut_around_their_first_difference():
    before, after = "a" * 300 + "OLD" + "b" * 300, "a" * 300 + "NEW" + "b" * 300
    line = arrow(before, after)
    assert "OLD" in line
    assert "NEW" in line
    assert len(line) < 140
    assert arrow("x" * 100, "x" * 101).count("…") >= 2


def test_of_two_hashes_eight_letters_each_are_shown():
    assert arrow("0123456789ab" * 5, "f" * 64) == "01234567… → ffffffff…"
    assert arrow("0" * 31, "1" * 31).count("0") == 31  # another number


def test_a_long_list_of_names_is_cut_and_an_order_shown_from_where_it_changes():
    before, after = {f"n{number}": 0 for number in range(40)}, {f"n{number}": 0 for number in range(20)}
    assert list(changes({"a": before}, {"a": after})) == [
        "a: n20 0 is gone, n21 0 is gone, n22 0 is gone, n23 0 is gone, n24 0 is gone, n25 0 is gone, n26 0 is gone, "
        "n27 0 is gone and 12 more"
    ]
    swapped = {**{f"n{number}": 0 for number in range(38)}, "n39": 0, "n38": 0}
    assert list(changes({"a": before}, {"a": swapped})) == ["a: their order: n38, n39 → n39, n38"]


def test_numbers_truth_and_text_are_not_the_same_though_python_says_so():
    assert list(changes({"a": 1}, {"a": True})) == ["a: 1 → true"]
    assert list(changes({"a": 1}, {"a": 1.0})) == ["a: 1 → 1.0"]
    assert list(changes({"a": [{"b": 1}]}, {"a": [{"b": 2}]})) == ["a[0].b: 1 → 2"]
    assert list(changes({"a": None}, {})) == ["environment: a null is gone"]
