"""The trajectory browser: `trajectories.html` and its data, from stored trajectories alone.

Each policy's file is read once, and an episode goes at once into files, so memory grows only with a few numbers per
episode and the word index. A page opened from disk may fetch nothing, so all data are scripts.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, write_text
from tasks.core.pages import STYLE
from tasks.core.records import Trajectory
from tasks.report.episodes import errors_of, shown_episode, texts_of, tools_of
from tasks.report.script_files import ChunkWriter, ScriptFolder, address_of, script_json
from tasks.report.token_heat import Numbers, TokenReader
from tasks.report.word_index import WordIndex
from tasks.rewards.stored import Rescorer, read_trajectories

PAGE = Path(__file__).parent / "page"
PAGE_FILE = "trajectories.html"
FILE_OF_PAGE = re.compile(r'(?<==")\w+\.(?:js|css)(?=")')
MAX_REQUEST_CHARACTERS = 160  # of a request in the list
NAMES = ("categories", "outcomes", "limits", "tools", "errors", "sets")  # the index has numbers for these


@dataclass(frozen=True, slots=True)
class Policy:
    """One column: `name` (known ones have a colour), `label` for people; `model` is a folder with its tokenizer, if
    any.
    """

    name: str
    label: str
    trajectories: Path
    model: Path | None = None


def build_browser(folder: Path, policies: Sequence[Policy], *, title: str) -> Path:
    """Write a folder with the browser alone, for two policies or more; returns its trajectories.html. ValueError where
    a file is missing or has no trajectories, or where the first two policies share no problem.
    """
    with atomic_folder(folder) as temporary:
        write_browser(temporary, policies, title=title)
    return folder / PAGE_FILE


def write_browser(
    folder: Path,
    policies: Sequence[Policy],
    *,
    title: str,
    overview: str | None = None,
    rescorer: Rescorer | None = None,
) -> dict[str, int]:
    """The same into an existing folder; `overview` is a page to link to. Returns how many problems `improved`,
    `regressed` or stayed the `same` from the first policy to the second, and how many are `failing` (an episode of the
    second fails).
    """
    assert len({policy.name for policy in policies}) == len(policies), "links name policies"
    data = folder / "data"
    data.mkdir(parents=True)
    scripts = ScriptFolder(data)
    writer = DataWriter(scripts, rescorer)
    problems = [writer.add(policy) for policy in policies]
    if len(policies) < 2 or not problems[0] & problems[1]:
        files = " and ".join(str(policy.trajectories) for policy in policies[:2])
        raise ValueError(
            f"{files}: share no problem, so nothing can be compared. "
            f"Run `python -m tasks evaluate` again, or compare two models that played the same problems."
        )
    scripts.write("index", script_json({"title": title, "overview": overview, **writer.finish()}))
    for file in [*PAGE.iterdir(), STYLE]:
        shutil.copyfile(file, folder / file.name)
    write_text(folder / PAGE_FILE, _page_with_digests(folder, scripts.digests["index"]))
    return writer.changes()


def _page_with_digests(folder: Path, index: str) -> str:
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    page = page.replace('data-index=""', f'data-index="{index}"', 1)
    return FILE_OF_PAGE.sub(lambda found: address_of(folder / found[0]), page)


def files_of_browser() -> set[str]:
    return {"data", *(file.name for file in (*PAGE.iterdir(), STYLE))}


class DataWriter:
    """Writes the chunks while episodes come, and gathers the index: one list per column, one entry per episode."""

    def __init__(self, scripts: ScriptFolder, rescorer: Rescorer | None):
        self.scripts, self.rescorer = scripts, rescorer
        self.shown, self.tokens = ChunkWriter(scripts, "episodes"), ChunkWriter(scripts, "tokens")
        self.words, self.texts = WordIndex(), Numbers()
        self.policies: list[dict[str, Any]] = []
        self.problems: dict[str, list[Any]] = {}  # id: its number, category and the start of its request
        self.numbers = {name: Numbers() for name in NAMES}
        self.rows: list[dict[str, int | None]] = []

    def add(self, policy: Policy) -> set[str]:
        file, first = str(policy.trajectories), len(self.rows)
        self.policies.append({"name": policy.name, "label": policy.label, "file": file, "first": first})
        reader, keys = TokenReader(policy.model, self.texts), set[tuple[str, int]]()
        for line, episode in read_trajectories(policy.trajectories, is_only_shown=True):
            key = (episode.problem_id, episode.sample_index)
            if key in keys:
                raise ValueError(
                    f"{policy.trajectories}, line {line}: a second episode of problem {key[0]!r}, sample {key[1]}, "
                    f"but the page can show only one. Give it the trajectories of one evaluation."
                )
            keys.add(key)
            self._add_episode(episode, line, reader)
        if not keys:
            raise ValueError(f"{policy.trajectories}: contains no trajectory. Run the stage that wrote it again.")
        return {problem for problem, _ in keys}

    def _add_episode(self, episode: Trajectory, line: int, reader: TokenReader) -> None:
        self.words.add(len(self.rows), texts_of(episode))
        score = self.rescorer.shown_score(episode) if self.rescorer else None
        self.shown.add(shown_episode(episode, line=line, score=score))
        self.tokens.add(reader.turns(episode))
        self.rows.append(
            {
                "problem": self._problem(episode),
                "sample": episode.sample_index,
                "outcome": self.numbers["outcomes"].of(episode.outcome),
                "limit": None if episode.limit is None else self.numbers["limits"].of(episode.limit),
                "tools": self._set("tools", tools_of(episode)),
                "errors": self._set("errors", errors_of(episode)),
                "num_calls": episode.num_calls,
                "num_invalid_calls": episode.num_invalid_calls,
                "num_sampled_tokens": episode.num_sampled_tokens if episode.sequences else None,
            }
        )

    def _problem(self, episode: Trajectory) -> int:
        known = self.problems.get(episode.problem_id)
        if known is None:
            request = " ".join(episode.request[: 2 * MAX_REQUEST_CHARACTERS].split())[:MAX_REQUEST_CHARACTERS]
            known = [len(self.problems), self.numbers["categories"].of(episode.category), request]
            self.problems[episode.problem_id] = known
        return int(known[0])

    def _set(self, kind: str, values: Iterable[str]) -> int:
        """The number of a set of tools or errors: most episodes have one of a few."""
        return self.numbers["sets"].of(tuple(sorted(self.numbers[kind].of(value) for value in sorted(values))))

    def changes(self) -> dict[str, int]:
        """Problems by whether the second policy solves more, fewer or as many of the samples that both were measured
        on; page/data.js counts the same way. An episode that the environment lost says nothing about a policy.
        """
        first, second = self._successes(0), self._successes(1)
        gains: dict[int | None, int] = {}
        for problem, sample in first.keys() & second.keys():
            gains[problem] = gains.get(problem, 0) + second[problem, sample] - first[problem, sample]
        return {
            "improved": sum(gain > 0 for gain in gains.values()),
            "regressed": sum(gain < 0 for gain in gains.values()),
            "same": sum(gain == 0 for gain in gains.values()),
            "failing": len({problem for (problem, _), succeeded in second.items() if not succeeded}),
        }

    def _successes(self, number: int) -> dict[tuple[int | None, int | None], bool]:
        success, lost = (self.numbers["outcomes"].of(outcome) for outcome in ("success", "environment_error"))
        bounds = [*(policy["first"] for policy in self.policies), len(self.rows)]
        rows = self.rows[bounds[number] : bounds[number + 1]]
        return {(row["problem"], row["sample"]): row["outcome"] == success for row in rows if row["outcome"] != lost}

    def finish(self) -> dict[str, Any]:
        self.shown.close()
        self.tokens.close()
        self.scripts.write("token-texts", script_json(self.texts.values))
        return {
            "policies": self.policies,
            "problems": [[name, *row[1:]] for name, row in self.problems.items()],
            "episodes": {name: [row[name] for row in self.rows] for name in self.rows[0]},
            **{name: numbers.values for name, numbers in self.numbers.items()},
            "chunks": {"episodes": self.shown.starts, "tokens": self.tokens.starts},
            "words": self.words.write(self.scripts),
            "digests": self.scripts.digests,
        }
