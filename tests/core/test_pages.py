"""Pages: values come out as text whatever they contain, and a page is one quiet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.pages import page_text, render

PAGE = """{% extends "base.html.jinja" %}
{% block title %}{{ name }}{% endblock %}
{% block eyebrow %}test{% endblock %}
{% block header %}<h1>{{ name }}</h1>{% endblock %}
{% block main %}{% for part in name | breakable %}{{ part }}<wbr>{% endfor %} {{ 1234 | count }}{% endblock %}
"""


def page_of(folder: Path, **values: Any) -> str:
    (folder / "page.html.jinja").write_text(PAGE, encoding="utf-8")
    return render(folder, "page.html.jinja", **values)


def test_a_value_is_text_and_what_hides_in_it_is_shown(tmp_path: Path):
    page = page_of(tmp_path, name="<script>x</script>\x1b[31m\u202e")
    assert "<h1>&lt;script&gt;x&lt;/script&gt;⟨U+001B⟩[31m⟨U+202E⟩</h1>" in page
    assert "<script" not in page and "default-src 'none'" in page and "prefers-color-scheme: dark" in page


def test_a_name_may_break_after_its_parts_and_numbers_have_thousands(tmp_path: Path):
    assert "quote/<wbr>check_<wbr>card<wbr> 1,234" in page_of(tmp_path, name="quote/check_card")


def test_a_value_that_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(Exception, match="name"):
        page_of(tmp_path)


def test_page_text_keeps_ordinary_text_newlines_and_tabs():
    text = "ħéllo 東京 مرحبا\n\t{}<>"
    assert page_text(text) == text
    assert page_text("a\r\nb\rc") == "a\nb⟨U+000D⟩c"


def test_what_has_no_shape_is_spelled_out_and_what_scripts_and_emoji_need_stays():
    tags = "".join(chr(0xE0000 + ord(letter)) for letter in "pay")
    assert page_text(f"a{tags}b") == "a⟨U+E0070⟩⟨U+E0061⟩⟨U+E0079⟩b"
    for hidden in "\xad\u034f\u115f\u1160\u180e\u200b\u2060\u2064\u206a\u206f\u3164\ufeff\uffa0\ufff9\ufffb\U000e0fff":
        assert page_text(f"pay{hidden}pal") == f"pay⟨U+{ord(hidden):04X}⟩pal"
    scotland = "\U0001f3f4" + "".join(chr(0xE0000 + ord(letter)) for letter in "gbsct") + "\U000e007f"
    for text in (scotland, "👩\u200d🚀", "می\u200cخواهم", "❤\ufe0f ❤\ufe0e"):
        assert page_text(text) == text
    assert page_text(f"\U0001f3f4{tags}") == "\U0001f3f4⟨U+E0070⟩⟨U+E0061⟩⟨U+E0079⟩"  # no flag without its end
