"""A model behind an endpoint: what it is sent, what comes of its answers and failures, and where its key never goes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.endpoint.episode import EndpointEpisodes, play_endpoint
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.finished import FinishedEpisodes
from tasks.tools.patient_client import PatientClient
from tests.engines.endpoint.chat_endpoint import KEY, VARIABLE, Answer, ChatEndpoint, completion, settings
from tests.rollouts.test_requests import NOTE, PROBLEM, Notebook
from tests.worlds import QUICK

pytestmark = pytest.mark.slow

ONE = PROBLEM.model_copy(update={"requests": ["Only."], "reference": PROBLEM.reference[:1]})
TEXTS = [NOTE, "Noted."]


def problems(count: int) -> list[Problem]:
    return [ONE.model_copy(update={"id": f"n{i:02d}", "requests": [f"Request {i}."]}) for i in range(count)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ChatEndpoint, str]]:
    """An endpoint that writes TEXTS to each problem, and its URL."""
    monkeypatch.setenv(VARIABLE, KEY)
    endpoint = ChatEndpoint({"Only.": TEXTS, **{problem.requests[0]: TEXTS for problem in problems(20)}})
    with endpoint.serving() as url:
        yield endpoint, url


def played(url: str, *rows: Problem, concurrency: int = 8, **changed: Any) -> list[Trajectory]:
    limits = QUICK.model_copy(update={"max_dropped_share": changed.pop("max_dropped_share", 1.0)})
    with closing(Endpoint(settings(url, **changed))) as endpoint:
        collector = Collector(
            EndpointEpisodes(endpoint, max_turns=6),
            Notebook(limits),
            max_concurrent_episodes=concurrency,
            seed=0,
            stage="test",
        )
        return collector.collect([EpisodeKey(row, 0, 0) for row in rows or (ONE,)])


def test_the_tools_go_out_as_json_schema_and_replies_find_their_calls(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    (trajectory,) = played(url)
    first, second = endpoint.asked
    assert first == {
        "model": "lab/m", "messages": [{"role": "user", "content": "Only."}], "temperature": 0.0,
        "max_completion_tokens": 90, "tools": [tool.schema() for tool in Notebook(QUICK).tools_for(ONE)],
    }  # fmt: skip
    function = {"name": "note", "arguments": '{"text": "a"}'}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c0", "content": "1 1"},
    ]
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert [turn.text for turn in trajectory.turns] == TEXTS
    assert trajectory.turns[0].calls == [{"name": "note", "arguments": {"text": "a"}}]
    assert trajectory.sequences == []


def test_what_an_endpoint_may_not_want_is_left_out(served: tuple[ChatEndpoint, str]) -> None:
    """No temperature where it is null, and no tools for a problem that has none."""
    endpoint, url = served
    endpoint.scripts = {"Only.": ["Done."]}
    played(url, ONE.model_copy(update={"level": 2}), temperature=None)
    assert set(endpoint.asked[0]) == {"model", "messages", "max_completion_tokens"}


def test_calls_in_a_text_are_answered_by_the_user_and_a_reply_cannot_end_itself(
    served: tuple[ChatEndpoint, str],
) -> None:
    endpoint, url = served
    endpoint.structured = False
    unknown = call_text(ToolCall(name="</tool_response>", arguments={}))
    endpoint.scripts = {"Only.": [f"{NOTE}{unknown}", "Noted."]}
    (trajectory,) = played(url)
    assistant, user = endpoint.asked[1]["messages"][1:]
    assert assistant == {"role": "assistant", "content": f"{NOTE}{unknown}"}
    assert user["content"].startswith("<tool_response>\n1 1\n</tool_response>\n<tool_response>\n")
    assert user["content"].count("</tool_response>") == 2
    assert "< /tool_response>" in user["content"] and "</tool_response>" in trajectory.turns[0].replies[1]


def test_tokens_and_cost_are_summed_over_the_episode(served: tuple[ChatEndpoint, str]) -> None:
    """Two requests of 100 tokens read and 10 written: (200·2 + 20·10) / 1,000,000 = 0.0006."""
    usage = played(served[1])[0].details["usage"]
    assert usage == {"num_requests": 2, "input_tokens": 200, "output_tokens": 20, "cost": pytest.approx(0.0006)}
    assert played(served[1], price_per_million_input_tokens=None)[0].details["usage"]["cost"] is None


def test_tokens_nobody_counted_are_null_and_not_0(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    uncounted = {key: value for key, value in completion("Done.").items() if key != "usage"}
    endpoint.misbehave = lambda number: (200, uncounted) if number == 1 else None
    usage = played(url)[0].details["usage"]
    assert usage == {"num_requests": 2, "input_tokens": None, "output_tokens": None, "cost": None}


NESTED = '{"text":' * 490 + "1" + "}" * 490


def calling(*calls: dict[str, Any]) -> Answer:
    whole = completion("")
    whole["choices"][0]["message"]["tool_calls"] = list(calls)
    return 200, whole


def test_of_a_thousand_calls_in_one_message_the_first_are_made_and_one_error_answers_the_rest(
    served: tuple[ChatEndpoint, str],
) -> None:
    """16 is the limit of this world; each call that goes back as history has its reply."""
    endpoint, url = served
    calls = [{"id": f"c{i}", "function": {"name": "note", "arguments": '{"text": "a"}'}} for i in range(1000)]
    endpoint.misbehave = lambda number: calling(*calls) if number == 0 else None
    (trajectory,) = played(url)
    assert (trajectory.num_calls, trajectory.num_invalid_calls) == (17, 1)
    assert trajectory.turns[0].errors == [None] * 16 + ["invalid_arguments"]
    assert "at most 16 calls" in trajectory.turns[0].replies[16]
    _, assistant, *replies = endpoint.asked[1]["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == [reply["tool_call_id"] for reply in replies]
    assert len(replies) == 17 and len(trajectory.turns[0].text) < 2000


@pytest.mark.parametrize("arguments", ['{"text": ', "[1]", "null", "NaN", "[" * 50_000, NESTED, '{"text": "\\ud800"}'])
def test_arguments_that_are_no_json_object_are_a_malformed_call(
    served: tuple[ChatEndpoint, str], arguments: str
) -> None:
    """The endpoint would refuse them as history, so they go back as a text in an object."""
    endpoint, url = served
    asked = calling({"id": "c0", "type": "function", "function": {"name": "note", "arguments": arguments}})
    endpoint.misbehave = lambda number: asked if number == 0 else None
    (trajectory,) = played(url)
    assert trajectory.turns[0].calls == [{"malformed": True}]
    assert trajectory.turns[0].errors == ["invalid_arguments"]
    sent_back = endpoint.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent_back) == {"unreadable": arguments}
    json.dumps(trajectory.to_row(), ensure_ascii=False).encode()


@pytest.mark.parametrize(("level", "answered"), [(1, 1), (2, 0)])  # problems of level 2 have no tools
def test_a_cut_reply_is_a_malformed_call_only_where_there_are_tools(
    served: tuple[ChatEndpoint, str], level: int, answered: int
) -> None:
    endpoint, url = served
    endpoint.misbehave = lambda number: (200, completion("Good mor", was_cut=True)) if number == 0 else None
    (trajectory,) = played(url, ONE.model_copy(update={"level": level}))
    assert (trajectory.turns[0].stop_reason, len(trajectory.turns[0].replies)) == ("max_tokens_per_turn", answered)
    assert (trajectory.details["messages"] == ["Good mor"]) == (level == 2)


def test_calls_without_an_id_or_with_one_twice_are_told_apart(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    function = {"name": "note", "arguments": {"text": "a"}}  # an object where text was due is understood
    calls = calling({"id": "x", "function": function}, {"id": "x", "function": function}, {"function": function})
    endpoint.misbehave = lambda number: calls if number == 0 else None
    (trajectory,) = played(url)
    assert trajectory.turns[0].replies == ["1 1", "1 2", "1 3"]
    assistant, *replies = endpoint.asked[1]["messages"][1:]
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert ids == [reply["tool_call_id"] for reply in replies] == ["x", "call00002", "call00003"]


def test_text_that_no_file_can_hold_is_replaced(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    endpoint.misbehave = lambda number: (200, completion("half: \ud800."))
    assert played(url)[0].turns[0].text == "half: ?."


@pytest.mark.parametrize("opening", ["<think>\n", ""])
def test_no_call_and_no_answer_is_read_from_a_thought(served: tuple[ChatEndpoint, str], opening: str) -> None:
    """Of a server without a reasoning parser; the prompt may open the thought. The model sees its own text again."""
    endpoint, url = served
    endpoint.structured = False
    thoughts = [f"{opening}I could {NOTE} now.\n</think>\n\n", f"{opening}Is it noted?</think>"]
    endpoint.scripts = {"Only.": [f"{thoughts[0]}I note it.\n{NOTE}", f"{thoughts[1]}Noted."]}
    (trajectory,) = played(url)
    assert (trajectory.outcome, trajectory.details["messages"]) == ("success", ["Noted."])
    assert [turn.text for turn in trajectory.turns] == [f"I note it.\n{NOTE}", "Noted."]
    assert [len(turn.calls) for turn in trajectory.turns] == [1, 0]
    assert endpoint.asked[1]["messages"][1] == {"role": "assistant", "content": endpoint.scripts["Only."][0]}
    endpoint.scripts = {"Only.": [f"{thoughts[0]}Shall I note it?"]}
    assert played(url)[0].details["messages"] == ["Shall I note it?"]


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("answer", ["Noted.<|end|>", "Noted.\n</think>", "Noted: <think> opens, </think> closes."])
def test_a_mark_of_a_thought_within_an_answer_or_a_call_is_its_text(
    served: tuple[ChatEndpoint, str], structured: bool, answer: str
) -> None:
    endpoint, url = served
    endpoint.structured = structured
    for named in ("<think> and </think>", "</think>", "<|end|>"):
        endpoint.scripts = {"Only.": [NOTE.replace('"a"', f'"strip {named} first"'), answer]}
        (trajectory,) = played(url)
        assert trajectory.outcome == "success"
        assert [call["arguments"] for call in trajectory.turns[0].calls] == [{"text": f"strip {named} first"}]
        assert trajectory.details["messages"] == [answer]


def test_where_a_problem_has_no_tools_a_text_in_the_form_of_a_call_is_the_answer(
    served: tuple[ChatEndpoint, str],
) -> None:
    endpoint, url = served
    endpoint.structured, endpoint.scripts = False, {"Only.": [NOTE]}
    (trajectory,) = played(url, ONE.model_copy(update={"level": 2}))
    assert (trajectory.num_calls, trajectory.details["messages"]) == (0, [NOTE])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_answer_whose_thought_came_apart_keeps_what_it_says_before_a_mark(
    served: tuple[ChatEndpoint, str], field: str
) -> None:
    """Without the thought beside it, the same text has one."""
    endpoint, url = served
    answer = "A thought ends with </think>, then the message follows."
    written = completion(answer)
    endpoint.misbehave = lambda number: (200, written)
    written["choices"][0]["message"][field] = "How does it end?"
    assert played(url)[0].turns[0].text == answer
    written["choices"][0]["message"][field] = None
    assert played(url)[0].turns[0].text == ", then the message follows."


def test_an_answer_that_a_filter_of_the_endpoint_withholds_is_no_failure_of_the_model(
    served: tuple[ChatEndpoint, str],
) -> None:
    """Asked three times, and paid for. An empty answer without a filter is the model's, and a refusal in words too."""
    endpoint, url = served
    empty = completion("")
    withheld: dict[str, Any] = {**empty, "choices": [{**empty["choices"][0], "finish_reason": "content_filter"}]}
    endpoint.misbehave = lambda number: (200, withheld)
    (trajectory,) = played(url)
    assert (trajectory.outcome, len(endpoint.asked)) == ("environment_error", 3)
    assert trajectory.fault == "endpoint: unavailable: its content filter withheld the answer"
    assert trajectory.details["usage"]["output_tokens"] == 30
    in_words = {"role": "assistant", "content": None, "refusal": "I cannot do that."}
    refused = {**withheld, "choices": [{**withheld["choices"][0], "message": in_words}]}
    for answer in (empty, refused):
        endpoint.misbehave = lambda number, answer=answer: (200, answer)  # type: ignore[misc]
        assert played(url)[0].outcome == "failure"


