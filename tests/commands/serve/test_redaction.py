"""What the patterns that ship hide of a served conversation, what they leave, and how long a hostile text takes."""

from __future__ import annotations

import time

import pytest

from tasks.commands.serve.recorder import Redaction
from tests.profiles import profile_params

MAIL = ["ann@shop.com"]
CARDS = [
    "4111 1111 1111 1111",
    "4111-1111-1111-1111",
    "4111.1111.1111.1111",
    "3782.822463.10005",
    "4111\xa01111\xa01111\xa01111",
]
PHONES = [
    "+49 171 2345678", "+49.171.2345678", "+49 (0)171 2345678", "0049 171 2345678", "0171 2345678", "0171/2034-567",
    "030 / 1234567", "(030) 1234-567", "01712345678", "06 12 34 56 78", "01.23.45.67.89", "020 7946 0958",
    "(555) 123-4567", "(555)123-4567", "555-123-4567", "555.123.4567", "555 123 4567", "1-800-555-1234",
]  # fmt: skip
SERVICE_KEYS = [
    "sk-proj-abcdefghijklmnopqrst", "rk_live_abcdefghijklmnopqrst", "xoxb-123456789012-abcdefghij",
    "github_pat_11ABCDEFG0abcdefghijklmnop", "gho_16C7e42F292c6912E7710c838347Ae178B4a", "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstu", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefghijk",
    "eyJhbGciOiJSU0EtT0FFUCJ9..48V1_ALb6US04U3b.5eym8TW_c8SuK0ltJ3rpYI.XFBoMYUZodetZdvTiFvSkQ",
]  # fmt: skip
ORDINARY = [
    "2024-01-15", "2024-01-15 10:30", "2024-01-15T10:30:00Z", "01/02/2024 10:30", "05.12.2024", "05 11 2024",
    "09.12.24", "01.-05.02.2024", "01.02.2024-05.02.2024", "07:15 - 09:45", "room 012 2024-01-15",
    "desk 0123 01.02.2024", "order 4500012345", "order 0012345678", "#12345678", "100-2000-300",
    "SKU-0123-456", "01067 Dresden", "0800", "1,234.56", "12,345,678.90", "12 345 678", "1.234.567,89",
    "200 300 400", "0.123456789", "3.14159", "192.168.100.200", "52.5200066, 13.404954", "eyJ", "AIza",
    "AKIA1", "sk-learn",
]  # fmt: skip


@pytest.fixture(scope="module")
def redaction() -> Redaction:
    return Redaction(profile_params("demo")["serve"]["record"]["redact"], [])


@pytest.mark.parametrize("text", [*MAIL, *CARDS, *PHONES, *SERVICE_KEYS])
def test_the_patterns_that_ship_hide(text: str, redaction: Redaction):
    assert redaction.text(f"It is {text}, ok?") == "It is [redacted], ok?"
    assert text not in redaction.text(f"Is:{text}.")


@pytest.mark.parametrize("text", ORDINARY)
def test_the_patterns_that_ship_leave(text: str, redaction: Redaction):
    assert redaction.text(f"It is {text}, ok?") == f"It is {text}, ok?"


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["1", "0", "01 ", "00 1", "+1.", "(0171) ", "0171 ", "555-", "(555)", "4111.", "eyJ", "eyJaaaaaaaa-",
              "eyJaaaaaaaa.", "eyJaaaaaaaa.a ", "AIza-", "github_pat_", "gho-a-", "sk-", "0./ -", "a@", "a@a-"],
)  # fmt: skip
@pytest.mark.parametrize("opening", ["", "+1", "001", "eyJaaaaaaaa", "a@"])
def test_a_hostile_text_takes_time_in_proportion_to_its_length(opening: str, piece: str, redaction: Redaction):
    text = opening + piece * (60_000 // len(piece))  # 3.6e9 steps, were they the square of it
    began = time.process_time()
    redaction.text(text)
    assert time.process_time() - began < 10
