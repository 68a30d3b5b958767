"""Episodes of a model that thinks: two requests a turn, a thought cut by its budget, and what the loss sees of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, Trajectory
from tasks.core.seeds import stream_seed
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.learning.grpo.metrics import thinking_metrics
from tasks.measurement.statistics import summarise
from tasks.models.settings import PLAIN_TEMPLATE
from tasks.models.template import state_template
from tasks.report.episodes import shown_episode, texts_of
from tasks.rewards.stored import turn_tokens
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import TurnReply, TurnRequest, never
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.load import load_checked_chat, refuse_thinking_budget
from tasks.rollouts.sampling import StopStrings
from tests import tiny

pytestmark = pytest.mark.slow
SAMPLING = tiny.ROOMY.model_copy(update={"max_thinking_tokens_per_turn": 12, "max_tokens_per_turn": 40})
CLOSED = "\n</think>\n\n"


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(tiny.THINKING), source="test")


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Cancel a booking: one call, then the answer."""
    return tiny.problems(1)[0]


class Recording(ScriptedEngine):
    """Completes a turn with the token that completes `stop`, as engines do."""

    def __init__(self, chat: ChatFormat, texts: Sequence[str], stop: str | None):
        super().__init__([[chat.encode(text) for text in texts]], end_of_turn=chat.end_of_turn)
        self.asked: list[TurnRequest] = []
        self.stop = None if stop is None else StopStrings([stop], chat)

    def submit(self, request: TurnRequest) -> None:
        self.asked.append(request)
        super().submit(request)

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        return [self._cut(reply) for reply in super().poll(until)]

    def _cut(self, reply: TurnReply) -> TurnReply:
        for end in range(1, len(reply.token_ids) + 1):
            if self.stop is not None and self.stop.found(reply.token_ids[:end]):
                return TurnReply(reply.episode, reply.token_ids[:end], [0.0] * end, "stop_string", [0] * end)
        return reply


def play(
    chat: ChatFormat, problem: Problem, texts: Sequence[str], *, stop: str | None = None, **limits: int | None
) -> tuple[Trajectory, list[TurnRequest]]:
    engine = Recording(chat, texts, stop)
    kind = EngineEpisodes(engine, chat, SAMPLING.model_copy(update=limits))
    collector = Collector(kind, TravelDesk(), max_concurrent_episodes=1, seed=5, stage="test")
    return collector.collect([EpisodeKey(problem, 0, 0)])[0], engine.asked


def turns_of(problem: Problem, *, thoughts: Sequence[str] = ("go on", "answer")) -> list[str]:
    (call,), answer = problem.reference[0].calls, problem.reference[0].answer
    return [f"<think>\n{thoughts[0]}{CLOSED}{call_text(call)}", f"<think>\n{thoughts[1]}{CLOSED}{answer}"]


def sampled_text(chat: ChatFormat, played: Trajectory) -> str:
    pairs = zip(played.sequences[0].token_ids, played.sequences[0].sampled_mask, strict=True)
    return chat.decode([token for token, is_sampled in pairs if is_sampled])


def test_a_turn_is_a_request_for_the_thought_and_one_for_the_message(chat: ChatFormat, problem: Problem) -> None:
    played, asked = play(chat, problem, turns_of(problem))
    assert played.outcome == "success"
    assert [turn.thought for turn in played.turns] == ["go on", "answer"]
    assert [turn.num_thought_tokens for turn in played.turns] == [
        len(chat.encode(f"<think>\n{thought}\n</think>")) for thought in ("go on", "answer")
    ]
    assert played.turns[1].text == problem.reference[0].answer
    assert [request.end_ids for request in asked] == [(chat.end_of_thought,), ()] * 2
    assert [request.max_new_tokens for request in asked] == [12, 40, 12, 40]
    assert sampled_text(chat, played) == "".join(f"{text}<|im_end|>" for text in turns_of(problem))


def test_each_request_of_a_turn_has_a_stream_of_its_own_and_the_first_the_one_it_always_had(
    chat: ChatFormat, problem: Problem
) -> None:
    _, thinking = play(chat, problem, turns_of(problem))
    _, plain = play(chat, problem, turns_of(problem), max_thinking_tokens_per_turn=None)
    key = (5, "test", 0, problem.id, 0)
    assert [request.seed for request in plain] == [stream_seed(*key, 0), stream_seed(*key, 1)]
    assert [request.seed for request in thinking[::2]] == [request.seed for request in plain]
    assert len({request.seed for request in thinking}) == 4


