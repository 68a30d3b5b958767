"""A sample of evaluation's episodes as MLflow traces: one span per episode, in it one per turn, in that one per tool
call.

Records contain no times: spans are a millisecond apart in the order of events, and each trace says that these are no
durations. Writing never fails a flow, since the champion is decided by then. `choose` decides which episodes are shown.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.records import Score, Trajectory, Turn
from tasks.core.settings import Paths
from tasks.core.text import one_line
from tasks.rewards.settings import RewardSettings
from tasks.rewards.stored import Rescorer, TurnTokens, turn_tokens
from tasks.tracking.journal import operator
from tasks.tracking.trace_choice import Shown, choose, read_chosen, read_index, test_files, trajectories_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Span

MAX_CHARACTERS = 10_000  # of one text in a span; the trajectory file has the rest
MAX_PREVIEW = 500  # in the list of traces
STEP_NS = 1_000_000
TIMES = "not measured: spans are a millisecond apart, in the order in which things happened"


class Opened(NamedTuple):
    span_id: str
    parent_id: str | None
    start_ns: int


class Place(NamedTuple):
    experiment_id: str
    run_id: str
    evaluation: str


def log_traces(
    client: MlflowClient,
    paths: Paths,
    rewards: RewardSettings | None,
    *,
    experiment_id: str,
    run_id: str,
    evaluation: str,
    most: int,
) -> int:
    """Write up to `most` traces to the run; returns how many. A fault is one line of the log. `evaluation` is a hash
    ("" if unknown): one with traces of an earlier flow gets no second set.
    """
    if most == 0:
        return 0
    try:
        if evaluation and _has_traces(client, experiment_id, evaluation):
            return 0
        files = test_files(paths)
        shown = read_chosen(files, choose({policy: read_index(file) for policy, file in files.items()}, most))
        rescorer = Rescorer(paths, rewards, ("test",)) if rewards and shown else None
        for episode in shown:
            _write(episode, rescorer, Place(experiment_id, run_id, evaluation))
        return len(shown)
    except Exception as error:  # a sample for people must not fail a flow that has promoted
        reason = one_line(error)
        logging.getLogger(__name__).warning(
            "no traces in MLflow (%s: %s); the trajectories are in %s",
            type(error).__name__,
            reason,
            trajectories_folder(paths),
        )
        return 0


def _has_traces(client: MlflowClient, experiment_id: str, evaluation: str) -> bool:
    same = f"tags.evaluation = '{evaluation}'"
    return bool(client.search_traces(locations=[experiment_id], filter_string=same, max_results=1, include_spans=False))


def _write(shown: Shown, rescorer: Rescorer | None, place: Place) -> None:
    """One trace in two calls. MLflow's decorators would make one call per span, hundreds per flow."""
    import mlflow
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient

    episode, trace = shown.trajectory, Spans(time.time_ns())
    root = trace.open()
    score = rescorer.shown_score(episode) if rescorer else None
    said = [{"role": "user", "content": _cut(episode.request)}]
    for number, (turn, tokens) in enumerate(zip_longest(episode.turns, turn_tokens(episode)), start=1):
        _add_turn(trace, root, number, turn, said, tokens)
        said = _answers(turn)
    answer = _cut(episode.turns[-1].message) if episode.turns else None
    trace.close(
        root,
        f"{shown.policy}: {_cut(episode.problem_id, 250)}",
        "AGENT",
        inputs={"request": _cut(episode.request)},
        outputs={"answer": answer, "outcome": episode.outcome},
        attributes=_episode_attributes(shown, score),
        is_error=episode.is_lost,
    )
    info = TraceInfo(
        trace_id=trace.trace_id,
        trace_location=TraceLocation.from_experiment_id(place.experiment_id),
        request_time=trace.start_ns // STEP_NS,
        execution_duration=(trace.now_ns - trace.start_ns) // STEP_NS,
        state=TraceState.ERROR if episode.is_lost else TraceState.OK,
        request_preview=_cut(episode.request, MAX_PREVIEW),
        response_preview=_cut(answer or episode.outcome, MAX_PREVIEW),
        trace_metadata={
            "mlflow.sourceRun": place.run_id,
            "mlflow.trace_schema.version": "3",
            "mlflow.trace.session": _cut(episode.problem_id, 200),  # every policy's episodes of a problem side by side
            "mlflow.trace.user": operator(),
        },
        tags={**_tags(shown), "evaluation": place.evaluation, "mlflow.trace.spansLocation": "TRACKING_STORE"},
        assessments=_assessments(episode, score, trace.trace_id),
    )
    client = TracingClient(mlflow.get_tracking_uri())
    client.start_trace(info)
    client.log_spans(place.experiment_id, trace.spans)


