"""Token budgets against references: counted by hand, refused before weights are loaded, with the value to set."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.chat.format import ChatFormat, load_chat
from tasks.core.files import write_json, write_jsonl
from tasks.core.records import ReferenceTurn, ToolCall
from tasks.core.settings import Paths, load, read_params
from tasks.core.splits import read_split
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.budgets import KEPT, Size, fit, reference_size, sampled_sizes
from tasks.rollouts.settings import SamplingSettings
from tasks.stages.assess.base_model import check_budgets
from tasks.stages.assess.settings import AssessSections
from tasks.stages.curate.references import Replays, Row, replay_references, sample_of_references
from tests import tiny
from tests.conftest import ROOT

SAMPLING = tiny.SAMPLING.model_copy(update={"max_turns": 4, "max_tokens_per_turn": 20, "max_tokens_per_episode": 100})


def size(problem_id: str, *, turns: int = 2, a_turn: int = 15, episode: int = 60, prompt: int = 10) -> Size:
    needs = {"max_turns": turns, "max_tokens_per_turn": a_turn, "max_tokens_per_episode": episode}
    return Size(problem_id, "cancel/none", {**needs, "max_completion_tokens": episode - prompt})


def test_a_reference_takes_its_prompt_a_turn_a_call_each_reply_and_the_answer() -> None:
    chat = ChatFormat(tiny.tokenizer(), source="tiny")
    problem = tiny.problems(1)[0]
    call = ToolCall(name="cancel_booking", arguments={"booking_id": "B88"})
    problem = problem.model_copy(
        update={
            "requests": ["Cancel B88.", "Thanks."],
            "reference": [
                ReferenceTurn(calls=[call], answer="The refund is 34."),
                ReferenceTurn(calls=[], answer="Bye."),
            ],
        }
    )
    reply = '{"status": "ok", "refund": 34}'
    # One token more a turn than its text has: the end of the turn.
    turns = [len(chat.encode(text)) + 1 for text in (chat.call_format.text([call]), "The refund is 34.", "Bye.")]
    given = len(chat.reply_ids((reply,))) + len(chat.request_ids("Thanks."))
    prompt = len(chat.prompt_ids("Cancel B88.", []))
    assert reference_size(chat, TravelDesk(), problem, [reply]).needs == {
        "max_turns": 3,
        "max_tokens_per_turn": max(turns),
        "max_tokens_per_episode": prompt + sum(turns) + given,
        "max_completion_tokens": sum(turns) + given,
    }


def test_the_worst_problem_and_the_values_that_fit_are_named() -> None:
    found = fit([size("a"), size("long", a_turn=41, episode=300), size("turns", turns=5)], SAMPLING)
    assert (len(found.cut), found.is_hopeless) == (2, True)
    assert "2 of 3 references do not fit" in found.sentence
    # 300 of 100 is further beyond than 41 of 20 and 5 of 4.
    assert found.sentence.endswith("'long' needs 300 tokens per episode")
    values = "sampling.max_turns to at least 5 and sampling.max_tokens_per_turn to at least 41 and"
    assert f"Set {values} sampling.max_tokens_per_episode to at least 300." in found.remedy({})


MEMBERS = {"desk": {}, "shop": {"max_turns": 2}, "bank": {"max_turns": 3, "max_tokens_per_episode": 50}}


def apply(remedy: str, sizes: list[Size], sampling: SamplingSettings) -> tuple[list[Size], SamplingSettings]:
    """As a person does: set each key that the advice names."""
    given = {key: int(value) for key, value in re.findall(r"(\S+) to at least (\d+)", remedy)}
    own = {
        member: {
            name: given.pop(f"environment.settings.members[{member}].budgets.{name}", value)
            for name, value in budgets.items()
        }
        for member, budgets in MEMBERS.items()
    }
    raised = sampling.model_copy(update={key.removeprefix("sampling."): value for key, value in given.items()})
    assert raised.model_dump().keys() == sampling.model_dump().keys()
    return [replace(size, budgets=own[size.member]) for size in sizes], raised


def test_a_member_with_a_budget_of_its_own_is_told_its_own_key() -> None:
    """Of 4 turns in `sampling` and 2 in the shop; the shop's 3 turns are the larger part, and the desk's 5 the more."""
    sizes = [
        replace(size("shop/a", turns=3), member="shop", budgets=MEMBERS["shop"]),
        replace(size("desk/a", turns=5), member="desk"),
    ]
    told = fit(sizes[:1], SAMPLING).remedy({})
    assert told.endswith(" Set environment.settings.members[shop].budgets.max_turns to at least 3.")
    told = fit(sizes, SAMPLING).remedy({})
    assert "members[shop].budgets.max_turns to at least 3" in told and "sampling.max_turns to at least 5" in told


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*MEMBERS]), st.integers(1, 9), st.integers(1, 40), st.integers(80, 300)),
                min_size=1, max_size=5))  # fmt: skip
def test_what_the_remedy_names_fits_every_reference(drawn: list[tuple[str, int, int, int]]) -> None:
    sizes = [
        replace(size(member, turns=turns, a_turn=a_turn, episode=episode), member=member, budgets=MEMBERS[member])
        for member, turns, a_turn, episode in drawn
    ]
    tight = SAMPLING.model_copy(update={"max_completion_tokens": 90})
    if fit(sizes, tight).cut:
        again, raised = apply(fit(sizes, tight).remedy({}), sizes, tight)
        assert not fit(again, raised).cut
        for item in again:
            raised.within(item.budgets)  # refuses one above those of `sampling`


def test_what_is_longer_than_the_models_context_cannot_be_set() -> None:
    found = fit([size("a"), size("long", episode=300)], SAMPLING)
    assert not found.is_hopeless
    for config in ({"max_position_embeddings": 256}, {"text_config": {"max_position_embeddings": 256}}):
        assert "The model's context is 256 tokens" in found.remedy(config)
    assert "context" not in found.remedy({"max_position_embeddings": 300})


def test_a_limit_that_is_not_set_cuts_nothing_and_no_reference_is_none_cut() -> None:
    assert not fit([size("a", episode=90)], SAMPLING).cut
    tight = SAMPLING.model_copy(update={"max_completion_tokens": 79})
    assert fit([size("a", episode=90)], tight).sentence.endswith("'a' needs 80 tokens after the prompt")
    assert not fit([], SAMPLING).cut


def test_a_name_out_of_a_row_stays_on_its_line() -> None:
    said = fit([size("\x1b[31mred\n" + "x" * 500, turns=9)], SAMPLING).sentence
    assert said.isprintable() and len(said) < 300


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """What assess reads of curation, and a model folder without weights."""
    paths = Paths(tmp_path_factory.mktemp("budgets"))
    problems = tiny.problems(33)
    replays = replay_references(Replays(TravelDesk()), problems)
    rows = [
        Row(place, "", problem, replay) for place, (problem, replay) in enumerate(zip(problems, replays, strict=True))
    ]
    for name in ("train", "select"):
        write_jsonl(paths.split(name), (row.problem.model_dump() for row in rows[name == "select" :: 2]))
    write_jsonl(paths.stage("curate") / "references.jsonl", sample_of_references(rows))
    tiny.tokenizer().save_pretrained(paths.artifacts / "model")
    write_json(paths.artifacts / "model" / "config.json", {"max_position_embeddings": 512})
    return paths


def check(paths: Paths, **budgets: Any) -> None:
    params = read_params(ROOT / "params.yaml")
    params["sampling"] |= {"max_tokens_per_turn": 60, **budgets}
    check_budgets(paths.artifacts / "model", load(AssessSections, params), paths, TravelDesk())


@pytest.mark.slow
def test_assess_refuses_budgets_that_most_references_do_not_fit(curated: Paths) -> None:
    with pytest.raises(ValueError) as error:
        check(curated, max_tokens_per_turn=4)
    splits = {split: read_split(curated, split) for split in KEPT}
    longest = max(
        size.needs["max_tokens_per_turn"]
        for size in sampled_sizes(load_chat(curated.artifacts / "model"), TravelDesk(), curated, splits)
    )
    assert "33 of 33 references do not fit" in str(error.value)
    assert str(error.value).endswith(f"Set sampling.max_tokens_per_turn to at least {longest}.")
    assert "\n" not in str(error.value)
    check(curated, max_tokens_per_turn=longest)


@pytest.mark.slow
def test_assess_warns_where_some_do_not_fit(curated: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    check(curated, max_turns=6)
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and "Set sampling.max_turns to at least 7." in said
    check(curated)
    assert capsys.readouterr().err == ""
