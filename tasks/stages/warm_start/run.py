"""A warm start as attempts: each is trained, played on some problems of select, and followed by another if need be.

All state is in the folder `resume`: checkpoints of the attempt under way, the weights of those that ended, and
`attempts.json`. A run that was killed goes on from there and ends with the same bits.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tasks.chat.format import load_chat
from tasks.core.files import link_or_copy, read_json, write_json
from tasks.core.progress import progress_bar
from tasks.core.records import Metrics, Trajectory
from tasks.core.seeds import stream_seed
from tasks.core.settings import Paths
from tasks.core.terminal import tell, warn
from tasks.core.workspace import as_shell_sees
from tasks.learning.sft.trainer import NotFinite, SupervisedTrainer
from tasks.learning.shared.checkpoints import Checkpoint, Checkpoints
from tasks.learning.shared.host_memory import host_copies
from tasks.learning.shared.ranks import ALONE, Ranks
from tasks.learning.shared.whole_policy import WholePolicy
from tasks.models.folders import load_config, save_snapshot, stored_dtype, weights_hash
from tasks.models.limits import check_trainable
from tasks.models.saving import rehearse_saving
from tasks.stages.warm_start.attempts import (
    Attempt,
    End,
    EndedAttempt,
    Patience,
    best_attempt,
    is_good_enough,
    next_attempt,
)
from tasks.stages.warm_start.policy import Beginning, build_trainer, free_trainer, load_start
from tasks.stages.warm_start.rows import demonstration_rows
from tasks.stages.warm_start.settings import WarmStartSections
from tasks.stages.warm_start.success import measure_success, read_played

ATTEMPTS, MODELS, PLAYED = "attempts.json", "attempts", "played"


class WarmStartRun:
    """Fine-tunes the model in `base`; `metrics` has one row per optimizer step, `ended` the attempts."""

    def __init__(
        self, settings: WarmStartSections, paths: Paths, *, base: Path, resume: Path, ranks: Ranks | None = None
    ):
        self.settings, self.params, self.paths = settings, settings.warm_start, paths
        self.ranks = ranks or ALONE
        self.base, self.resume, self.chat = base, resume, load_chat(base)
        self.rows, self.held_out = demonstration_rows(settings, paths, self.chat)
        longest = max(len(row.token_ids) for row in (*self.rows, *self.held_out))
        check_trainable(load_config(base), packing=self.params.packing, max_tokens=longest, key="warm_start.packing")
        self.metrics: list[Metrics] = []
        self.ended: list[EndedAttempt] = []
        self._read_ended()
        self.checkpoints = Checkpoints(resume, unit="step")

    def train(self, output: Path) -> None:
        """Attempt after attempt until one is good enough or the bound is reached; the best one's weights go into
        `output`.
        """
        with closing(self.checkpoints):
            found, refused = self.checkpoints.load()
            for sentence in refused:
                warn(f"warning: {sentence}")
            while (attempt := next_attempt(self.ended, self.params)) is not None:
                is_under_way = found is not None and found.state["attempt"] == attempt.number
                self._run_attempt(attempt, found if is_under_way else None)
                self._announce()
        self._keep_best(output)

    def _run_attempt(self, attempt: Attempt, found: Checkpoint | None) -> None:
        stop, folder = self.params.stop, self._model_of(attempt.number)
        patience = Patience(stop.patience if stop else 1)  # without a stop no loss is observed
        begun = self._begin(attempt)
        with self.ranks.leading(begun):
            end, num_steps = self._train_attempt(attempt, begun, found, patience, folder)
        free_trainer(self.settings.compute)  # its memory is the engine's now, which may be another process
        success = None if end == "not_finite" else self._measure(attempt, folder)
        self.ended.append(EndedAttempt(**asdict(attempt), num_steps=num_steps, end=end, success=success,
                                       held_out_loss=patience.lowest))  # fmt: skip
        ended = [asdict(item) for item in self.ended]
        write_json(self.resume / ATTEMPTS, {"ended": ended, "metrics": self.metrics})

    def _train_attempt(
        self, attempt: Attempt, begun: Beginning, found: Checkpoint | None, patience: Patience, folder: Path
    ) -> tuple[End, int]:
        """From the checkpoint `found`, if any, into `folder`; how it ended, and after how many optimizer steps."""
        model = load_start(self.settings, begun)
        rehearse_saving(begun.start, model, self.chat.tokenizer)
        policy = WholePolicy(model, None, self.ranks, in_host_memory=True)
        trainer = build_trainer(self.settings, begun, model, self.ranks)
        lowest = None
        if found is not None:
            trainer.load(found.tensors, found.state["trainer"])
            patience.lowest, patience.num_since = found.state["lowest_loss"], found.state["num_since_lowest"]
            lowest, self.metrics = found.tensors.get("lowest"), found.state["metrics"]
            warn(f"continuing after step {len(self.metrics)}, from {as_shell_sees(self.checkpoints.folder)}")
        end, lowest = self._take_steps(attempt, trainer, patience, lowest)
        if end != "not_finite":
            if lowest is None:
                policy.take(trainer.policy_tensors())
            else:
                policy.put(lowest)
            save_snapshot(folder, policy.model, self.chat.tokenizer, dtype=stored_dtype(self.base))
        return end, trainer.optimizer.steps_done

    def _begin(self, attempt: Attempt) -> Beginning:
        """The first attempt has the run's own seed, each other one a seed of its own."""
        start = self.base if attempt.start is None else self._model_of(attempt.start)
        seed = self.settings.seed if not attempt.number else self._seed_of(attempt)
        return Beginning(start, weights_hash(start), seed, attempt.learning_rate, self.rows, self.held_out)

    def _seed_of(self, attempt: Attempt) -> int:
        return stream_seed(self.settings.seed, "warm_start", "attempt", attempt.number)

    def _take_steps(
        self, attempt: Attempt, trainer: SupervisedTrainer, patience: Patience, lowest: dict[str, Tensor] | None
    ) -> tuple[End, dict[str, Tensor] | None]:
        """The rest of an attempt's steps; where there is a held-out loss, also the weights of the lowest."""
        params, stop, before = self.params, self.params.stop, len(self.metrics) - trainer.optimizer.steps_done
        bar = progress_bar("warm start", total=before + params.num_steps, done=len(self.metrics))
        with bar as advancing:
            while not self._is_over(trainer, patience):
                try:
                    row = trainer.step()
                except NotFinite as error:
                    return self._give_up(attempt, error), None
                step = trainer.optimizer.steps_done
                row |= {"step": before + step, "attempt": attempt.number}
                if stop and self.held_out and (step % stop.check_interval == 0 or step == params.num_steps):
                    row["held_out_loss"] = trainer.held_out_loss()
                    if patience.observe(row["held_out_loss"]):
                        lowest = host_copies(trainer.policy_tensors(), trainer.model.device)
                self.metrics.append(row)
                advancing.advance(f"loss {row['loss']:.3f}")
                if step % params.checkpoint_interval == 0 or (stop and self._is_over(trainer, patience)):
                    self._save(attempt, trainer, patience, lowest)
        return "held_out_loss" if patience.is_over else "num_steps", lowest

    def _is_over(self, trainer: SupervisedTrainer, patience: Patience) -> bool:
        return patience.is_over or trainer.optimizer.steps_done == self.params.num_steps

    def _save(
        self, attempt: Attempt, trainer: SupervisedTrainer, patience: Patience, lowest: dict[str, Tensor] | None
    ) -> None:
        tensors = trainer.tensors() | ({} if lowest is None else {"lowest": lowest})
        state = {
            "attempt": attempt.number,
            "trainer": trainer.state(),
            "lowest_loss": patience.lowest,
            "num_since_lowest": patience.num_since,
            "metrics": self.metrics,
        }
        self.checkpoints.save(len(self.metrics), tensors, state)

    def _give_up(self, attempt: Attempt, error: NotFinite) -> End:
        """A step that would destroy the weights ends the attempt where others may follow; else the run."""
        is_last = self.params.stop is None or attempt.number + 1 == self.params.stop.max_attempts
        if is_last and best_attempt(self.ended) is None:
            raise error
        warn(f"warning: {error}")
        return "not_finite"

    def _measure(self, attempt: Attempt, folder: Path) -> float | None:
        if self.params.stop is None:
            return None
        return measure_success(folder, self.settings, self.paths, num_problems=self.params.stop.num_problems,
                               finished=self._played_of(attempt.number))  # fmt: skip

    def _announce(self) -> None:
        """One line where an attempt was not good enough: what it reached, and what follows."""
        stop, last = self.params.stop, self.ended[-1]
        if stop is None or is_good_enough(best_attempt(self.ended), self.params):
            return
        least = f"less than warm_start.stop.minimum_success ({stop.minimum_success:.0%})"
        reached = "its gradient was not finite" if last.success is None else f"it solves {last.success:.1%}, {least}"
        found = f"warm start, attempt {last.number + 1} of {stop.max_attempts}: {reached}"
        following = next_attempt(self.ended, self.params)
        if following is None:
            warn(
                f"warning: {found}. The best attempt is used; RL may find little to learn from. Raise "
                f"curate.num_demonstrations, warm_start.num_steps or warm_start.stop.max_attempts."
            )
        elif following.start is None:
            tell(f"{found}. Another begins anew, with learning rate {following.learning_rate:g}.")
        else:
            tell(f"{found}. Another {self.params.num_steps} steps go on from it.")

    def attempts(self) -> list[dict[str, Any]]:
        """What each came to, and which one's weights are kept."""
        return [{**asdict(ended), "is_kept": ended is self._best} for ended in self.ended]

    def played(self) -> list[Trajectory]:
        """The episodes of the model that is kept; none without `stop`."""
        stop = self.params.stop
        if stop is None:
            return []
        return read_played(self.paths, num_problems=stop.num_problems, finished=self._played_of(self._best.number))

    def _keep_best(self, output: Path) -> None:
        shutil.copytree(self._model_of(self._best.number), output, copy_function=link_or_copy)

    @property
    def _best(self) -> EndedAttempt:
        best = self.ended[-1] if self.params.stop is None else best_attempt(self.ended)
        assert best is not None, "an attempt without weights ends the run"
        return best

    def _read_ended(self) -> None:
        """The attempts that ended before a kill, and the metrics up to their end."""
        path = self.resume / ATTEMPTS
        found = read_json(path) if path.exists() else {"ended": [], "metrics": []}
        self.ended, self.metrics = [EndedAttempt(**row) for row in found["ended"]], found["metrics"]

    def _model_of(self, number: int) -> Path:
        return self.resume / MODELS / str(number)

    def _played_of(self, number: int) -> Path:
        return self.resume / PLAYED / f"{number}.jsonl"
