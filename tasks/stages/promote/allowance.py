"""What a decision may still do, given the past decisions on its registered model.

Error: first and forced promotions spend none. A repeated decision (same policy, same episodes of all sides, byte for
byte) keeps its error. Every other one spends its alpha, also where another check failed (`error_budget.py`).

Test problems: where more than half were looked at more than `promote.max_looks_per_problem` times,
`promote.on_holdout_reuse` decides. Fresh problems give no error back: the budget counts decisions, not test sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.files import content_hash, file_hash, json_hash, read_json
from tasks.core.params_text import set_number
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell
from tasks.core.yaml_text import PLAIN
from tasks.stages.evaluate.noted import read_evaluations
from tasks.stages.promote.decision import Decision
from tasks.stages.promote.error_budget import ErrorBudget, Spending, budget_warning, error_budget, times
from tasks.stages.promote.policy import way_of
from tasks.stages.promote.settings import PolicySettings

if TYPE_CHECKING:
    from tasks.stages.promote.challenger import Challenger
    from tasks.stages.promote.episodes import Conditions
    from tasks.stages.promote.overrides import ManualOverride
    from tasks.stages.promote.settings import PromoteSettings
    from tasks.tracking.holdout_reuse import HoldoutHistory, HoldoutSet, Looks
    from tasks.tracking.registry import Registry

Kind = Literal["first", "forced", "against the champion"]
SHOWN = ("snapshot", "weights", "against", "policy_decision", "way", "alpha")
NUM_SHOWN = 20  # the latest decisions on these problems, for decision.json
SECTION, OPTION = "curate", "test_rotation"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one decision may do. `alpha` is its one-sided error, `evaluation` the hash of the challenger's episodes.
    Until it is known what is compared, `id` is a prefix, and `alpha` and `is_new` are those of the latest similar
    decision.
    """

    id: str
    kind: Kind
    evaluation: str
    test: HoldoutSet
    past: HoldoutHistory
    looks: Looks
    budget: ErrorBudget
    alpha: float
    is_new: bool

    @property
    def spent(self) -> float:
        return self.alpha if self.kind == "against the champion" else 0.0


def count_looks(registry: Registry, paths: Paths, challenger: Challenger) -> None:
    from tasks.tracking.holdout_reuse import HoldoutSet, record_looks

    noted = [(HoldoutSet(item.test, item.problem_ids), item.episodes) for item in read_evaluations(paths)]
    record_looks(registry, [*noted, (holdout_set(paths), file_hash(challenger.episodes))])


def holdout_set(paths: Paths) -> HoldoutSet:
    from tasks.tracking.holdout_reuse import HoldoutSet

    return HoldoutSet(sha256 := content_hash(paths.split("test")), _problem_ids(paths, sha256))


@lru_cache(maxsize=1)
def _problem_ids(paths: Paths, sha256: str) -> tuple[str, ...]:
    """Of the test set with this hash, which a promotion asks for several times."""
    return tuple(problem.id for problem in read_split(paths, "test"))


def read_allowance(
    settings: PromoteSettings,
    challenger: Challenger,
    conditions: Conditions,
    override: ManualOverride | None,
    *,
    compared: str | None = None,
) -> Allowance:
    """What the decision may spend now. `compared` is the hash of all compared episodes, None while unknown."""
    from tasks.tracking.holdout_reuse import read_holdout_history

    champion = conditions.champion
    kind: Kind = "forced" if override else "against the champion" if champion else "first"
    policy = settings.model_dump(include=set(PolicySettings.model_fields) - {"power"})  # what a decision depends on
    asked = [conditions.key(challenger.files), champion.identity if champion else None, policy, kind]
    test, past = holdout_set(conditions.paths), read_holdout_history(conditions.registry)
    question = f"{test.name}.{json_hash(asked)[:32]}"
    id = f"{question}.{compared[:32]}" if compared else question
    level = (1 - settings.confidence) / 2  # no decision gets more error than promote.confidence allows one
    spendings = [Spending(*spent) for spent in past.errors_spent]
    budget = error_budget(settings.error_budget, spendings, at=datetime.now(UTC), most=level)
    before = past.decision(id) if compared else past.repeated(question)
    alpha = level if kind == "first" else budget.alpha
    if before is not None and kind == "against the champion":
        alpha = float(before.body["alpha"])
    evaluation = file_hash(challenger.episodes)
    return Allowance(id, kind, evaluation, test, past, past.looks_at(test), budget, alpha, before is None)


