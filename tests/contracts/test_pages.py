"""The pages people read: every link leads somewhere, every command exists, and marked blocks run as they are printed.

A block that opens with ```` ```sh runnable ```` is run, whole and in order, in a copy of the project.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import typer
import yaml

from flows.__main__ import app as flows_app
from tasks.__main__ import app as tasks_app
from tasks.commands.profile import merge
from tasks.core.params_text import refuse_what_dvc_cannot_read
from tasks.core.settings import parse_params, read_params
from tasks.pipeline.order import check_params
from tests.conftest import ROOT
from tests.contracts.test_layout import files_of_the_project
from tests.profiles import profile_text

PAGES = [file for file in files_of_the_project("*.md") if file.parts[:2] != ("infra", "decisions")]
ROOMS_PEOPLE_VISIT = (
    *("tasks", "tasks/custom", "tasks/environments", "tasks/engines", "tasks/learning", "tasks/tools"),
    *("tasks/stages/promote", "tasks/report", "infra", "infra/profiles", "tests"),
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"python -m (tasks|flows) ([^`|#\n)]*)")
PATH = re.compile(
    r"(?<![\w/.:@$}{~<-])((?:[a-z_]\w*/)+[\w-]+\.(?:py|md|yaml)|(?:tasks|tests|infra|flows)/[\w./-]*\w)(?![\w/]|[*{<$…])"
)
EXAMPLES = (
    *("infra/profiles/mine.yaml", "tasks/custom/", "tasks/environments/stockroom"),  # what a reader would write
    "infra/secrets",  # git ignores it
    *("infra/examples/memory/problems.jsonl", "infra/examples/shop/problems.jsonl"),  # git ignores these
    "rfcs/0001-trajectory-format.md",  # another project's
)
APPS = {"tasks": typer.main.get_command(tasks_app), "flows": typer.main.get_command(flows_app)}


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = BLOCK.sub("", text_of(page))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_dvc_can_read_what_a_page_has_its_reader_write() -> None:
    blocks = [(page, *found) for page in PAGES for found in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]
    texts = [(page, dedent(text)) for page, kind, text in blocks if kind.split()[:1] == ["yaml"]]
    assert len(texts) > 20
    for page, text in texts:
        refuse_what_dvc_cannot_read(text, page)


def test_a_colon_that_dvc_cannot_read_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"mine.yaml: DVC cannot read line 2 .*needs quotes"):
        refuse_what_dvc_cannot_read("a: 1\nb: {c: tasks.custom.mine:check}\n", Path("mine.yaml"))
    refuse_what_dvc_cannot_read('b: {c: "tasks.custom.mine:check"}\n', Path("mine.yaml"))


def test_the_first_page_fits_one_reading():
    lines = text_of(Path("README.md")).splitlines()
    assert len(lines) <= 130
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize("room", ROOMS_PEOPLE_VISIT)
def test_a_room_people_visit_has_a_page(room: str):
    assert len(text_of(Path(room) / "README.md").splitlines()) >= 5


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path):
    broken = []
    for target in LINK.findall(BLOCK.sub("", text_of(page))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.relative_to(ROOT))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_of_a_page_exists_with_its_options(page: Path):
    assert not [f"python -m {app} {words}" for app, words in commands_of(page) if not is_known(app, words)]


def commands_of(page: Path) -> Iterator[tuple[str, str]]:
    for app, words in COMMAND.findall(text_of(page)):
        yield app, words.strip().rstrip(".,;:")


def is_known(app: str, words: str) -> bool:
    """Whether the command line's parser has the command, and its options; STAGE and NAME stand for any."""
    command = APPS[app]
    for word in re.split(r"\s*(?:&&|\|\|)\s*", words)[0].split():
        if word.startswith("--"):
            if word.partition("=")[0] not in {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }:
                return False
        elif isinstance(command, typer.core.TyperGroup) and not word.isupper() and word != "…":
            if word not in command.commands:
                return False
            command = command.commands[word]
    return True


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_make_target_of_a_page_exists(page: Path):
    targets = set(re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known = {name for line in targets for name in line.split()}
    named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text_of(page), re.MULTILINE))
    assert not named - known


def runnable_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = [code for opening, code in BLOCK.findall(text_of(page)) if opening.split() == ["sh", "runnable"]]
        found += [(f"{page}, block {number}", code) for number, code in enumerate(blocks, 1)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("where", "code"), runnable_blocks())
def test_a_block_that_is_marked_runnable_runs(where: str, code: str, tmp_path: Path):
    copy = tmp_path / "turnwise"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    for file in files_of_the_project():  # what is not committed yet, too
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((ROOT / file).read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=copy,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_blocks_are_marked_and_every_one_can_be_read_as_shell():
    blocks = runnable_blocks()
    assert blocks
    assert all(shlex.split(line, comments=True) for _, code in blocks for line in code.splitlines() if line.strip())


def prose_of(file: Path) -> str:
    """The text of a file; of a test's source its docstrings and comments, since its strings name made-up projects."""
    text = text_of(file)
    if file.suffix != ".py" or file.parts[0] != "tests":
        return text
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


@cache
def exists(name: str, folder: Path) -> bool:
    """From the root, from tasks/, or from the folder or one above it; the end of a name may be left off."""
    bases = (Path("tasks"), folder, *folder.parents)
    return any((ROOT / base / name).exists() or next((ROOT / base).glob(f"{name}*"), None) for base in bases)


def test_every_file_that_a_text_names_exists():
    files = [file for pattern in ("*.py", "*.md", "*.yaml") for file in files_of_the_project(pattern)]
    assert not [
        f"{file} names {name}"
        for file in files
        if file.parts[:2] != ("infra", "decisions") and missing(text_of(file), file)  # strings too: most name nothing
        for name in missing(prose_of(file), file)
    ]


def missing(text: str, file: Path) -> list[str]:
    """The paths that a text of a file names and that do not exist."""
    return [name for name in PATH.findall(text) if not name.startswith(EXAMPLES) and not exists(name, file.parent)]


def test_the_walk_sees_a_path_and_no_address():
    text = "as in `learning/policy.py` (tasks/core); see https://host/a/b.md and {folder}/c.py"
    assert PATH.findall(text) == ["learning/policy.py", "tasks/core"]


WRITTEN_BY_THE_READER = r"importing tasks\.custom\.\w+ failed|there is no folder 'stockroom'"


def overlays(page: Path) -> Iterator[str]:
    """The blocks of a page that stand for lines of params.yaml: their keys are sections, an environment is named."""
    sections = read_params(ROOT / "params.yaml").keys()
    for opening, code in BLOCK.findall(text_of(page)):
        rows = yaml.safe_load(dedent(code)) if opening.strip() == "yaml" else None
        if rows and sections > set(rows) and "name" in rows.get("environment", ["name"]):
            yield dedent(code)


OVERLAYS = [(page, number, code) for page in PAGES for number, code in enumerate(overlays(page))]


@pytest.mark.parametrize(("page", "code"), [pytest.param(page, code, id=f"{page}-{n}") for page, n, code in OVERLAYS])
def test_what_a_page_has_its_reader_write_into_params_is_accepted_over_the_demo(page: Path, code: str):
    try:
        check_params(parse_params(merge(profile_text("demo"), code, source=page), page), source=page)
    except ValueError as error:
        if not re.search(WRITTEN_BY_THE_READER, str(error)):
            raise


def test_pages_with_such_lines_are_found():
    pages = {page.as_posix() for page, *_ in OVERLAYS}
    assert {"infra/profiles/README.md", "tasks/environments/agent/README.md", "tasks/engines/README.md"} < pages
