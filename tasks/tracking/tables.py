"""Tables in MLflow's pages: rows that a run keeps beside its few metrics.

MLflow shows a JSON file of columns and data as a table where a tag of the run names it. `mlflow.log_table` appends to
a table of the same name, which would double it when a killed flow's work is logged again, so the file is written whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own name: [{"path": …, "type": "table"}]


def log_table(client: MlflowClient, run_id: str, file: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """`rows` as the table `file` of a run, in place of the one before; a column per key that any row has."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[_plain(row.get(name)) for name in columns] for row in rows]
    client.log_dict(run_id, {"columns": columns, "data": data}, file)
    known = json.loads(client.get_run(run_id).data.tags.get(TABLES_TAG, "[]"))
    entry = {"path": file, "type": "table"}
    if entry not in known:
        client.set_tag(run_id, TABLES_TAG, json.dumps([*known, entry]))


def _plain(value: Any) -> Any:
    """A cell: what is nested as text, since MLflow shows an object as one letter after another."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
