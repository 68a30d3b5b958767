"""Which conversations succeeded: by a function of the user's, or by the judge of params.yaml as `judge-check` allows.

    def check(conversation: dict) -> bool | dict | None     # tasks/custom; {"id", "version", "messages", "tools"}

None: it cannot be said. A dict has `success`, and may have `category`, `level` and `world`: with a `world` the problem
can be replayed there, so its reference keeps the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from tasks.commands.harvest.conversations import Conversation
from tasks.commands.judge_check import judge_all
from tasks.core.load_object import load_object
from tasks.core.records import Record
from tasks.core.text import one_line
from tasks.core.user_code import users_line
from tasks.tools.judge.evidence import measured_agreement
from tasks.tools.judge.settings import JudgeSettings


class Label(Record):
    """`success` None: nobody can say. `world` None: it can be replayed nowhere."""

    success: bool | None
    category: str = Field(default="served", min_length=1)
    level: int = Field(default=1, ge=1, le=100)
    world: dict[str, Any] | None = None


def label_by_checker(conversations: Sequence[Conversation], path: str) -> list[Label]:
    """ValueError where the function fails, or says something else."""
    check, found = load_object(path), []
    for conversation in conversations:
        try:
            said = check(conversation.to_row())
        except Exception as error:
            place = users_line(error) or path
            raise ValueError(
                f"{place}: failed on the conversation {conversation.id} ({one_line(error)}), so nothing was labelled. "
                f"Correct it and run again."
            ) from error
        try:
            found.append(Label.model_validate(said if isinstance(said, dict) else {"success": said}))
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(
                f"{path}: gave no label for the conversation {conversation.id} ({'.'.join(map(str, fault['loc']))}: "
                f"{fault['msg']}). Return True, False, None, or a dict with success."
            ) from None
    return found


def label_by_judge(conversations: Sequence[Conversation], settings: JudgeSettings | None) -> list[Label]:
    """ValueError without a judge, or with one that was not measured as `environment.judge.agreement` asks."""
    if settings is None:
        raise ValueError(
            "environment.judge is null, so nobody says which conversations succeeded. Fill it in, as "
            "tasks/tools/README.md shows, or name a function with --checker tasks.custom.module:function."
        )
    if settings.show_reference:
        raise ValueError(
            "environment.judge.show_reference is true, and a served conversation has no reference. Set it to false, or "
            "name a function with --checker tasks.custom.module:function."
        )
    measured_agreement(settings)
    judged = judge_all(settings, [conversation.judged() for conversation in conversations])
    return [Label(success=judgement.success) for judgement in judged]
