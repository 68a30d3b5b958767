"""DVC's default remote, where that is on S3."""

from __future__ import annotations

import subprocess
import sys

from tasks.core.urls import is_url


def dvc_remote() -> tuple[str, str | None] | None:
    """Its URL and endpoint; None where there is none, or one that is not on S3."""
    lines = ask_dvc("config", "--list", may_fail=True).splitlines()
    stated = dict(line.split("=", 1) for line in lines if "=" in line)
    name = stated.get("core.remote")
    url = stated.get(f"remote.{name}.url", "")
    return (url, stated.get(f"remote.{name}.endpointurl")) if is_url(url) else None


def ask_dvc(*arguments: str, may_fail: bool = False) -> str:
    """DVC's output; ValueError where it fails, or "" where it may."""
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 and not may_fail:
        raise ValueError(
            f"`dvc {' '.join(arguments)}` failed, so it is not known what DVC keeps and nothing was done: "
            f"{' '.join(done.stderr.split())[:300]} Put that right and run again."
        )
    return done.stdout.strip() if done.returncode == 0 else ""
