"""A sample of evaluation's episodes as MLflow traces: one span an episode, in it one a turn, in that one a tool call.

They hang on the flow's parent run, so that who looks at its numbers can open what they are made of. A record holds no
times: spans begin when they are written, a millisecond apart, which keeps them in order and measures nothing; each
trace says so. Writing is quick and never fails a flow: by then the champion is decided, and the trajectories are in
artifacts. Which episodes are shown is a rule (`choose`) that no taste enters. Left out: token ids, and the champion.
"""

from __future__ import annotations

import filecmp
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import read_jsonl
from tasks.core.records import Trajectory, Turn
from tasks.core.settings import Paths
from tasks.core.text import encodable, one_line
from tasks.rewards.settings import RewardSettings
from tasks.rewards.stored import Rescorer, TurnTokens, turn_tokens

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Span

POLICIES = ("base", "warm_start", "best")
BEFORE, AFTER = "warm_start", "best"  # what training changed, which `improved` and `regressed` tell
MAX_CHARACTERS = 10_000  # of one text in a span; the trajectory file has the rest
MAX_PREVIEW = 500  # in the list of traces
STEP_NS = 1_000_000
TIMES = "not measured: spans are a millisecond apart, in the order in which things happened"

Key = tuple[str, int]  # problem id, sample index


class Entry(NamedTuple):
    """What choosing needs to know of an episode."""

    category: str
    is_success: bool


Index = dict[Key, Entry]


class Choice(NamedTuple):
    """An episode to show, and the kind of the rule that chose it."""

    policy: str
    chosen_as: str
    key: Key


class Opened(NamedTuple):
    """A span that has begun."""

    span_id: str
    parent_id: str | None
    start_ns: int


class Place(NamedTuple):
    """Where a trace goes, and the hash of the evaluation it is from."""

    experiment_id: str
    run_id: str
    evaluation: str


class Shown(NamedTuple):
    """A chosen episode with its record."""

    policy: str
    chosen_as: str
    trajectory: Trajectory


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
    """Write up to `most` traces to the run; returns how many. A fault is told in one line of the log and no more.

    `evaluation` is a hash of the evaluation ("" if unknown): one that has traces, from a flow before, gets no second
    set.
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
    except Exception as error:  # whatever it is: a sample for the eye is not worth a flow that has promoted
        reason = one_line(error)
        logging.getLogger(__name__).warning(
            "no traces in MLflow (%s: %s); the trajectories are in %s", type(error).__name__, reason, _folder(paths)
        )
        return 0


def _has_traces(client: MlflowClient, experiment_id: str, evaluation: str) -> bool:
    same = f"tags.evaluation = '{evaluation}'"
    return bool(client.search_traces(locations=[experiment_id], filter_string=same, max_results=1, include_spans=False))


def test_files(paths: Paths) -> dict[str, Path]:
    """The file of each policy's episodes on test. A base that is the warm start too stands there once."""
    files = {policy: file for policy in POLICIES if (file := _folder(paths) / f"test_{policy}.jsonl").exists()}
    if "base" in files and BEFORE in files and filecmp.cmp(files["base"], files[BEFORE], shallow=False):
        del files["base"]
    return files


def read_index(file: Path) -> Index:
    """What choosing needs of each episode, in file order: whole files of long episodes would not fit in memory."""
    rows = read_jsonl(file, is_only_shown=True)
    return {_key(row): Entry(row["category"], row["outcome"] == "success") for _, row in rows}


def read_chosen(files: Mapping[str, Path], choices: Sequence[Choice]) -> list[Shown]:
    """The chosen episodes, in the order of the choices. Half a surrogate pair, which no database takes, is U+FFFD, and
    so are bytes that are no UTF-8.
    """
    wanted = {(choice.policy, choice.key) for choice in choices}
    rows = {
        (policy, key): encodable(json.dumps(row, ensure_ascii=False))
        for policy, file in files.items()
        for _, row in read_jsonl(file, is_only_shown=True)
        if (policy, key := _key(row)) in wanted
    }
    return [
        Shown(policy, chosen_as, Trajectory.from_row(json.loads(rows[policy, key])))
        for policy, chosen_as, key in choices
    ]


