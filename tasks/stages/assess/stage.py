"""assess: how good is the base model without training, and what does that call for?

Takes the curated problems and `model.path`; leaves the base model (built on the spot, or a pointer to the user's
folder), its trajectories and `baseline.json` with success, interval and the gate:

    warm_start   success lies below `warm_start_below`: exploration finds too little, so demonstrations come first
    rl           it lies between the thresholds
    skip_rl      it lies above `skip_rl_above`: RL brings little, so `train` passes the model on as it is

While the interval holds a threshold the answer is `need_more_evidence`, and more episodes are played, up to
`max_episodes`. What is decided there without evidence, and why, is in `baseline.json` too. Several looks at one model
are several chances to be wrong, so each look's interval is that much surer (Bonferroni), and `baseline.json` reports
that one, with its `confidence`.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.files import atomic_folder, read_records, write_json, write_jsonl
from tasks.core.records import Demonstration, Problem, Trajectory
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.drift.pin import check_pin
from tasks.environments.catalog import load_environment
from tasks.models.settings import EmbeddedModelSettings
from tasks.stages.assess.settings import AssessSections, AssessSettings
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result

Gate = Literal["skip_rl", "rl", "warm_start"]
Answer = Literal["skip_rl", "rl", "warm_start", "need_more_evidence"]


SETTINGS = AssessSections


def run(settings: AssessSections, paths: Paths) -> None:
    from tasks.models.embedded import is_embedded
    from tasks.models.folders import check_model_path

    options = settings.assess
    if not is_embedded(settings.model.path):
        check_model_path(settings.model.path)
    check_pin(settings.environment, paths, stage="assess")
    select = read_split(paths, "select")
    looks = planned_looks(options, len(select))
    resume = resume_folder("assess", settings, paths)
    with atomic_folder(paths.stage("assess")) as folder, closing(load_environment(settings.environment)) as world:
        prepare_base_model(folder / "base_model", settings, paths, world)
        check_budgets(folder / "base_model", settings, paths, world)
        seen: list[dict[str, Any]] = []
        for num_problems, num_samples in looks:
            problems = select[:num_problems]
            played = play(folder / "base_model", world, problems, num_samples, settings, resume / "episodes.jsonl")
            result, row = look(played, options, confidence=of_each_look(options, len(looks)))
            seen.append(row)
            if row["answer"] != "need_more_evidence":
                break
        decision = decide(seen, options, confidence=of_each_look(options, len(looks)))
        told = {name: decision[name] for name in ("gate", "confidence")}
        write_json(folder / "baseline.json", {**result, **told, "decision": decision})
        write_jsonl(folder / "trajectories.jsonl", (trajectory.to_row() for trajectory in played))
    clear_resume("assess", paths)
    tell(f"gate: {decision['gate']}. {decision['reason']}")


def check_budgets(model: Path, settings: AssessSections, paths: Paths, world: Environment) -> None:
    """ValueError where most references do not fit the budgets of `sampling`, before an hour is spent on finding every
    episode cut; one line where some do not. Reads the tokenizer alone.
    """
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config
    from tasks.rollouts.budgets import fit, sampled_sizes

    found = fit(sampled_sizes(load_chat(model), world, paths), settings.sampling)
    if not found.cut:
        return
    told = f"{found.sentence}. {found.remedy(model_config(model))}"
    if found.is_hopeless:
        raise ValueError(told)
    warn(f"warning: {told}")


def planned_looks(options: AssessSettings, num_select: int) -> list[tuple[int, int]]:
    """(problems, samples of each) of the first look and of those that may follow: first up to twice the problems, and
    where select has no more, twice the samples; never more than `max_episodes` after the first.
    """
    looks = [(min(options.num_problems, num_select), options.samples_per_problem)]
    while True:
        num_problems, num_samples = looks[-1]
        more = (min(2 * num_problems, num_select), num_samples)
        if num_problems == num_select:
            more = (num_problems, 2 * num_samples)
        if more[0] * more[1] > options.max_episodes:
            return looks
        looks.append(more)


def play(
    model: Path, world: Environment, problems: list[Problem], num_samples: int, settings: AssessSections, resume: Path
) -> list[Trajectory]:
    """The episodes of one look; those of earlier looks, and of a run that was killed, are not played again."""
    from tasks.rollouts.collect import sample_episodes
    from tasks.rollouts.finished import FinishedEpisodes

    return sample_episodes(
        model,
        world,
        problems,
        settings.play(num_samples),
        stage="assess",
        label="assess the base model",
        finished=FinishedEpisodes(resume),
    )


def of_each_look(options: AssessSettings, num_looks: int) -> float:
    """The confidence of each look's interval, with which all of them together have `assess.confidence` (Bonferroni)."""
    return round(1 - (1 - options.confidence) / num_looks, 6)


