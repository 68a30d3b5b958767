"""Checks of the conversation as tokens: the chat template, the loss mask, control tokens in texts, token budgets.

A fault here is silent: a tokenizer that returns other text, or a mask that is off by one, trains something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tasks.chat.format import ChatFormat
from tasks.commands.doctor.context import DoctorContext, PlayedReference
from tasks.commands.doctor.findings import Finding, failed, list_some, passed, warned
from tasks.core.records import TokenSequence, Turn
from tasks.core.text import counted, one_line
from tasks.models.embedded import is_embedded
from tasks.planning.family import check_config
from tasks.rollouts.budgets import fit, sampled_sizes
from tasks.stages.evaluate.sharded import choose_problems
from tasks.tools.user.environment import check_user

BROKEN_UP = (
    "Episodes split such a token with a space, so that no text is read as another message. Do the same in "
    "production, or remove these tokens from the problems and from the tools' replies."
)
CUT_NOTE = "[cut here: "  # the end of a reply that the tool layer cut
MOST_RENDERED = 50  # references compared with the template's own rendering; the first cover the most


def chat_template(context: DoctorContext) -> Finding:
    """The template can render a conversation (`ChatFormat` refuses one that cannot), and shows the tools."""
    chat, tools = context.chat, context.tool_schemas
    rules = context.environment.rules_for(context.problems["train"][0]) if context.problems["train"] else ""
    prompt = chat.decode(chat.prompt_ids("?", tools, rules))
    if not is_embedded(context.settings.model.path) and not any(tool["function"]["name"] in prompt for tool in tools):
        return warned(
            "the prompt that it renders names no tool",
            "The model cannot know which tools it may call. Use a template that renders `tools`, or name them in the "
            "request.",
        )
    return passed(f"it writes calls as {chat.call_format.name} ({context.model.source})")


def model_family(context: DoctorContext) -> Finding:
    """Its config.json asks for nothing that the trainer, or the engine in this process, does not compute."""
    if is_embedded(context.settings.model.path):
        return passed("the embedded model's")
    name = check_config(Path(context.model.source), context.settings)
    return passed(f"{name}: its config.json asks for nothing that trainer and engine do not compute")


def loss_mask(context: DoctorContext) -> Finding:
    """References played as text: the mask covers the scripted messages with their ends, and nothing else."""
    references = context.references
    for number, reference in enumerate(references):
        fault = mask_fault(context, reference)
        if not fault and number < MOST_RENDERED:
            fault = rendering_fault(context, reference)
        if fault:
            return failed(
                f"{one_line(repr(reference.problem.id))}: {fault}",
                "The loss would be on tokens that the policy did not choose. Save the tokenizer without normalising or "
                "cleaning up text, with a template that renders each message the same wherever it is.",
            )
    return passed(f"{counted(len(references), 'reference')}: their own tokens, nothing else")


def mask_fault(context: DoctorContext, reference: PlayedReference) -> str:
    chat, played = context.chat, reference.trajectory
    (tokens,) = played.sequences  # a reference is played by turnwise's own loop
    lengths = {len(tokens.token_ids), len(tokens.sampled_mask), len(tokens.sampler_logp)}
    if len(lengths) > 1:
        return f"token ids, mask and log-probs have {sorted(lengths)} entries"
    sampled, given = split_by_mask(tokens)
    end = chat.decode([chat.end_of_turn])
    for written, text in zip([chat.decode(ids) for ids in sampled], reference.texts, strict=False):
        asked = empty_thought(chat) + text + end
        if written != asked:
            return f"the model wrote {one_line(repr(asked))}, and its tokens read {one_line(repr(written))}"
    if len(sampled) != len(reference.texts):
        wrote, masked = counted(len(reference.texts), "message"), counted(len(sampled), "run")
        return f"the model wrote {wrote}, and the mask has {masked} of tokens"
    expected = [[reference.problem.requests[0]], *filter(None, map(given_after, played.turns))]
    for ids, texts in zip(given, expected, strict=False):
        missing = [text for text in texts if not _is_among(chat, ids, text)]
        if missing:
            return f"{one_line(repr(missing[0]))} was given to the model, but is not between its turns"
    return "" if len(given) == len(expected) else "a tool reply is in the mask, or a message of the model is not"


def empty_thought(chat: ChatFormat) -> str:
    """What a scripted model writes before its message, if the model thinks."""
    return chat.decode(chat.written_ids("")[0])


def given_after(turn: Turn) -> list[str]:
    return turn.replies or ([turn.follow_up] if turn.follow_up is not None else [])


def rendering_fault(context: DoctorContext, reference: PlayedReference) -> str:
    """How the template's rendering of the whole conversation differs from the episode; empty where it does not."""
    chat, played = context.chat, reference.trajectory
    tools = [tool.schema() for tool in context.environment.tools_for(reference.problem)]
    messages, rendered_tools = chat.opening(
        reference.problem.requests[0], tools, context.environment.rules_for(reference.problem)
    )
    for text, turn in zip(reference.texts, played.turns, strict=False):
        messages.append(chat.template.written(text))
        messages += chat.replies(tuple(turn.replies)) if turn.replies else []
        messages += [chat.asking(turn.follow_up)] if turn.follow_up is not None else []
    rendered = chat.template.without_thoughts(chat.template.render(messages, tools=rendered_tools))
    whole = chat.template.without_thoughts(chat.decode(played.sequences[0].token_ids))
    if rendered.startswith(whole) or chat.decode(chat.encode(rendered)).startswith(whole):
        return ""
    start = next((place for place, (a, b) in enumerate(zip(whole, rendered, strict=False)) if a != b), len(rendered))
    differing = slice(max(0, start - 12), start + 24)
    return (
        f"the template renders another conversation than was played: {whole[differing]!r} became "
        f"{rendered[differing]!r}"
    )


