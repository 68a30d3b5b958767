"""The connection to S3, by boto3: bounded attempts and time-outs, and errors of one line without a secret.

Keys come from boto3's own chain (environment, ~/.aws, the machine's role). boto3 is imported at the first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from tasks.core.secrets import Secrets
from tasks.core.surroundings import exempt_loopback
from tasks.core.text import one_line
from tasks.core.urls import S3Url
from tasks.storage.settings import StorageSettings

AWS = (".amazonaws.com", ".amazonaws.com.cn")
ANY_REGION = "us-east-1"  # servers that are not AWS have none, and the signature needs one
NOT_THERE = ("404", "NoSuchKey", "NotFound")
CHANGED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
ALTERED = ("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody")
# What S3 answers → what is wrong, and what to do.
REFUSALS = {
    "NoSuchBucket": "there is no such bucket. Create it, or correct the name",
    "InvalidAccessKeyId": "the server does not know the access key, or its session token has expired. Correct "
    "AWS_ACCESS_KEY_ID and AWS_SESSION_TOKEN, or the profile",
    "SignatureDoesNotMatch": "the secret key is wrong. Correct AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the session token has expired. Get a new one (such as `aws sso login`), then run again",
    "ExpiredTokenException": "the session token has expired. Get a new one (such as `aws sso login`), then run again",
    "InvalidToken": "the session token is not valid. Get a new one, or unset AWS_SESSION_TOKEN",
    "AccessDenied": "access is denied: no such bucket, one that is not ours, or a key without the right. Check the "
    "name, or ask its owner",
    "400": "the request is refused, as an expired session token is. Get a new one (such as `aws sso login`), or "
    "correct the credentials",
    "403": "access is denied: a wrong key, an expired token, or a bucket that is not ours. Check the credentials",
    "PermanentRedirect": "the bucket is in another region. Set AWS_DEFAULT_REGION to it",
    "301": "the bucket is in another region. Set AWS_DEFAULT_REGION to it",
    "EntityTooLarge": "the server refuses files of this size. Use a server without that limit",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes. Set it",
}


class StorageError(ValueError):
    """S3 could not be used; the message is one line for people. `is_passing`: the same request may succeed later."""

    def __init__(self, message: str, *, is_passing: bool = False):
        super().__init__(message)
        self.is_passing = is_passing


class Absent(StorageError):
    """There is no such object."""


class Changed(StorageError):
    """The object is not the one that was read before: another writer was there."""


class Altered(StorageError):
    """Other bytes arrived than were sent, here or there."""

    def __init__(self, url: S3Url | str):
        super().__init__(
            f"{url}: arrived with other bytes than were sent, so it is not used. Run again; if it stays so, the "
            f"object is damaged: write it again.",
            is_passing=True,
        )


@dataclass(frozen=True, slots=True)
class Store:
    """A client of one server, and what must not be shown of it."""

    client: Any
    transfer: Any
    secrets: Secrets

    @contextmanager
    def clear_errors(self, url: S3Url) -> Iterator[None]:
        """Turn an error of boto3 into a StorageError."""
        try:
            yield
        except Exception as error:
            told = explain(error, str(url), server=f"the server at {self.address}", hide=self.secrets.hide)
            if told is None:
                raise
            raise told from None

    @property
    def address(self) -> str:
        """Host and port alone."""
        place = urlsplit(self.client.meta.endpoint_url)
        return f"{place.hostname}:{place.port}" if place.port else str(place.hostname)


def explain(error: Exception, place: str, *, server: str, hide: Callable[[str], str]) -> StorageError | None:
    """What boto3's error means for `place`, in one line; None for any other error. `hide` takes secrets out."""
    if not type(error).__module__.startswith(("boto3.", "botocore.", "s3transfer.")):
        return None
    cause = error.__context__ if type(error).__module__ == "boto3.exceptions" else None  # of a transfer
    response = getattr(cause or error, "response", None)
    if isinstance(response, dict):
        return refusal(place, response, hide)
    return _no_answer(place, cause or error, server, hide)


def refusal(place: str, response: Mapping[str, Any], hide: Callable[[str], str]) -> StorageError:
    """What the error in S3's answer means for `place`, in one line."""
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in CHANGED:
        return Changed(f"{place}: another run wrote there at the same time, so nothing was replaced. Run again.")
    if code in NOT_THERE:
        return Absent(f"{place}: there is no such object, so there is nothing to read. Correct the URL.")
    if code in ALTERED:
        return Altered(place)
    if code in REFUSALS:
        return StorageError(f"{place}: {REFUSALS[code]}.")
    said = one_line(hide(f"{code} {response.get('Error', {}).get('Message', '')}"), limit=200)
    return StorageError(
        f"{place}: S3 answered {status} ({said}). Try again later, or ask who runs the server.",
        is_passing=status >= 500 or status == 429,
    )


def _no_answer(place: str, error: BaseException, server: str, hide: Callable[[str], str]) -> StorageError:
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return StorageError(
            f"{place}: boto3 found no credentials. Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or set "
            f"AWS_PROFILE."
        )
    if name in ("TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"):
        return StorageError(f"{place}: {REFUSALS['ExpiredToken']}.")
    if name == "S3DownloadFailedError":  # of s3transfer, which compares the ETag of each part
        return replaced_meanwhile(place)
    if name == "FlexibleChecksumError":  # the one that boto3 added when it uploaded
        return Altered(place)
    said = one_line(hide(str(error)), limit=200)
    return StorageError(
        f"{place}: {server} could not be reached ({name}: {said}). Check the network and storage.endpoint_url (or "
        f"AWS_ENDPOINT_URL_S3).",
        is_passing=True,
    )


def replaced_meanwhile(place: S3Url | str) -> StorageError:
    return StorageError(
        f"{place}: was changed while it was downloaded, so the copy is not used. Run again.", is_passing=True
    )


def require_boto3() -> None:
    """ValueError where it is not installed; it is not imported."""
    if find_spec("boto3") is None:
        raise ValueError(
            "the package boto3 is not installed, so s3:// cannot be read or written. Run `make setup-services`."
        )


def connect(settings: StorageSettings) -> Store:
    """ValueError where boto3 is not installed or its own configuration is wrong. Nothing is asked of the server yet."""
    require_boto3()
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    exempt_loopback()
    try:
        session = boto3.Session()
        config = Config(
            retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
            connect_timeout=settings.connect_timeout_seconds,
            read_timeout=settings.read_timeout_seconds,
            max_pool_connections=settings.max_concurrency,
        )
        region = session.region_name or ANY_REGION
        client = session.client("s3", endpoint_url=settings.endpoint_url, region_name=region, config=config)
        if not is_aws(client.meta.endpoint_url):
            by_path = config.merge(Config(s3={"addressing_style": "path"}))
            client = session.client("s3", endpoint_url=settings.endpoint_url, region_name=region, config=by_path)
        keys = session.get_credentials()
        secrets = [] if keys is None else [keys.secret_key or "", keys.token or ""]
    except (BotoCoreError, ValueError) as error:
        raise ValueError(
            f"boto3's own configuration cannot be used ({type(error).__name__}: {one_line(error, limit=200)}), so S3 "
            f"cannot be reached. Correct ~/.aws/config, the AWS_… variables or storage.endpoint_url."
        ) from None
    return Store(client, TransferConfig(max_concurrency=settings.max_concurrency), Secrets(secrets))


def is_aws(endpoint: str) -> bool:
    return str(urlsplit(endpoint).hostname).endswith(AWS)
