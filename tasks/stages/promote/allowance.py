"""What the past of a registered model leaves to this decision: the error it may spend, and test problems not yet worn.

Both are known before anything is measured. A first promotion and one that a person forces spend nothing: before the
first there is no champion to lose, and what a person forces is not the policy's error. An approval carries out what was
decided, and paid for, before. A decision taken before has the error it had then: the same policy, on the same episodes
of both sides and of the anchor, byte for byte. Episodes that were measured again and came out otherwise are another
chance, and are paid for. Everything else spends its alpha, also where another check failed
(`measurement/error_budget.py` says why).

Where more than half of the test problems were looked at as often as `promote.max_looks_per_problem` allows,
`promote.on_holdout_reuse` says what happens. A rotation brings fresh problems, which find smaller differences than
problems that everybody has fitted; it gives back no error, since the budget is of decisions and not of test sets.
Left out: how
looks are counted (`tracking/holdout_reuse.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.files import content_hash, json_hash, read_json
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.core.terminal import tell
from tasks.stages.evaluate.looks import read_evaluations
from tasks.stages.promote.budget_words import times
from tasks.stages.promote.decision import Decision
from tasks.stages.promote.error_budget import ErrorBudget, Spending, error_budget
from tasks.stages.promote.policy import way_of
from tasks.stages.promote.rotation import raise_test_rotation

if TYPE_CHECKING:
    from tasks.stages.promote.overrides import ManualOverride
    from tasks.stages.promote.settings import PromoteSettings
    from tasks.tracking.holdout_reuse import HoldoutHistory, HoldoutSet, Looks
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

Kind = Literal["first", "forced", "against the champion"]
SHOWN = ("snapshot", "weights", "against", "policy_verdict", "way", "alpha")
NUM_SHOWN = 20  # decisions on these problems that decision.json lists, the latest


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one decision may do. `alpha` is its one-sided error, `evaluation` the hash of the challenger's episodes. The
    `id` is whole once it is known what is compared; before, `alpha` and `is_new` are of the latest decision like it.
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
        """What the journal writes down as this decision's error."""
        return self.alpha if self.kind == "against the champion" else 0.0


def read_allowance(
    options: PromoteSettings,
    registry: Registry,
    test: HoldoutSet,
    *,
    challenger: str,
    evaluation: str,
    champion: Version | None,
    policy: Mapping[str, Any],
    override: ManualOverride | None,
    compared: str | None,
) -> Allowance:
    """`challenger` is the key of its episodes and `evaluation` their hash, `policy` what the verdict depends on beside
    them, `compared` the hash of all episodes that are compared, None as long as they are not known.
    """
    from tasks.tracking.holdout_reuse import read_holdout_history

    kind: Kind = "forced" if override else "against the champion" if champion else "first"
    asked = [challenger, champion.identity if champion else None, dict(policy), kind]
    past, question = read_holdout_history(registry), f"{test.name}.{json_hash(asked)[:32]}"
    id = f"{question}.{compared[:32]}" if compared else question
    level = (1 - options.confidence) / 2  # no decision errs more often than promote.confidence says of one
    spendings = [Spending(*spent) for spent in past.errors_spent]
    budget = error_budget(options.error_budget, spendings, at=datetime.now(UTC), most=level)
    before = past.decision(id) if compared else past.repeated(question)
    alpha = level if kind == "first" else budget.alpha
    if before is not None and kind == "against the champion":
        alpha = float(before.body["alpha"])
    looks = past.looks_at(test)
    return Allowance(id, kind, evaluation, test, past, looks, budget, alpha, before is None)


def holdout_set(paths: Paths) -> HoldoutSet:
    from tasks.core.splits import read_split
    from tasks.tracking.holdout_reuse import HoldoutSet

    file = paths.split("test")
    return HoldoutSet(content_hash(file), [problem.id for problem in read_split(paths, "test")])


