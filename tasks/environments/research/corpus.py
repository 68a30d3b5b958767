"""A corpus: documents by id, and their BM25 index, made once per process.

The ranking is bm25s' (Lucene's variant of BM25, k1 1.5, b 0.75) over title and text. Equal scores keep the order of the
corpus, so a search is a function of corpus and query alone. An id is a key of a dictionary, never a path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from tasks.core.files import read_jsonl
from tasks.core.records import Record
from tasks.core.text import one_line

if TYPE_CHECKING:
    import bm25s

MAX_QUERY_CHARACTERS = 400


class Document(Record):
    """One line of a corpus file."""

    id: str = Field(min_length=1)
    title: str
    text: str = Field(min_length=1)


@dataclass(frozen=True)
class Corpus:
    documents: dict[str, Document]
    ids: Sequence[str]
    index: bm25s.BM25
    sha256: str  # of the documents, in order

    def search(self, query: str, *, num_results: int) -> list[Document]:
        """The documents that share a word with the query, best first, at most `num_results`."""
        import numpy as np

        words = self.index.get_tokens_ids(_words([query[:MAX_QUERY_CHARACTERS]])[0])
        if not words:
            return []
        scores = self.index.get_scores(words)
        num = min(num_results, len(scores))
        threshold = np.partition(scores, -num)[-num]
        found = np.flatnonzero((scores >= threshold) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:num]
        return [self.documents[self.ids[place]] for place in best]


def make_corpus(documents: Sequence[Document]) -> Corpus:
    """Index documents. ValueError if the library is missing."""
    if importlib.util.find_spec("bm25s") is None:
        raise ValueError(
            "environment.name is research, and the package bm25s is not installed, so nothing can be searched. Run "
            "`make setup-demo`, or `.venv/bin/pip install --no-deps bm25s==0.3.16`."
        )
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG when it is imported
    words = _words([f"{document.title} {document.text}" for document in documents])
    if not any(words):
        raise ValueError(
            "environment.settings.corpus: no document has a word of two letters or more, so no search could find one. "
            "Give a corpus whose texts have words."
        )
    index = bm25s.BM25(backend="numpy")
    index.index(words, show_progress=False)
    rows = json.dumps([document.model_dump() for document in documents], ensure_ascii=False)
    return Corpus(
        documents={document.id: document for document in documents},
        ids=[document.id for document in documents],
        index=index,
        sha256=hashlib.sha256(rows.encode()).hexdigest(),
    )


def read_corpus(path: Path) -> Corpus:
    """The corpus of a JSONL file; ValueError names the line that is no document."""
    if not path.is_file():
        raise ValueError(
            f"environment.settings.corpus = {str(path)!r} is no file, so there is nothing to search. Give the path of "
            f'a JSONL file with one {{"id": …, "title": …, "text": …}} per line.'
        )
    return _read_once(path, hashlib.sha256(path.read_bytes()).hexdigest())


@lru_cache(maxsize=4)
def _read_once(path: Path, sha256: str) -> Corpus:
    documents: dict[str, Document] = {}
    for number, raw in read_jsonl(path, by_hand=True):
        document = _document(raw, where=f"{path}, line {number}")
        if document.id in documents:
            raise ValueError(
                f"{path}, line {number}: the id {document.id!r} is that of an earlier document, so a citation could "
                f"mean either. Give each document an id of its own."
            )
        documents[document.id] = document
    if not documents:
        raise ValueError(f"{path}: contains no document, so there is nothing to search. Write one per line.")
    return make_corpus(list(documents.values()))


def _document(raw: Any, *, where: str) -> Document:
    try:
        document = Document.model_validate(raw)
        document.model_dump_json()
    except (ValidationError, ValueError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": str(error)}]
        found = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        raise ValueError(
            f"{where}: not a document: {one_line(found)}. A part of the corpus would be missing from every search. "
            f'Write {{"id": …, "title": …, "text": …}}, all three as text.'
        ) from None
    return document


def _words(texts: Sequence[str]) -> list[list[str]]:
    """Lower case, of two letters or more (bm25s' own pattern); "the" counts, as a question may ask for The Who."""
    import bm25s

    words: list[list[str]] = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
    return words
