"""Prefect's server of the user's: is it there and does it take our password, asked before anything runs; and what a
person is told where it is gone at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import get_client

from tasks.core.passing_faults import PassingFault, causes

REFUSED = (401, 403)


def check_server() -> None:
    """ValueError where the server of PREFECT_API_URL does not answer, refuses the password, or is no Prefect."""
    url = os.environ["PREFECT_API_URL"]
    try:
        with get_client(sync_client=True, httpx_settings={"timeout": 30.0}) as client:
            client.read_work_pools(limit=1)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in REFUSED:
            raise ValueError(
                f"Prefect's server ({url}) refuses the password, so no run could be recorded there. "
                f"Export PREFECT_API_AUTH_STRING as USER:PASSWORD, the server's PREFECT_SERVER_API_AUTH_STRING."
            ) from None
        raise ValueError(_describe(url, f"answered with status {status}")) from None
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(_describe(url, f"does not answer ({type(error).__name__})")) from None


@contextmanager
def show_what_ended_the_run() -> Iterator[None]:
    """A run that cannot report its end is an error of the network in Prefect; what ended the run is behind that."""
    try:
        yield
    except httpx.TransportError as error:
        told = next((link for link in causes(error) if isinstance(link, ValueError)), None)
        fault = f"does not answer any more ({type(error).__name__})"
        raise told or PassingFault(_describe(os.environ["PREFECT_API_URL"], fault)) from None


def _describe(url: str, fault: str) -> str:
    return (
        f"Prefect's server ({url}) {fault}, so no run could be recorded there. Start it, or correct PREFECT_API_URL "
        f"(it ends in /api); without that variable turnwise starts a server of its own."
    )