def hold_for_worn_problems(options: PromoteSettings, allowance: Allowance, paths: Paths) -> Decision | None:
    """None where the decision may be taken. ValueError, or a decision to hold, as `on_holdout_reuse` has it, where the
    problems are worn; nothing is compared then.
    """
    if not _is_worn(options, allowance) or allowance.kind == "forced" or options.on_holdout_reuse == "warn":
        return None
    if options.on_holdout_reuse == "refuse":
        raise ValueError(
            f"{_worn_text(options, allowance)}, so nothing is decided on them (promote.on_holdout_reuse: refuse). "
            f"Raise curate.test_rotation for the next kept test set, or bring new problems; then run the flow again."
        )
    card = read_json(paths.stage("curate") / "card.json")
    rotation = raise_test_rotation(PARAMS_FILE, curated=int(card.get("test_rotation", 0)))
    tell(f"promote: curate.test_rotation is {rotation} in {PARAMS_FILE} from now on")
    return Decision(
        "hold",
        [
            f"{_worn_text(options, allowance)}. Nothing was compared. {PARAMS_FILE} asks for the next test set "
            f"(curate.test_rotation: {rotation}, by promote.on_holdout_reuse): run `python -m flows run` again, and "
            f"this challenger is decided on fresh problems. What decisions spent of the error budget stays spent."
        ],
    )


def decide_within(
    allowance: Allowance,
    registry: Registry,
    refresh: Callable[[], Allowance],
    judge: Callable[[Allowance], Decision],
    *,
    note: Mapping[str, Any],
) -> tuple[Decision, Allowance]:
    """The decision at the error it may spend, written down before anything comes of it.

    Where another decision was written down meanwhile it is judged again, at what is left then: so of several at once
    the errors still add up to no more than the budget.
    """
    from tasks.tracking.holdout_reuse import record_decision

    while True:
        decision = judge(allowance)
        body = {
            **note,
            "policy_verdict": decision.policy_verdict,
            "way": way_by(decision, allowance),
            "alpha": allowance.spent,
            "evaluation": allowance.evaluation,
        }
        if record_decision(registry, allowance.test, body, id=allowance.id, expected=allowance.past):
            return decision, allowance
        allowance = refresh()


def count_looks(registry: Registry, paths: Paths, *, evaluation: str) -> None:
    """Count every evaluation that people saw, whatever is decided on it: all that are noted, and the one at hand."""
    from tasks.tracking.holdout_reuse import HoldoutSet, record_looks

    noted = [(HoldoutSet(item.test, item.problem_ids), item.episodes) for item in read_evaluations(paths)]
    record_looks(registry, [*noted, (holdout_set(paths), evaluation)])


def way_by(decision: Decision, allowance: Allowance) -> str | None:
    """By which way the policy promotes: first, better or cheaper; None where it does not; forced, whatever it says."""
    if allowance.kind == "forced":
        return "forced"
    if decision.policy_verdict != "promote":
        return None
    return "first" if allowance.kind == "first" else way_of(decision.checks)


def rows_of(options: PromoteSettings, allowance: Allowance, registry: Registry) -> dict[str, Any]:
    """`error_budget` and `test_set` of decision.json, with this decision in them."""
    from tasks.tracking.holdout_reuse import read_holdout_history

    looks = read_holdout_history(registry).looks_at(allowance.test)
    decisions = [
        {"decided_at": entry.at, **{name: entry.body.get(name) for name in SHOWN}} for entry in looks.decisions
    ]
    test_set = {
        "hash": allowance.test.sha256,
        "num_problems": len(allowance.test.problem_ids),
        "most_looks": looks.most,
        "median_looks": looks.median,
        "max_looks": options.max_looks_per_problem,
        "num_decisions": len(decisions),
        "is_new_decision": allowance.is_new,
        "decisions": decisions[-NUM_SHOWN:],
    }
    is_spent_anew = allowance.is_new and allowance.spent > 0
    row = allowance.budget.to_row(this_decision=allowance.spent, is_spent_anew=is_spent_anew)
    decisions_per_year = options.error_budget.decisions_per_year
    return {"test_set": test_set, "error_budget": {**row, "kind": allowance.kind, "planned": decisions_per_year}}


def _is_worn(options: PromoteSettings, allowance: Allowance) -> bool:
    """Whether this would be a look too many; an evaluation that nothing was decided on is counted already."""
    past, seen = allowance.past, (allowance.test, allowance.evaluation)
    is_counted = past.has_seen(*seen) and past.num_decisions_on(*seen) == 0
    looks = allowance.looks.median + (not is_counted)
    return allowance.is_new and looks > options.max_looks_per_problem


def _worn_text(options: PromoteSettings, allowance: Allowance) -> str:
    return (
        f"More than half of the {len(allowance.test.problem_ids)} test problems were looked at "
        f"{times(allowance.looks.median)}, and promote.max_looks_per_problem is {options.max_looks_per_problem}"
    )
