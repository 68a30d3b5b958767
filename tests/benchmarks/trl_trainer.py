"""TRL's side of `trl_step.py`: its GRPOTrainer on the same problems, with settings that make both do equal work."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.chat.format import load_chat
from tasks.core.records import Problem
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.folders import load_tokenizer
from tasks.rollouts.settings import SamplingSettings
from tests.benchmarks.trl_world import CHAT_TEMPLATE, TravelDeskTools, outcome


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one trainer."""

    seconds: float
    sampled_tokens: int
    episodes: int
    successes: int


def their_batches(
    model_folder: Path,
    drawn: Sequence[Sequence[Problem]],
    params: dict[str, Any],
    settings: GRPOSettings,
    num_threads: int,
    *,
    between: Callable[[], None],
    their_rows: int,
) -> list[Batch]:
    """TRL's batches; `between` is called after each while its clock stands still."""
    from transformers import TrainerCallback
    from transformers.utils import logging

    batches: list[Batch] = []
    episodes = settings.problems_per_iteration * settings.group_size

    class Clock(TrainerCallback):
        """A batch ends with its last optimizer step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % settings.updates_per_batch:
                return
            seconds = time.perf_counter() - self.start
            metrics = trainer._metrics["train"]
            batches.append(
                Batch(
                    seconds,
                    sampled_tokens=round(metrics["completions/mean_length"][-1] * episodes),
                    episodes=episodes,
                    successes=round(metrics["reward"][-1] * episodes),
                )
            )
            between()
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        logging.disable_progress_bar()
        trainer = their_trainer(model_folder, drawn, params, settings, Path(folder), Clock(), their_rows=their_rows)
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(mode=False)
        trainer.train()
        logging.enable_progress_bar()
    return batches


def their_trainer(
    model_folder: Path,
    drawn: Sequence[Sequence[Problem]],
    params: dict[str, Any],
    settings: GRPOSettings,
    folder: Path,
    clock: Any,
    *,
    their_rows: int,
) -> Any:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig
    from trl import GRPOTrainer as TheirTrainer
    from trl.chat_template_utils import qwen3_template

    problems = {problem.id: problem for batch in drawn for problem in batch}
    rows = [
        {"prompt": [{"role": "user", "content": problem.requests[0]}], "problem_id": problem.id}
        for batch in drawn
        for problem in batch
    ]
    tokenizer = load_tokenizer(model_folder)
    tokenizer.padding_side, tokenizer.chat_template = "left", CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    sampling, chat = SamplingSettings(**params["sampling"]), load_chat(model_folder)
    shortest_prompt = min(len(chat.prompt_ids(problem.requests[0], [])) for problem in problems.values())
    first, second = settings.betas
    trainer = TheirTrainer(
        model=str(model_folder),
        reward_funcs=outcome,
        args=GRPOConfig(
            output_dir=str(folder),
            # The batch: its episodes, its steps, their order.
            max_steps=len(drawn) * settings.updates_per_batch,
            num_generations=settings.group_size,
            num_iterations=settings.updates_per_batch,
            per_device_train_batch_size=their_rows,
            gradient_accumulation_steps=settings.problems_per_iteration * settings.group_size // their_rows,
            shuffle_dataset=False,
            # Generation.
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_completion_length=sampling.max_tokens_per_episode - shortest_prompt,
            max_tool_calling_iterations=sampling.max_turns - 1,
            generation_kwargs={"max_new_tokens": sampling.max_tokens_per_turn},
            # The loss.
            loss_type="dapo",
            scale_rewards="group" if settings.advantage == "std" else "none",
            epsilon=settings.clip_low,
            epsilon_high=settings.clip_high,
            beta=settings.kl_weight,
            use_bias_correction_kl=False,
            mask_truncated_completions=settings.filter_overlong,
            # The optimizer.
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=settings.warmup_steps,
            adam_beta1=first,
            adam_beta2=second,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            # Nothing that costs time.
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            use_cpu=params["compute"]["device"] == "cpu",
            bf16=settings.autocast == "bfloat16",
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=params["seed"],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=lambda: TravelDeskTools(problems),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
