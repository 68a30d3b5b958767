"""Checks of what is played only after training: the environments of `evaluate.also`, and `evaluate.reflexion`."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, passed, warned
from tasks.commands.doctor.model import assessed_folder
from tasks.core.text import counted
from tasks.stages.evaluate.reflexion import tokens_with_notes
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.transfer import read_others


def other_environments(context: DoctorContext) -> Finding:
    """They start, their references are solved, their prompts leave room, and the model has learnt from none."""
    sections = EvaluateSections(**{name: getattr(context.settings, name) for name in EvaluateSections.model_fields})
    if not sections.evaluate.also:
        return passed("evaluate.also names none")
    folder = assessed_folder(context.paths, context.settings.model.path)
    found = read_others(sections, context.chat, context.model.config, [folder] if folder else [])
    told = ", ".join(f"{name}: {counted(len(problems.solvable), 'problem')}" for name, problems in found.items())
    num_left_out = sum(problems.num_unsolvable for problems in found.values())
    if num_left_out:
        return warned(
            f"{told}; {num_left_out:,} more are left out", "Their reference solutions do not score 1. Correct them."
        )
    return passed(told)


def notes(context: DoctorContext) -> Finding:
    """An attempt of Reflexion fits the model's context with its notes."""
    options = context.settings.evaluate.reflexion
    if options is None:
        return passed("evaluate.reflexion is null")
    most = tokens_with_notes(options, context.chat, context.model.config, context.settings.sampling)
    return passed(f"an attempt with notes takes up to {most:,} tokens, which the model's context has")
