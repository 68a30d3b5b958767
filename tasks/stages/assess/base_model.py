"""The base model of a run: the embedded one, built on the spot, or a pointer to the user's folder."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.core.files import read_records
from tasks.core.records import Demonstration
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import warn
from tasks.models.settings import EmbeddedModelSettings
from tasks.stages.assess.settings import AssessSections
from tasks.tools.base import Environment


def prepare_base_model(folder: Path, settings: AssessSections, paths: Paths, environment: Environment) -> None:
    from tasks.chat.format import load_chat
    from tasks.models.embedded import build_embedded_model, is_embedded
    from tasks.models.folders import write_pointer
    from tasks.models.missing import check_model_path
    from tasks.models.trained_on import TrainedOn, write_trained_on

    if is_embedded(settings.model.path):
        build_embedded_model(
            folder,
            texts=embedded_texts(settings.model.embedded, paths, environment),
            vocabulary=environment.vocabulary(),
            settings=settings.model.embedded,
            template=settings.model.template,
            seed=settings.seed,
            compute=settings.compute,
        )
        write_trained_on(folder, TrainedOn())  # trained on nothing; of a user's model that is unknown
        return
    check_model_path(settings.model.path)
    write_pointer(folder, settings.model.path, template=settings.model.template)
    load_chat(folder)


def embedded_texts(settings: EmbeddedModelSettings, paths: Paths, environment: Environment) -> list[str]:
    train = read_split(paths, "train")
    texts = [request for problem in train for request in problem.requests]
    texts += [rules for problem in train if (rules := environment.rules_for(problem))]
    for shown in read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration):
        texts += [*shown.assistant_texts, *(reply for replies in shown.replies for reply in replies)]
        texts += environment.thoughts(shown) if settings.thinks else []
    if settings.tools_in_prompt:
        texts += [json.dumps(tool.schema(), ensure_ascii=False) for tool in environment.tools]
    return list(dict.fromkeys(texts))


def check_budgets(model: Path, settings: AssessSections, paths: Paths, environment: Environment) -> None:
    """ValueError where most references do not fit the budgets of `sampling`; a warning where some do not."""
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config
    from tasks.rollouts.budgets import fit, sampled_sizes

    splits = {"train": read_split(paths, "train"), "select": read_split(paths, "select")}
    found = fit(sampled_sizes(load_chat(model), environment, paths, splits), settings.sampling)
    if not found.cut:
        return
    message = f"{found.sentence}. {found.remedy(model_config(model))}"
    if found.is_hopeless:
        raise ValueError(message)
    warn(f"warning: {message}")