def requests(context: DoctorContext) -> Finding:
    """No text is read as another message, and the user can play each problem; where evaluation tells test in parts, it
    has problems with parts.
    """
    in_parts = choose_problems(context.environment, context.problems["test"], context.settings.evaluate.sharded)
    problems = [problem for split in context.problems.values() for problem in split]
    for problem in problems:
        check_user(context.environment, context.settings.environment.user, problem)
    marked = [problem.id for problem in problems if with_control_tokens(context, problem.requests)]
    if marked:
        return warned(f"{len(marked):,} contain control tokens of the template: {list_some(marked)}", BROKEN_UP)
    most = max(len(problem.requests) for problem in problems)
    told = f"{counted(len(problems), 'problem')}, {'one' if most == 1 else f'up to {most}'} each, no control token"
    return passed(f"{told}; {len(in_parts):,} of test told in parts too" if in_parts else told)


def tool_replies(context: DoctorContext) -> Finding:
    replies = {
        reply
        for reference in context.played_references
        for turn in reference.trajectory.turns
        for reply in turn.replies
    }
    limit = context.environment.limits.max_reply_characters
    marked = with_control_tokens(context, replies)
    if marked:
        return warned(f"some contain control tokens of the template: {list_some(marked)}", BROKEN_UP)
    if any(CUT_NOTE in reply[limit:] for reply in replies):
        return warned(
            f"some are cut at {limit:,} characters",
            "Have the tool answer in pages, or raise environment.tools.max_reply_characters (and the token budgets).",
        )
    return passed(f"up to {max(map(len, replies), default=0):,} of {limit:,} characters, no control token")


def budgets(context: DoctorContext) -> Finding:
    """The references whose replies `curate` kept, against the budgets of `sampling`: assess refuses what fails here."""
    sizes = sampled_sizes(context.chat, context.environment, context.paths, context.problems)
    fitted = fit(sizes, context.settings.sampling)
    if not fitted.num_measured:
        return passed("no known solution to measure")
    if not fitted.cut:
        return passed(f"{fitted.num_measured:,} references fit: {fitted.used}")
    told = failed if fitted.is_hopeless else warned
    return told(fitted.sentence, fitted.remedy(context.model.config))


def with_control_tokens(context: DoctorContext, texts: Iterable[str]) -> list[str]:
    return sorted(text for text in texts if context.chat.as_data(text) != text)


def split_by_mask(tokens: TokenSequence) -> tuple[list[list[int]], list[list[int]]]:
    pairs = zip(tokens.token_ids, tokens.sampled_mask, strict=True)
    runs = [(is_sampled, [token for token, _ in run]) for is_sampled, run in groupby(pairs, key=lambda pair: pair[1])]
    return [ids for is_sampled, ids in runs if is_sampled], [ids for is_sampled, ids in runs if not is_sampled]


def _is_among(chat: ChatFormat, ids: list[int], text: str) -> bool:
    """Whether the tokens contain the text: as it is, trimmed, or as a JSON string (Llama's template)."""
    data = chat.as_data(text)
    forms = (data, data.strip(), json.dumps(data, ensure_ascii=False)[1:-1])
    return any(chat.decode(chat.encode(form)) in chat.decode(ids) for form in forms)
