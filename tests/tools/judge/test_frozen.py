"""A judge in this process: always of the schema, the same to the same seed, and refused where it agrees too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tasks.core import background
from tasks.tools.base import EnvironmentFault
from tasks.tools.judge.frozen import BEGINNING, VERDICT, FrozenJudge
from tasks.tools.judge.judge import Judge, Judgement, describe_judge
from tasks.tools.judge.opinion import read_opinion
from tasks.tools.judge.prompt import messages_for
from tasks.tools.judge.settings import JudgeSettings
from tests import tiny
from tests.chat import templates
from tests.tools.judge.endpoint import judge_row
from tests.tools.judge.test_judge import JUDGED, ask
from tests.tools.test_frozen import model_with

POSITIONS = 6000  # the tests' tokenizer writes a word that it does not know letter by letter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: a model that can only babble."""
    embedded = tiny.EMBEDDED.model_copy(update={"max_position_embeddings": POSITIONS})
    return tiny.model_folder(tmp_path_factory.mktemp("base"), embedded=embedded)


def settings(base: Path, folder: Path, **changed: Any) -> JudgeSettings:
    row = judge_row("", folder, model=str(base), max_output_tokens=20)
    return JudgeSettings.model_validate({**row, "url": None, "api_key_variable": None, **changed})


@pytest.mark.slow
def test_a_model_that_can_only_babble_gives_a_verdict_of_the_schema_each_time(base: Path, tmp_path: Path) -> None:
    judge = Judge(settings(base, tmp_path, num_votes=9, temperature=1.0))
    (found,) = ask(judge)
    assert len(found.votes) == 9 and judge.counts()["judge_invalid_answers"] == 0
    assert len({vote.reason for vote in found.votes}) > 1
    assert all(vote.score in {tenths / 10 for tenths in range(11)} for vote in found.votes)


@pytest.mark.slow
def test_the_same_weights_seed_and_episode_give_the_same_verdict(base: Path, tmp_path: Path) -> None:
    def judged(name: str, **changed: Any) -> Judgement:
        return ask(Judge(settings(base, tmp_path / name, temperature=1.0, **changed)))[0]

    assert judged("a") == judged("b")
    assert judged("a").votes != judged("c", seed=8).votes


@pytest.mark.slow
def test_what_is_chosen_is_what_the_model_finds_likeliest_of_the_values(base: Path, tmp_path: Path) -> None:
    """At temperature 0, against one plain forward over the whole text."""
    judge = FrozenJudge(settings(base, tmp_path, max_output_tokens=1))
    messages = messages_for(JUDGED, rubric="Judge.", max_characters=2000)
    said = background.run(judge.answer(messages, seed=1)).result(60).text
    assert said is not None
    opinion = read_opinion(said)
    ids_of, model = judge.model.chat.encode, judge.model._model

    before = said.partition(" true" if opinion.success else " false")[0]
    pieces = ['{"reason": "', opinion.reason, '"', ', "success":']
    assert "".join(pieces) == before
    ids = judge.model.prompt_ids(messages) + [token for piece in pieces for token in ids_of(piece)]
    true, false = ids_of(" true"), ids_of(" false")
    place = next(n for n in range(len(true)) if true[n] != false[n])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + true[:place]])).logits[0, -1]
    assert opinion.success == bool(logits[true[place]] > logits[false[place]])


def test_other_weights_in_the_same_folder_are_another_judge(base: Path, tmp_path: Path) -> None:
    other = tiny.model_folder(tmp_path / "other", embedded=tiny.EMBEDDED, seed=1)
    first, second = (describe_judge(settings(folder, tmp_path)) for folder in (base, other))
    assert first["weights"] != second["weights"]


def test_a_judge_whose_reason_is_cut_elsewhere_is_another_judge(base: Path, tmp_path: Path) -> None:
    """The verdict is chosen after the reason, so another limit is another verdict."""
    short, long = (describe_judge(settings(base, tmp_path, max_output_tokens=limit)) for limit in (20, 21))
    assert {name for name in short if short[name] != long[name]} == {"max_output_tokens"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"api_key_variable": "JUDGE_KEY"}, "takes no key.* Set it to null"),
        ({"model": "artifacts/assess/base_model"}, "what the stage assess makes"),
        ({"model": "artifacts/train/snapshots/iteration-0010"}, "what the stage train makes"),
    ],
)
def test_a_key_that_nobody_reads_and_a_folder_that_a_stage_makes_are_refused(
    base: Path, tmp_path: Path, changed: dict[str, str], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(base, tmp_path, **changed)


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, templates.GEMMA])
def test_an_episode_that_the_model_cannot_read_is_dropped_and_rules_that_leave_it_no_room_end_the_run(
    base: Path, tmp_path: Path, template: str | None
) -> None:
    """At the very token. Gemma's template knows no system message: the rules begin the user's."""

    def folder(positions: int) -> Path:
        embedded = tiny.EMBEDDED.model_copy(update={"max_position_embeddings": positions})
        return (
            tiny.model_folder(tmp_path / str(positions), embedded=embedded)
            if template is None
            else model_with(template, tmp_path / str(positions), positions=positions)
        )

    judge = Judge(settings(folder(POSITIONS), tmp_path))
    rules, _ = messages_for(JUDGED, rubric=judge.rubric, max_characters=2000)
    model = FrozenJudge(judge.settings).model
    empty = model.prompt_ids([rules, {"role": "user", "content": ""}])
    num_tokens = len(empty) + len(model.chat.encode(BEGINNING + VERDICT))
    with pytest.raises(EnvironmentFault, match=r"it reads at most .*; lower environment\.judge\.max_characters"):
        ask(Judge(settings(folder(num_tokens + 1), tmp_path)))
    with pytest.raises(ValueError, match=r"environment\.judge\.model: .* reads at most .* tokens and the rules"):
        ask(Judge(settings(folder(num_tokens), tmp_path)))


def test_a_model_in_process_cannot_be_told_to_ignore_the_schema(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="always answers by the schema"):
        settings(base, tmp_path, structured=False)


def test_a_folder_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"url is null, and model .* is no folder"):
        Judge(settings(tmp_path / "none", tmp_path))