def hold_for_holdout_reuse(settings: PromoteSettings, allowance: Allowance, paths: Paths) -> Decision | None:
    """None where the decision may be taken on these problems; else, before comparing, what `on_holdout_reuse` says:
    ValueError, or a decision to hold with the next test set asked for in params.yaml.
    """
    reuse = settings.on_holdout_reuse
    if not _is_look_too_many(settings, allowance) or allowance.kind == "forced" or reuse == "warn":
        return None
    if reuse == "refuse":
        raise ValueError(
            f"{_reuse_text(settings, allowance)}, so nothing is decided on them (promote.on_holdout_reuse: refuse). "
            f"Raise curate.test_rotation for the next kept test set, or bring new problems; then run the flow again."
        )
    card = read_json(paths.stage("curate") / "card.json")
    rotation = raise_test_rotation(PARAMS_FILE, curated=int(card.get("test_rotation", 0)))
    tell(f"promote: curate.test_rotation is {rotation} in {PARAMS_FILE} from now on")
    reason = (
        f"{_reuse_text(settings, allowance)}. Nothing was compared. {PARAMS_FILE} asks for the next test set "
        f"(curate.test_rotation: {rotation}, by promote.on_holdout_reuse): run `python -m flows run` again, and this "
        f"challenger is decided on fresh problems. What decisions spent of the error budget stays spent."
    )
    return Decision("hold", [reason])


def spend(
    allowance: Allowance, decision: Decision, registry: Registry, *, note: Mapping[str, Any]
) -> HoldoutHistory | None:
    """Record the decision and its error before it takes effect; returns the history with it. None, with nothing
    recorded, where another decision came first, so that concurrent decisions stay within the budget.
    """
    from tasks.tracking.holdout_reuse import record_decision

    body = {
        **note,
        "policy_decision": decision.by_policy,
        "way": _way(decision, allowance),
        "alpha": allowance.spent,
        "evaluation": allowance.evaluation,
    }
    return record_decision(registry, allowance.test, body, id=allowance.id, expected=allowance.past)


def allowance_rows(settings: PromoteSettings, allowance: Allowance, past: HoldoutHistory) -> dict[str, Any]:
    """`error_budget` and `test_set` of decision.json; `past` includes this decision."""
    looks = past.looks_at(allowance.test)
    decisions = [
        {"decided_at": entry.at, **{name: entry.body.get(name) for name in SHOWN}} for entry in looks.decisions
    ]
    test_set = {
        "hash": allowance.test.sha256,
        "num_problems": len(allowance.test.problem_ids),
        "most_looks": looks.most,
        "median_looks": looks.median,
        "max_looks": settings.max_looks_per_problem,
        "num_decisions": len(decisions),
        "is_new_decision": allowance.is_new,
        "decisions": decisions[-NUM_SHOWN:],
    }
    is_spent_anew = allowance.is_new and allowance.spent > 0
    row = allowance.budget.to_row(this_decision=allowance.spent, is_spent_anew=is_spent_anew)
    planned = settings.error_budget.decisions_per_year
    return {"test_set": test_set, "error_budget": {**row, "kind": allowance.kind, "planned": planned}}


def allowance_warnings(rows: Mapping[str, Any]) -> list[str]:
    test_set, warnings = rows["test_set"], []
    if test_set["median_looks"] > test_set["max_looks"]:
        warnings.append(
            f"More than half of the test problems were looked at {times(test_set['median_looks'])} or more, and "
            f"promote.max_looks_per_problem is {test_set['max_looks']}: choosing models by their results on them fits "
            f"these very problems in the end. Raise curate.test_rotation for fresh ones, or bring new ones."
        )
    less_error = budget_warning(rows["error_budget"])
    return [*warnings, *([less_error] if less_error else [])]


def raise_test_rotation(file: Path, *, curated: int) -> int:
    """Ask in a params.yaml for the test set after the `curated` one; returns its number. The rest of the text stays,
    and a file that asks for a later set. ValueError where no further set is kept, or the text has no such value.
    """
    options = (PLAIN.load(file.read_bytes()) or {}).get(SECTION) or {}
    if options.get(OPTION, 0) > curated:
        return int(options[OPTION])
    if curated + 1 >= options.get("num_test_sets", 1):
        raise ValueError(
            f"The test problems were looked at too often, and no further test set is kept ({SECTION}.num_test_sets: "
            f"{options.get('num_test_sets', 1)}). Bring problems of new split groups to {SECTION}.source, or set "
            f"promote.on_holdout_reuse to warn and decide on these."
        )
    if set_number(file, (SECTION, OPTION), curated + 1):
        return curated + 1
    raise ValueError(
        f"{file}: {SECTION}.{OPTION} could not be raised without changing more than that, and nothing was written. "
        f"Write it as a plain number under {SECTION}, or raise it by hand."
    )


def _way(decision: Decision, allowance: Allowance) -> str | None:
    """How the policy promotes: first, better or cheaper; None where it does not; forced, whatever the policy says."""
    if allowance.kind == "forced":
        return "forced"
    if decision.by_policy != "promote":
        return None
    return "first" if allowance.kind == "first" else way_of(decision.checks)


def _is_look_too_many(settings: PromoteSettings, allowance: Allowance) -> bool:
    past, seen = allowance.past, (allowance.test, allowance.evaluation)
    is_counted = past.has_seen(*seen) and past.num_decisions_on(*seen) == 0
    looks = allowance.looks.median + (not is_counted)
    return allowance.is_new and looks > settings.max_looks_per_problem


def _reuse_text(settings: PromoteSettings, allowance: Allowance) -> str:
    return (
        f"More than half of the {len(allowance.test.problem_ids)} test problems were looked at "
        f"{times(allowance.looks.median)}, and promote.max_looks_per_problem is {settings.max_looks_per_problem}"
    )