class Spans:
    """The spans of one trace in the making, on a clock that counts events."""

    def __init__(self, start_ns: int):
        self.trace_id = f"tr-{uuid.uuid4().hex}"
        self.start_ns = self.now_ns = start_ns
        self.spans: list[Span] = []

    def open(self, parent: Opened | None = None) -> Opened:
        self.now_ns += STEP_NS
        return Opened(uuid.uuid4().hex[:16], parent.span_id if parent else None, self.now_ns)

    def close(
        self,
        opened: Opened,
        name: str,
        kind: str,
        *,
        inputs: Any,
        outputs: Any,
        attributes: Mapping[str, Any],
        is_error: bool = False,
    ) -> None:
        """The span is complete: MLflow keeps every attribute as JSON."""
        from mlflow.entities import Span

        self.now_ns += STEP_NS
        own = {"traceRequestId": self.trace_id, "spanType": kind, "spanInputs": inputs, "spanOutputs": outputs}
        everything = {**attributes, **{f"mlflow.{key}": value for key, value in own.items()}}
        row = {
            "trace_id": self.trace_id,
            "span_id": opened.span_id,
            "parent_span_id": opened.parent_id,
            "name": name,
            "start_time_unix_nano": opened.start_ns,
            "end_time_unix_nano": self.now_ns,
            "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in everything.items()},
            "status": {"code": "ERROR" if is_error else "OK", "message": ""},
        }
        self.spans.append(Span.from_dict(row))


def _add_turn(
    trace: Spans, root: Opened, number: int, turn: Turn, said: list[dict[str, str]], tokens: TurnTokens | None
) -> None:
    """The messages since the model's last turn, what it wrote, and each call with its reply."""
    span = trace.open(root)
    for call, reply, error in zip_longest(turn.calls, turn.replies, turn.errors):
        trace.close(
            trace.open(span),
            _cut((call or {}).get("name") or "malformed call", 250),
            "TOOL",
            inputs={"arguments": _cut_value((call or {}).get("arguments"))},
            outputs={"reply": None if reply is None else _cut(reply)},
            attributes={"error": error},
            is_error=error is not None,
        )
    trace.close(
        span,
        f"turn {number}",
        "CHAT_MODEL",
        inputs={"messages": said},
        outputs={
            "role": "assistant",
            **({} if turn.thought is None else {"reasoning_content": _cut(turn.thought)}),
            "content": _cut(turn.text),
        },
        attributes={
            "stop_reason": turn.stop_reason,
            "policy_version": turn.policy_version,
            "sequence": turn.sequence,
            "begun": tokens.sequence.begun if tokens else "",
            **_usage(tokens),
        },
    )


def _tags(shown: Shown) -> dict[str, str]:
    episode = shown.trajectory
    tags = {
        "mlflow.traceName": f"{shown.policy}: {episode.problem_id}",
        "policy": shown.policy,
        "outcome": episode.outcome,
        "category": episode.category,
        "problem_id": episode.problem_id,
        "chosen_as": shown.chosen_as,
    }
    return {name: _cut(value, 200) for name, value in tags.items()}


def _assessments(episode: Trajectory, score: Score | None, trace_id: str) -> list[Any]:
    """The environment's verdict and the reward, as feedback from code. A fault gives no verdict."""
    from mlflow.entities import AssessmentError, AssessmentSource, Feedback

    by_check = {"source": AssessmentSource("CODE", "environment"), "trace_id": trace_id}
    failed = [name for name, holds in episode.checks.items() if not holds]
    if episode.is_lost:
        verdict = Feedback("success", error=AssessmentError("environment_error", _cut(episode.fault or "")), **by_check)
    else:
        why = _cut(", ".join(failed) or episode.limit or episode.outcome, MAX_PREVIEW)
        verdict = Feedback("success", episode.is_success, rationale=why, **by_check)
    if score is None:
        return [verdict]
    by_reward = {"source": AssessmentSource("CODE", "reward"), "trace_id": trace_id}
    return [verdict, Feedback("reward", score.reward, **by_reward)]


def _episode_attributes(shown: Shown, score: Score | None) -> dict[str, Any]:
    episode = shown.trajectory
    return {
        "policy": shown.policy,
        "chosen_as": shown.chosen_as,
        "problem_id": episode.problem_id,
        "category": episode.category,
        "sample_index": episode.sample_index,
        "outcome": episode.outcome,
        "limit": episode.limit,
        "checks": episode.checks,
        "fault": episode.fault,
        "reward": score.reward if score else None,
        "reward_parts": score.parts if score else None,
        "num_calls": episode.num_calls,
        "num_invalid_calls": episode.num_invalid_calls,
        "num_sampled_tokens": episode.num_sampled_tokens,
        "environment_fingerprint": episode.environment_fingerprint,
        "times": TIMES,
    }


def _usage(tokens: TurnTokens | None) -> dict[str, Any]:
    """Tokens under the name MLflow sums over a trace, and the mean log-prob; nothing where none are known."""
    if tokens is None:
        return {}
    read, written = tokens.num_read, tokens.num_sampled
    return {
        "mlflow.chat.tokenUsage": {"input_tokens": read, "output_tokens": written, "total_tokens": read + written},
        "mean_sampler_logp": round(sum(tokens.sampler_logp) / written, 6),
    }


def _answers(turn: Turn) -> list[dict[str, str]]:
    replies = [{"role": "tool", "content": _cut(reply)} for reply in turn.replies]
    return replies + ([{"role": "user", "content": _cut(turn.follow_up)}] if turn.follow_up is not None else [])


def _cut_value(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_CHARACTERS else _cut(text)


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more characters"
