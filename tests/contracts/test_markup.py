"""Markup is in templates, where every value is escaped; a string of HTML in Python is where one forgets to."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.contracts.import_graph import python_files

TAGS = (
    "a|article|b|body|button|code|dd|details|div|dl|dt|em|figure|footer|form|h[1-6]|head|header|html|i|img|input|li|"
    "link|main|meta|nav|ol|option|p|picture|pre|script|section|select|span|strong|style|summary|table|tbody|td|th|tr|ul"
)
MARKUP = re.compile(rf"</(?:{TAGS})>|<(?:{TAGS})(?:>|\s[\w-]+=)|<!doctype", re.IGNORECASE)


def test_no_module_writes_markup():
    assert not [
        f"{file}:{number}"
        for file in python_files("tasks", "flows")
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), start=1)
        if MARKUP.search(line)
    ]


@pytest.mark.parametrize("line", ['"<div class=row>"', "f'<td>{value}'", "</table>", "<!DOCTYPE html>"])
def test_the_search_sees_markup(line: str):
    assert MARKUP.search(line)
