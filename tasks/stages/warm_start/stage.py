"""warm_start: supervised fine-tuning on error-free expert episodes, where the baseline gate asks for it.

Takes demonstrations and the base model; leaves `warm_start/model`, either fine-tuned weights or a pointer to the base
where no warm start is needed, so that the graph keeps one shape, and the loss of every step.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import atomic_folder, read_json, read_records, write_jsonl
from tasks.core.records import Demonstration
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import warn
from tasks.environments.catalog import load_environment
from tasks.stages.warm_start.settings import WarmStartSections

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.chat.format import ChatFormat
    from tasks.learning.sft.trainer import SupervisedTrainer
    from tasks.learning.shared.batching import Row


SETTINGS = WarmStartSections


def run(settings: WarmStartSections, paths: Paths) -> None:
    from tasks.models.folders import write_pointer

    base = paths.stage("assess") / "base_model"
    gate = read_json(paths.stage("assess") / "baseline.json")["gate"]
    with atomic_folder(paths.stage("warm_start")) as folder:
        if gate != "warm_start":
            write_pointer(folder / "model", str(base))
            write_jsonl(folder / "metrics.jsonl", [])
            return
        from tasks.models.folders import save_snapshot

        trainer, tokenizer, metrics = _fine_tune(settings, paths, base)
        save_snapshot(folder / "model", trainer.model, tokenizer)
        write_what_was_seen(paths, base, folder / "model")
        write_jsonl(folder / "metrics.jsonl", metrics)
    clear_resume("warm_start", paths)


def write_what_was_seen(paths: Paths, base: Path, model: Path) -> None:
    """Note in the model's folder what it learnt from: the problems that were demonstrated, and what its base did."""
    from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on

    shown = {item.problem_id for item in read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration)}
    problems = [problem for problem in read_split(paths, "train") if problem.id in shown]
    write_trained_on(model, read_trained_on(base) | TrainedOn(digests_of(problems)))


def _fine_tune(
    settings: WarmStartSections, paths: Paths, base: Path
) -> tuple[SupervisedTrainer, PreTrainedTokenizerBase, list[dict[str, Any]]]:
    """The trainer after its last step, from the last checkpoint of a run that was killed where there is one."""
    from tasks.chat.format import load_chat
    from tasks.core.progress import progress_bar
    from tasks.learning.sft.trainer import SupervisedTrainer
    from tasks.learning.shared.checkpoints import Checkpoints, seed_generators
    from tasks.models.folders import load_model

    options = settings.warm_start
    chat = load_chat(base)
    rows = demonstration_rows(settings, paths, chat)
    seed_generators(settings.seed)
    trainer = SupervisedTrainer(load_model(base, num_threads=settings.num_threads), rows, options, seed=settings.seed)
    checkpoints = Checkpoints(resume_folder("warm_start", settings, paths), unit="step")
    found, refused = checkpoints.load()
    for sentence in refused:
        warn(f"warning: {sentence}")
    metrics: list[dict[str, Any]] = []
    if found is not None:
        trainer.load(found.tensors, found.state["trainer"])
        metrics = found.state["metrics"]
        warn(f"going on after step {len(metrics)}, from {checkpoints.folder}")
    with progress_bar("warm start", total=options.num_steps, done=len(metrics)) as bar:
        while len(metrics) < options.num_steps:
            metrics.append(trainer.step())
            bar.advance(f"loss {metrics[-1]['loss']:.3f}")
            if len(metrics) % options.checkpoint_interval == 0:
                state = {"trainer": trainer.state(), "metrics": metrics}
                checkpoints.save(len(metrics), trainer.tensors(), state)
    return trainer, chat.tokenizer, metrics


def demonstration_rows(settings: WarmStartSections, paths: Paths, chat: ChatFormat) -> list[Row]:
    """Demonstrations as ids and masks, rendered exactly as an episode would append them."""
    path = paths.stage("curate") / "demonstrations.jsonl"
    problems = {problem.id: problem for problem in read_split(paths, "train")}
    rows = []
    with closing(load_environment(settings.environment)) as environment:
        for demonstration in read_records(path, Demonstration):
            tools = environment.tools_for(problems[demonstration.problem_id])
            rows.append(demonstration_row(demonstration, chat, [tool.schema() for tool in tools]))
    if not rows:
        raise ValueError(
            f"{path}: holds no demonstration, and the base model is below assess.warm_start_below, so there is nothing "
            f"to warm up on. Raise curate.num_demonstrations, or set assess.warm_start_below to 0 to go straight to RL."
        )
    return rows


def demonstration_row(demonstration: Demonstration, chat: ChatFormat, tools: list[dict[str, Any]]) -> Row:
    """Ids and mask of one demonstration: what the assistant wrote carries loss, prompt and replies do not."""
    from tasks.learning.shared.batching import Row

    token_ids = chat.prompt_ids(demonstration.request, tools)
    sampled_mask = [False] * len(token_ids)
    for text, replies in zip(demonstration.assistant_texts, demonstration.replies, strict=True):
        written = [*chat.encode(chat.call_format.rewritten(text)), chat.end_of_turn]
        answered = chat.reply_ids(tuple(replies)) if replies else []
        token_ids += written + answered
        sampled_mask += [True] * len(written) + [False] * len(answered)
    return Row(token_ids, sampled_mask, [0.0] * len(token_ids), advantage=1.0)