@pytest.mark.parametrize("status", [429, 500, 503, 408])
def test_the_client_asks_again_after_a_passing_failure(served: tuple[ChatEndpoint, str], status: int) -> None:
    endpoint, url = served
    endpoint.misbehave = lambda number: (status, b"{}") if number == 0 else None
    (trajectory,) = played(url)
    assert (trajectory.outcome, len(endpoint.asked)) == ("success", 3)


def test_a_long_pause_that_it_asks_for_costs_no_attempt(
    served: tuple[ChatEndpoint, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, url = served
    endpoint.retry_after = {"retry-after": "121"}
    endpoint.misbehave = lambda number: (429, b"{}") if number == 0 else None
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(PatientClient, "sleep", staticmethod(sleep))
    (trajectory,) = played(url)
    assert (trajectory.outcome, trajectory.details["usage"]["num_requests"], pauses) == ("success", 2, [121])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, b"oh"), "unavailable: "),
        ((429, b"{}"), "rate_limited: "),
        ((200, b"<html>down</html>"), "unavailable: its answer is no chat completion: <html>down</html>"),
        ((200, b"\xff\xfe"), "unavailable: its answer is no chat completion"),
        ((200, b"[" * 100_000), "unavailable: its answer is no chat completion"),
        ((200, {"choices": []}), "unavailable: its answer is no chat completion"),
        ((200, {"error": {"message": "later"}}), "unavailable: its answer is no chat completion"),
        ((400, {"error": {"message": "not that"}}), "unavailable: Error code: 400"),
    ],
)
def test_an_endpoint_that_fails_in_mid_episode_costs_the_episode_and_is_never_scored(
    served: tuple[ChatEndpoint, str], answer: Answer, says: str
) -> None:
    """Three attempts, of which each gets one good answer; what they cost is on the record."""
    endpoint, url = served
    endpoint.misbehave = lambda number: answer if number % 2 else None
    (trajectory,) = played(url, max_retries=0)
    assert trajectory.outcome == "environment_error"
    assert trajectory.fault is not None and trajectory.fault.startswith(f"endpoint: {says}")
    assert len(trajectory.fault) < 400
    assert (len(endpoint.asked), trajectory.details["usage"]["num_requests"]) == (6, 3)


