"""A folder of the test's own on the S3 server, and the settings that reach it by the environment alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.storage.settings import PathsSettings, StorageSections, StorageSettings

SETTINGS = StorageSettings(
    endpoint_url=None,
    max_attempts=2,
    connect_timeout_seconds=5.0,
    read_timeout_seconds=5.0,
    max_concurrency=4,
    finish_seconds=30.0,
)


def sections(remote: str, artifacts: Path) -> StorageSections:
    return StorageSections(
        paths=PathsSettings(artifacts=str(artifacts), custom="tasks/custom", remote=remote), storage=SETTINGS
    )


@dataclass(frozen=True)
class Place:
    client: Any
    bucket: str
    prefix: str

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}/{name}"

    def put(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=body)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")

    def names(self, under: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}/{under}").get("Contents", [])
        return sorted(item["Key"].removeprefix(f"{self.prefix}/") for item in found)
