"""The empty databases that Prefect and MLflow begin with, made once at set-up: their migrations take 5 to 10 s and 1 to
3 s of a processor in each new folder. `python infra/locks/empty_databases.py` with the Python of the environment, which
then has them in share/turnwise; `tasks/core/databases.py` copies them from there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(sys.prefix) / "share" / "turnwise"


def main() -> None:
    """Both at once. Files of earlier versions go."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=len(MAKERS), mp_context=get_context("spawn")) as processes:
        made = {*processes.map(make, MAKERS)}
    for file in FOLDER.glob("*.db"):
        if file not in made:
            file.unlink()


def make(package: str) -> Path:
    target = FOLDER / f"{package}-{version(package)}.db"
    with TemporaryDirectory(dir=FOLDER) as folder:
        whole = Path(folder) / "whole.db"
        with closing(sqlite3.connect(MAKERS[package](Path(folder)))) as opened:
            opened.execute("VACUUM INTO ?", (str(whole),))  # one file, without what a journal still holds
        os.replace(whole, target)
    return target


def make_for_prefect(folder: Path) -> Path:
    os.environ |= {"DO_NOT_TRACK": "1", "PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    os.environ.pop("PREFECT_API_DATABASE_CONNECTION_URL", None)
    from prefect.server.database import provide_database_interface

    asyncio.run(provide_database_interface().create_db())
    return folder / "prefect.db"


def make_for_mlflow(folder: Path) -> Path:
    os.environ |= {"DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    logging.disable(logging.INFO)  # a line per step
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import URL, create_engine

    database = folder / "mlflow.db"
    engine = create_engine(URL.create("sqlite", database=str(database)))
    _initialize_tables(engine)
    engine.dispose()
    return database


MAKERS: dict[str, Callable[[Path], Path]] = {"prefect": make_for_prefect, "mlflow": make_for_mlflow}

if __name__ == "__main__":
    main()
