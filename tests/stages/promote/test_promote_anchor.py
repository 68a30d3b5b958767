"""Promotion as cheaper, one after another: success is held to the anchor, and not to last night's champion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.commands.rollback import rollback
from tasks.core.records import Trajectory
from tasks.tracking import pruning
from tasks.tracking.history import anchors
from tasks.tracking.journal import read_journal
from tasks.tracking.pruning import find_unneeded, needed_versions, remove_unneeded
from tasks.tracking.registry import Registry
from tests.stages.promote import test_promote
from tests.stages.promote.test_promote import Pipeline, pipeline
from tests.tracking.project import SETTINGS

__all__ = ["pipeline"]  # fixtures
pytestmark = pytest.mark.slow
CALLS = {0.9: 16, 0.88: 8, 0.83: 4, 0.97: 4}  # per episode, by the share of problems that are solved
PLAY = test_promote.play


def play_at_a_cost(share: float, *args: Any, **kwargs: Any) -> list[Trajectory]:
    return [replace(item, num_calls=CALLS.get(share, 16)) for item in PLAY(share, *args, **kwargs)]


@pytest.fixture
def cheaper(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A champion of 90%, and after it one of 88% at half the cost. Ten points may be lost."""
    monkeypatch.setattr(test_promote, "play", play_at_a_cost)
    pipeline.params["promote"]["or_cheaper"] = {"measure": "calls", "max_success_loss": 0.1, "min_saving": 0.1}
    for share in (0.9, 0.88):
        pipeline.evaluate(share)
        assert pipeline.promote()["decision"] == "promote"
    return pipeline


def test_a_third_champion_within_the_margin_of_the_second_is_held_to_the_first(cheaper: Pipeline):
    """Of 200 problems 83% are ten fewer than the champion's, and fourteen fewer than the anchor's."""
    cheaper.evaluate(0.83)
    decision = cheaper.promote()
    assert decision["decision"] == "hold"
    anchor = decision["anchor"]
    assert (anchor["version"], anchor["success_rate"], anchor["is_next"]) == (1, 0.9, False)
    losses = next(check for check in decision["checks"] if check["name"] == "cheaper")["numbers"]["losses"]
    assert {name: (loss["difference"], loss["is_as_good"]) for name, loss in losses.items()} == {
        "the champion, version 2": (-0.05, True),
        "the anchor, version 1": (-0.07, False),
    }
    page = (cheaper.paths.stage("promote") / "decision.html").read_text(encoding="utf-8")
    assert "the anchor, version 1 (90.0% on these problems)" in page
    cheaper.evaluate(0.97)
    decision = cheaper.promote()
    assert decision["decision"] == "promote" and decision["anchor"]["is_next"]
    assert anchors(read_journal(Registry(SETTINGS, "travel-desk-agent")).entries) == [1, 3]


def test_where_the_anchor_was_deleted_the_best_that_is_left_takes_its_place_and_that_is_said(cheaper: Pipeline):
    registry = Registry(SETTINGS, "travel-desk-agent")
    registry.client.delete_model_version("travel-desk-agent", "1")
    cheaper.evaluate(0.83)
    decision = cheaper.promote()
    assert decision["decision"] == "promote"
    assert (decision["anchor"]["version"], decision["anchor"]["deleted"]) == (2, 1)
    assert any(
        warning.startswith("Version 1, which success may not fall below, was") for warning in decision["warnings"]
    )
    assert anchors(read_journal(registry).entries)[-1] == 2


def promote_a_better_one(cheaper: Pipeline) -> Registry:
    """The third champion, which is the anchor from now on; the registry."""
    cheaper.evaluate(0.97)
    assert cheaper.promote()["anchor"]["is_next"]
    return Registry(SETTINGS, "travel-desk-agent")


def test_prune_keeps_the_anchor_of_the_champion_that_a_rollback_leads_to(cheaper: Pipeline):
    """Version 2, which a rollback leads to, was promoted as cheaper than version 1."""
    registry = promote_a_better_one(cheaper)
    needed = needed_versions(registry, read_journal(registry), registry.versions(), keep=1)
    assert (needed[1], needed[3]) == (
        "the anchor of decisions after a rollback to version 2",
        "champion by the journal",
    )
    assert list(find_unneeded(registry, keep=1)) == []


def test_an_anchor_that_was_pruned_is_as_one_that_was_deleted(cheaper: Pipeline):
    """Version 1, which a release before this pruned, cannot be played on another test set."""
    registry = promote_a_better_one(cheaper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "_anchor_after_rollback", lambda *_: [])
        for item in find_unneeded(registry, keep=1):
            remove_unneeded(registry, item.model_id, keep=1)
    rollback(reason="version 3 leaks names")
    assert anchors(read_journal(registry).entries) == [1]
    cheaper.drawn_from = {"temperature": 0.8, "top_p": 0.9}
    cheaper.evaluate(0.95)
    decision = cheaper.promote()
    assert (decision["anchor"]["version"], decision["anchor"]["deleted"]) == (2, 1)
    assert any("lost its weights to `prune`" in warning for warning in decision["warnings"])
