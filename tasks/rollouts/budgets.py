"""Do the known reference solutions fit the token budgets of `sampling`? No policy learns what no reference can do.

A reference is measured as an episode: prompt, one call per message with its end-of-turn token, each reply as the
template renders it, closing message. Text a policy adds, such as reasoning, is not counted, but for the empty thought
of a model that thinks. `assess` refuses budgets that most references exceed before it loads weights; `curate` warns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any

from tasks.chat.format import ChatFormat
from tasks.core.files import read_jsonl
from tasks.core.records import Problem
from tasks.core.settings import Paths
from tasks.core.text import first_few
from tasks.models.limits import context_length
from tasks.rollouts.references import reference_messages
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment

KEPT = ("train", "select")  # the splits of whose references `curate` keeps replies
MOST_NAMED, LONGEST_NAME = 3, 60  # categories, characters
WHAT = {
    "max_turns": "turns",
    "max_tokens_per_turn": "tokens per turn",
    "max_tokens_per_episode": "tokens per episode",
    "max_completion_tokens": "tokens after the prompt",
}


@dataclass(frozen=True, slots=True)
class Size:
    problem_id: str
    category: str
    needs: dict[str, int]
    budgets: Mapping[str, int] = field(default_factory=dict)  # lower than those of `sampling`, by name
    member: str = ""  # of a mixture, whose they are


@dataclass(frozen=True, slots=True)
class Fit:
    most: dict[str, Size]
    limits: dict[str, int]
    cut: list[Size]
    num_measured: int
    raised: dict[str, int]  # the least values by which none is cut, by key of params

    @property
    def is_hopeless(self) -> bool:
        """Most references are cut: too few problems are left to train on."""
        return 2 * len(self.cut) > self.num_measured

    @property
    def used(self) -> str:
        """`5 of 10 turns, 21 of 28 tokens per turn, …`: the most that any reference needs."""
        return ", ".join(
            f"{size.needs[name]:,} of {self.limits[name]:,} {WHAT[name]}" for name, size in self.most.items()
        )

    @property
    def sentence(self) -> str:
        """`12 of 40 references do not fit (book/none): 7 of 6 turns, …; 'td-7' needs 7 turns`"""
        categories = sorted({size.category for size in self.cut})
        return (
            f"{len(self.cut):,} of {self.num_measured:,} references do not fit "
            f"({first_few([*map(shown, categories)], MOST_NAMED)}): {self.used}; {self.worst}"
        )

    @property
    def worst(self) -> str:
        """The problem furthest beyond a budget, and by how much: `'td-7' needs 41 tokens per turn`."""
        name = max(self.most, key=lambda name: self.most[name].needs[name] / self.limits[name])
        return f"{shown(self.most[name].problem_id)} needs {self.most[name].needs[name]:,} {WHAT[name]}"

    def remedy(self, config: Mapping[str, Any]) -> str:
        """The values that fit every reference; other advice where one exceeds the context in the model's
        config.json.
        """
        context = context_length(config)
        tokens = max(size.needs["max_tokens_per_episode"] for size in self.cut)
        told = " and ".join(f"{key} to at least {value}" for key, value in self.raised.items())
        if context is not None and tokens > context:
            return (
                f"No policy can learn to solve these problems. The model's context is {context:,} tokens: drop the "
                f"longest problems, shorten tool replies (environment.tools.max_reply_characters), or use a model "
                f"with a longer context. Then set {told}."
            )
        return f"No policy can learn to solve these problems. Set {told}."


def shown(name: str) -> str:
    """A name from a row in quotes: one line, no control characters, bounded length."""
    return repr(name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…")


def sampled_sizes(
    chat: ChatFormat, environment: Environment, paths: Paths, splits: Mapping[str, Sequence[Problem]]
) -> list[Size]:
    """The sizes of the references whose replies `curate` kept, of train and select; empty where none solves its
    problem.
    """
    problems = {problem.id: problem for split in KEPT for problem in splits[split]}
    kept = [(row["problem_id"], row["replies"]) for _, row in read_jsonl(paths.stage("curate") / "references.jsonl")]
    return [reference_size(chat, environment, problems[name], replies) for name, replies in kept if name in problems]


def reference_size(chat: ChatFormat, environment: Environment, problem: Problem, replies: Sequence[str]) -> Size:
    """`replies` are what the tools answered its calls, in order."""
    tools = [tool.schema() for tool in environment.tools_for(problem)]
    prompt = len(chat.prompt_ids(problem.requests[0], tools, environment.rules_for(problem)))
    turns = [len(ids) for ids in reference_messages(chat, problem)]
    num_replies = sum(len(turn.calls) for turn in problem.reference)
    given = [chat.reply_ids((reply,)) for reply in islice(chain(replies, repeat("")), num_replies)]
    given += [chat.request_ids(request) for request in problem.requests[1 : len(problem.reference)]]
    size = size_of(problem, turns=turns, prompt=prompt, rest=sum(turns) + sum(map(len, given)))
    return replace(size, budgets=environment.budgets_for(problem), member=environment.member_of(problem.id) or "")


def size_of(problem: Problem, *, turns: Sequence[int], prompt: int, rest: int) -> Size:
    needs = {
        "max_turns": len(turns),
        "max_tokens_per_turn": max(turns),
        "max_tokens_per_episode": prompt + rest,
        "max_completion_tokens": rest,
    }
    return Size(problem.id, problem.category, needs)


def fit(sizes: Sequence[Size], sampling: SamplingSettings) -> Fit:
    """`most` and `limits` are of the size that takes the largest part of its budget."""
    limits = {name: value for name in WHAT if (value := getattr(sampling, name)) is not None}
    raised = _raise_budgets(sizes, limits)
    budgets = [(size, {**limits, **size.budgets}) for size in sizes]
    most: dict[str, Size] = {}
    for name in WHAT:
        bounded = [(size.needs[name] / own[name], size, own[name]) for size, own in budgets if name in own]
        if bounded:
            _, most[name], limits[name] = max(bounded, key=lambda found: found[0])
    cut = [size for size, own in budgets if any(size.needs[name] > limit for name, limit in own.items())]
    return Fit(most, limits, cut, len(sizes), raised)


def _raise_budgets(sizes: Sequence[Size], limits: Mapping[str, int]) -> dict[str, int]:
    """What the longest needs of each budget that cuts one: a member's own, and those of `sampling`, which bound it."""
    raised: dict[str, int] = {}
    for name in WHAT:
        for size in sizes:
            need, own = size.needs[name], f"environment.settings.members[{size.member}].budgets.{name}"
            for key, budgets in ((own, size.budgets), (f"sampling.{name}", limits)):
                if need > budgets.get(name, need):
                    raised[key] = max(need, raised.get(key, 0))
    return raised
