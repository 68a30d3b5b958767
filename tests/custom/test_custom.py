"""tasks/custom: an environment of the user's own takes one file there and a few lines of params.yaml."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.settings import read_params
from tasks.pipeline.order import check_params
from tests.pipeline.project import Project, make_project
from tests.profiles import profile_params
from tests.readme import page_block

PAGE = Path("tasks/custom/README.md")
MODULES = {
    "wrong": "raise RuntimeError('no\\nlicence')\n",
    "plain": "class Shop:\n    pass\n",
    "shop": page_block(PAGE, "python", "class Shop"),
    "bare": """
from pydantic import Field
from tasks.core.settings import Settings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment

class Silent(ToolEpisode):
    pass

class Episode(ToolEpisode):
    def verdict(self, final_message): ...

class Shadow(Settings):
    object: str

class Bare(ToolEnvironment):
    name, episode_class = "bare", Episode

class Nameless(ToolEnvironment):
    episode_class = Episode

class Toolless(ToolEnvironment):
    name = "toolless"

class Unjudged(ToolEnvironment):
    name, episode_class = "unjudged", Silent

class Shadowed(Bare):
    settings_class = Shadow

class Unchecked(Bare):
    settings_class = dict

class HalfDone(Environment):
    name = "half"
    def start(self, problem, *, stream=""): ...
""",
}


@pytest.fixture
def yours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a user's in tasks/custom, which is a folder of the test's own."""
    monkeypatch.setattr(importlib.import_module("tasks.custom"), "__path__", [str(tmp_path)])
    for name, code in MODULES.items():
        (tmp_path / f"yours_{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(f"tasks.custom.yours_{name}", None)


def params_with(settings: Any) -> dict[str, Any]:
    params = profile_params("test")
    params["environment"] |= {"name": "custom", "settings": settings}
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, r"environment.settings: .* custom needs settings: object.*tasks/custom/README\.md"),
        ({"shelf_size": 3}, r"environment\.settings\.object is missing"),
        (
            {"object": "tasks/custom/shop.py:Shop"},
            r"environment\.settings\.object: .*Write it as tasks\.custom\.shop:Shop",
        ),
        ({"object": "shop"}, r"environment\.settings\.object: 'shop' .* tasks\.custom\.module:name"),
        (
            {"object": "tasks.custom.yours_none:Shop"},
            r"environment\.settings\.object: .* tasks.custom.yours_none failed .* Correct the name",
        ),
        (
            {"object": "tasks.custom.yours_wrong:Shop"},
            r"environment\.settings\.object: .* \(RuntimeError: no licence\)",
        ),
        ({"object": "tasks.custom.yours_shop:Shopp"}, r"environment\.settings\.object: .*did you mean Shop"),
        (
            {"object": "tasks.custom.yours_plain:Shop"},
            r"environment\.settings\.object: .* is no environment.*tasks/custom/README",
        ),
        ({"object": "yours_shop:Shop"}, r"environment\.settings\.object: .*write tasks\.custom\.yours_shop:Shop"),
        *(
            ({"object": f"tasks.custom.yours_bare:{name}"}, rf"environment\.settings\.object: .*:{name} .*{found}")
            for name, found in {
                "ToolEnvironment": "has no name",
                "Environment": "does not define start, tools, describe, fingerprint, from_settings",
                "HalfDone": "does not define tools, describe, fingerprint, from_settings",
                "Nameless": "has no name",
                "Toolless": "has no episode_class",
                "Unjudged": "Define verdict in Silent",
                "Shadowed": "called object",
                "Unchecked": "settings_class <class 'dict'>",
            }.items()
        ),
        (
            {"object": "tasks.custom.yours_shop:Shop", "shelf": 3},
            r"settings\.shelf is not a setting.* Did you mean shelf_size",
        ),
        (
            {"object": "tasks.custom.yours_shop:Shop", "shelf_size": 0},
            r"environment\.settings\.shelf_size = 0 is refused",
        ),
        (
            {"object": "tasks.custom.yours_shop:Shop", "shelf_size": 3, "x": 1},
            r"environment\.settings\.x is not a setting",
        ),
        (
            {"object": "tasks.custom.yours_bare:Bare", "shelf_size": 3},
            r"environment\.settings\.shelf_size is not a setting",
        ),
    ],
)
@pytest.mark.usefixtures("yours")
def test_what_cannot_be_an_environment_is_refused_in_one_line_by_its_key(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        check_params(params_with(settings))
    lines = str(refusal.value).splitlines()
    assert all(line.startswith("params.yaml: environment.settings") for line in lines)
    assert sum("shelf_size is missing" not in line for line in lines) == 1


def test_a_misspelled_object_is_named() -> None:
    with pytest.raises(ValueError, match=r"settings\.objct is not a setting.*Did you mean object\?"):
        check_params(params_with({"objct": "tasks.custom.yours_shop:Shop", "shelf_size": 3}))


@pytest.mark.usefixtures("yours")
def test_settings_of_the_class_are_validated_and_of_a_class_without_there_are_none() -> None:
    check_params(params_with({"object": "tasks.custom.yours_shop:Shop", "shelf_size": 3}))
    check_params(params_with({"object": "tasks.custom.yours_bare:Bare"}))


def git(project: Project, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=project.folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_pages_shop_is_curated_and_only_tasks_custom_and_params_change(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    shop = project.folder / "tasks/custom/shop.py"
    shop.write_text(page_block(PAGE, "python", "class Shop"), encoding="utf-8")
    params = read_params(project.folder / "params.yaml")
    asked = yaml.safe_load(page_block(PAGE, "yaml", "shelf_size"))
    params["environment"] |= asked["environment"]
    params["curate"] |= asked["curate"] | {"num_generated": 200, "num_demonstrations": 20}
    (project.folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")

    project.repro("curate")

    problems = (project.artifacts / "curate/train.jsonl").read_text(encoding="utf-8")
    assert '"shop-' in problems
    changed = {line[3:] for line in git(project, "status", "--porcelain")}
    assert changed == {"dvc.lock", "params.yaml", "tasks/custom/shop.py"}
    assert "curate" not in project.changed()

    shop.write_text(shop.read_text(encoding="utf-8").replace("is full.", "is full now."), encoding="utf-8")
    stages = {"curate", "assess", "warm_start", "train", "evaluate"}
    assert {stage for stage, found in project.changed().items() if "tasks/custom" in str(found)} == stages
