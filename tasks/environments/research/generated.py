"""An invented world of guilds, towns and rivers, and questions that take one to three documents to answer.

A cluster is one family of documents: a person works at a guild; the guild keeps its hall near a town; the town lies on
a river. Half of the guilds were renamed: then the person's document has the old name, and a document of its own says
what the guild is called now. A song mentions the same names and answers nothing; a short one ranks above the document
that is about the name. Clusters share no entity, and a question's split group is its cluster, so questions that were
held out are about entities that training never met.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.research.corpus import Corpus, Document, make_corpus
from tasks.environments.research.names import ENDINGS, draw_names, parts_of_names
from tasks.environments.research.settings import GeneratedCorpus

NUM_NAMES = {"person": 4, "guild": 2, "town": 2, "river": 1, "song": 1}  # per cluster
FIRST_ID, NUM_IDS = 1000, 9000  # four digits, in no order; 2,000 clusters take them all
DONE = "Done."
VERSES = ("", " which the old sing in winter when the nights are long")  # a song's length decides its rank
TRADES = ("baker", "carter", "miller", "potter", "tailor", "weaver")

# What a question asks for, through which documents, in which words.
ASKED = {
    "1_hop": {
        "guild": ("Where does {person} work?", "Which guild employs {person}?"),
        "birthplace": ("Where was {person} born?", "Which town is the birthplace of {person}?"),
        "teacher": ("Who taught {person}?", "Who was the teacher of {person}?"),
    },
    "2_hops": {
        "town": ("Near which town is the guild that employs {person}?", "Where is the hall of the guild of {person}?"),
        "master": ("Who leads the guild that employs {person}?", "Who is master of the guild of {person}?"),
    },
    "3_hops": {
        "river": ("On which river is the town near the guild of {person}?",
                  "Which river passes the town where the guild of {person} has its hall?"),
        "mayor": ("Who is mayor of the town near the guild of {person}?",
                  "Who governs the town where the guild of {person} has its hall?"),
    },
}  # fmt: skip
RENAMED = "/renamed"
LEVELS = {"1_hop": 1, "2_hops": 2, "3_hops": 3, f"2_hops{RENAMED}": 3, f"3_hops{RENAMED}": 4}  # documents to read


@dataclass(frozen=True)
class Cluster:
    """One family of entities. `paths`: the entities whose documents lead to an answer, by what is asked for."""

    number: int
    person: str
    answers: dict[str, str]
    path: tuple[str, ...]  # person, guild (old name, then new), town
    is_renamed: bool

    def entities_for(self, category: str) -> tuple[str, ...]:
        return self.path[: LEVELS[category]]


@dataclass(frozen=True)
class GeneratedWorld:
    clusters: Sequence[Cluster]
    corpus: Corpus
    ids: dict[str, str]  # of documents, by title


@lru_cache(maxsize=4)
def make_world(settings: GeneratedCorpus) -> GeneratedWorld:
    """Deterministic in the settings."""
    rng = random.Random(f"research/{settings.seed}")
    names = {kind: iter(draw_names(kind, num * settings.num_clusters, rng)) for kind, num in NUM_NAMES.items()}
    ids = iter(rng.sample(range(FIRST_ID, FIRST_ID + NUM_IDS), NUM_IDS))
    clusters, pages = [], list[tuple[str, str]]()
    for number in range(settings.num_clusters):
        drawn = {kind: [next(names[kind]) for _ in range(num)] for kind, num in NUM_NAMES.items()}
        cluster, written = _cluster(number, drawn, rng)
        clusters.append(cluster)
        pages += written
    rng.shuffle(pages)
    documents = [Document(id=str(next(ids)), title=title, text=text) for title, text in pages]
    return GeneratedWorld(
        clusters=clusters,
        corpus=make_corpus(documents),
        ids={document.title: document.id for document in documents},
    )


def _cluster(number: int, names: dict[str, list[str]], rng: random.Random) -> tuple[Cluster, list[tuple[str, str]]]:
    """A cluster and its pages: (title, text)."""
    person, teacher, master, mayor = names["person"]
    (guild, old_name), (town, birthplace), [river], [song] = (
        names[kind] for kind in ("guild", "town", "river", "song")
    )
    is_renamed = number % 2 == 1
    employer = old_name if is_renamed else guild
    facts = [f"Works at {employer}.", f"Born in {birthplace}.", f"Taught by {teacher}."]
    rng.shuffle(facts)
    pages = [
        (person, f"A {rng.choice(TRADES)}. {' '.join(facts)}"),
        (guild, f"A guild. It keeps its hall near {town} under master {master}."),
        (town, f"A town. It lies on the river {river} under mayor {mayor}."),
        (song, f"A song of {' and '.join(rng.sample([person, employer, town], 3))}{rng.choice(VERSES)}."),
    ]
    if is_renamed:
        pages.append((old_name, f"A guild that is now called {guild}."))
    cluster = Cluster(
        number=number,
        person=person,
        answers={
            "guild": employer, "birthplace": birthplace, "teacher": teacher,
            "town": town, "master": master, "river": river, "mayor": mayor,
        },
        path=(person, *((old_name, guild) if is_renamed else (guild,)), town),
        is_renamed=is_renamed,
    )  # fmt: skip
    return cluster, pages


def draw_problems(world: GeneratedWorld, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
    """Questions of all categories up to `max_level`, in turn, none twice; fewer where the clusters have no more."""
    categories = [category for category, level in LEVELS.items() if level <= max_level]
    streams = [_questions(world, category, random.Random(f"{seed}/{category}")) for category in categories]
    rounds = (question for questions in zip(*streams, strict=False) for question in questions)
    for index, (category, cluster, asked, wording) in zip(range(num_problems), rounds, strict=False):
        yield _problem(world, f"rs-{seed}-{index:06d}", category, cluster, asked, wording)


Question = tuple[str, Cluster, str, str]  # category, cluster, what is asked for, wording


def _questions(world: GeneratedWorld, category: str, rng: random.Random) -> list[Question]:
    hops, is_renamed = category.removesuffix(RENAMED), category.endswith(RENAMED)
    clusters = [cluster for cluster in world.clusters if hops == "1_hop" or cluster.is_renamed == is_renamed]
    wordings = [(asked, wording) for asked, wordings in ASKED[hops].items() for wording in wordings]
    questions = [(category, cluster, asked, wording) for cluster, (asked, wording) in product(clusters, wordings)]
    rng.shuffle(questions)
    return questions


def _problem(
    world: GeneratedWorld, problem_id: str, category: str, cluster: Cluster, asked: str, wording: str
) -> Problem:
    entities, answer = cluster.entities_for(category), cluster.answers[asked]
    supporting = [world.ids[entity] for entity in entities]
    calls = [call for entity, document in zip(entities, supporting, strict=True) for call in look_up(entity, document)]
    calls.append(ToolCall(name="answer", arguments={"text": answer, "citations": supporting}))
    return Problem(
        id=problem_id,
        category=category,
        level=LEVELS[category],
        requests=[wording.format(person=cluster.person)],
        world={"questions": [{"answers": [answer], "supporting": supporting}]},
        reference=[ReferenceTurn(calls=calls, answer=DONE)],
        split_group=f"cluster {cluster.number}",
    )


def look_up(entity: str, document: str) -> list[ToolCall]:
    return [
        ToolCall(name="search", arguments={"query": entity}),
        ToolCall(name="open", arguments={"document": document}),
    ]


def words_of_the_world() -> list[str]:
    """Parts of names and of ids, for the embedded model's tokenizer."""
    digits = [f"{number:02d}" for number in range(100)]
    return [*parts_of_names(), *digits, *TRADES, *ENDINGS]
