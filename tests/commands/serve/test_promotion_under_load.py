"""A promotion and a rollback while clients ask: no request fails, and every reply names the version that wrote it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tasks.commands.rollback import rollback
from tasks.commands.serve.serving import Keys, Serving
from tasks.commands.serve.versions import open_source
from tests.commands.serve.clients import Load, until
from tests.commands.serve.conftest import PLAY, SETTINGS
from tests.tracking.candidates import MODEL, promote

pytestmark = pytest.mark.slow
FIRST, SECOND = f"{MODEL}/1", f"{MODEL}/2"


def test_a_client_whom_nobody_answers_counts_as_failed():
    with Load("http://127.0.0.1:1", MODEL, count=2) as load:
        until(lambda: len(load.failed) == 2)
    assert load.num_answered == 0


def test_no_request_fails_over_a_promotion_and_a_rollback(project: Path, models: list[Path], tmp_path: Path):
    promote("a", folder=models[0])
    source = open_source(f"models:/{MODEL}@champion", tmp_path / "served", None)
    settings = SETTINGS.model_copy(update={"poll_seconds": 0.2})

    with Serving(source, PLAY, settings, keys=Keys(), record=None) as serving:
        with Load(serving.gateway.url, MODEL, count=8) as load:
            until(lambda: load.answered_by(FIRST) >= 100)
            promote("b", folder=models[1])
            until(lambda: load.answered_by(SECOND) >= 100)
            before = load.answered_by(FIRST)
            rollback(reason="it books twice")
            until(lambda: load.answered_by(FIRST) >= before + 100)
        counts = serving.loop.counts()

    assert load.failed == []
    assert [[version for version, _ in groupby(row)] for row in load.versions] == [[FIRST, SECOND, FIRST]] * 8
    assert serving.watcher.num_changes == 2 and serving.watcher.trouble is None
    assert counts["answered"] == sum(map(len, load.versions)) >= 300
    # The one that answers, and the one before, which the way back does not fetch again.
    assert sorted(path.name.partition("-")[0] for path in source.folder.iterdir()) == ["1", "2"]