def test_without_a_budget_a_turn_is_one_request_whose_limit_covers_both(chat: ChatFormat, problem: Problem) -> None:
    played, asked = play(chat, problem, turns_of(problem), max_thinking_tokens_per_turn=None)
    assert [(request.max_new_tokens, request.end_ids) for request in asked] == [(40, ())] * 2
    with_budget, _ = play(chat, problem, turns_of(problem))
    assert played.to_row() == with_budget.to_row()


def test_a_thought_cut_by_its_budget_is_closed_by_ids_that_no_loss_sees(chat: ChatFormat, problem: Problem) -> None:
    """The budget is 12 tokens; the scripted engine then writes the message as its next text."""
    rambling = "<think>\n" + "go on " * 20
    call, answer = turns_of(problem)
    texts = [rambling, call.partition(CLOSED)[2], answer]
    played, asked = play(chat, problem, texts)
    first = played.turns[0]
    assert (first.num_thought_tokens, first.thought_was_cut, played.outcome) == (12, True, "success")
    assert rambling.removeprefix("<think>\n").startswith(str(first.thought))
    assert first.calls and not played.turns[1].thought_was_cut
    assert asked[1].token_ids == chat.encode(CLOSED) == chat.thought_closing_ids
    (tokens,), (first_tokens, _) = played.sequences, turn_tokens(played)
    start = first_tokens.start
    forced = [place for place in range(start, first_tokens.end) if not tokens.sampled_mask[place]]
    assert chat.decode([tokens.token_ids[place] for place in forced]) == CLOSED
    assert [tokens.sampler_logp[place] for place in forced] == [0.0] * len(forced)
    assert forced[0] == start + 12


def test_a_model_that_does_not_think_may_write_its_message_at_once(chat: ChatFormat, problem: Problem) -> None:
    """With a budget of 3 tokens, the message goes on in the second request, up to the message's own limit."""
    whole = [text.partition(CLOSED)[2] for text in turns_of(problem)]
    parts = [[text, chat.decode(chat.encode(text)[3:])] for text in whole]
    played, asked = play(chat, problem, [*parts[0], *parts[1]], max_thinking_tokens_per_turn=3)
    assert (played.outcome, [turn.text for turn in played.turns]) == ("success", whole)
    assert [request.max_new_tokens for request in asked] == [3, 37] * 2 and asked[1].token_ids == []
    assert all("thought" not in row for row in played.to_row()["turns"])


def test_a_thought_that_fills_the_episode_ends_it(chat: ChatFormat, problem: Problem) -> None:
    prompt = len(chat.prompt_ids(problem.requests[0], []))
    for room in (12, 12 + len(chat.thought_closing_ids)):
        played, asked = play(chat, problem, ["<think>\n" + "go on " * 20], max_tokens_per_episode=prompt + room)
        assert (played.outcome, played.limit, len(asked)) == ("overlong", "max_tokens_per_episode", 1)
        assert (played.turns[0].text, played.turns[0].thought_was_cut) == ("", False)
    room = len(chat.encode("<think>\ngo on\n</think>"))
    played, asked = play(chat, problem, turns_of(problem), max_tokens_per_episode=prompt + room)
    assert (played.outcome, played.turns[0].thought, len(asked)) == ("overlong", "go on", 1)


def test_a_call_within_a_thought_is_not_made(chat: ChatFormat, problem: Problem) -> None:
    call, _ = turns_of(problem)
    planned = f"<think>\n{call.partition(CLOSED)[2]}{CLOSED}Done."
    played, _ = play(chat, problem, [planned], max_thinking_tokens_per_turn=60)
    assert (played.num_calls, played.turns[0].text, played.outcome) == (0, "Done.", "failure")
    assert "cancel_booking" in str(played.turns[0].thought)


def test_a_turn_that_ends_within_its_thought_is_no_answer(chat: ChatFormat, problem: Problem) -> None:
    """Its end is answered as a malformed call, with a budget of its own and without; the agent goes on."""
    for budget in (12, None):
        played, _ = play(chat, problem, ["<think>\ngo on", *turns_of(problem)], max_thinking_tokens_per_turn=budget)
        first = played.turns[0]
        assert (first.text, first.thought, first.stop_reason) == ("", "go on", "end_of_turn")
        assert (len(first.replies), played.num_invalid_calls, played.outcome) == (1, 1, "success")
        assert first.num_thought_tokens == len(chat.encode("<think>\ngo on"))
    assert not chat.is_within_thought(chat.encode(f"<think>\ngo on{CLOSED}"))


