"""An episode of research: the four tools, their budgets, and what counts as success.

A document has a number from when a reply first names it: the first is 1, and it stays the same for the episode. Agents
open, search and cite by these numbers, as sources are numbered in a text; an id works too, for a problem's reference.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from tasks.core.records import Problem
from tasks.environments.research.corpus import MAX_QUERY_CHARACTERS, Corpus, Document
from tasks.environments.research.questions import Question
from tasks.environments.research.settings import ResearchSettings
from tasks.tools.authoring import ToolEpisode, tool
from tasks.tools.base import Verdict
from tasks.tools.layer import ToolError

Words = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARACTERS)]
Reference = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1, max_length=200)]  # its number, or its id
MAX_ANSWER_CHARACTERS, MAX_CITATIONS = 2000, 50
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Reply = dict[str, Any]
Given = tuple[str, set[str | None]]  # the text of an answer, and the ids it cites; None: what nothing had shown


class ResearchEpisode(ToolEpisode):
    """`shown`: the ids of the documents that a reply named, in order: the first is number 1. The budgets are of the
    current request.
    """

    def __init__(self, problem: Problem, questions: Sequence[Question], corpus: Corpus, settings: ResearchSettings):
        super().__init__(problem)
        self.questions, self.corpus, self.settings = questions, corpus, settings
        self.shown: dict[str, None] = {}
        self.answers: list[Given | None] = [None]  # one per request
        self.num_searches = self.num_characters = 0

    @tool("Search the corpus. Returns the best matching documents, each with its number.", read_only=True)
    def search(self, query: Words) -> Reply:
        if self.num_searches >= self.settings.max_searches:
            raise ToolError("conflict", "no search is left for this question; answer with what you have")
        self.num_searches += 1
        found = self.corpus.search(query, num_results=self.settings.num_results)
        return {"results": [self._result(document, query) for document in found]}

    @tool("Read a document from a character on; `next` is where to go on reading.", read_only=True)
    def open(self, document: Reference, start: Annotated[int, Field(ge=0)] = 0) -> Reply:
        found = self._document(document)
        end = start + min(self.settings.page_characters, self._characters_left())
        page = self._read(found.text[start:end])
        self.shown[found.id] = None
        return {"title": found.title, "text": page, **({"next": end} if end < len(found.text) else {})}

    @tool("Passages of a document that contain a text, whatever its case.", read_only=True)
    def find(self, document: Reference, text: Words) -> Reply:
        found = self._document(document)
        places = re.finditer(re.escape(text), found.text, re.IGNORECASE)
        passages = [
            self._read(_around(found.text, place.start(), place.end(), self.settings.snippet_characters))
            for place, _ in zip(places, range(self.settings.num_results), strict=False)
            if self._characters_left()
        ]
        self.shown[found.id] = None
        return {"title": found.title, "passages": passages}

    @tool("Give the answer and the numbers of the documents it rests on. The last answer counts.", idempotent=True)
    def answer(
        self,
        text: Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARACTERS)],
        citations: Annotated[list[Reference], Field(max_length=MAX_CITATIONS)],
    ) -> Reply:
        self.answers[-1] = (text, {self._shown_id(document) for document in citations})
        return {"status": "answered"}

    def number_of(self, id: str) -> int | None:
        """The number that a document has since it was first shown; None before."""
        return list(self.shown).index(id) + 1 if id in self.shown else None

    def numbers_found(self, query: str) -> list[int]:
        """The numbers of what a search that this episode made has found."""
        found = self.corpus.search(query, num_results=self.settings.num_results)
        return [number for document in found if (number := self.number_of(document.id))]

    def end_turn(self, message: str | None) -> None:
        self.answers.append(None)
        self.num_searches = self.num_characters = 0

    def verdict(self, final_message: str | None) -> Verdict:
        given = [*self.answers, *[None] * len(self.questions)]
        if len(self.questions) == 1:  # a user may have said more than the question: its last answer counts
            given = [next((answer for answer in reversed(self.answers) if answer), None)]
        judged = [self._judge(question, answer) for question, answer in zip(self.questions, given, strict=False)]
        checks = {name: all(check[name] for check in judged) for name in ("answer", "evidence")}
        relevant = dict.fromkeys(id for question in self.questions for id in question.supporting)
        return Verdict(
            all(checks.values()), checks, {"retrieval": {"ranked": list(self.shown), "relevant": list(relevant)}}
        )

    def _judge(self, question: Question, given: Given | None) -> dict[str, bool]:
        text, cited = given or ("", set())
        supporting = set(question.supporting)
        is_enough = cited == supporting if self.settings.citations == "all" else bool(cited)
        return {
            "answer": given is not None and normalise(text) in {normalise(answer) for answer in question.answers},
            "evidence": is_enough and cited <= supporting,
        }

    def _result(self, document: Document, query: str) -> Reply:
        self.shown[document.id] = None
        snippet = self._read(_snippet(document.text, query, self.settings.snippet_characters))
        return {
            "title": document.title,
            "document": self.number_of(document.id),
            **({"snippet": snippet} if snippet else {}),
        }

    def _id_of(self, document: int | str) -> str | None:
        """The id behind a number; None where no document has it. An id is itself, even of a document not yet shown."""
        if isinstance(document, str):
            return document
        return list(self.shown)[document - 1] if document <= len(self.shown) else None

    def _shown_id(self, document: int | str) -> str | None:
        """The id of what is cited; None where no reply has shown it so far: what is found later is no evidence."""
        id = self._id_of(document)
        return id if id in self.shown else None

    def _document(self, document: int | str) -> Document:
        found = self.corpus.documents.get(self._id_of(document) or "")
        if found is None:
            kind = "id" if isinstance(document, str) else "number"
            raise ToolError("not_found", f"no document has this {kind}; search returns the numbers")
        if not self._characters_left():
            raise ToolError("conflict", "no reading is left for this question; answer with what you have")
        return found

    def _characters_left(self) -> int:
        return max(0, self.settings.max_characters - self.num_characters)

    def _read(self, text: str) -> str:
        """The text as far as the budget goes, and count it."""
        text = text[: self._characters_left()]
        self.num_characters += len(text)
        return text


def normalise(text: str) -> str:
    """What is compared of an answer: no case, punctuation, articles or further white space."""
    bare = unicodedata.normalize("NFKC", text).casefold().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def _snippet(text: str, query: str, num_characters: int) -> str:
    """What surrounds the first word of the query that is in the text; else the beginning."""
    words = [re.escape(word) for word in re.findall(r"\w+", query)]
    place = re.search(rf"\b(?:{'|'.join(words)})\b", text, re.IGNORECASE) if words else None
    return _around(text, *(place.span() if place else (0, 0)), num_characters)


def _around(text: str, start: int, end: int, num_characters: int) -> str:
    """`num_characters` of the text around a place in it, without words that the cut would leave half."""
    first = max(0, start - max(0, num_characters - (end - start)) // 2)
    last = min(len(text), first + num_characters)
    if 0 < first < last and text[first - 1].isalnum() and text[first].isalnum():
        first = text.find(" ", first, last) + 1 or last
    if first < last < len(text) and text[last - 1].isalnum() and text[last].isalnum():
        last = max(text.rfind(" ", first, last), first)
    return text[first:last].strip()