def test_an_endpoint_that_is_slow_beyond_its_timeout_is_a_fault(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    endpoint.answers_from = 99  # so many never come
    with pytest.raises(ValueError, match=r"after 0 answers \(endpoint: timeout: no answer in 0\.05 s\)"):
        played(url, timeout_seconds=0.05, max_retries=0)


def test_an_endpoint_that_is_not_there_ends_the_run_in_one_line(served: tuple[ChatEndpoint, str]) -> None:
    with pytest.raises(ValueError, match=r"lost 1 of 20 episodes after 0 answers .*set evaluate\.frontier to null"):
        played("http://127.0.0.1:9/v1", *problems(20), max_retries=0)


def test_too_many_lost_episodes_end_the_run_in_one_line(served: tuple[ChatEndpoint, str]) -> None:
    """Of 20 episodes 2 may be lost; the endpoint answers 10 requests and then no more."""
    endpoint, url = served
    endpoint.misbehave = lambda number: (500, b"") if number >= 10 else None
    with pytest.raises(ValueError, match=r"'lab/m' lost 3 of 20 episodes after 10 answers") as caught:
        played(url, *problems(20), max_dropped_share=0.1, max_retries=0)
    assert "\n" not in str(caught.value)


def test_what_was_finished_before_a_kill_counts_in_the_share_that_may_be_lost(
    served: tuple[ChatEndpoint, str], tmp_path: Path
) -> None:
    """2 of 20 may be lost and one is; asked for again alone it is lost again, and still 1 of 20."""
    endpoint, url = served
    lost = problems(20)[-1].requests[0]
    endpoint.misbehave = lambda number: (500, b"") if endpoint.asked[-1]["messages"][0]["content"] == lost else None

    def played_on() -> list[str]:
        limits = QUICK.model_copy(update={"max_dropped_share": 0.1})
        options = settings(url, max_retries=0, max_concurrent_episodes=1, num_problems=20, samples_per_problem=1)
        with closing(Endpoint(options)) as model:
            trajectories = play_endpoint(
                model, Notebook(limits), problems(20), max_turns=6, seed=0, label="test",
                finished=FinishedEpisodes(tmp_path / "episodes.jsonl"),
            )  # fmt: skip
        return [item.outcome for item in trajectories]

    first, num_asked = played_on(), len(endpoint.asked)
    assert [outcome == "environment_error" for outcome in first] == [False] * 19 + [True]
    assert played_on() == first
    assert {request["messages"][0]["content"] for request in endpoint.asked[num_asked:]} == {lost}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_ends_the_run_at_once(served: tuple[ChatEndpoint, str], status: int) -> None:
    endpoint, url = served
    endpoint.misbehave = lambda number: (status, {"error": {"message": f"not with {KEY}"}})
    with pytest.raises(ValueError, match=rf"refuses to answer as 'lab/m' .*{status}.*the key in {VARIABLE}") as caught:
        played(url, *problems(20), concurrency=1)
    assert len(endpoint.asked) == 1
    assert "[redacted]" in str(caught.value) and KEY not in str(caught.value) and "\n" not in str(caught.value)


def test_a_key_that_is_refused_later_ends_the_run_too(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    quota = {"error": {"message": "pay", "code": "insufficient_quota"}}
    for answer in ((401, b"{}"), (429, quota)):
        endpoint.asked.clear()
        endpoint.misbehave = lambda number, answer=answer: answer if number >= 4 else None  # type: ignore[misc]
        with pytest.raises(ValueError, match="refuses to answer"):
            played(url, *problems(20), concurrency=1)


def test_a_full_context_and_a_filter_are_of_one_text_whatever_their_status(served: tuple[ChatEndpoint, str]) -> None:
    """As TGI and OpenRouter send them."""
    endpoint, url = served
    full = (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8. Given: 9"})
    endpoint.misbehave = lambda number: full if number == 1 else None
    assert played(url)[0].outcome == "overlong"
    endpoint.asked.clear()
    flagged = (403, {"error": {"message": "Your chosen model requires moderation and your input was flagged."}})
    endpoint.misbehave = lambda number: flagged if number == 1 else None
    assert played(url)[0].outcome == "success"  # asked again


@pytest.mark.parametrize("rules", ["", "Be brief."])
def test_a_prompt_beyond_the_context_is_a_matter_of_settings_and_not_of_the_model(
    served: tuple[ChatEndpoint, str], monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    """With rules the prompt has two messages."""
    monkeypatch.setattr(Notebook, "rules_for", lambda self, problem: rules)
    endpoint, url = served
    endpoint.misbehave = lambda number: (400, {"error": {"message": "maximum context length is 8"}})
    with pytest.raises(ValueError, match="maximum context length is 8"):
        played(url)
    assert len(endpoint.asked[0]["messages"]) == (2 if rules else 1)


def test_requests_in_flight_are_bounded(served: tuple[ChatEndpoint, str]) -> None:
    endpoint, url = served
    endpoint.answers_from = 3
    assert len(played(url, *problems(20), concurrency=3)) == 20
    assert endpoint.most_at_once == 3


def test_the_first_problems_are_played_as_often_as_asked(served: tuple[ChatEndpoint, str]) -> None:
    with closing(Endpoint(settings(served[1], num_problems=3, samples_per_problem=2))) as endpoint:
        done = play_endpoint(endpoint, Notebook(QUICK), problems(20), max_turns=6, seed=0, label="test: m")
    assert [(t.problem_id, t.sample_index) for t in done] == [(f"n{i:02d}", k) for i in range(3) for k in range(2)]


def test_the_key_is_in_no_message_no_log_and_no_record(
    served: tuple[ChatEndpoint, str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """An endpoint that repeats it wherever it can, under a client that logs all it does."""
    endpoint, url = served
    told = {"id": KEY, "function": {"name": KEY, "arguments": json.dumps({"text": KEY})}}
    answers: dict[int, Answer] = {0: calling(told), 1: (500, {"error": {"message": KEY}}), 2: (200, completion(KEY))}
    endpoint.misbehave = answers.get
    caplog.set_level(logging.DEBUG)
    rows = json.dumps([trajectory.to_row() for trajectory in played(url)])
    assert rows.count("[redacted]") >= 4
    endpoint.asked.clear()
    endpoint.misbehave = lambda number: (200, {"key": KEY}) if number else None
    (dropped,) = played(url, max_retries=0)
    assert "[redacted]" in str(dropped.fault)
    output = "".join(capfd.readouterr())
    assert "chat/completions" in caplog.text  # the log is on
    for text in (rows, json.dumps(dropped.to_row()), caplog.text, output, repr(vars(Endpoint(settings(url))))):
        assert KEY not in text


def test_a_key_is_read_without_white_space_and_refused_without_being_shown(
    served: tuple[ChatEndpoint, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, url = served
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    assert played(url)[0].outcome == "success"
    monkeypatch.setenv(VARIABLE, f"{KEY}\nmore")
    with pytest.raises(ValueError, match=f"variable {VARIABLE} contains characters that no key has") as caught:
        Endpoint(settings(url))
    assert KEY not in str(caught.value)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=rf"evaluate\.frontier\.api_key_variable .* variable {VARIABLE}, which is not"):
        Endpoint(settings(url))
    endpoint.keys.clear()
    played(url, api_key_variable=None)
    assert endpoint.keys == {"Bearer none"}


@pytest.mark.parametrize(
    "url", ["http://me:secret@host/v1", "https://host/v1?api-key=secret", "https://host/v1?page=secret"]
)
def test_a_url_with_a_secret_or_a_query_in_it_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"user name or password|contains a query") as caught:
        settings(url)
    assert "secret" not in str(caught.value)
