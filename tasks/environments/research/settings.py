"""Settings of research: which corpus, what a tool shows at a time, and the budgets of a question."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tasks.core.settings import Settings
from tasks.tools.settings import check_is_custom

MOST_CLUSTERS = 2000  # as many as the invented names suffice for


class GeneratedCorpus(Settings):
    """An invented world: `num_clusters` families of documents, which never mention each other."""

    seed: int = Field(ge=0)
    num_clusters: int = Field(ge=2, le=MOST_CLUSTERS)


class ResearchSettings(Settings):
    """Exactly one of `corpus` (a JSONL of {id, title, text} in tasks/custom/) and `generated`.

    A search shows `num_results`, each with a snippet of `snippet_characters`; `open` shows `page_characters` at a time.
    `max_searches` and `max_characters` (of snippets, pages and passages) are budgets of one user request. `citations`:
    the answer must cite `some` of its question's supporting documents, or `all`; never any other.
    """

    corpus: str | None
    generated: GeneratedCorpus | None
    num_results: int = Field(ge=1, le=100)
    snippet_characters: int = Field(ge=0)
    page_characters: int = Field(ge=1)
    max_searches: int = Field(ge=1)
    max_characters: int = Field(ge=1)
    citations: Literal["some", "all"]

    @field_validator("corpus")
    @classmethod
    def _check_corpus_is_watched(cls, corpus: str | None) -> str | None:
        if corpus is not None:
            check_is_custom(corpus)
        return corpus

    @model_validator(mode="after")
    def _check_one_corpus(self) -> ResearchSettings:
        if (self.corpus is None) == (self.generated is None):
            raise ValueError("set exactly one of corpus (a file of yours) and generated; the other is null")
        return self


SETTINGS = ResearchSettings