def look(played: list[Trajectory], options: AssessSettings, *, confidence: float) -> tuple[Result, dict[str, Any]]:
    """The result with the interval that the looks allow, and the gate's answer by that interval."""
    from tasks.measurement.statistics import summarise

    result = summarise(played, confidence=confidence)
    shown = ("num_problems", "samples_per_problem", "success_rate", "ci_low", "ci_high")
    row: dict[str, Any] = {name: result[name] for name in shown}  # type: ignore[literal-required]
    return result, {**row, "answer": answer(result["ci_low"], result["ci_high"], options)}


def answer(low: float, high: float, options: AssessSettings) -> Answer:
    """What an interval of success calls for; `need_more_evidence` where a threshold lies inside it."""
    if high < options.warm_start_below:
        return "warm_start"
    if options.skip_rl_above is not None and low >= options.skip_rl_above:
        return "skip_rl"
    is_weak_enough = options.skip_rl_above is None or high < options.skip_rl_above
    return "rl" if low >= options.warm_start_below and is_weak_enough else "need_more_evidence"


def decide(seen: list[dict[str, Any]], options: AssessSettings, *, confidence: float) -> dict[str, Any]:
    """The gate with its reason. At the limit it stays with the point estimate where a warm start is in question, and
    with RL where skipping is: a run too many costs hours, a model that never learns costs more.
    """
    last = seen[-1]
    has_evidence = last["answer"] != "need_more_evidence"
    gate: Gate = "warm_start" if last["success_rate"] < options.warm_start_below else "rl"
    if has_evidence:
        gate = last["answer"]
    return {
        "gate": gate,
        "has_evidence": has_evidence,
        "reason": _reason(gate, last, options, has_evidence=has_evidence),
        "confidence": confidence,  # of each look; all together: the setting's
        "looks": seen,
    }


def _reason(gate: Gate, last: dict[str, Any], options: AssessSettings, *, has_evidence: bool) -> str:
    low, high = f"{100 * last['ci_low']:.1f}", f"{100 * last['ci_high']:.1f}"
    found = (
        f"The base model succeeds on {last['success_rate']:.1%} of {last['num_problems']} problems × "
        f"{last['samples_per_problem']} (interval {low}–{high})"
    )
    meaning = {
        "warm_start": f"below assess.warm_start_below ({options.warm_start_below:.0%}): RL would find too little",
        "rl": "enough to learn from and not too much" if has_evidence else "",
        "skip_rl": f"at least assess.skip_rl_above ({options.skip_rl_above or 0:.0%}): RL would bring little, so train "
        f"passes it on untrained. Set assess.skip_rl_above higher, or to null, to train all the same",
    }
    if has_evidence:
        return f"{found}, {meaning[gate]}."
    threshold = "warm_start_below" if last["ci_low"] < options.warm_start_below <= last["ci_high"] else "skip_rl_above"
    why = {
        "warm_start": "the estimate itself lies below it",
        "rl": "the estimate itself does not lie below it"
        if threshold == "warm_start_below"
        else "skipping RL would need evidence",
    }
    return (
        f"{found}, and assess.{threshold} ({getattr(options, threshold):.0%}) lies inside the interval: not enough "
        f"evidence within assess.max_episodes ({options.max_episodes}); decided so because {why[gate]}."
    )


def prepare_base_model(folder: Path, settings: AssessSections, paths: Paths, environment: Environment) -> None:
    """Build the embedded model from the curated data, or point to the user's model, once it is known to be usable."""
    from tasks.chat.format import load_chat
    from tasks.models.embedded import build_embedded_model, is_embedded
    from tasks.models.folders import write_pointer
    from tasks.models.trained_on import TrainedOn, write_trained_on

    path = Path(settings.model.path)
    if not is_embedded(settings.model.path):
        if not (path / "config.json").exists():
            raise ValueError(
                f"model.path = {settings.model.path!r} is not a folder with a config.json, so nothing can be trained. "
                f"Point it to a Hugging Face model folder, or to tasks/models/embedded.py for the tiny one."
            )
        load_chat(path)
        write_pointer(folder, settings.model.path)
        return
    build_embedded_model(
        folder,
        texts=embedded_texts(settings.model.embedded, paths, environment),
        vocabulary=environment.vocabulary(),
        settings=settings.model.embedded,
        seed=settings.seed,
        num_threads=settings.num_threads,
    )
    write_trained_on(folder, TrainedOn())  # known to have seen nothing, unlike a model from elsewhere


def embedded_texts(settings: EmbeddedModelSettings, paths: Paths, environment: Environment) -> list[str]:
    """What the embedded tokenizer takes its pieces from: everything the demonstrations and the training requests say,
    and how the tools describe themselves, where prompts hold that.
    """
    texts = [request for problem in read_split(paths, "train") for request in problem.requests]
    for shown in read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration):
        texts += [*shown.assistant_texts, *(reply for replies in shown.replies for reply in replies)]
    if settings.tools_in_prompt:
        texts += [json.dumps(tool.schema(), ensure_ascii=False) for tool in environment.tools]
    return list(dict.fromkeys(texts))
