"""What readers require of the files between stages and flows; a file may contain more. `kept_files.py` assigns these
shapes to files and refuses others.
"""

# mypy: disable-error-code="misc,operator,valid-type"
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from tasks.core.records import DecisionKind, Gate


def shape(**fields: Any) -> Any:
    """A JSON object with at least these keys."""
    return TypedDict("shape", fields)


Number, Object = float | None, dict[str, Any]
INTERVAL = {"success_rate": float, "ci_low": float, "ci_high": float, "num_problems": int}
RATE = {**INTERVAL, "samples_per_problem": int}
Result = shape(**RATE, by_category=dict[str, shape(success_rate=float)])
Policies = shape(base=Result, warm_start=Result, best=Result)
Difference = shape(difference=float, ci_low=float, ci_high=float)
Elsewhere = shape(environment=str, results=Policies, gain=Difference)
Reflexion = shape(
    policy=str,
    num_attempts=int,
    result=shape(**RATE),
    retries=shape(**RATE),
    success_within=list[shape(attempts=int, reflexion=float, retries=float)],
    episodes=shape(rl_training=int, reflexion_at_most=int, reflexion=int, retries=int),
    best_minus_reflexion=Difference,
    reflexion_minus_retries=Difference,
)
Evaluation = shape(
    best_snapshot=str,
    select=dict[str, Result],
    test=Policies,
    weights=shape(best=str),
    folders=NotRequired[dict[str, str]],
    contents=NotRequired[dict[str, str]],
    measurement=NotRequired[shape(parts=Object)],
    greedy=NotRequired[dict[str, Result]],
    sharded=NotRequired[shape(results=Policies, at_once=Policies, drop=dict[str, Object], noise=Object)],
    also=NotRequired[dict[str, Elsewhere]],
    reflexion=NotRequired[Reflexion],
    warm_start_best_of_k=NotRequired[shape(k=float, same_cost=float, **INTERVAL, tries_to_match=int | None)],
)
Baseline = shape(**RATE, gate=Gate)
Card = shape(hashes=dict[str, str], split=str)
Pin = shape(fingerprint=str, description=Object, probes=list[Object])
AcceptedDrifts = list[shape(pinned=str, today=str, changes=list[str], stages=list[str], environment=Pin)]
Version = shape(version=int)
Decision = shape(
    decision=DecisionKind,
    reasons=NotRequired[list[str]],
    checks=NotRequired[list[Object]],
    model=str,
    challenger=shape(snapshot=str, weights=str),
    champion_before=NotRequired[Version | None],
    champion_after=Version | None,
    is_champion=bool,
)
Spent = dict[str, shape(seconds=float, episodes=int)]
Timings = shape(select=Spent, test=Spent, greedy=NotRequired[Spent], evaluation=str)
Idle = shape(iteration_seconds=float, trainer_idle_seconds=float, engine_idle_seconds=float, metrics=str)
FlowRecord = shape(seconds=dict[str, float], cached=dict[str, bool])
Pointer = shape(path=str, folder_hash=str)
Iteration = shape(iteration=int)
Learnt = shape(
    is_trained=bool, num_iterations=int, num_with_signal=int, success_rate=Number, untrained_snapshots=list[str]
)
Provenance = shape(
    stage=str,
    settings=Object,
    git_commit=str,
    git_dirty=Literal["true", "false", "unknown"],
    dvc_lock_hash=str,
    code=dict[str, str],
    data=dict[str, str],
    packages=dict[str, str],
    python=str,
    platform=str,
    cpu=str,
    num_threads=int,
    launcher=NotRequired[str],
    num_trainers=NotRequired[int],
    outs=str,
)
Replies = shape(problem_id=str, replies=list[Any])
# dvc.lock, as DVC checks it, without the fields of cloud storage.
LOCKED_FILE = with_config(ConfigDict(extra="allow"))(
    shape(path=str, md5=NotRequired[str], size=NotRequired[int], nfiles=NotRequired[int])
)
FILES = NotRequired[list[LOCKED_FILE]]
STAGE = with_config(ConfigDict(extra="forbid"))(
    shape(cmd=str | list[str], deps=FILES, outs=FILES, params=NotRequired[dict[str, Object]])
)
Lock = with_config(ConfigDict(extra="forbid"))(
    shape(schema=Literal["2.0"], stages=NotRequired[dict[str, STAGE]], datasets=NotRequired[Any])
)
