"""A decision that waits for a person: it is in the registry, so it survives the night and is approved from anywhere."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands import prefect_events
from tasks.commands.answer import write_ending
from tasks.commands.lineage import lineage
from tasks.core.files import read_json, write_jsonl
from tasks.stages.promote import approvals
from tasks.stages.promote.approvals import approve, name_of, withdraw
from tasks.stages.promote.overrides import ANSWER_HOURS, ManualOverride
from tasks.stages.promote.settings import PromoteSettings
from tasks.stages.promote.stage import time_to_approve
from tasks.tracking import waiting as waiting_module
from tasks.tracking.connection import absolute_location, absolute_uri
from tasks.tracking.journal import Entry, read_journal
from tasks.tracking.registry import Registry
from tasks.tracking.stage_results import outcome_tags
from tasks.tracking.versions import VERIFYING_TAGS
from tasks.tracking.waiting import ended_unapproved, ending_of, find_waiting, withdraw_unanswered
from tests.stages.promote.test_promote import (  # noqa: F401 (fixtures)
    FORCE,
    PROBLEMS,
    Pipeline,
    killed,
    make_pipeline,
    pipeline,
)
from tests.tracking.project import DATABASE, SETTINGS

pytestmark = pytest.mark.slow
MODEL = "travel-desk-agent"
APPROVE = ManualOverride("approve", "looked at ten episodes")
DAY = datetime(2026, 1, 1, tzinfo=UTC)
WITHDRAW = ManualOverride("withdraw", "it books twice")


@pytest.fixture
def night(pipeline: Pipeline) -> Pipeline:  # noqa: F811
    """A project whose policy leaves the last word to a person."""
    pipeline.params["promote"]["approval"] = True
    return pipeline


@pytest.fixture(scope="module")
def first_night(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[tuple[Pipeline, Path]]:
    """A project with a champion of 0.7 and a decision about 0.9 that waits; and a copy of its files."""
    folder, copy = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("copy") / "files"
    with pytest.MonkeyPatch.context() as patch:
        night = make_pipeline(folder, empty_database, patch)
        night.evaluate(0.7)
        night.promote()
        night.params["promote"]["approval"] = True
        night.evaluate(0.9)
        night.promote()
        shutil.copytree(folder, copy)
        yield night, copy


@pytest.fixture
def waiting(first_night: tuple[Pipeline, Path], monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """That project as it was then. Its database is written in place, since MLflow keeps it open."""
    night, copy = first_night
    folder = Path.cwd()
    used = folder / DATABASE
    with closing(sqlite3.connect(copy / DATABASE)) as before, closing(sqlite3.connect(used)) as now:
        before.backup(now)
    for item in [*folder.glob("artifacts/*"), *folder.glob("artifacts/mlflow/*")]:
        if item.is_dir() and item != used.parent:
            shutil.rmtree(item)
    shutil.copytree(copy, folder, dirs_exist_ok=True, ignore=lambda place, names: {DATABASE.name} & set(names))
    night.params["promote"]["approval"] = True
    return night


def registry() -> Registry:
    return Registry(SETTINGS, MODEL)


def entries(*kinds: Any) -> list[Entry]:
    return read_journal(registry()).of(*kinds)


def aliases() -> dict[str, int]:
    model = registry().client.get_registered_model(MODEL)
    return {alias: int(number) for alias, number in model.aliases.items()}


def tags_of_training(version: int) -> dict[str, str]:
    found = registry().version(version)
    assert found is not None
    return {name: value for name, value in found.tags.items() if name != "last_event"}


def test_a_decision_that_waits_is_in_the_registry_with_all_that_an_approval_needs(night: Pipeline, capsys: Any):
    night.evaluate(0.9)
    decision = night.promote()
    assert (decision["decision"], decision["policy_decision"], decision["approval"]) == ("hold", "promote", "waiting")
    (entry,) = entries("waiting")
    assert entry.body["version"] == aliases()["challenger"] == 1
    assert (entry.body["decided_at"], entry.body["expires"]) == (decision["decided_at"], decision["expires"])
    days = datetime.fromisoformat(decision["expires"]) - datetime.fromisoformat(decision["decided_at"])
    assert abs(days - timedelta(days=7)) < timedelta(minutes=10)
    told = " ".join(capsys.readouterr().out.split())
    assert "python -m tasks promote --approve --reason" in told and decision["expires"][:10] in told
    assert night.champion() is None


def test_a_decision_expires_when_the_flow_that_waits_for_it_ends_it(night: Pipeline, monkeypatch: pytest.MonkeyPatch):
    """3 hours of the flow, and 7 days of the policy."""
    monkeypatch.setenv(ANSWER_HOURS, "3.0")
    night.evaluate(0.9)
    decision = night.promote()
    left = datetime.fromisoformat(decision["expires"]) - datetime.fromisoformat(decision["decided_at"])
    assert abs(left - timedelta(hours=3)) < timedelta(minutes=10)
    (waits,) = [reason for reason in decision["reasons"] if "waits for approval until" in reason]
    assert decision["expires"][:16].replace("T", " ") in waits and "python -m flows approve" in waits
    assert time_to_approve(PromoteSettings.model_validate(night.params["promote"])) == timedelta(hours=3)
    monkeypatch.setenv(ANSWER_HOURS, "240")
    assert time_to_approve(PromoteSettings.model_validate(night.params["promote"])) == timedelta(days=7)


def test_the_next_morning_it_is_approved_from_another_folder_after_an_edit_and_without_artifacts(
    waiting: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """params.yaml names the registry; the learning rate, the policy and the test problems are others by then."""
    before, num_files = tags_of_training(2), len(list(Path("artifacts/mlflow").rglob("*")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    places = {"uri": absolute_uri(SETTINGS), "artifact_location": absolute_location(SETTINGS)}
    edited = {**waiting.params["promote"], "minimum_success": 0.99, "approval_expires_days": 1}
    params = {"paths": {"artifacts": "artifacts"}, "promote": edited, "tracking": {**SETTINGS.model_dump(), **places}}
    (elsewhere / "params.yaml").write_text(yaml.safe_dump({**params, "train": {"learning_rate": 5}}), encoding="utf-8")
    home = Path.cwd()
    monkeypatch.chdir(elsewhere)
    told = approve(APPROVE)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["params.yaml"]
    monkeypatch.chdir(home)
    assert (
        "iteration-0010 became champion: travel-desk-agent, version 2" in told[0]
        and "looked at ten episodes" in told[0]
    )
    assert waiting.champion() == (2, 0.9)
    assert aliases() == {"champion": 2, "previous": 1}
    assert tags_of_training(2) == before
    assert registry().version(2).lineage_files  # type: ignore[union-attr]
    logs = len(list(Path("artifacts/mlflow").rglob("journal-*")))
    assert len(list(Path("artifacts/mlflow").rglob("*"))) <= num_files + logs  # no lineage of its own
    (approval,) = entries("approval")
    assert approval.body["reason"] == "looked at ten episodes" and getpass.getuser() in approval.by
    assert entries("promotion")[-1].body["override"] == "approve"

    decision = waiting.promote()  # the next night in the folder that decided: told how it ended, nothing decided anew
    assert (decision["decision"], decision["approval"]) == ("promote", "given")
    assert decision["reasons"][-1].endswith(": looked at ten episodes")


def test_where_the_decision_was_made_its_record_says_how_it_ended(waiting: Pipeline):
    record = waiting.paths.stage("promote") / "decision.json"
    before = read_json(record)
    assert "decision.html" in approve(APPROVE)[-1]
    decision = read_json(record)
    assert (decision["decision"], decision["approval"], decision["is_champion"]) == ("promote", "given", True)
    assert decision["comparison"] == before["comparison"]
    assert decision["override"]["reason"] == "looked at ten episodes"
    assert not [reason for reason in decision["reasons"] if "waits for approval" in reason or "stays" in reason]
    assert f"Approved by {getpass.getuser()}" in record.with_suffix(".html").read_text(encoding="utf-8")
    outcome = read_json(record.with_name("outcome.json"))
    assert (outcome["decision"], outcome["approval"]) == ("promote", "given")
    assert (outcome["registered_version"], outcome["champion"]) == (2, 2)


def test_a_decision_that_was_withdrawn_waits_no_more_in_any_record(waiting: Pipeline):
    record = waiting.paths.stage("promote") / "decision.json"
    assert "decision.html" in withdraw(WITHDRAW)[-1]
    decision, outcome = read_json(record), read_json(record.with_name("outcome.json"))
    page = record.with_suffix(".html").read_text(encoding="utf-8")
    assert (decision["decision"], decision["approval"]) == (outcome["decision"], outcome["approval"])
    assert (outcome["decision"], outcome["approval"], outcome["champion"]) == ("hold", "withdrawn", 1)
    assert "iteration-0010 is not promoted; version 1 stays champion" in page and "It waits" not in page
    assert "it books twice" in page and "The champion, version 1, stays." in page


def test_a_decision_that_nobody_answered_waits_no_more_in_any_record(waiting: Pipeline):
    """As a flow ends it; a second look changes nothing."""
    record = waiting.paths.stage("promote") / "decision.json"
    decided_at = read_json(record)["decided_at"]
    for num_lines in (1, 0):
        withdraw_unanswered(registry(), decided_at, DAY)
        ending = ending_of(registry(), decided_at)
        assert ending is not None and len(write_ending(ending)) == num_lines
    decision, outcome = read_json(record), read_json(record.with_name("outcome.json"))
    page = record.with_suffix(".html").read_text(encoding="utf-8")
    assert (decision["decision"], decision["approval"]) == (outcome["decision"], outcome["approval"])
    assert (outcome["decision"], outcome["approval"], outcome["champion"]) == ("hold", "withdrawn", 1)
    assert (
        "nobody approved it by 2026-01-01 00:00 UTC" in page and "It waits" not in page and "Withdrawn by" not in page
    )


@pytest.mark.parametrize("answer", [APPROVE, WITHDRAW])
def test_mlflows_runs_that_ended_while_it_waited_say_how_it_ended_and_no_other(
    waiting: Pipeline, answer: ManualOverride
):
    """Two runs found version 2 waiting, one version 1, one version 2 a month before, which nobody answered; what they
    were asked to tag is what promote left.
    """
    client, asked = registry().client, {"kind": "flow", **outcome_tags(waiting.paths)}
    experiment = registry().experiment_id
    first, second, other, expired = (
        client.create_run(experiment, tags={**asked, **own}).info.run_id
        for own in ({}, {"decided_at": "later"}, {"registered_version": "1"}, {"decided_at": "2026-01-02T03:04:05"})
    )
    (approve if answer is APPROVE else withdraw)(answer)
    expected = ("promote", "given", "2") if answer is APPROVE else ("hold", "withdrawn", "1")
    still = ("hold", "waiting", "1")
    for run, told in ((first, expected), (second, expected), (other, still), (expired, still)):
        tags = client.get_run(run).data.tags
        assert tuple(tags[name] for name in ("decision", "approval", "champion")) == told
    now = outcome_tags(waiting.paths)
    assert now.items() <= client.get_run(first).data.tags.items()


def test_an_approval_counts_also_where_mlflows_run_cannot_say_so(waiting: Pipeline, monkeypatch: pytest.MonkeyPatch):
    def fail(*given: Any) -> None:
        raise ValueError("MLflow is away.")

    monkeypatch.setattr(approvals, "tag_answered_runs", fail)
    told = approve(APPROVE)
    assert waiting.champion() == (2, 0.9)
    assert any("warning: " in line and "MLflow is away." in line for line in told)


def test_a_decision_that_was_approved_from_another_folder_waits_no_more_in_the_records_of_its_own(
    waiting: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    """As the next flow of the folder ends it; approved elsewhere, nothing was written here."""
    record, decided_at = waiting.paths.stage("promote") / "decision.json", entries("waiting")[-1].body["decided_at"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(approvals, "_update_here", lambda *given: [])
        approve(APPROVE)
    assert read_json(record)["approval"] == "waiting"
    for num_lines in (1, 0):
        ending = ending_of(registry(), decided_at)
        assert ending is not None and len(write_ending(ending)) == num_lines
    decision, outcome = read_json(record), read_json(record.with_name("outcome.json"))
    assert (decision["decision"], decision["approval"], decision["champion_after"]["version"]) == (
        "promote",
        "given",
        2,
    )
    assert (outcome["decision"], outcome["approval"], outcome["champion"]) == ("promote", "given", 2)


def test_an_approval_by_hand_is_told_to_prefect_with_the_new_champion(
    waiting: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    told: list[tuple[str, str, int]] = []
    monkeypatch.setattr(prefect_events, "tell_prefect", lambda *event: told.append(event[:3]))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    prefect_events.tell_approval(approve(APPROVE)[0])
    assert told == [("promoted", MODEL, 2)]


def test_an_answer_to_another_decision_than_the_one_that_waits_moves_nothing(waiting: Pipeline):
    for answer, override in ((approve, APPROVE), (withdraw, WITHDRAW)):
        with pytest.raises(ValueError, match=r"decision of 2026-01-01 no longer waits.*version 2.*@challenger"):
            answer(override, decided_at="2026-01-01")
    assert entries("approval", "withdrawal") == []
    (entry,) = entries("waiting")
    approve(APPROVE, decided_at=entry.body["decided_at"])
    ending = ending_of(registry(), entry.body["decided_at"])
    assert ending is not None and ending.kind == "approval"
    assert ended_unapproved(registry()) is None


def test_a_decision_that_nobody_answered_may_be_put_up_again_and_is_a_reason_to_decide(waiting: Pipeline):
    (entry,) = entries("waiting")
    assert ended_unapproved(registry()) is None
    withdraw_unanswered(registry(), "2026-01-01", DAY)  # another one
    assert find_waiting(registry()) is not None
    withdraw_unanswered(registry(), entry.body["decided_at"], DAY)
    assert ended_unapproved(registry()) == (
        "the decision about version 2 ended unapproved: nobody approved it by 2026-01-01 00:00 UTC"
    )
    assert waiting.promote()["approval"] == "waiting"
    assert ended_unapproved(registry()) is None


def test_an_expired_decision_is_a_reason_too(waiting: Pipeline, monkeypatch: pytest.MonkeyPatch):
    travel(monkeypatch, timedelta(days=8))
    assert "the decision about version 2 expired at 20" in str(ended_unapproved(registry()))


def test_stale_stages_are_no_matter_to_an_approval(waiting: Pipeline):
    shutil.rmtree(waiting.paths.stage("train"))
    shutil.rmtree(waiting.paths.stage("evaluate"))
    write_jsonl(waiting.paths.split("test"), (problem.model_dump() for problem in reversed(PROBLEMS)))
    approve(APPROVE)
    assert waiting.champion() == (2, 0.9)


def test_the_lineage_of_an_approved_champion_is_a_promotion_by_the_person_who_approved(waiting: Pipeline):
    asked = lineage(f"models:/{MODEL}@challenger")["decision"]
    assert asked["decision"] == "hold" and any("It waits for approval" in reason for reason in asked["reasons"])
    approve(APPROVE)
    made = lineage(f"models:/{MODEL}@champion")["decision"]
    assert (made["decision"], made["override"]["kind"]) == ("promote", "approve")
    assert APPROVE.reason in made["reasons"][-1]
    assert not any("It waits for approval" in reason for reason in made["reasons"])


def test_a_challenger_whose_files_are_gone_is_decided_anew_and_no_champion_is_rolled_back(waiting: Pipeline):
    version = Registry(SETTINGS, MODEL).at("challenger")
    assert version is not None
    for file in Path("artifacts/mlflow/artifacts").rglob(f"{version.model_id}/artifacts/*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="its weights are gone") as caught:
        approve(APPROVE)
    assert "promote --force" in str(caught.value) and "rollback" not in str(caught.value)
    waiting.promote(FORCE)
    assert waiting.champion() == (2, 0.9)
    registry().verify(registry().champion())  # type: ignore[arg-type]


def test_an_approval_is_given_once(waiting: Pipeline):
    approve(APPROVE)
    with pytest.raises(ValueError, match=r"no decision waits.*version 2 was approved at .*looked at ten episodes"):
        approve(APPROVE)
    assert len(entries("approval")) == 1


def test_there_must_be_something_to_approve(night: Pipeline):
    night.evaluate(0.5)
    night.promote()
    for override in (approve, withdraw):
        with pytest.raises(ValueError, match=r"no decision waits for approval; none ever did\..*tasks promote"):
            override(APPROVE)


def test_an_expired_approval_is_refused_and_the_waiting_ended(waiting: Pipeline, monkeypatch: pytest.MonkeyPatch):
    travel(monkeypatch, timedelta(days=8))
    with pytest.raises(
        ValueError, match=r"can no longer be approved: expired at 20.*tasks promote` for a new"
    ) as error:
        approve(APPROVE)
    assert "\n" not in str(error.value)
    assert entries("withdrawal")[-1].body["reason"].startswith("expired at 20")
    assert aliases() == {"champion": 1}
    with pytest.raises(ValueError, match=r"version 2 was withdrawn at .*expired at"):
        approve(APPROVE)


def travel(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz or UTC) + by

    monkeypatch.setattr(waiting_module, "datetime", Later)


def test_an_approval_finds_another_champion_than_the_decision_had(waiting: Pipeline):
    waiting.evaluate(0.8)
    waiting.promote(FORCE)
    with pytest.raises(
        ValueError, match=r"no decision waits.*decided against version 1, and now version 3 is champion"
    ):
        approve(APPROVE)
    assert waiting.champion() == (3, 0.8)


def test_a_champion_that_was_rolled_back_meanwhile_is_another(waiting: Pipeline):
    from tasks.commands.rollback import rollback

    waiting.params["promote"]["approval"] = False
    waiting.evaluate(0.8)
    waiting.promote(FORCE)  # version 3, which ends the waiting of version 2
    waiting.params["promote"]["approval"] = True
    waiting.evaluate(0.95)
    waiting.promote()
    assert "version 1 is champion" in rollback(reason="a drill")
    with pytest.raises(
        ValueError,
        match=r"no decision waits.*version 4 was withdrawn.*decided against version 3, and now version 1 is champion",
    ):
        approve(APPROVE)
    assert aliases()["champion"] == 1


@pytest.mark.parametrize("user", ["", "nobody", None])
def test_an_approval_by_nobody_is_refused_in_one_line(waiting: Pipeline, monkeypatch: pytest.MonkeyPatch, user: Any):
    def getuser() -> str:
        if user is None:
            raise KeyError("uid not found")
        return str(user)

    monkeypatch.setattr(getpass, "getuser", getuser)
    for verb, override in ((approve, APPROVE), (withdraw, WITHDRAW)):
        with pytest.raises(ValueError, match=r"by nobody.*--by NAME") as error:
            verb(override)
        assert "\n" not in str(error.value)
    assert waiting.champion() == (1, 0.7)
    approve(ManualOverride("approve", "looked", by="Jane Doe"))
    (approval,) = entries("approval")
    assert approval.by.startswith("Jane Doe (through ")


@pytest.mark.parametrize("name", ["", "  ", "a\x07b", "x" * 1001])
def test_a_name_that_names_nobody_is_refused(name: str):
    with pytest.raises(ValueError, match="by nobody"):
        name_of(name, "approve")


def test_whoever_answers_from_a_shell_of_the_same_machine_is_named_once():
    me = name_of(None, "approve")
    named = name_of("Jane Doe", "approve")
    assert named == f"Jane Doe (through {me})"
    assert (name_of(named, "approve"), name_of(me, "approve")) == (named, me)


def test_the_same_challenger_the_next_night_waits_on_and_nothing_is_registered_again(waiting: Pipeline, capsys: Any):
    before = tags_of_training(2)
    capsys.readouterr()
    waiting.promote()
    told = " ".join(capsys.readouterr().out.split())
    assert "Version 2 (iteration-0010) still waits for approval" in told and "that waits: artifacts/promote" in told
    decision = read_json(waiting.paths.stage("promote") / "decision.json")
    assert decision["approval"] == "waiting" and decision["checks"]  # the decision that waits is kept here too
    assert tags_of_training(2) == before
    assert len(entries("waiting")) == 1
    assert len(entries("decision")) == 2  # the first champion's and this one: no new look at the test set
    approve(APPROVE)
    assert waiting.champion() == (2, 0.9)


def test_a_decision_waits_on_also_where_a_click_took_its_alias(waiting: Pipeline):
    before, (entry,) = tags_of_training(2), entries("waiting")
    registry().client.delete_registered_model_alias(MODEL, "challenger")
    decision = waiting.promote()
    assert decision["approval"] == "waiting" and entries("waiting") == [entry] and entries("withdrawal") == []
    assert tags_of_training(2) == before
    approve(APPROVE)
    assert waiting.champion() == (2, 0.9)


@pytest.mark.parametrize("step", ["tracking.registry.Registry.register", "tracking.aliases.make_champion"])
def test_a_killed_force_of_the_version_that_waits_ends_the_waiting_and_blocks_no_later_approval(
    waiting: Pipeline, monkeypatch: pytest.MonkeyPatch, step: str
):
    with monkeypatch.context() as patch:
        patch.setattr(f"tasks.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            waiting.promote(FORCE)
    with pytest.raises(ValueError, match=r"no decision waits.*version 2 was withdrawn at .*decided again"):
        approve(APPROVE)
    assert waiting.promote()["approval"] == "waiting"
    approve(APPROVE)
    assert waiting.champion() == (2, 0.9)
    assert waiting.num_versions() == 2


def test_a_better_challenger_takes_the_place_of_the_one_that_waits_with_a_word(waiting: Pipeline):
    waiting.evaluate(0.95)
    waiting.promote()
    (withdrawal,) = entries("withdrawal")
    assert (withdrawal.body["version"], withdrawal.body["reason"]) == (2, "superseded by version 3")
    assert aliases()["challenger"] == 3
    approve(APPROVE)
    assert waiting.champion() == (3, 0.95)


def test_a_challenger_that_does_not_pass_leaves_the_one_that_waits(waiting: Pipeline):
    waiting.evaluate(0.5)
    decision = waiting.promote()
    assert decision["decision"] == "reject"
    assert any(
        re.search(r"Version 2 \(iteration-0010\) still waits for approval", told) for told in decision["warnings"]
    )
    assert aliases()["challenger"] == 2
    approve(APPROVE)
    assert waiting.champion() == (2, 0.9)


def test_an_expired_one_is_decided_anew_the_next_night(waiting: Pipeline, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        travel(patch, timedelta(days=8))
        waiting.promote()
    assert [entry.body["reason"][:7] for entry in entries("withdrawal")] == ["expired"]
    assert len(entries("waiting")) == 2
    assert waiting.num_versions() == 2


def test_a_person_takes_it_back_with_a_reason(waiting: Pipeline):
    assert "it books twice" in withdraw(WITHDRAW)[0]
    assert aliases() == {"champion": 1}
    assert entries("withdrawal")[-1].body["reason"] == "it books twice"
    with pytest.raises(ValueError, match=r"no decision waits.*version 2 was withdrawn at .*it books twice"):
        approve(APPROVE)


def test_what_was_withdrawn_by_a_person_is_not_put_up_again_the_next_night(waiting: Pipeline):
    withdraw(WITHDRAW)
    decision = waiting.promote()
    assert decision["decision"] == "hold"
    assert "withdrawn" in decision["reasons"][0] and "it books twice" in decision["reasons"][0]
    assert find_waiting(registry()) is None


@pytest.mark.parametrize("change", ["weights", "decision", "tag", "version"])
def test_a_version_that_is_not_what_was_registered_is_not_approved(waiting: Pipeline, change: str):
    client = registry().client
    if change == "tag":
        client.set_model_version_tag(MODEL, "2", VERIFYING_TAGS[0], "edited")
    elif change == "version":
        client.delete_model_version(MODEL, "2")
    else:
        name = "model.safetensors" if change == "weights" else "decision.json"
        for file in Path("artifacts/mlflow").rglob(name):
            file.write_text(json.dumps({"decision": "promote"}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        approve(APPROVE)
    assert "\n" not in str(error.value)
    assert aliases().get("champion") == 1
    assert entries("approval") == []
