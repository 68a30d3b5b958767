"""Secrets: read from environment variables, passed to servers, and removed from everything they return.

A server may repeat a secret in a reply, an error or a log line. Hidden are the value, its longer words ("Bearer abc…"
may return as "abc…"), and both in JSON and URL encoding. Not hidden: other encodings, and values under four characters,
which would garble every reply.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "[redacted]"
MIN_CHARACTERS, MIN_WORD_CHARACTERS = 4, 8
# A URL's user and password. At http a user alone may be a token; elsewhere it is a name, as in ssh://git@host, and a
# password may contain a slash. Digits before a slash are a port, except where SQLAlchemy reads them as a password.
# Where no @ follows, a password that began ends nowhere: `hide_in_urls` looks no further than the last @ of a word.
USER_INFO = re.compile(
    r"https?://[^\s/?#@]*@|(?<=[\w+.-])(?<!\bhttp)(?<!\bhttps)://[^\s/?#@:\[\]]*:(?!\d*/)[^\s@]*@|"
    r"\b(?:postgres|mysql|mariadb|mssql|oracle)[\w+.-]{0,40}://[^\s/?#@:\[\]]*:[^\s@]*@",
    re.IGNORECASE,
)
SECRET_PARAMETER = re.compile(
    r"[?&;](?:(?=[\w-]*(?:passw|pwd|secret|token|api[-_]?key|access[-_]?key|signature|credential))[\w-]+|key|sig|auth)="
    r"[^\s&;]",
    re.IGNORECASE,
)
SECRET_VARIABLE = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|(ACCESS|API|PRIVATE|SECRET)_KEY|AUTH_STRING|(NOTIFY|RELOAD|WEBHOOK)_URL)$"
)
CONVENTIONAL_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")  # unlike the keys of any known service


def read_secret(variable: str, *, setting: str) -> str:
    """The value of an environment variable; ValueError names it and its setting if it is unset. If it does not look
    like a variable's name, it may be the secret itself, and is not printed.
    """
    value = os.environ.get(variable, "")
    if not value:
        is_a_name = CONVENTIONAL_NAME.fullmatch(variable) is not None
        shown = variable if is_a_name else "that it names (not shown, in case it is the secret itself)"
        raise ValueError(
            f"{setting} takes its value from the environment variable {shown}, which is not set, so the server would "
            f"refuse access. Export {variable if is_a_name else 'the secret as a variable, write its name there'} "
            f"and run again."
        )
    return value


class Secrets:
    def __init__(self, values: Iterable[str]):
        forms = {form for value in values for form in _forms(value)}
        ordered = sorted(forms, key=lambda form: (-len(form), form))  # longest first: no partial replacement
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def hide(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text) if self._pattern else text

    def hide_in(self, value: Any) -> Any:
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide_in(item) for key, item in value.items()}
        return [self.hide_in(item) for item in value] if isinstance(value, list) else value


def _forms(value: str) -> Iterator[str]:
    words = [word for word in value.split() if len(word) >= MIN_WORD_CHARACTERS]
    for text in (value, value.strip(), *words):
        if len(text) >= MIN_CHARACTERS:
            yield from (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
            yield from (quote(text), quote(text, safe=""))


@lru_cache(maxsize=1)
def _hider(values: frozenset[str]) -> Secrets:
    return Secrets(values)


def hide_known_secrets(text: str) -> str:
    """For lines that repeat what a library or a server said: without logins and keys in URLs, and without the values of
    variables that by their names are secrets. Of USER:PASSWORD the password is hidden alone too.
    """
    secrets = [value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)]
    words = {word for value in secrets for word in (value, value.partition(":")[2]) if len(word) >= MIN_WORD_CHARACTERS}
    return hide_in_urls(_hider(frozenset(words)).hide(text))


def hide_in_urls(text: str) -> str:
    """Without the logins and keys in URLs, in time proportional to the text's length: whoever asks a server may have
    written it.
    """
    return re.sub(r"\S+", _hide_in_word, text) if "://" in text else text


def _hide_in_word(found: re.Match[str]) -> str:
    login, at, rest = found[0].rpartition("@")
    word = USER_INFO.sub(lambda found: f"{found[0].partition('://')[0]}://{HIDDEN}@", login + at) + rest
    scheme, mark, address = word.partition("://")
    if SECRET_PARAMETER.search(address):
        return f"{scheme}{mark}{re.split('[?&;]', address, maxsplit=1)[0]}?{HIDDEN}"
    return word
