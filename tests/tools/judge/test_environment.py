"""An environment with a judge: what is left on the trajectory, who decides, and episodes that cannot be judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.harmony import HARMONY
from tasks.chat.formats.hermes import HERMES
from tasks.chat.formats.recipe import RECIPE
from tasks.core import background
from tasks.core.files import file_hash, write_json, write_jsonl
from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.environments.catalog import load_bare_environment, load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.rollouts.conversation import Conversation
from tasks.tools.base import Environment, EnvironmentFault, Verdict, block_until
from tasks.tools.judge.environment import JudgedEnvironment
from tasks.tools.judge.evidence import Agreement, Evidence, Table, measured_agreement
from tasks.tools.judge.judge import describe_judge
from tasks.tools.judge.prompt import Judged, messages_for
from tasks.tools.judge.settings import JudgeSettings
from tasks.tools.user.environment import ReplayedUser, UserEnvironment
from tasks.tracking.lineage import judge_of
from tests import tiny
from tests.chat import templates
from tests.rollouts.test_requests import NOTE, Notebook
from tests.tools.judge.endpoint import Endpoint, judge_row, judge_settings, opinion, serve
from tests.tools.user.test_script import PARTS, WHOLE, play, script
from tests.worlds import QUICK, environment_settings

(PROBLEM,) = tiny.problems(1)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve(Endpoint()) as made:
        yield made


def settings_with(endpoint: Endpoint, folder: Path, **changed: Any) -> EnvironmentSettings:
    return environment_settings(judge=judge_row(endpoint.url, folder, **changed))


def play_reference(environment: Environment, problem: Problem = PROBLEM, *, is_cut: bool = False) -> Verdict:
    episode = environment.start(problem)
    for turn in problem.reference:
        for call in turn.calls:
            block_until(episode.call(call.name, call.arguments))
        if turn is not problem.reference[-1]:
            episode.end_turn(turn.answer)
    verdict = block_until(episode.verdict(None if is_cut else problem.reference[-1].answer))
    episode.close()
    return verdict


def test_a_judge_that_does_not_decide_leaves_its_opinion_in_the_details_alone(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.says = lambda messages, request: opinion(False, 0.25, 0.75)
    with closing(load_environment(environment_settings())) as plain:
        expected = play_reference(plain)
    with closing(load_environment(settings_with(endpoint, tmp_path, decides=False))) as environment:
        found = play_reference(environment)
        assert environment.counts()["judge_requests"] == 1
    assert (found.success, found.checks) == (True, expected.checks)
    votes = [{"reason": "So it is.", "success": False, "score": 0.25, "soundness": 0.75}]
    assert found.details == {
        **expected.details,
        "judge": {"success": False, "score": 0.25, "soundness": 0.75, "votes": votes},
    }
    json.dumps(found.details)
    document = json.loads(endpoint.asked[0]["messages"][1]["content"].split("\n", 2)[2].rsplit("\nepisode-", 1)[0])
    assert document["final_message"] == PROBLEM.reference[-1].answer
    assert [event["tool"] for event in document["events"]] == [
        call.name for turn in PROBLEM.reference for call in turn.calls
    ]


@pytest.mark.slow
@pytest.mark.parametrize("says_success", [True, False])
def test_a_judge_that_decides_is_one_more_check_and_saves_no_failure(
    endpoint: Endpoint, tmp_path: Path, says_success: bool
) -> None:
    endpoint.says = lambda messages, request: opinion(says_success)
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        found = play_reference(environment)
        assert (found.success, found.checks["judge"]) == (says_success, says_success)
        idle = environment.start(PROBLEM)
        assert not block_until(idle.verdict("I did nothing.")).success


def test_what_the_user_says_in_between_is_read_too(endpoint: Endpoint, tmp_path: Path) -> None:
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        asked = PROBLEM.model_copy(update={"requests": ["Book a flight.", "And a second one."]})
        episode, user = environment.start(asked, stream="1/train"), environment.start_user(asked, stream="1/train")
        assert (block_until(user.open()), block_until(user.answer("Done."))) == tuple(asked.requests)
        episode.end_turn("Done.")
        assert block_until(user.answer("Done again.")) is None
        block_until(episode.verdict("Done again."))
    assert '"user": "And a second one."' in endpoint.asked[0]["messages"][1]["content"]


def test_what_the_user_of_a_replay_says_is_read_too(endpoint: Endpoint, tmp_path: Path) -> None:
    """A replay draws another user for the same episode, which keeps its own stream."""
    asked = PROBLEM.model_copy(update={"requests": ["Book a flight.", "And a second one."]})
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        replayed = ReplayedUser(environment, 2)
        episode, user = replayed.start(asked, stream="1/eval"), replayed.start_user(asked, stream="1/eval")
        block_until(user.open())
        block_until(user.answer("Done."))
        episode.end_turn("Done.")
        block_until(episode.verdict("Done again."))
    assert '"user": "And a second one."' in endpoint.asked[0]["messages"][1]["content"]


def test_a_stored_episode_reads_as_it_did_when_it_ended(endpoint: Endpoint, tmp_path: Path) -> None:
    """Else judge-check would measure the judge on other documents than training shows it."""
    chat, settings = ChatFormat(tiny.tokenizer(), source="test"), judge_settings(endpoint, tmp_path, decides=False)
    one_call = QUICK.model_copy(update={"max_calls_per_turn": 1})
    world = UserEnvironment(Notebook(one_call), script("sharded"))
    with closing(JudgedEnvironment(world, settings, is_asked=True)) as environment:
        played = play(chat, environment, ["What else?", f"{NOTE}\n{NOTE}", "<tool_call>\n{", "Noted.", "All noted."])
    assert [len(turn.calls) for turn in played.turns] == [0, 2, 1, 0, 0]
    (request,) = endpoint.asked
    stored = Judged.of_stored(WHOLE, Trajectory.from_row(played.to_row()), show_reference=False)
    rubric = settings.rubric_file.read_text(encoding="utf-8")
    assert request["messages"] == messages_for(stored, rubric=rubric, max_characters=settings.max_characters)
    assert stored.requests == WHOLE.requests
    assert [event.get("tool", event.get("user", "malformed")) for event in stored.events] == [
        PARTS[0], PARTS[1], "note", "malformed", PARTS[2],
    ]  # fmt: skip


@pytest.mark.parametrize("call_format", [HERMES, RECIPE, HARMONY], ids=lambda one: one.name)
def test_judge_check_reads_a_message_without_the_marks_of_its_format_as_the_judge_did(
    endpoint: Endpoint, tmp_path: Path, call_format: CallFormat
) -> None:
    """So it asks for no vote that is stored. In Hermes a message is its text, and the row is what it always was."""
    chat = ChatFormat(templates.tokenizer(templates.PHI), source="test")
    chat.call_format = call_format
    note = call_format.text([ToolCall(name="note", arguments={"text": "a"})])
    settings, texts = judge_settings(endpoint, tmp_path), [note, *map(call_format.closing, ["For whom?", "Noted."])]
    world = UserEnvironment(Notebook(QUICK), script("on_request"))
    with closing(JudgedEnvironment(world, settings, is_asked=True)) as environment:
        played = play(chat, environment, texts)
        row = played.to_row()
        stored = Judged.of_stored(WHOLE, Trajectory.from_row(row), show_reference=False)
        background.run(environment.judge.judge(stored)).result(60)
    assert ([event.get("message") for event in stored.events[2:]], stored.final_message) == (["For whom?"], "Noted.")
    assert len(endpoint.asked) == 1
    assert [turn["text"] for turn in row["turns"]] == texts
    with_marks = {} if call_format is HERMES else {1: "For whom?", 2: "Noted."}
    assert {number: turn["answer"] for number, turn in enumerate(row["turns"]) if "answer" in turn} == with_marks


def test_the_first_words_of_a_user_are_read_only_where_they_are_not_the_request(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    opened: Future[str] = Future()
    opened.set_result("Hi, I need something.")
    openings: list[Any] = [opened, PROBLEM.requests[0]]

    class Talker:
        def open(self) -> Any:
            return openings.pop(0)

    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        environment.inner.start_user = lambda problem, *, stream: Talker()  # type: ignore[attr-defined]
        for _ in range(2):
            episode, user = environment.start(PROBLEM, stream="s"), environment.start_user(PROBLEM, stream="s")
            user.open()
            block_until(episode.verdict("Done."))
    first, second = (request["messages"][1]["content"] for request in endpoint.asked)
    assert '"user": "Hi, I need something."' in first and '"events": []' in second


def test_an_episode_that_ended_on_a_limit_gets_zeros_and_nobody_is_asked(endpoint: Endpoint, tmp_path: Path) -> None:
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        found = play_reference(environment, is_cut=True)
    assert not found.success and found.details["judge"] == {"success": False, "score": 0, "soundness": 0, "votes": []}
    assert not endpoint.asked


@pytest.mark.slow
def test_a_judge_that_is_away_ends_the_episode_with_a_fault_and_no_verdict(endpoint: Endpoint, tmp_path: Path) -> None:
    """The runner starts such an episode again, then drops it: it asserts that a fault is never scored."""
    endpoint.failures = [500] * 2
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        with pytest.raises(EnvironmentFault, match="judge: unavailable"):
            play_reference(environment)
        assert play_reference(environment).success

        class Closing(Conversation):
            def _close(self) -> Any:
                yield from self._end("Done.", "failure", None)

        endpoint.failures = [429] * 2
        from tasks.rollouts.conversation import EpisodeKey

        run = Closing(EpisodeKey(PROBLEM, 0, 0), environment=environment, seed=1, stage="train", attempt=0)
        run._steps = run._close()
        run.resume()
        assert run.waiting_for is not None
        assert isinstance(run.waiting_for.exception(), EnvironmentFault)
        run.resume()
        assert run.outcome == "environment_error" and run.fault is not None and run.fault.type == "rate_limited"


@pytest.mark.slow
def test_references_are_played_without_a_judge_that_decides_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    for decides in (False, True):
        settings = settings_with(endpoint, tmp_path, decides=decides)
        with closing(load_bare_environment(settings)) as bare, closing(load_environment(settings)) as whole:
            assert play_reference(bare).success
            assert bare.fingerprint() == whole.fingerprint()
        assert len(endpoint.asked) == decides


def test_the_environment_describes_its_judge_and_without_one_nothing_changed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    with closing(load_environment(environment_settings())) as plain:
        assert "judge" not in plain.describe()
        assert judge_of(plain.describe()) is None
    with closing(load_environment(settings_with(endpoint, tmp_path))) as environment:
        told = judge_of(environment.describe())
        assert told is not None
        assert (told["model"], told["agreement"], len(told["rubric"])) == ("stand-in", "not measured", 64)
        assert environment.fingerprint() != plain.fingerprint()


EVIDENCE = Agreement(
    agreement=0.95, ci_low=0.88, ci_high=0.98, confidence=0.95, kappa=0.9, num_labels=100,
    table=Table(yes_yes=50, yes_no=5, no_yes=0, no_no=45),
)  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`environment.judge` with evidence that it agrees with people, in a project of its own."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("tasks/custom/labels.jsonl"), [{"label": True}])
    wanted = {"labels": "tasks/custom/labels.jsonl", "evidence": "tasks/custom/judge.json", "confidence": 0.95}
    row = judge_row("http://h/v1", tmp_path, agreement={**wanted, "min_agreement": 0.85, "min_kappa": 0.6})
    write_evidence(row, EVIDENCE)
    return row


def write_evidence(row: dict[str, Any], found: Agreement) -> None:
    labels = file_hash(Path("tasks/custom/labels.jsonl"))
    evidence = Evidence(judge=describe_judge(JudgeSettings.model_validate(row)), labels=labels, measured=found)
    write_json(Path("tasks/custom/judge.json"), evidence.model_dump())


def test_a_judge_that_agrees_enough_is_used_and_its_agreement_is_in_the_lineage(measured: dict[str, Any]) -> None:
    with closing(load_environment(environment_settings(judge=measured))) as environment:
        told = judge_of(environment.describe())
    assert told is not None
    assert (told["agreement"]["agreement"], told["agreement"]["kappa"]) == (0.95, 0.9)
    assert told["agreement"]["labels"] == file_hash(Path("tasks/custom/labels.jsonl"))


@pytest.mark.parametrize(
    ("found", "key"),
    [({"ci_low": 0.84}, "min_agreement"), ({"kappa": 0.5}, "min_kappa")],
)
def test_a_judge_below_a_threshold_is_refused_before_anything_is_played(
    measured: dict[str, Any], found: dict[str, float], key: str
) -> None:
    write_evidence(measured, EVIDENCE.model_copy(update=found))
    with pytest.raises(ValueError, match=rf"judge.json: the judge is refused.*{key}.*Improve"):
        load_environment(environment_settings(judge=measured))


def test_evidence_of_another_judge_or_of_other_labels_or_none_is_refused(measured: dict[str, Any]) -> None:
    def refused(row: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match="judge-check") as caught:
            measured_agreement(JudgeSettings.model_validate(row))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "it differs in model" in refused({**measured, "model": "another"})
    write_jsonl(Path("tasks/custom/labels.jsonl"), [{"label": False}])
    assert "on other labels" in refused(measured)
    Path("tasks/custom/judge.json").write_text("{}", encoding="utf-8")
    assert "not what judge-check writes" in refused(measured)
    Path("tasks/custom/judge.json").unlink()
    assert "does not exist" in refused(measured)
