"""warm_start: supervised fine-tuning on error-free expert episodes, where the baseline gate asks for it.

Takes demonstrations and the base model; leaves `warm_start/model`, either fine-tuned weights or a pointer to the base
where no warm start is needed, so that the graph keeps one shape, and the loss of every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.environments.catalog import EnvironmentSettings, load_environment
from tasks.learning.options import SupervisedSettings
from tasks.records import Demonstration
from tasks.settings import Paths, Settings
from tasks.storage import atomic_folder, read_json, read_jsonl, write_jsonl

if TYPE_CHECKING:
    from tasks.learning.batching import Row
    from tasks.rollouts.chat import ChatFormat


class WarmStartSettings(Settings):
    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    warm_start: SupervisedSettings


SETTINGS = WarmStartSettings


def run(settings: WarmStartSettings, paths: Paths) -> None:
    from tasks.models import write_pointer

    base = paths.stage("assess") / "base_model"
    gate = read_json(paths.stage("assess") / "baseline.json")["gate"]
    with atomic_folder(paths.stage("warm_start")) as folder:
        if gate == "rl":
            write_pointer(folder / "model", str(base))
            write_jsonl(folder / "metrics.jsonl", [])
            return
        from tasks.learning.supervised import fine_tune
        from tasks.models import load_model, save_snapshot
        from tasks.progress import progress_bar
        from tasks.rollouts.chat import load_chat

        model, chat = load_model(base, num_threads=settings.num_threads), load_chat(base)
        rows = demonstration_rows(settings, paths, chat)
        metrics = []
        with progress_bar("warm start", total=settings.warm_start.num_steps) as bar:
            for row in fine_tune(model, rows, settings.warm_start, seed=settings.seed):
                metrics.append(row)
                bar.advance(f"loss {row['loss']:.3f}")
        save_snapshot(folder / "model", model, chat.tokenizer)
        write_jsonl(folder / "metrics.jsonl", metrics)


def demonstration_rows(settings: WarmStartSettings, paths: Paths, chat: ChatFormat) -> list[Row]:
    """Demonstrations as ids and masks, rendered exactly as an episode would append them."""
    tools = [tool.schema() for tool in load_environment(settings.environment).tools]
    path = paths.stage("curate") / "demonstrations.jsonl"
    rows = [demonstration_row(Demonstration.model_validate(line), chat, tools) for _, line in read_jsonl(path)]
    if not rows:
        raise ValueError(
            f"{path}: holds no demonstration, and the base model is below assess.warm_start_below, so there is nothing "
            f"to warm up on. Raise curate.num_demonstrations, or set assess.warm_start_below to 0 to go straight to RL."
        )
    return rows


def demonstration_row(demonstration: Demonstration, chat: ChatFormat, tools: list[dict[str, Any]]) -> Row:
    """Ids and mask of one demonstration: what the assistant wrote carries loss, prompt and replies do not."""
    from tasks.learning.batching import Row

    token_ids = chat.prompt_ids(demonstration.request, tools)
    sampled_mask = [False] * len(token_ids)
    for text, replies in zip(demonstration.assistant_texts, demonstration.replies, strict=True):
        written = [*chat.encode(text), chat.end_of_turn]
        answered = chat.reply_ids(tuple(replies)) if replies else []
        token_ids += written + answered
        sampled_mask += [True] * len(written) + [False] * len(answered)
    return Row(token_ids, sampled_mask, [0.0] * len(token_ids), advantage=1.0)
