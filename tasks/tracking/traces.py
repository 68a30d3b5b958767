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
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.records import Trajectory, Turn
from tasks.rewards.parts import RewardSettings
from tasks.settings import Paths
from tasks.storage import read_jsonl
from tasks.stored import Rescorer, TurnTokens, encodable, turn_tokens

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LiveSpan

POLICIES = ("base", "warm_start", "best")
BEFORE, AFTER = "warm_start", "best"  # what training changed, which `improved` and `regressed` tell
MAX_CHARACTERS = 10_000  # of one text in a span; the trajectory file has the rest
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
        place = Place(experiment_id, run_id, evaluation)
        for number, episode in enumerate(shown):
            _write(episode, rescorer, place, start_ns=time.time_ns() + number)
        if shown:
            import mlflow

            mlflow.flush_trace_async_logging(terminate=True)
        return len(shown)
    except Exception as error:  # whatever it is: a sample for the eye is not worth a flow that has promoted
        reason = " ".join(str(error).split())[:300]
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
    return {_key(row): Entry(row["category"], row["outcome"] == "success") for _, row in read_jsonl(file)}


def read_chosen(files: Mapping[str, Path], choices: Sequence[Choice]) -> list[Shown]:
    """The chosen episodes, in the order of the choices. Half a surrogate pair, which no database takes, is U+FFFD."""
    wanted = {(choice.policy, choice.key) for choice in choices}
    rows = {
        (policy, key): encodable(json.dumps(row, ensure_ascii=False))
        for policy, file in files.items()
        for _, row in read_jsonl(file)
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


def _write(shown: Shown, rescorer: Rescorer | None, place: Place, *, start_ns: int) -> None:
    """One trace: the root with the verdict, a child a turn, a grandchild a call."""
    import mlflow
    from mlflow.entities import SpanType

    episode = shown.trajectory
    clock = _clock(start_ns)
    root = mlflow.start_span_no_context(
        f"{shown.policy}: {episode.problem_id}",
        span_type=SpanType.AGENT,
        inputs={"request": _cut(episode.request)},
        attributes=_episode_attributes(shown, rescorer),
        tags={
            "policy": shown.policy,
            "outcome": episode.outcome,
            "category": _cut(episode.category, 250),
            "problem_id": _cut(episode.problem_id, 250),
            "chosen_as": shown.chosen_as,
            "evaluation": place.evaluation,
        },
        metadata={"mlflow.sourceRun": place.run_id},
        experiment_id=place.experiment_id,
        start_time_ns=next(clock),
    )
    said = [{"role": "user", "content": _cut(episode.request)}]
    tokens = turn_tokens(episode)
    for number, turn in enumerate(episode.turns):
        _write_turn(root, number, turn, said, tokens[number] if tokens else None, clock)
        said = _answers(turn)
    root.set_outputs({"answer": _cut(episode.turns[-1].text) if episode.turns else None, "outcome": episode.outcome})
    root.end(status="ERROR" if episode.outcome == "environment_error" else "OK", end_time_ns=next(clock))


def _write_turn(
    root: LiveSpan, number: int, turn: Turn, said: list[dict[str, str]], tokens: TurnTokens | None, clock: Iterator[int]
) -> None:
    """What the model was told since its last turn, what it wrote, and each call with its reply."""
    import mlflow
    from mlflow.entities import SpanType

    span = mlflow.start_span_no_context(
        f"turn {number + 1}",
        span_type=SpanType.CHAT_MODEL,
        parent_span=root,
        inputs={"messages": said},
        attributes={"stop_reason": turn.stop_reason, "policy_version": turn.policy_version, **_usage(tokens)},
        start_time_ns=next(clock),
    )
    for call, reply, error in zip_longest(turn.calls, turn.replies, turn.errors):
        name = (call or {}).get("name") or "malformed call"
        tool = mlflow.start_span_no_context(
            _cut(name, 250),
            span_type=SpanType.TOOL,
            parent_span=span,
            inputs={"arguments": _cut_value((call or {}).get("arguments"))},
            attributes={"error": error} if error else {},
            start_time_ns=next(clock),
        )
        tool.set_outputs({"reply": None if reply is None else _cut(reply)})  # bare, MLflow would read JSON out of it
        tool.end(status="ERROR" if error else "OK", end_time_ns=next(clock))
    span.set_outputs({"role": "assistant", "content": _cut(turn.text)})
    span.end(end_time_ns=next(clock))


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


def _clock(start_ns: int) -> Iterator[int]:
    while True:
        yield start_ns
        start_ns += STEP_NS


def _cut_value(value: Any) -> Any:
    """Arguments as they are where they are short; else the beginning of their JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_CHARACTERS else _cut(text)


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more characters"
