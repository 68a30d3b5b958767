"""Whether a POST to /reload is MLflow's: the signature of its webhooks, over the delivery, its time and its body.

A reload has the registry looked up; nothing that the body says is used. Source: MLflow's delivery of webhooks, after
the convention of Standard Webhooks.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping

MAX_AGE_SECONDS = 300  # of a delivery: an older one is somebody's copy
VERSION = "v1"


def is_signed(headers: Mapping[str, str], body: bytes, secret: str, *, now: float) -> bool:
    """`headers` with names in lower case; `now` in seconds since 1970."""
    kind, _, given = headers.get("x-mlflow-signature", "").partition(",")
    delivery, sent = headers.get("x-mlflow-delivery-id", ""), headers.get("x-mlflow-timestamp", "")
    if kind != VERSION or not (sent.isascii() and sent.isdecimal()) or abs(now - int(sent)) > MAX_AGE_SECONDS:
        return False
    try:
        signature = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        return False
    expected = hmac.digest(secret.encode(), f"{delivery}.{sent}.".encode() + body, "sha256")
    return hmac.compare_digest(signature, expected)