def choose(episodes: Mapping[str, Index], most: int) -> list[Choice]:
    """In turns: an improved episode, a regressed one, a failure of each policy; and again, until `most` are chosen.

    Improved and regressed are from warm start to best snapshot, both shown. Within a kind a category gives its first
    episode of the file, then the next category; after the last, the second of each. Nothing is chosen twice.
    """
    before, after = episodes.get(BEFORE, {}), episodes.get(AFTER, {})
    both = [key for key in after if key in before]
    kinds: list[list[list[Choice]]] = []
    for kind, was, now in (("improved", False, True), ("regressed", True, False)):
        changed = [key for key in both if (before[key].is_success, after[key].is_success) == (was, now)]
        in_order = _by_category(after, changed)
        kinds.append([[Choice(policy, kind, key) for policy in (BEFORE, AFTER)] for key in in_order])
    for policy, index in episodes.items():
        failed = [key for key, entry in index.items() if not entry.is_success]
        kinds.append([[Choice(policy, "failure", key)] for key in _by_category(index, failed)])
    in_turns = [choice for row in zip_longest(*kinds) for choices in row if choices for choice in choices]
    once = {(choice.policy, choice.key): choice for choice in reversed(in_turns)}
    order = dict.fromkeys((choice.policy, choice.key) for choice in in_turns)
    return [once[item] for item in order][:most]


def _by_category(index: Index, keys: list[Key]) -> list[Key]:
    queues: dict[str, list[Key]] = {}
    for key in keys:
        queues.setdefault(index[key].category, []).append(key)
    in_turns = zip_longest(*(queues[category] for category in sorted(queues)))
    return [key for row in in_turns for key in row if key is not None]


def _key(row: Mapping[str, Any]) -> Key:
    return row["problem_id"], row["sample_index"]


def _folder(paths: Paths) -> Path:
    return paths.stage("evaluate") / "trajectories"


def _write(shown: Shown, rescorer: Rescorer | None, place: Place) -> None:
    """One trace in two calls. MLflow's decorators would make one for each span, hundreds a flow."""
    import mlflow
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient

    episode, trace = shown.trajectory, Spans(time.time_ns())
    root = trace.open()
    said = [{"role": "user", "content": _cut(episode.request)}]
    for number, (turn, tokens) in enumerate(zip_longest(episode.turns, turn_tokens(episode)), start=1):
        _add_turn(trace, root, number, turn, said, tokens)
        said = _answers(turn)
    is_fault = episode.outcome == "environment_error"
    answer = _cut(episode.turns[-1].text) if episode.turns else None
    trace.close(
        root,
        f"{shown.policy}: {_cut(episode.problem_id, 250)}",
        "AGENT",
        inputs={"request": _cut(episode.request)},
        outputs={"answer": answer, "outcome": episode.outcome},
        attributes=_episode_attributes(shown, rescorer),
        is_error=is_fault,
    )
    info = TraceInfo(
        trace_id=trace.trace_id,
        trace_location=TraceLocation.from_experiment_id(place.experiment_id),
        request_time=trace.start_ns // STEP_NS,
        execution_duration=(trace.now_ns - trace.start_ns) // STEP_NS,
        state=TraceState.ERROR if is_fault else TraceState.OK,
        request_preview=_cut(episode.request, MAX_PREVIEW),
        response_preview=_cut(answer or episode.outcome, MAX_PREVIEW),
        trace_metadata={"mlflow.sourceRun": place.run_id, "mlflow.trace_schema.version": "3"},
        tags={**_tags(shown), "evaluation": place.evaluation, "mlflow.trace.spansLocation": "TRACKING_STORE"},
    )
    client = TracingClient(mlflow.get_tracking_uri())
    client.start_trace(info)
    client.log_spans(place.experiment_id, trace.spans)


class Spans:
    """The spans of one trace while they are made, on a clock that counts what happened instead of time."""

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
        """The span is whole: MLflow keeps every attribute as JSON."""
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
    """What the model was told since its last turn, what it wrote, and each call with its reply."""
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
        outputs={"role": "assistant", "content": _cut(turn.text)},
        attributes={"stop_reason": turn.stop_reason, "policy_version": turn.policy_version, **_usage(tokens)},
    )


def _tags(shown: Shown) -> dict[str, str]:
    """What traces are found by; MLflow bounds their length."""
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


def _episode_attributes(shown: Shown, rescorer: Rescorer | None) -> dict[str, Any]:
    episode = shown.trajectory
    score = rescorer.score(episode) if rescorer else None
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
    """Tokens under the name MLflow sums over a trace, and how sure the policy was; nothing where none are known."""
    if tokens is None:
        return {}
    read, written = len(tokens.prompt_ids), len(tokens.sampled_ids)
    return {
        "mlflow.chat.tokenUsage": {"input_tokens": read, "output_tokens": written, "total_tokens": read + written},
        "mean_sampler_logp": round(sum(tokens.sampler_logp) / written, 6),
    }


def _answers(turn: Turn) -> list[dict[str, str]]:
    """What the next turn was told: the replies, or what the user said next."""
    replies = [{"role": "tool", "content": _cut(reply)} for reply in turn.replies]
    return replies + ([{"role": "user", "content": _cut(turn.follow_up)}] if turn.follow_up is not None else [])


def _cut_value(value: Any) -> Any:
    """Arguments as they are where they are short; else the beginning of their JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_CHARACTERS else _cut(text)


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more characters"
