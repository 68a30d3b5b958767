"""Settings of promote."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.core.settings import Settings
from tasks.measurement.savings import Measure
from tasks.rollouts.settings import PlaySections
from tasks.tracking.settings import ModelName, TrackingSettings

OnHoldoutReuse = Literal["warn", "refuse", "rotate"]


MORE_PROBLEMS = (
    "Bring problems of more split groups, raise curate.max_test_problems or lower curate.num_test_sets where they "
    "bind, or lower promote.min_unseen_problems; fewer problems show larger differences alone."
)


class CheaperSettings(Settings):
    measure: Measure
    max_success_loss: float = Field(ge=0, lt=1)
    min_saving: float = Field(ge=0, lt=1)


class CostBound(Settings):
    measure: Measure
    share: float = Field(ge=0)


class CategorySettings(Settings):
    """The tolerated loss, the share of equal challengers held for one, and categories that must be shown not to lose
    it.
    """

    max_loss: float = Field(gt=0, lt=1)
    false_alarm: float = Field(gt=0, lt=1)
    never_fall: list[str]


class ErrorBudgetSettings(Settings):
    """The chance of making even one champion wrongly within any 365 days, and the planned number of decisions."""

    per_year: float = Field(gt=0, lt=1)
    decisions_per_year: int = Field(ge=1)


class PolicySettings(Settings):
    """What a challenger must show. Null: only better passes (`or_cheaper`), no bound (`max_cost_increase`). `power` is
    that of every smallest difference in a check's sentence.
    """

    minimum_success: float = Field(ge=0, le=1)
    confidence: float = Field(gt=0, lt=1)
    or_cheaper: CheaperSettings | None
    max_cost_increase: CostBound | None
    categories: CategorySettings
    max_extra_lost_share: float = Field(ge=0, le=1)
    max_invalid_call_share: float = Field(ge=0, le=1)
    max_overlong_share: float = Field(ge=0, le=1)
    power: float = Field(gt=0, lt=1)


class PromoteSettings(PolicySettings):
    """The policy, the registered model, and the rules around a decision.

    `approval`: a promotion waits for a person, for `approval_expires_days`. `error_budget` bounds how often a year of
    decisions makes a champion wrongly. Where test problems were looked at more than `max_looks_per_problem` times,
    `on_holdout_reuse: warn` adds a warning, `refuse` decides nothing, `rotate` decides nothing and asks for the next
    test set in params.yaml. Test problems that either side was trained on are left out; with fewer than
    `min_unseen_problems` left, nothing is compared.
    """

    model_name: ModelName
    approval: bool
    approval_expires_days: int = Field(ge=1)
    error_budget: ErrorBudgetSettings
    max_looks_per_problem: int = Field(ge=1)
    on_holdout_reuse: OnHoldoutReuse
    min_unseen_problems: int = Field(ge=1)


class PromoteSections(PlaySections):
    promote: PromoteSettings
    tracking: TrackingSettings
