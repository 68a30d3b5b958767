"""The judge: what it asks, what counts as an answer, how votes count, and what becomes of an endpoint that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.core import background
from tasks.tools.base import EnvironmentFault
from tasks.tools.judge.judge import Judge, Judgement
from tasks.tools.judge.opinion import Opinion, answer_schema, read_opinion
from tasks.tools.judge.prompt import Judged, encode, fit
from tasks.tools.judge.settings import JudgeSettings
from tests.tools.judge.endpoint import Endpoint, Messages, judge_row, judge_settings, opinion, serve

KEY = "sk-0815-very-secret"
JUDGED = Judged(["Book the attic."], [{"tool": "book", "arguments": {"room": "attic"}, "reply": "booked"}], "Done.")
OTHER = Judged(["Book the attic."], [], "Done.")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve(Endpoint()) as made:
        yield made


def ask(judge: Judge, *episodes: Judged) -> list[Judgement]:
    async def together() -> list[Judgement]:
        import asyncio

        try:
            return await asyncio.gather(*(judge.judge(item) for item in episodes or (JUDGED,)))
        finally:
            await judge.close()

    return background.run(together()).result(60)


def test_the_request_has_the_rubric_alone_as_system_message_and_asks_for_the_schema(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    rubric = Path("tasks/tools/judge/rubric.md").read_text(encoding="utf-8").strip()
    (found,) = ask(Judge(judge_settings(endpoint, tmp_path)))
    assert (found.success, found.score, found.soundness) == (True, 1.0, 1.0)
    (request,) = endpoint.asked
    system, user = request["messages"]
    assert system["content"].startswith(rubric) and 'booked"' not in system["content"]
    assert user["role"] == "user" and '"reply": "booked"' in user["content"]
    assert request["response_format"]["json_schema"]["schema"] == answer_schema()
    assert (request["temperature"], request["seed"], request["max_completion_tokens"]) == (0.0, 7, 300)
    assert ask(Judge(judge_settings(endpoint, tmp_path, structured=False)))[0].success
    assert "response_format" not in endpoint.asked[1] and endpoint.asked[1]["max_tokens"] == 300


def test_the_same_episode_is_asked_once_even_at_the_same_moment_and_after_a_restart(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    judge = Judge(judge_settings(endpoint, tmp_path))
    first = ask(judge, JUDGED, OTHER, JUDGED, OTHER)
    assert len(endpoint.asked) == 2 and first[0] == first[2]
    again = Judge(judge_settings(endpoint, tmp_path))
    assert ask(again, JUDGED) == [first[0]]
    assert (len(endpoint.asked), again.counts()["judge_stored_votes"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"model": "another"}, {"show_reference": True}, {"seed": 8}, {"max_output_tokens": 301}, {"rubric": "mine"}],
)
def test_another_model_or_rubric_is_asked_anew(
    endpoint: Endpoint, tmp_path: Path, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(Judge(judge_settings(endpoint, tmp_path)))
    settings = judge_settings(
        endpoint, tmp_path, **{name: value for name, value in changed.items() if name != "rubric"}
    )
    judge = Judge(settings)
    if "rubric" in changed:
        judge.rubric = "Be stricter."
    ask(judge)
    assert len(endpoint.asked) == (1 if "show_reference" in changed else 2)  # a text without a reference is the same


def test_most_votes_decide_and_scores_are_medians(endpoint: Endpoint, tmp_path: Path) -> None:
    answers = {7: opinion(True, 0.9, 0.5), 9: opinion(False, 0.2, 0.4), 11: opinion(True, 0.6, 0.1)}
    endpoint.says = lambda messages, request: answers[request["seed"]]
    (found,) = ask(Judge(judge_settings(endpoint, tmp_path, num_votes=3, temperature=0.7)))
    assert (found.success, found.score, found.soundness) == (True, 0.6, 0.4)
    assert [vote.success for vote in found.votes] == [True, False, True]
    assert sorted(request["seed"] for request in endpoint.asked) == [7, 9, 11]  # two attempts each


@pytest.mark.parametrize(
    "changed", [{"num_votes": 2, "temperature": 1.0}, {"num_votes": 3}, {"url": "https://h/v1?k=1"}]
)
def test_votes_that_may_tie_or_cannot_differ_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"num_votes|query"):
        JudgeSettings.model_validate({**judge_row("http://h/v1", Path()), **changed})


def test_an_answer_that_is_not_of_the_schema_is_asked_for_again_with_another_seed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    def second_time(messages: Messages, request: dict[str, Any]) -> str:
        return opinion() if request["seed"] == 8 else "Certainly! It was a success."

    endpoint.says = second_time
    judge = Judge(judge_settings(endpoint, tmp_path))
    assert ask(judge)[0].success
    assert judge.counts() == {"judge_requests": 2, "judge_stored_votes": 0, "judge_invalid_answers": 1}


WRONG = [
    None, "", "yes", "[true]", '{"success": true}', opinion().replace("1.0", "7"), opinion().replace("true", '"true"'),
    opinion()[:-1] + ', "also": 1}', opinion()[:-1], opinion() + opinion(), "NaN", "[" * 500,
    opinion().replace("1.0", "NaN"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("said", WRONG)
def test_any_other_answer_is_a_fault_after_the_last_attempt_and_is_not_stored(
    endpoint: Endpoint, tmp_path: Path, said: str | None
) -> None:
    endpoint.says = lambda messages, request: said
    with pytest.raises(EnvironmentFault, match=r"judge: unavailable: its answer is not the requested JSON, 2 times"):
        ask(Judge(judge_settings(endpoint, tmp_path)))
    endpoint.says = lambda messages, request: opinion()
    assert ask(Judge(judge_settings(endpoint, tmp_path)))[0].success
    assert len(endpoint.asked) == 3


def test_a_cut_answer_names_the_setting_that_cut_it(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.says, endpoint.finish_reason = lambda messages, request: opinion(reason="a" * 900)[:800], "length"
    with pytest.raises(EnvironmentFault, match=r"2 times .* cut at 300 tokens .*environment\.judge\.max_output_tok"):
        ask(Judge(judge_settings(endpoint, tmp_path)))


def test_a_code_block_around_the_answer_is_the_one_thing_that_is_repaired() -> None:
    assert read_opinion(f"```json\n{opinion()}\n```\n") == Opinion.model_validate_json(opinion())
    assert read_opinion(f"\n ``` \n\n{opinion()}\n\n ```") == Opinion.model_validate_json(opinion())
    for said in (f"Here it is: {opinion()}", f"```json\n{opinion()}", f"```py\n{opinion()}\n```", "```", "```\n```"):
        with pytest.raises(ValueError):
            read_opinion(said)
    assert len(read_opinion(opinion(reason="a" * 9000)).reason) == 2000


@pytest.mark.parametrize(
    "said", ["```json" + "\n" * 100_000 + "x", "```" + " \n" * 50_000 + "```", " " * 100_000 + "x"]
)
def test_an_answer_of_nothing_but_line_ends_stops_no_other_episode(said: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError):
        read_opinion(said)
    assert time.process_time() - begun < 1  # of 3,000 line ends, a regular expression took minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "fault", "num_asked"),
    [
        ([500, 500], "unavailable", 2), ([503, 503], "unavailable", 2), ([429, 429], "rate_limited", 2),
        (["cut"], "unavailable", 1), (["drop", "drop"], "unavailable", 2),
        (["slow", "slow"], "timeout", 2),
    ],
)  # fmt: skip
def test_an_endpoint_that_fails_is_an_environment_fault_and_never_a_verdict(
    endpoint: Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[int | str],
    fault: str,
    num_asked: int,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    endpoint.failures = list(failures)
    seconds = 1.0 if "slow" in failures else 20.0
    settings = judge_settings(endpoint, tmp_path, api_key_variable="JUDGE_KEY", timeout_seconds=seconds)
    with pytest.raises(EnvironmentFault) as caught:
        ask(Judge(settings))
    assert str(caught.value).startswith(f"judge: {fault}: ")
    assert KEY not in str(caught.value) and "\n" not in str(caught.value)
    assert len(endpoint.asked) == num_asked and endpoint.keys[0] == f"Bearer {KEY}"
    assert ask(Judge(judge_settings(endpoint, tmp_path)))[0].success  # once it is back


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_a_refused_key_or_model_ends_the_run_at_once(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    endpoint.failures = [status] * 9
    with pytest.raises(
        ValueError, match=r"^environment\.judge: .* so no episode can be judged\. .*api_key_var"
    ) as told:
        ask(Judge(judge_settings(endpoint, tmp_path, api_key_variable="JUDGE_KEY")))
    assert KEY not in str(told.value) and "\n" not in str(told.value) and len(endpoint.asked) == 1


NO_QUOTA = b'{"error": {"message": "Check your plan.", "code": "insufficient_quota"}}'
NO_TEMPERATURE = b'{"error": {"message": "temperature does not support 0.0 with this model."}}'
TOO_LONG = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
FILTERED = b'{"error": {"message": "filtered", "code": "content_filter"}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "body", "ends"),
    [
        (401, b"{}", ValueError), (402, b"{}", ValueError), (429, NO_QUOTA, ValueError),
        (403, b"{}", EnvironmentFault), (404, b"{}", EnvironmentFault), (400, NO_TEMPERATURE, EnvironmentFault),
    ],
)  # fmt: skip
def test_an_endpoint_that_has_answered_may_refuse_one_episode(
    endpoint: Endpoint, tmp_path: Path, status: int, body: bytes, ends: type[Exception]
) -> None:
    """A filter that refuses one text is no wrong key."""
    endpoint.failures, endpoint.body_of_failure = [200, (status, "")], body
    settings = judge_settings(
        endpoint, tmp_path, num_votes=3, temperature=1.0, max_concurrent_requests=1, max_retries=0
    )
    judge = Judge(settings)
    with pytest.raises(ends):
        ask(judge)
    assert judge.num_asked == 3


@pytest.mark.parametrize(
    ("status", "body", "ends"),
    [
        (400, NO_TEMPERATURE, ValueError), (422, b"{}", ValueError), (429, NO_QUOTA, ValueError),
        (400, TOO_LONG, EnvironmentFault), (413, b"{}", EnvironmentFault), (400, FILTERED, EnvironmentFault),
        (429, b"{}", EnvironmentFault), (408, b"{}", EnvironmentFault),
    ],
)  # fmt: skip
def test_an_endpoint_that_refuses_its_first_request_ends_the_run_unless_it_names_the_text(
    endpoint: Endpoint, tmp_path: Path, status: int, body: bytes, ends: type[Exception]
) -> None:
    """Else hundreds of episodes are played before so many are lost that the run stops."""
    endpoint.failures, endpoint.body_of_failure = [(status, "600")], body
    with pytest.raises(ends, match=r"^environment\.judge: .*setting" if ends is ValueError else "^judge: "):
        ask(Judge(judge_settings(endpoint, tmp_path, max_retries=0)))
    assert len(endpoint.asked) == 1


@pytest.mark.slow
def test_nobody_listening_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="judge: unavailable: the endpoint failed: Connection error"):
        ask(Judge(judge_settings(Endpoint(url="http://127.0.0.1:9/v1"), tmp_path)))


@pytest.mark.slow
def test_one_failure_within_the_retries_is_not_seen_and_retry_after_is_waited_for(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    import time

    endpoint.failures, endpoint.retry_after = [429], "1"
    start = time.monotonic()
    assert ask(Judge(judge_settings(endpoint, tmp_path)))[0].success
    assert 1 <= time.monotonic() - start < 120


def test_a_vote_that_came_is_kept_when_another_fails(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.says = lambda messages, request: opinion() if request["seed"] == 7 else "no"
    settings = judge_settings(endpoint, tmp_path, num_votes=3, temperature=1.0, max_attempts=1)
    with pytest.raises(EnvironmentFault):
        ask(Judge(settings))
    endpoint.says = lambda messages, request: opinion()
    judge = Judge(settings)
    assert ask(judge)[0].success
    assert (judge.num_stored, judge.num_asked) == (1, 2)


def test_a_missing_key_or_rubric_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    nowhere = Endpoint(url="http://h/v1")
    with pytest.raises(ValueError, match="the environment variable JUDGE_KEY, which is not set"):
        Judge(judge_settings(nowhere, tmp_path, api_key_variable="JUDGE_KEY"))
    with pytest.raises(ValueError, match=r"environment.judge.rubric: tasks/custom/none.md cannot be read"):
        Judge(judge_settings(nowhere, tmp_path, rubric="tasks/custom/none.md"))
    with pytest.raises(ValidationError, match="is not in tasks/custom/"):
        judge_settings(nowhere, tmp_path, rubric="/etc/passwd")


def test_a_long_episode_loses_the_middle_of_its_longest_texts_then_its_middle_events() -> None:
    row = Judged(["Book."], [{"message": "short"}, {"message": "a" * 5000 + "b" * 5000}], "end").to_row()
    document = json.loads(fit(row, 2000))
    assert document["events"][0] == {"message": "short"} and document["final_message"] == "end"
    assert document["events"][1]["message"].startswith("aaa") and document["events"][1]["message"].endswith("bbb")
    assert "[cut: 9" in document["events"][1]["message"]
    many = json.loads(fit(Judged(["Book."], [{"message": str(n)} for n in range(1000)], "end").to_row(), 2000))
    assert len(fit(many, 2000)) <= 2000
    assert many["events"][0] == {"message": "0"} and many["events"][-1] == {"message": "999"}
    assert sum(event.get("left_out", 1) for event in many["events"]) == 1000


NESTED: dict[str, Any] = {"a": [[["x" * 40] * 10] * 10] * 10}


@pytest.mark.parametrize(
    "arguments",
    [{"rooms": list(range(50_000))}, {f"key {n}": n for n in range(50_000)}, NESTED, {"n": 10**4000}],
    ids=["list", "mapping", "nested", "number"],
)
def test_no_argument_is_so_long_that_other_calls_are_left_out(arguments: dict[str, Any]) -> None:
    calls = [{"tool": "steal", "arguments": {}, "reply": "stolen"}, {"tool": "b", "arguments": arguments, "reply": "r"}]
    text = fit(Judged(["Book."], [*calls, calls[0]], "end").to_row(), 2000)
    document = json.loads(text)
    assert len(text) <= 2000 and "[cut: " in text
    assert [event["tool"] for event in document["events"]] == ["steal", "b", "steal"]
    assert document["events"][0] == calls[0] and document["requests"] == ["Book."]


def test_a_list_that_fits_is_whole_and_a_long_one_keeps_its_ends() -> None:
    def rooms(num: int, max_characters: int) -> list[Any]:
        events = [{"tool": "b", "arguments": {"rooms": [1] * num}, "reply": "r"}]
        found: list[Any] = json.loads(fit(Judged([], events, "").to_row(), max_characters))["events"][0]["arguments"]
        return found["rooms"] if isinstance(found, dict) else found

    assert rooms(200, 2000) == [1] * 200  # 1,600 characters
    assert rooms(500, 2000) == [*[1] * 100, "[cut: 300 items]", *[1] * 100]


@pytest.mark.slow
@hypothesis_settings(max_examples=30, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), st.recursive(st.text() | st.integers(), st.lists, max_leaves=50)),
    num_events=st.integers(0, 8),
)
def test_a_document_that_fits_is_as_it_was(arguments: dict[str, Any], num_events: int) -> None:
    row = Judged(["Book."], [{"tool": "b", "arguments": arguments, "reply": "r"}] * num_events, "end").to_row()
    assert fit(row, len(encode(row))) == encode(row)


def test_a_long_episode_does_not_keep_others_waiting(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from tasks.tools.judge import judge as judging

    threads: list[str] = []
    real = judging.messages_for

    def noted(*args: Any, **options: Any) -> Messages:
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    async def name() -> str:
        return threading.current_thread().name

    monkeypatch.setattr(judging, "messages_for", noted)
    ask(Judge(judge_settings(endpoint, tmp_path)))
    assert len(threads) == 1 and threads[0] != background.run(name()).result()


def test_the_row_of_the_settings_is_whole() -> None:
    assert set(judge_row("u", Path())) == set(judge_settings(Endpoint(url="http://h"), Path()).model_dump())
