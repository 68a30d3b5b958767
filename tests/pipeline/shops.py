"""Environments of a project's own: the shop of tasks/custom's page, and a kiosk, which is a shop with other words."""

from __future__ import annotations

from typing import Any

from tests.pipeline.project import Project
from tests.readme import page_block
from tests.worlds import NO_BUDGETS, member

KIOSK = """

class Kiosk(Shop):
    name = "kiosk"

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        for problem in super().generate(seed=seed + 1, num_problems=num_problems, max_level=max_level):
            request = f"Please fill the kiosk with {problem.category}."
            yield problem.model_copy(update={"id": f"kiosk-{problem.id}", "requests": [request]})
"""
SHORT = {**NO_BUDGETS, "max_turns": 3, "max_tokens_per_episode": 110}  # less than the test profile's 4 and 128


def open_shops(project: Project) -> None:
    code = page_block("tasks/custom/README.md", "python", "class Shop") + KIOSK
    (project.folder / "tasks" / "custom" / "shops.py").write_text(code, encoding="utf-8")


def shop_settings(name: str) -> dict[str, Any]:
    return {"object": f"tasks.custom.shops:{name}", "shelf_size": 9}


def also_kiosk(num_problems: int) -> dict[str, Any]:
    """An entry of `evaluate.also`: one episode of each problem."""
    kiosk = {"name": "custom", "settings": shop_settings("Kiosk"), "source": None, "max_level": None, "budgets": SHORT}
    return {**kiosk, "num_problems": num_problems, "samples_per_problem": 1}


def mixed_with_desk(*, also: int) -> dict[str, Any]:
    """Params of a mixture, the travel desk's first level and the shop, two to one; `also` problems of the kiosk."""
    members = [
        member("travel_desk", share=2.0, max_level=1),
        member("custom", shop_settings("Shop"), share=1.0, budgets=SHORT),
    ]
    return {
        "environment.name": "mixture",
        "environment.settings": {"members": members},
        "curate.source": "tasks/environments/mixture",
        "evaluate.also": [also_kiosk(also)],
    }
