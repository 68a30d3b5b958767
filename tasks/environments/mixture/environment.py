"""mixture: plays each problem in the environment it is from, so that one run trains on several.

A problem's id, category and split group begin with the label of its environment, or else its name, and a slash
(`bfcl/multi_turn_base_7`); its environment sees them without. So results by category are results by environment, and no
two environments share a problem or a split group. The model is shown the tools of the problem's environment alone. Each
member is within wrappers of its own (retries, cache, faults), as the `environment` section has them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.files import json_hash
from tasks.core.records import Demonstration, Problem, ReferenceTurn
from tasks.environments.catalog import read_problems_of
from tasks.environments.mixture.settings import MemberSettings, MixtureSettings
from tasks.environments.settings import EnvironmentSettings
from tasks.tools.authoring import describe_tool
from tasks.tools.base import Environment, Episode, Expert, Tool, User
from tasks.tools.replay import demonstrate_reference
from tasks.tools.settings import ToolSettings

SEPARATOR = "/"


class Mixture(Environment):
    """The members by their label, or else their name."""

    name = "mixture"

    def __init__(self, members: Mapping[str, Environment], settings: MixtureSettings, limits: ToolSettings):
        self.members, self.limits = members, limits
        self.settings = {member.title: member for member in settings.members}
        self._tools = _join_tools(members.values())

    @classmethod
    def compose(cls, section: EnvironmentSettings, load: Callable[[EnvironmentSettings], Environment]) -> Mixture:
        """Load each member with the rest of the section, its tools, cache and faults."""
        assert isinstance(section.settings, MixtureSettings)
        members = {member.title: load(member.within(section)) for member in section.settings.members}
        return cls(members, section.settings, section.tools)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._tools

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return self._of(problem.id).start(own_problem(problem), stream=stream)

    def describe(self) -> dict[str, Any]:
        return {
            "environment": {"name": self.name},
            "members": {name: member.describe() for name, member in self.members.items()},
            "budgets": {name: member.budgets.given() for name, member in self.settings.items()},
            "tools": {tool.name: describe_tool(tool) for tool in self.tools},
        }

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for member in self.members.values():
            total.update(member.counts())
        return dict(total)

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
        return self._of(problem.id).tools_for(own_problem(problem))

    def rules_for(self, problem: Problem) -> str:
        return self._of(problem.id).rules_for(own_problem(problem))

    def start_user(self, problem: Problem, *, stream: str = "") -> User:
        return self._of(problem.id).start_user(own_problem(problem), stream=stream)

    def check_user(self, problem: Problem) -> None:
        self._of(problem.id).check_user(own_problem(problem))

    def user_guidelines(self, problem: Problem) -> str:
        return self._of(problem.id).user_guidelines(own_problem(problem))

    def shards(self, problem: Problem) -> Sequence[str]:
        return self._of(problem.id).shards(own_problem(problem))

    def judges_each_request(self, problem: Problem) -> bool:
        return self._of(problem.id).judges_each_request(own_problem(problem))

    def budgets_for(self, problem: Problem) -> dict[str, int]:
        return self.settings[member_of(problem.id)].budgets.given()

    def member_of(self, problem_id: str) -> str:
        return member_of(problem_id)

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """Each member's share of `num_problems`; all that a member has where it has fewer."""
        shares = {name: member.share for name, member in self.settings.items()}
        for name, count in divide_by_share(num_problems, shares).items():
            for problem in self._problems_of(name, seed=seed, num_problems=count, max_level=max_level):
                yield in_mixture(problem, name)

    def expert(self) -> Expert | None:
        """Each member's own; the reference solutions of a member that has none. None where none has."""
        experts = {name: member.expert() for name, member in self.members.items()}
        if not any(experts.values()):
            return None

        def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
            name, own = member_of(problem.id), own_problem(problem)
            expert = experts[name]
            found = expert(own, rng) if expert else demonstrate_reference(self.members[name], own)
            return found and found.model_copy(update={"problem_id": problem.id})

        return demonstrate

    def thoughts(self, demonstration: Demonstration) -> list[str]:
        own = demonstration.model_copy(update={"problem_id": demonstration.problem_id.partition(SEPARATOR)[2]})
        return self._of(demonstration.problem_id).thoughts(own)

    def vocabulary(self) -> list[str]:
        return list(dict.fromkeys(word for member in self.members.values() for word in member.vocabulary()))

    def baselines(self, problem: Problem) -> dict[str, Sequence[ReferenceTurn]]:
        name = member_of(problem.id)
        found = self.members[name].baselines(own_problem(problem))
        return {f"{name}{SEPARATOR}{policy}": turns for policy, turns in found.items()}

    def find_problem(self, problem_id: str) -> Problem | None:
        name, _, own_id = problem_id.partition(SEPARATOR)
        found = self.members[name].find_problem(own_id) if name in self.members else None
        return found and in_mixture(found, name)

    def knows_solution(self, problem: Problem) -> bool:
        return self._of(problem.id).knows_solution(own_problem(problem))

    def starts_afresh(self) -> bool:
        return all(member.starts_afresh() for member in self.members.values())

    def cheaper_starts(self) -> str:
        return next(filter(None, (member.cheaper_starts() for member in self.members.values())), "")

    def is_live(self) -> bool:
        return any(member.is_live() for member in self.members.values())

    def _of(self, problem_id: str) -> Environment:
        name = member_of(problem_id)
        if name not in self.members:
            raise ValueError(
                f"problem {problem_id!r}: {name!r} is none of the environments of the mixture, so nothing can play it. "
                f"Begin its id with one of: {', '.join(f'{member}{SEPARATOR}' for member in self.members)}"
            )
        return self.members[name]

    def _problems_of(self, name: str, *, seed: int, num_problems: int, max_level: int) -> list[Problem]:
        member: MemberSettings = self.settings[name]
        return read_problems_of(self.members[name], member, seed=seed, num_problems=num_problems, max_level=max_level)


def divide_by_share(number: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole parts that add up to `number`, by largest remainders; at least one each, even where that is more."""
    exact = {name: number * share / sum(shares.values()) for name, share in shares.items()}
    parts = dict.fromkeys(shares, 1)
    for _ in range(number - len(shares)):
        parts[max(parts, key=lambda name: exact[name] - parts[name])] += 1
    return parts


def member_of(problem_id: str) -> str:
    return problem_id.partition(SEPARATOR)[0]


def in_mixture(problem: Problem, name: str) -> Problem:
    """The problem as the rest of turnwise sees it."""
    named = {key: f"{name}{SEPARATOR}{getattr(problem, key)}" for key in ("id", "category", "split_group")}
    return problem.model_copy(update=named)


def own_problem(problem: Problem) -> Problem:
    """The problem as its environment sees it."""
    own = {key: getattr(problem, key).partition(SEPARATOR)[2] for key in ("id", "category", "split_group")}
    return problem.model_copy(update=own)


def _join_tools(members: Iterable[Environment]) -> tuple[Tool, ...]:
    """One per name, as the first member describes it. Two of one name are as harmless as the less harmless of them."""
    joined: dict[str, Tool] = {}
    for tool in (tool for member in members for tool in member.tools):
        known = joined.get(tool.name, tool)
        flags = {
            name: getattr(known, name) and getattr(tool, name) for name in ("read_only", "idempotent", "stateless")
        }
        joined[tool.name] = replace(known, **flags)
    return tuple(joined.values())


ENVIRONMENT = Mixture
