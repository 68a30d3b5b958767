"""Checks of the conversation as tokens: the chat template, the loss mask, the budgets, and what the texts hold.

What a trainer gets wrong here is silent: a template that rewrites history, a tokenizer that gives back other text, a
mask that is off by one all train, and train something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby

from tasks.chat.format import ChatFormat
from tasks.commands.doctor.context import DoctorContext, PlayedReference
from tasks.commands.doctor.findings import Finding, failed, passed, some, warned
from tasks.core.records import ToolCall, Trajectory, Turn
from tasks.core.text import one_line
from tasks.models.embedded import is_embedded
from tasks.rollouts.budgets import Size, fit, size_of

BROKEN_UP = (
    "Episodes break such a token up with a space, so that no text poses as another message. Have production do the "
    "same, or keep them out of the rows and of what tools answer."
)
CUT_NOTE = "[cut here: "  # how the tool layer ends a reply that it cut
MOST_RENDERED = 50  # references compared with the template's own rendering; the first are the telling ones


def chat_template(context: DoctorContext) -> Finding:
    """Each rendering of a growing conversation opens with the one before it, tool replies and new turns included."""
    chat, tools = context.chat, context.tool_schemas
    end = chat.template.after_assistant
    messages, rendered_tools = chat.opening("Which of the two is nearer?", tools)
    before = ""
    for turn, replies in enumerate((('{"km": 3}',), ('{"km": 5}', '{"km": 8}'), ()), start=1):
        text = chat.call_format.text([ToolCall(name="look", arguments={"turn": turn})])
        opened = chat.template.render(messages, tools=rendered_tools, continues=True)
        messages.append(chat.template.written(text))
        closed = chat.template.render(messages, tools=rendered_tools).removesuffix(end)
        messages += chat.replies(replies)
        for earlier, later in ((before, opened), (opened, closed)):
            if not later.startswith(earlier):
                return failed(
                    f"at turn {turn} it rewrites earlier text: {_difference(earlier, later)}",
                    f"Past tokens would no longer match their log-probs. Save the tokenizer of {context.model.source} "
                    f"with a template whose history is a prefix of its continuation.",
                )
        before = closed
    prompt = chat.decode(chat.prompt_ids("?", tools))
    if not is_embedded(context.settings.model.path) and not any(tool["function"]["name"] in prompt for tool in tools):
        return warned(
            "it keeps its prefix, but the prompt it renders names no tool",
            "The model cannot know what it may call. Use a template that renders `tools`, or name them in the request.",
        )
    return passed(f"four turns keep their prefix, calls as {chat.call_format.name} ({context.model.source})")


def loss_mask(context: DoctorContext) -> Finding:
    """References played as text: in the mask is what was scripted, each turn with its end, and nothing else."""
    references = context.references
    for number, reference in enumerate(references):
        fault = mask_fault(context, reference) or (
            rendering_fault(context, reference) if number < MOST_RENDERED else ""
        )
        if fault:
            return failed(
                f"{one_line(repr(reference.problem.id))}: {fault}",
                "The loss would fall on other tokens than the policy chose. Save the tokenizer without normalising or "
                "cleaning up text, with a template that renders each message the same wherever it stands.",
            )
    return passed(f"{len(references):,} references: their own tokens, nothing else")


def mask_fault(context: DoctorContext, reference: PlayedReference) -> str:
    """What is wrong with the token lists of an episode; empty where nothing is."""
    chat, played = context.chat, reference.trajectory
    lengths = {len(played.token_ids), len(played.sampled_mask), len(played.sampler_logp)}
    if len(lengths) > 1:
        return f"token ids, mask and log-probs have {sorted(lengths)} entries"
    sampled, given = runs(played)
    end = chat.decode([chat.end_of_turn])
    for written, text in zip([chat.decode(ids) for ids in sampled], reference.texts, strict=False):
        if written != text + end:
            return f"the model wrote {one_line(repr(text + end))}, and its tokens read {one_line(repr(written))}"
    if len(sampled) != len(reference.texts):
        return f"{len(reference.texts)} messages were written, and {len(sampled)} runs of tokens are in the mask"
    expected = [[reference.problem.requests[0]], *filter(None, map(answered, played.turns))]
    for ids, texts in zip(given, expected, strict=False):
        missing = [text for text in texts if not _holds(chat, ids, text)]
        if missing:
            return f"{one_line(repr(missing[0]))} was given to the model, and is not between its turns"
    return "" if len(given) == len(expected) else "a tool reply is in the mask, or a message of the model is not"


def answered(turn: Turn) -> list[str]:
    """What the model was given after a turn: the tools' replies, or the user's next request."""
    return turn.replies or ([turn.follow_up] if turn.follow_up is not None else [])


def rendering_fault(context: DoctorContext, reference: PlayedReference) -> str:
    """Whether the template, asked for the whole conversation at once, writes what the episode consists of."""
    chat, played = context.chat, reference.trajectory
    tools = [tool.schema() for tool in context.environment.tools_for(reference.problem)]
    messages, rendered_tools = chat.opening(reference.problem.requests[0], tools)
    for text, turn in zip(reference.texts, played.turns, strict=False):
        messages.append(chat.template.written(text))
        messages += chat.replies(tuple(turn.replies)) if turn.replies else []
        messages += [chat.asking(turn.follow_up)] if turn.follow_up is not None else []
    rendered, whole = chat.template.render(messages, tools=rendered_tools), chat.decode(played.token_ids)
    if rendered.startswith(whole) or chat.decode(chat.encode(rendered)).startswith(whole):
        return ""
    return f"the template renders the conversation otherwise than it was played: {_difference(whole, rendered)}"


def token_budgets(context: DoctorContext) -> Finding:
    """Whether references fit the limits of `sampling`, which end an episode or cut a turn."""
    sampling, references = context.settings.sampling, context.references
    context_length = context.model.config.get("max_position_embeddings")
    if context_length is not None and sampling.max_tokens_per_episode > context_length:
        return failed(
            f"sampling.max_tokens_per_episode is {sampling.max_tokens_per_episode:,}, "
            f"and the model's context is {context_length:,}",
            f"Set it to at most {context_length}.",
        )
    num_tokens, problem_id = max((len(runs(item.trajectory)[1][0]), item.problem.id) for item in references)
    if num_tokens >= sampling.max_tokens_per_episode:
        return failed(
            f"the prompt of {one_line(problem_id)} alone has {num_tokens:,} of {sampling.max_tokens_per_episode:,} "
            f"tokens",
            "Raise sampling.max_tokens_per_episode or drop the problem; training would refuse it.",
        )
    found = fit([_size(reference) for reference in references], sampling)
    if not found.cut:
        return passed(f"the longest references: {found.used}")
    return (failed if found.is_hopeless else warned)(found.sentence, found.remedy(context.model.config))


def requests(context: DoctorContext) -> Finding:
    """What users ask: no control token of the template."""
    problems = [problem for split in context.problems.values() for problem in split]
    marked = [problem.id for problem in problems if holds_control_tokens(context, problem.requests)]
    if marked:
        return warned(f"{len(marked):,} hold control tokens of the template: {some(marked)}", BROKEN_UP)
    most = max(len(problem.requests) for problem in problems)
    return passed(f"{len(problems):,} problems, {'one' if most == 1 else f'up to {most}'} each, no control token")


def tool_replies(context: DoctorContext) -> Finding:
    """What tools say: nothing cut at the size limit, no control token of the template."""
    replies = {
        reply
        for reference in context.played_references
        for turn in reference.trajectory.turns
        for reply in turn.replies
    }
    limit = context.environment.limits.max_reply_characters
    longest = max(map(len, replies), default=0)
    held = holds_control_tokens(context, replies)
    if held:
        return warned(f"some hold control tokens of the template: {some(held)}", BROKEN_UP)
    if any(CUT_NOTE in reply[limit:] for reply in replies):
        return warned(
            f"some are cut at {limit:,} characters",
            "Have the tool answer in pages, or raise environment.tools.max_reply_characters (and the token budgets).",
        )
    return passed(f"up to {longest:,} of {limit:,} characters, no control token")


def holds_control_tokens(context: DoctorContext, texts: Iterable[str]) -> list[str]:
    """The texts that hold a token by which the template tells messages apart."""
    return sorted(text for text in texts if context.chat.as_data(text) != text)


def _holds(chat: ChatFormat, ids: list[int], text: str) -> bool:
    """Whether the text is among the tokens: as it is, trimmed, or as a JSON string, as Llama's template has replies."""
    data = chat.as_data(text)
    forms = (data, data.strip(), json.dumps(data, ensure_ascii=False)[1:-1])
    return any(chat.decode(chat.encode(form)) in chat.decode(ids) for form in forms)


def runs(played: Trajectory) -> tuple[list[list[int]], list[list[int]]]:
    """The stretches of sampled tokens and those of given ones, each in order."""
    pairs = zip(played.token_ids, played.sampled_mask, strict=True)
    stretches = [
        (is_sampled, [token for token, _ in stretch])
        for is_sampled, stretch in groupby(pairs, key=lambda pair: pair[1])
    ]
    return [ids for sampled, ids in stretches if sampled], [ids for sampled, ids in stretches if not sampled]


def _size(reference: PlayedReference) -> Size:
    sampled, (prompt, *_) = runs(reference.trajectory)
    rest = len(reference.trajectory.token_ids) - len(prompt)
    return size_of(reference.problem, turns=[len(ids) for ids in sampled], prompt=len(prompt), rest=rest)


def _difference(one: str, other: str) -> str:
    """Where two texts part, each from a few characters before: `'ab|c' became 'ab|d'`."""
    start = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    return f"{one[max(0, start - 12) : start + 24]!r} became {other[max(0, start - 12) : start + 24]!r}"
