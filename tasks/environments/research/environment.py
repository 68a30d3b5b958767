"""research: questions over a corpus, answered from evidence that the agent found.

The tools are a search (BM25), a look into a document, a search within one, and the answer with its citations. Success:
the last answer is right once case, punctuation and articles are left out (as SQuAD compares, arXiv:1606.05250), and it
cites supporting documents alone, which this episode has shown. The corpus is a file of one's own or an invented world
(`generated.py`). Each user request has a budget of searches and of characters read.

The verdict's details have `retrieval`: the documents in the order they were first shown, and the supporting ones, from
which NDCG@k and Recall@k follow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from tasks.core.records import Demonstration, Problem
from tasks.core.settings import Settings
from tasks.environments.research.corpus import Corpus, read_corpus
from tasks.environments.research.episode import ResearchEpisode
from tasks.environments.research.experts import demonstrate
from tasks.environments.research.generated import draw_problems, make_world, words_of_the_world
from tasks.environments.research.questions import read_questions
from tasks.environments.research.settings import ResearchSettings
from tasks.tools.authoring import ToolEnvironment
from tasks.tools.base import Expert
from tasks.tools.settings import IN_MEMORY, ToolSettings


class Research(ToolEnvironment):
    name = "research"
    version = "3"
    episode_class = ResearchEpisode
    settings_class: ClassVar[type[Settings]] = ResearchSettings
    seed_scheme = "research/1"
    packages = ("bm25s",)
    settings: ResearchSettings

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Settings | None = None):
        if not isinstance(settings, ResearchSettings):
            raise ValueError(
                "environment.settings is null, so research has no corpus to search. Write the settings of "
                "infra/profiles/research_demo.yaml, or those for a corpus of yours in tasks/environments/README.md."
            )
        super().__init__(limits, settings)
        self.corpus = _load_corpus(settings)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "data": self.corpus.sha256}

    def make_episode(self, problem: Problem) -> ResearchEpisode:
        return ResearchEpisode(problem, read_questions(problem, self.corpus), self.corpus, self.settings)

    def judges_each_request(self, problem: Problem) -> bool:
        return len(problem.requests) > 1

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem] | None:
        """Questions about the invented world; None with a corpus of one's own."""
        if self.settings.generated is None:
            return None
        world = make_world(self.settings.generated)
        return draw_problems(world, seed=seed, num_problems=num_problems, max_level=max_level)

    def expert(self) -> Expert:
        return self._demonstrate

    def _demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        cites_all = self.settings.generated is None or self.settings.citations == "all"
        episode = self.make_episode(problem)
        episode.layer = self.layer
        return demonstrate(episode, rng, cites_all=cites_all)

    def vocabulary(self) -> list[str]:
        return words_of_the_world() if self.settings.generated else []


def _load_corpus(settings: ResearchSettings) -> Corpus:
    if settings.generated is not None:
        return make_world(settings.generated).corpus
    assert settings.corpus is not None
    return read_corpus(Path(settings.corpus))


ENVIRONMENT = Research
