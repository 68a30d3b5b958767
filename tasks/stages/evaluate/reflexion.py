"""Reflexion: a frozen policy tries each test problem again, with notes of its own on what went wrong (`notes.py`).

The baseline that training must beat at equal episodes (arXiv:2303.11366). **It reads the verdict of test problems**,
since an attempt is repeated only where the last one failed; the trained policy never does. Its first attempt is the
policy's own first test episode. Beside it the same attempts are played without notes, with the same random streams:
best of k with a perfect verifier, which is all that notes without content can reach.

Finished episodes and notes are stored as they come, so a killed stage plays only what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_jsonl, write_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.core.text import counted
from tasks.measurement.points import difference_text
from tasks.models.limits import context_length
from tasks.rollouts.settings import SamplingSettings
from tasks.stages.evaluate.runner import Store
from tasks.stages.evaluate.settings import EvaluateSections, ReflexionSettings

if TYPE_CHECKING:
    from tasks.chat.format import ChatFormat
    from tasks.measurement.statistics import EpisodeSummary
    from tasks.rollouts.collect import Collector
    from tasks.rollouts.engine import Engine
    from tasks.rollouts.notes import RememberingEpisodes
    from tasks.tools.base import Environment

Attempts = dict[str, list[Trajectory]]  # by problem id, in order
COSTS = ("num_sampled_tokens", "num_thought_tokens", "num_calls", "num_invalid_calls")  # of an episode
FILES = ("reflexion", "retries")  # of all attempts, with notes and without
STAGE = "reflexion"  # of the random streams of later attempts, with notes and without


def measure_reflexion(
    settings: EvaluateSections,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    model: Path,
    first: Sequence[Trajectory],
    best: list[Trajectory],
    num_rl_episodes: int,
    resume: Path,
    store: Store,
) -> dict[str, Any]:
    """Success within each number of attempts, with notes and without, and both budgets of episodes.

    `first` are the policy's test episodes, of which the first sample is attempt 1; `best` those of the trained one.
    """
    options = settings.evaluate.reflexion
    assert options is not None
    num_attempts = attempts_for(options, num_rl_episodes, len(problems))
    own_first = {item.problem_id: [item] for item in first if item.sample_index == 0}
    with closing(_Arms(settings, options, environment, problems, model, resume)) as arms:
        noted, note_tokens = arms.play(own_first, num_attempts, with_notes=True)
        plain, _ = arms.play(own_first, num_attempts, with_notes=False)
    for name, attempts in zip(FILES, (noted, plain), strict=True):
        store(name, [item for problem in problems for item in attempts[problem.id]])
    confidence = settings.evaluate.confidence
    found = {
        **compare(noted, plain, best, num_attempts, note_tokens=note_tokens, confidence=confidence),
        "policy": options.policy,
        "num_attempts": num_attempts,
        "reads_test_verdicts": True,
        "episodes": {
            "rl_training": num_rl_episodes,
            "reflexion_at_most": num_attempts * len(problems),
            "reflexion": sum(map(len, noted.values())),
            "retries": sum(map(len, plain.values())),
        },
    }
    tell(f"reflexion: {_in_words(found)}")
    return found


def attempts_for(options: ReflexionSettings, num_rl_episodes: int, num_problems: int) -> int:
    """As many per test problem as RL's episodes allow, and no more than the settings do."""
    equal = max(1, num_rl_episodes // num_problems)
    return equal if options.max_attempts is None else min(equal, options.max_attempts)


def count_rl_episodes(metrics: Path) -> int:
    """Episodes that training drew first; those that dynamic sampling drew in the place of others are not counted."""
    return sum(row["num_episodes"] for _, row in read_jsonl(metrics)) if metrics.exists() else 0


def compare(
    noted: Attempts,
    plain: Attempts,
    best: list[Trajectory],
    num_attempts: int,
    *,
    note_tokens: Mapping[str, int],
    confidence: float,
) -> dict[str, Any]:
    """Results of the attempts as of one policy: a problem is solved if any attempt solved it, at the cost of all of
    them and of its notes (`note_tokens`, by problem).
    """
    from tasks.measurement.statistics import paired_difference, summarise

    def result(attempts: Attempts, more_tokens: Mapping[str, int]) -> dict[str, Any]:
        whole = summarise(_as_one(attempts, num_attempts, more_tokens), confidence=confidence)
        for row in (whole, *whole["by_category"].values()):
            row["samples_per_problem"] = num_attempts
        return dict(whole)

    finals = outcomes(noted, num_attempts)
    return {
        "result": result(noted, note_tokens),
        "retries": result(plain, {}),
        "success_within": [
            {"attempts": k, "reflexion": _share_solved(noted, k), "retries": _share_solved(plain, k)}
            for k in range(1, num_attempts + 1)
        ],
        "best_minus_reflexion": paired_difference(best, finals, confidence=confidence),
        "reflexion_minus_retries": paired_difference(finals, outcomes(plain, num_attempts), confidence=confidence),
    }


def outcomes(attempts: Attempts, num_attempts: int) -> list[Trajectory]:
    """Per problem the first success within so many attempts, else the last attempt that was no error of ours."""
    found = []
    for items in attempts.values():
        tried = items[:num_attempts]
        measured = [item for item in tried if not item.is_lost] or tried
        found.append(next((item for item in measured if item.is_success), measured[-1]))
    return found


def _as_one(attempts: Attempts, num_attempts: int, more_tokens: Mapping[str, int]) -> list[EpisodeSummary]:
    """Per problem its outcome, with the tokens and calls of all attempts."""
    from tasks.measurement.statistics import EpisodeSummary

    found = []
    for final, items in zip(outcomes(attempts, num_attempts), attempts.values(), strict=True):
        costs = {name: sum(getattr(item, name) for item in items) for name in COSTS}
        costs["num_sampled_tokens"] += more_tokens.get(final.problem_id, 0)
        found.append(EpisodeSummary.of(final)._replace(**costs))
    return found


def _share_solved(attempts: Attempts, k: int) -> float:
    finals = [item for item in outcomes(attempts, k) if not item.is_lost]
    return round(sum(item.is_success for item in finals) / len(finals), 6) if finals else 0.0


class _Arms:
    """One engine over the frozen policy, which plays both arms."""

    def __init__(
        self,
        settings: EvaluateSections,
        options: ReflexionSettings,
        environment: Environment,
        problems: Sequence[Problem],
        model: Path,
        resume: Path,
    ):
        from tasks.models.folders import model_config
        from tasks.rollouts.load import Engines, load_checked_chat
        from tasks.rollouts.notes import RememberingEpisodes

        self.settings, self.options, self.environment, self.resume = settings, options, environment, resume
        self.problems, self.model = {problem.id: problem for problem in problems}, model
        play = settings.plays["test"]
        self.sampling = play.sampling
        self.chat: ChatFormat = load_checked_chat(model, environment, problems, self.sampling)
        most = tokens_with_notes(options, self.chat, model_config(model), self.sampling)
        wider = play.sampling.model_copy(update={"max_tokens_per_episode": most})
        self.engines = Engines(play.model_copy(update={"sampling": wider}))
        self.engine: Engine = self.engines.over(model, self.chat, environment, problems)
        self.kind: RememberingEpisodes = RememberingEpisodes(
            self.engine, self.chat, self.sampling, max_memory_tokens=options.max_memory_tokens
        )

    def play(self, first: Attempts, num_attempts: int, *, with_notes: bool) -> tuple[Attempts, Counter[str]]:
        """All attempts by problem, until one succeeds, and the tokens of its notes."""
        from tasks.rollouts.collect import collect_missing
        from tasks.rollouts.conversation import EpisodeKey
        from tasks.rollouts.finished import FinishedEpisodes

        attempts = {name: list(items) for name, items in first.items()}
        notes: dict[str, list[str]] = {}
        name, note_tokens = "reflexion" if with_notes else "retries", Counter[str]()
        collector = self._collector()
        collector.faults.num_finished = len(attempts)  # attempt 1: a lost episode is judged against all
        for number in range(2, num_attempts + 1):
            failed = [items[-1] for items in attempts.values() if not items[-1].is_success]
            if not failed:
                break
            if with_notes:
                note_tokens.update(self._note(failed, notes, number))
            self.kind.remember(notes)
            keys = [EpisodeKey(self.problems[item.problem_id], number - 1, 0) for item in failed]
            finished = FinishedEpisodes(self.resume / f"{name}_{number:03d}.jsonl")
            for played in collect_missing(collector, keys, finished, label=f"{name}: attempt {number}"):
                attempts[played.problem_id].append(played)
        self._confirm(name)
        return attempts, note_tokens

    def _confirm(self, name: str) -> None:
        """ValueError if the weights were not those of the snapshot; then no attempt is kept."""
        try:
            self.engines.confirm(self.model)
        except ValueError:
            for file in [*self.resume.glob(f"{name}_*.jsonl"), *self.resume.glob("notes_*.jsonl")]:
                file.unlink()
            raise

    def close(self) -> None:
        self.engines.close()

    def _collector(self) -> Collector:
        from tasks.rollouts.collect import Collector

        return Collector(
            self.kind,
            self.environment,
            max_concurrent_episodes=self.settings.engine.max_concurrent_episodes,
            seed=self.settings.seed,
            stage=STAGE,
        )

    def _note(self, failed: Sequence[Trajectory], notes: dict[str, list[str]], number: int) -> dict[str, int]:
        """Add a note on each failed attempt, none on an error of ours; the tokens written, by problem."""
        from tasks.rollouts.notes import write_notes

        file = self.resume / f"notes_{number:03d}.jsonl"
        seen = [item for item in failed if not item.is_lost]
        kept = [row for _, row in read_jsonl(file)] if file.exists() else []
        if [row["problem_id"] for row in kept] != [item.problem_id for item in seen]:
            written = write_notes(
                self.engine,
                self.chat,
                seen,
                self.options.question,
                max_note_tokens=self.options.max_note_tokens,
                max_episode_tokens=self.sampling.max_tokens_per_episode + self.options.max_memory_tokens,
                max_at_once=self.settings.engine.max_concurrent_episodes,
                seed=self.settings.seed,
            )
            kept = [
                {"problem_id": item.problem_id, "note": note, "num_tokens": num_tokens}
                for item, (note, num_tokens) in zip(seen, written, strict=True)
            ]
            write_jsonl(file, kept)
        for row in kept:
            if row["note"]:
                notes.setdefault(row["problem_id"], []).append(row["note"])
        return {row["problem_id"]: row["num_tokens"] for row in kept}


def tokens_with_notes(
    options: ReflexionSettings, chat: ChatFormat, config: Mapping[str, Any], sampling: SamplingSettings
) -> int:
    """The most that an attempt with notes takes; ValueError where the context in config.json is shorter."""
    from tasks.rollouts.notes import room_for_notes

    room = room_for_notes(
        chat, options.question, max_memory_tokens=options.max_memory_tokens, max_note_tokens=options.max_note_tokens
    )
    most = sampling.max_tokens_per_episode + room
    refuse_short_context(config, most, room)
    return most


def refuse_short_context(config: Mapping[str, Any], needed: int, room: int) -> None:
    context = context_length(config)
    if context is not None and needed > context:
        raise ValueError(
            f"evaluate.reflexion: an attempt with notes takes up to {needed} tokens ({room} of them for notes), and "
            f"the model's context is {context}, so it could not be played. Lower evaluate.reflexion.max_memory_tokens "
            f"and max_note_tokens, or set evaluate.reflexion to null."
        )


def _in_words(row: dict[str, Any]) -> str:
    episodes, gap = row["episodes"], row["best_minus_reflexion"]
    return (
        f"{row['result']['success_rate']:.1%} within {counted(row['num_attempts'], 'attempt')} "
        f"({row['retries']['success_rate']:.1%} without notes), reading test's verdicts, in "
        f"{counted(episodes['reflexion'], 'episode')}; RL trained on {episodes['rl_training']:,}; best in one attempt "
        f"{difference_text(gap)} points"
    )