def test_a_stop_string_within_a_thought_ends_the_turn_there_and_is_no_answer(
    chat: ChatFormat, problem: Problem
) -> None:
    """As where the turn ends within it: what was planned is no message, and the agent is told and goes on."""
    stopped, rest = "<think>\ngo on", turns_of(problem, thoughts=("answer", "answer"))
    for budget in (12, None):
        played, asked = play(
            chat, problem, [f"{stopped} answer", *rest], stop="go on", max_thinking_tokens_per_turn=budget
        )
        first = played.turns[0]
        assert (first.text, first.thought, first.stop_reason) == ("", "go on", "stop_string")
        assert (first.num_thought_tokens, first.thought_was_cut) == (len(chat.encode(stopped)), False)
        assert (len(first.replies), played.num_invalid_calls, played.outcome) == (1, 1, "success")
        assert len(asked) == (5 if budget else 3)


def test_a_second_end_of_a_thought_is_of_the_message_and_a_second_thought_is_counted(
    chat: ChatFormat, problem: Problem
) -> None:
    played, _ = play(chat, problem, ["<think>\ngo on\n</think>\n\nanswer</think>go"])
    (turn,) = played.turns
    assert (turn.thought, turn.text) == ("go on", "answer</think>go")
    assert turn.num_thought_tokens == len(chat.encode("<think>\ngo on\n</think>"))
    twice = f"<think>\ngo on{CLOSED}<think>\nanswer\n</think>"
    (turn,) = play(chat, problem, [f"{twice}\n\nDone."])[0].turns
    assert (turn.text, turn.num_thought_tokens) == ("Done.", len(chat.encode(twice)))


def test_a_message_without_a_thought_may_not_exceed_its_own_limit(chat: ChatFormat, problem: Problem) -> None:
    """Eight letters and the end, in a first request of up to 12 tokens; a message has 4."""
    text = "go on go"
    assert len(chat.encode(text)) == 8
    limits: dict[str, Any] = {"max_tokens_per_turn": 4, "max_turns": 1}
    played, _ = play(chat, problem, [text], **limits)
    assert (played.turns[0].stop_reason, played.outcome) == ("max_tokens_per_turn", "max_turns")


def test_thoughts_are_counted_apart(chat: ChatFormat, problem: Problem) -> None:
    """Thoughts of 12 (cut) and 5 tokens in one episode, none in another: 8.5 a trajectory, half of them cut."""
    call, answer = turns_of(problem)
    cut, _ = play(chat, problem, ["<think>\n" + "go on " * 20, call.partition(CLOSED)[2], answer])
    plain, _ = play(chat, problem, [text.partition(CLOSED)[2] for text in (call, answer)])
    number = cut.num_thought_tokens
    assert number == 12 + cut.turns[1].num_thought_tokens
    assert thinking_metrics([cut, plain]) == {"mean_thinking_tokens": number / 2, "cut_thought_share": 0.5}
    assert thinking_metrics([plain]) == {}
    assert summarise([cut], confidence=0.9).get("mean_thinking_tokens") == number
    assert "mean_thinking_tokens" not in summarise([plain], confidence=0.9)
    read = Trajectory.from_row(cut.to_row())
    assert read == cut
    shown = shown_episode(cut, line=1)["turns"]
    assert [turn["thought"]["was_cut"] for turn in shown] == [True, False]
    assert shown[1]["thought"]["text"] == "answer" and "answer" in list(texts_of(cut))
    assert "thought" not in shown_episode(plain, line=1)["turns"][0]


def test_a_budget_is_refused_where_thoughts_cannot_be_told_apart(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"knows no thoughts.*max_thinking_tokens_per_turn"):
        load_checked_chat(folder, TravelDesk(), [], SAMPLING.model_copy(update={"max_tokens_per_episode": 200}))
    words = tiny.tokenizer()
    words.chat_template = tiny.tokenizer(tiny.THINKING).chat_template
    several = ChatFormat(words, source="test")
    assert several.end_of_thought is None
    with pytest.raises(ValueError, match=r"'</think>' is several tokens.*max_tokens_per_turn"):
        refuse_thinking_budget(several, SAMPLING)
    refuse_thinking_budget(several, tiny.SAMPLING)


def test_switched_off_the_model_is_asked_for_its_message_alone(problem: Problem) -> None:
    words = tiny.tokenizer(tiny.THINKING)
    state_template(words, PLAIN_TEMPLATE.model_copy(update={"enable_thinking": False}))
    chat = ChatFormat(words, source="test")
    texts = [text.partition(CLOSED)[2] for text in turns_of(problem)]
    played, _ = play(chat, problem, texts)
    assert played.outcome == "success"
    assert chat.decode(played.sequences[0].token_ids).count("<think>\n\n</think>\n\n") == 2
    assert [turn.thought for turn in played.turns] == [None, None]
