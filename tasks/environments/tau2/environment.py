"""tau2: τ²-bench with the package's worlds, tools, rules and verdicts. `domain` says which class plays it.

Telecom is solo: a ticket, and no user. Retail and airline are conversations with a customer, whom `environment.user`
plays. Left out: telecom with a user who holds the phone, and the banking domain.
"""

from __future__ import annotations

from tasks.environments.tau2.benchmark import Tau2
from tasks.environments.tau2.desk import Desk
from tasks.environments.tau2.settings import Tau2Settings
from tasks.environments.tau2.telecom import Telecom


def class_of(settings: Tau2Settings | None) -> type[Tau2]:
    """Without settings telecom, which says that it needs some."""
    return Desk if settings is not None and settings.needs_user else Telecom


ENVIRONMENT = class_of
