"""Uploads and downloads of 256 MB, ours (SHA-256 compared both ways) against boto3's own transfer, in turns.

Both use boto3's transfer manager with the same settings. Writes artifacts/bench/storage.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tasks.core.files import write_json
from tasks.core.settings import load
from tasks.core.urls import parse_url
from tasks.storage.client import connect
from tasks.storage.objects import download, upload
from tasks.storage.settings import StorageSections
from tests.benchmarks.demo import demo_params
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT
from tests.services.servers import ObjectStore

pytestmark = pytest.mark.bench
MEGABYTES, ROUNDS = 256, 5
GOAL, FLOOR = 0.9, 0.5  # of boto3's throughput: what we want, and what would be a fault


def megabytes_per_second(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return MEGABYTES / (time.perf_counter() - began)


def test_ours_is_nearly_as_fast_as_boto3s_own(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.variables().items():
        monkeypatch.setenv(name, value)
    store = connect(load(StorageSections, demo_params()).storage)
    file, target = tmp_path / "file", tmp_path / "target"
    ours, bucket, theirs = parse_url(f"s3://{object_store.bucket}/bench/ours"), object_store.bucket, "bench/theirs"
    work: dict[str, Callable[[], Any]] = {
        "upload": lambda: upload(store, file, ours),
        "boto3_upload": lambda: store.client.upload_file(str(file), bucket, theirs, Config=store.transfer),
        "download": lambda: download(store, ours, target, sha256=None),
        "boto3_download": lambda: store.client.download_file(bucket, theirs, str(target), Config=store.transfer),
    }
    speeds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(ROUNDS):
        file.write_bytes(os.urandom(MEGABYTES * 1_000_000))  # the hash of an old one would be remembered
        for pair in (["upload", "boto3_upload"], ["download", "boto3_download"]):
            for name in pair if number % 2 else reversed(pair):
                speeds[name].append(megabytes_per_second(work[name]))
    found = {name: round(median(values)) for name, values in speeds.items()}
    ratios = {
        way: round(median(o / t for o, t in zip(speeds[way], speeds[f"boto3_{way}"], strict=True)), 2)
        for way in ("upload", "download")
    }
    print(f"\n{found} MB/s; ours over boto3's: {ratios}")
    row = {"cpu": cpu_model(), "megabytes": MEGABYTES, **found, "ratios": ratios, "goal": GOAL}
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "storage.json", row)
    assert min(ratios.values()) >= FLOOR
