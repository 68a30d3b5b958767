"""Check of the environments of `evaluate.also`, which are played only when training is over."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, passed, warned
from tasks.commands.doctor.model import trained_folder
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.transfer import read_others


def other_environments(context: DoctorContext) -> Finding:
    """They start, their references are solved, their prompts leave room, and the model has learnt from none."""
    sections = EvaluateSections(**{name: getattr(context.settings, name) for name in EvaluateSections.model_fields})
    if not sections.evaluate.also:
        return passed("evaluate.also names none")
    folder = trained_folder(context.paths, context.settings.model.path)
    found = read_others(sections, context.chat, context.model.config, [folder] if folder else [])
    told = ", ".join(f"{name}: {len(problems.solvable):,} problems" for name, problems in found.items())
    num_left_out = sum(problems.num_unsolvable for problems in found.values())
    if num_left_out:
        return warned(
            f"{told}; {num_left_out:,} more are left out", "Their reference solutions do not score 1. Correct them."
        )
    return passed(told)
