"""What a setting may name a file or a folder by: a path, which no shell expands, or an `s3://` URL with a local copy.
And the URL of a model's endpoint.

`tasks/storage` downloads the copy and checks it, before a stage or a command reads it. Here is only the name of its
place, so that every room can find it and none but `storage` needs boto3.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

S3 = "s3://"
COPIES = Path(".cache/s3")  # of the workspace; `rm -r` costs a download
# Of AWS's rules those that matter here: nothing that leaves the folder, no port and no user.
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
HASH = re.compile(r"sha256=([0-9a-f]{64})")


class S3Url(NamedTuple):
    """`sha256` is of the object's bytes where the URL ends with #sha256=…: then it names that content and no other."""

    bucket: str
    key: str
    sha256: str | None

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> S3Url:
        return S3Url(self.bucket, f"{self.key}/{name}".lstrip("/"), None)


def refuse_home(path: str) -> str:
    """ValueError for a path with `~`, which a shell replaces and nothing else."""
    if path.startswith("~"):
        raise ValueError(
            f"{path!r} begins with `~`, which is not expanded here, so a folder of that name would be made. Write "
            f"{os.path.expanduser(path)}"
        )
    return path


def _refuse_query(url: str) -> str:
    if "?" in url:
        raise ValueError("it contains a query, so no path can be added to it; put a key in api_key_variable instead")
    return url


EndpointUrl = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(_refuse_query)]  # OpenAI-compatible


def is_url(text: str) -> bool:
    return text.startswith(S3)


def parse_url(text: str) -> S3Url:
    """ValueError where the URL names no bucket, leaves its folder, or ends with something else than a hash."""
    place, sign, fragment = text.removeprefix(S3).partition("#")
    bucket, _, key = place.partition("/")
    key = key.rstrip("/")
    found = HASH.fullmatch(fragment)
    if not is_url(text) or not BUCKET.fullmatch(bucket) or (sign and found is None):
        raise ValueError(
            f"{text!r} is no address of S3, so nothing can be read or written there. Write s3://BUCKET/KEY, with "
            f"#sha256=… after it where the content must not change"
        )
    if key and any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"{text!r} has an empty part, `.` or `..` in its key, which no file name may be. Correct it")
    return S3Url(bucket, key, found and found[1])


def local_path(text: str) -> Path:
    """The path itself, or the place of the copy of what the URL names. One URL has one place, on every machine."""
    if not is_url(text):
        return Path(text)
    url = str(parse_url(text))
    return COPIES / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]
