"""The command `export`: stored trajectories in the Agent Trajectory Interchange Format (`atif.py`).

A folder gets one file per trajectory, a .jsonl file one document per line, a .json file the only trajectory there is.
An older export is replaced, and nothing else.
Problem ids come from users' data, so file names keep only letters, digits and `._-` of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.commands.export.atif import AGENT, SCHEMA_VERSION, Origin, document_text, to_document
from tasks.commands.outputs import first_json, refuse_to_replace
from tasks.commands.policies import Source, find_sources
from tasks.core.files import atomic_file, atomic_folder
from tasks.core.records import Trajectory
from tasks.core.settings import Settings, load, load_paths, read_params
from tasks.core.text import counted
from tasks.core.workspace import as_shell_sees
from tasks.rewards.settings import RewardSettings
from tasks.rewards.stored import Rescorer, read_trajectories

FORMATS = ("atif",)
MARK = ".turnwise-export"  # in a folder that `export` wrote, and that the next may replace
MAX_NAME = 80  # characters of an id in a file's name


class ExportSections(Settings):
    reward: RewardSettings


def export(reference: str | None, out: Path | None, *, file_format: str, with_tokens: bool) -> list[str]:
    """Write what `reference` names (None: the run in artifacts) to `out`; returns the lines to print."""
    if file_format not in FORMATS:
        raise ValueError(f"--format {file_format} is not known, so nothing was written. Use --format atif.")
    params = read_params()
    settings, paths = load(ExportSections, params), load_paths(params)
    out = out or paths.artifacts / "export" / file_format
    sources = find_sources(reference or str(paths.artifacts), paths)
    is_file = out.suffix in (".jsonl", ".json")
    refuse_to_replace(
        out,
        kind="an export of turnwise",
        is_own=_is_document if is_file else _is_folder_of_documents,
        remedy="Name a new file with --out." if is_file else "Name a new folder with --out, or a .jsonl or .json file.",
        is_folder=not is_file,
        reads=[source.trajectories for source in sources],
    )
    documents = Documents(Rescorer(paths, settings.reward), with_tokens=with_tokens)
    if out.suffix == ".jsonl":
        count = write_lines(sources, documents, out)
    elif out.suffix == ".json":
        count = write_only(sources, documents, out)
    else:
        count = write_folder(sources, documents, out)
    policies = ", ".join(source.label for source in sources)
    return [f"{as_shell_sees(out)}: {counted(count, 'trajectory', 'trajectories')} as {SCHEMA_VERSION} ({policies})"]


def _is_document(out: Path) -> bool:
    found = first_json(out)
    return isinstance(found, dict) and isinstance(agent := found.get("agent"), dict) and agent.get("name") == AGENT


def _is_folder_of_documents(out: Path) -> bool:
    return out.is_dir() and ((out / MARK).exists() or not any(out.iterdir()))


class Documents:
    def __init__(self, rescorer: Rescorer, *, with_tokens: bool):
        self.rescorer, self.with_tokens = rescorer, with_tokens

    def of(self, source: Source) -> Iterator[tuple[str, str]]:
        """(file name without its ending, document) of each trajectory, in file order; file names are unique."""
        origin = Origin(source.model_name, source.details, source.split, source.seed)
        taken = set[str]()
        for _, trajectory in read_trajectories(source.trajectories, is_only_shown=True):
            name = _unique(file_name(trajectory), taken)
            document = to_document(
                trajectory,
                origin,
                document_id=f"{source.name}/{name}",
                score=self.rescorer.shown_score(trajectory),
                with_tokens=self.with_tokens,
            )
            yield name, document_text(document)


def write_folder(sources: Sequence[Source], documents: Documents, out: Path) -> int:
    """OUT/<policy>/<problem>-d<draw>-s<sample>.json"""
    count = 0
    with atomic_folder(out) as folder:
        (folder / MARK).touch()
        taken = set[str]()
        for source in sources:
            subfolder = folder / _unique(safe_name(source.name), taken)
            subfolder.mkdir()
            for name, text in documents.of(source):
                (subfolder / f"{name}.json").write_text(text, encoding="utf-8")
                count += 1
    return count


def write_lines(sources: Sequence[Source], documents: Documents, out: Path) -> int:
    count = 0
    with atomic_file(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for source in sources:
            for _, text in documents.of(source):
                stream.write(text)
                count += 1
    return count


def write_only(sources: Sequence[Source], documents: Documents, out: Path) -> int:
    texts = (text for source in sources for _, text in documents.of(source))
    text = next(texts, None)
    if text is None or next(texts, None) is not None:
        raise ValueError(
            f"{out}: a .json file contains one trajectory, and there is {'none' if text is None else 'more than one'}. "
            f"Give a folder or a name that ends in .jsonl."
        )
    with atomic_file(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return 1


def file_name(trajectory: Trajectory) -> str:
    """`td-11-000042-d0-s1`: problem, draw and sample."""
    return f"{safe_name(trajectory.problem_id)}-d{int(trajectory.draw)}-s{int(trajectory.sample_index)}"


def safe_name(text: str) -> str:
    """A valid file name for any `text`; with a piece of its hash where something had to change."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:MAX_NAME].strip(".-")
    if name and name == text:
        return name
    return f"{name or 'x'}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or with a number where it is taken; some file systems ignore case."""
    candidate, number = name, 1
    while candidate.lower() in taken:
        number += 1
        candidate = f"{name}-{number}"
    taken.add(candidate.lower())
    return candidate
