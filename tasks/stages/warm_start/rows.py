"""Demonstrations as token ids and masks, with the same tokens as an episode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from tasks.chat.format import ChatFormat
from tasks.core.files import read_records
from tasks.core.records import Demonstration
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.learning.shared.rows import Row
from tasks.stages.warm_start.settings import WarmStartSections


def demonstration_rows(settings: WarmStartSections, paths: Paths, chat: ChatFormat) -> tuple[list[Row], list[Row]]:
    """The rows of all curated demonstrations, to train on and held out; ValueError where one of them must not be empty.

    `warm_start.stop.held_out_share` of the split groups are held out, each by a draw of its own.
    """
    stop = settings.warm_start.stop
    share = 0.0 if stop is None else stop.held_out_share
    path = paths.stage("curate") / "demonstrations.jsonl"
    problems = {problem.id: problem for problem in read_split(paths, "train")}
    rows: list[Row] = []
    held_out: list[Row] = []
    with closing(load_environment(settings.environment)) as environment:
        for demonstration in read_records(path, Demonstration):
            problem = problems[demonstration.problem_id]
            tools = [tool.schema() for tool in environment.tools_for(problem)]
            thoughts = environment.thoughts(demonstration) if chat.thoughts_are_learnt else []
            is_held_out = random.Random(f"held out/{settings.seed}/{problem.split_group}").random() < share
            row = demonstration_row(demonstration, chat, tools, thoughts, environment.rules_for(problem))
            (held_out if is_held_out else rows).append(row)
    if share and rows and not held_out:
        raise ValueError(
            f"warm_start.stop.held_out_share is {share:g} and holds out none of the demonstrated split groups, so "
            f"there is no loss to stop by. Raise it, or set it to 0."
        )
    if not rows and not held_out:
        raise ValueError(
            f"{path}: contains no demonstration, and the base model is below assess.warm_start_below, so a warm start "
            f"has nothing to learn from. Raise curate.num_demonstrations, or set assess.warm_start_below to 0 to go "
            f"straight to RL."
        )
    if not rows:
        raise ValueError(
            f"warm_start.stop.held_out_share is {share:g} and holds out every demonstration, so none is left to learn "
            f"from. Lower it, or set it to 0."
        )
    return rows, held_out


def demonstration_row(
    demonstration: Demonstration,
    chat: ChatFormat,
    tools: list[dict[str, Any]],
    thoughts: Sequence[str] = (),
    rules: str = "",
) -> Row:
    """The mask is True for what the assistant wrote, False for prompt and replies. `thoughts` is empty, or has one for
    each of its messages.
    """
    token_ids = chat.prompt_ids(demonstration.request, tools, rules)
    sampled_mask = [False] * len(token_ids)
    texts, follow_ups = demonstration.assistant_texts, iter(demonstration.follow_ups)
    for text, replies, thought in zip(texts, demonstration.replies, thoughts or [""] * len(texts), strict=True):
        given, written = chat.written_ids(chat.call_format.rewrite(text), thought)
        written = [*written, chat.end_of_calls if replies else chat.end_of_turn]
        follow_up = None if replies else next(follow_ups, None)
        answered = chat.reply_ids(tuple(replies)) if replies else chat.request_ids(follow_up) if follow_up else []
        token_ids += given + written + answered
        sampled_mask += [False] * len(given) + [True] * len(written) + [False] * len(answered)
    return Row(token_ids, sampled_mask, [0.0] * len(token_ids), advantage=1.0)
