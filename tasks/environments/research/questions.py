"""What `world` says of a problem of research: per user request, the accepted answers and the supporting documents.
What `world["user"]` says is the simulated user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, ValidationError

from tasks.core.records import Problem, Record
from tasks.core.text import counted, one_line
from tasks.environments.research.corpus import Corpus
from tasks.tools.user.hidden import KEY


class Question(Record):
    answers: list[str] = Field(min_length=1)
    supporting: list[str] = Field(min_length=1)


class World(Record):
    questions: list[Question] = Field(min_length=1)


def read_questions(problem: Problem, corpus: Corpus) -> Sequence[Question]:
    """The questions of a problem; ValueError if they do not fit its requests or name unknown documents."""
    try:
        questions = World.model_validate({key: value for key, value in problem.world.items() if key != KEY}).questions
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(
            f"problem {problem.id!r}: world.{'.'.join(map(str, fault['loc']))}: {one_line(fault['msg'])}, so no answer "
            f'could be judged. Write {{"questions": [{{"answers": […], "supporting": […]}}]}}.'
        ) from None
    if len(questions) != len(problem.requests):
        raise ValueError(
            f"problem {problem.id!r}: world.questions has {counted(len(questions), 'entry', 'entries')} for "
            f"{counted(len(problem.requests), 'request')}, so no answer could be judged. Write one entry per request."
        )
    unknown = [id for question in questions for id in question.supporting if id not in corpus.documents]
    if unknown:
        raise ValueError(
            f"problem {problem.id!r}: world.questions names the document {unknown[0]!r} as support, which the corpus "
            f"lacks, so no answer could succeed. Correct the id, or add the document."
        )
    return questions
