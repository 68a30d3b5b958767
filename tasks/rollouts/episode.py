"""One episode as a state machine: prompt, then assistant turns and tool replies until something ends it.

It never waits (`conversation.py`), so any number of episodes interleave. A closing message answers the current request;
after the last request the episode ends. It also ends at a limit (turns: an ordinary failure; tokens: overlong) or with
a fault of the environment. A turn cut at its own token limit, or that ends within its thought, does not end it: it is
answered as a malformed call, or where the problem has no tools taken as what the agent says.

An episode may begin with messages that are given, such as the start of an earlier one. The environment answers them
afresh, so its state is right, and no loss sees them.

Where thoughts have a budget of their own, a turn is two requests: the first ends with the thought, or with the turn
where there is none. A thought that its budget cuts is closed by ids that are given, not sampled, so no loss sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, StopReason, TokenSequence, Turn
from tasks.core.seeds import SeedStream
from tasks.rollouts.conversation import Conversation, EpisodeKey, Waits
from tasks.rollouts.engine import Engine, EpisodeHandle, TurnReply, TurnRequest
from tasks.rollouts.engine_clock import EngineClock
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment, EnvironmentFault

if TYPE_CHECKING:
    from tasks.rollouts.fault_log import FaultLog

TokenBudget = Literal["max_tokens_per_episode", "max_completion_tokens"]
Prompt = Callable[[str], tuple[list[int], SamplingSettings]]  # from the user's first message


class Opening(NamedTuple):
    """What a problem's episodes begin with, beside what the user says: schemas of the tools, budgets, rules."""

    tools: list[dict[str, Any]]
    sampling: SamplingSettings
    rules: str


class EpisodeRun(Conversation):
    """`next_request` is the turn it needs, `advance` takes the reply; `outcome` is set when it has ended. `replies` are
    those it took. All of it is one `sequence`, which is empty until the user has opened it.
    """

    is_replayable = True  # from what the policy wrote: the environment answers that as before
    _unsent: list[int]  # what the engine has not been given yet

    def __init__(
        self,
        key: EpisodeKey,
        handle: EpisodeHandle,
        *,
        environment: Environment,
        chat: ChatFormat,
        prompt: Prompt,
        tools: list[dict[str, Any]],
        sampling: SamplingSettings,
        seed: int,
        stage: str,
        attempt: int = 0,
    ):
        super().__init__(key, environment=environment, seed=seed, stage=stage, attempt=attempt)
        self.handle, self.chat, self.tools, self.sampling = handle, chat, tools, sampling
        self.seeds = SeedStream(seed, stage, key.draw, key.problem.id, key.sample_index)
        self._budget = sampling.max_thinking_tokens_per_turn if chat.thinking else None
        self._unsent = []
        self.sequence = TokenSequence()
        self.replies: list[TurnReply] = []
        self._begin_turn()
        self._steps = self._open(prompt)
        self.resume()

    def _open(self, prompt: Prompt) -> Waits:
        """A prompt that leaves no room is refused before a run; only a simulated user can still write one."""
        yield from self._hear_opening()
        prompt_ids, self.sampling = prompt(self.request)
        self.token_limit = self.sampling.token_limit(len(prompt_ids))
        if len(prompt_ids) >= self.token_limit:
            raise EnvironmentFault("its first message leaves no room for the agent", tool="user")
        self.sequences.append(self.sequence)
        self._append(prompt_ids)
        for message in self.key.prefix:
            if self.outcome is not None or not self._has_room_after(message):
                break
            yield from self._replay(message)
        self.num_calls = self.num_invalid_calls = 0  # of given messages

    def _has_room_after(self, message: Sequence[int]) -> bool:
        """Whether a turn of the policy's own can follow. The reply to the message is not known yet, and may be long."""
        fits = len(self.sequence.token_ids) + len(message) < self.token_limit
        return fits and len(self.turns) + 1 < self.sampling.max_turns

    def _replay(self, message: Sequence[int]) -> Waits:
        self.num_replayed_turns += 1
        self._written += message
        self._append(self._written)
        given = TurnReply(self.handle, self._written, [0.0] * len(message), "end_of_turn", [0] * len(message))
        yield from self._take_turn(given)

    def next_request(self) -> TurnRequest:
        """The second request of a turn has a stream of its own; the first has the one it always had."""
        room, is_first = self.token_limit - len(self.sequence.token_ids), not self._written
        seed = self.seeds.seed(len(self.turns), *([] if is_first else [1]))
        if is_first and self._budget is not None:
            assert self.chat.end_of_thought is not None
            return TurnRequest(self.handle, self._unsent, min(self._budget, room), seed, (self.chat.end_of_thought,))
        left = self.sampling.max_tokens_per_turn - self._num_message_tokens
        return TurnRequest(self.handle, self._unsent, min(left, room), seed)

    def advance(self, reply: TurnReply) -> None:
        is_thought = not self._written and self._budget is not None
        self.replies.append(reply)
        self._unsent = []
        self._written += reply.token_ids
        self.sequence.append_sampled(reply.token_ids, reply.sampler_logp, reply.token_versions)
        if is_thought and self._goes_on_after(reply):
            return
        self._num_message_tokens += 0 if is_thought else len(reply.token_ids)
        self._steps = self._take_turn(reply)
        self.resume()

    def begin_anew(self) -> None:
        """With the next request: an engine that has nothing of the episode is given all of it."""
        self._unsent = list(self.sequence.token_ids)

    def _goes_on_after(self, reply: TurnReply) -> bool:
        """Whether a turn's first request is followed by a second. One that wrote no thought has begun the message."""
        num_tokens = len(reply.token_ids)
        thinks = self.chat.read_turn(self._written).thought is not None
        self._num_message_tokens = 0 if thinks else num_tokens
        is_closed = reply.token_ids[-1] == self.chat.end_of_thought
        if is_closed or not thinks:
            is_cut = reply.finish == "length" and num_tokens == self._budget
            has_room = len(self.sequence.token_ids) < self.token_limit
            return (is_closed or is_cut) and has_room and self._num_message_tokens < self.sampling.max_tokens_per_turn
        return num_tokens == self._budget and reply.finish == "length" and self._close_thought()

    def _close_thought(self) -> bool:
        """Give the ids that close a thought cut by its budget, unless no token would fit after them."""
        closing = self.chat.thought_closing_ids
        assert self.chat.end_of_thought is not None
        if len(self.sequence.token_ids) + len(closing) >= self.token_limit:
            return False
        self._num_closing = closing.index(self.chat.end_of_thought) + 1
        self._written += closing
        self._append(closing)
        return True

    def _take_turn(self, reply: TurnReply) -> Waits:
        turn = self._read_turn(reply)
        self.turns.append(turn)
        is_ended = reply.token_ids[-1] in self.chat.end_ids
        is_cut = turn.stop_reason == "max_tokens_per_turn" or self.chat.is_within_thought(self._written_without_end)
        self._begin_turn()
        calls = self.chat.calls(turn.text, self.tools) if self.tools else []
        if turn.stop_reason == self._token_budget:
            yield from self._end(None, "overlong", self._token_budget)
            return
        if is_cut and self.tools:
            calls = calls or [None]
        if calls:
            yield from self._answer(turn, calls)
            closing = [] if is_ended else [self.chat.end_of_calls]
            self._append([*closing, *self.chat.reply_ids(tuple(turn.replies))])
        else:
            turn.message = self.chat.call_format.answer(turn.text)
            yield from self._hear_answer(turn, turn.message)
            if turn.follow_up is None:
                yield from self._end(turn.message, "failure", None)
                return
            closing = [] if is_ended else [self.chat.end_of_turn]
            self._append([*closing, *self.chat.request_ids(turn.follow_up)])
        if len(self.turns) == self.sampling.max_turns:
            yield from self._end(None, "max_turns", "max_turns")
        elif len(self.sequence.token_ids) >= self.token_limit:
            yield from self._end(None, "overlong", self._token_budget)

    def _begin_turn(self) -> None:
        """`_written` has the ids of the turn so far, and `_num_closing` counts those given to close a thought."""
        self._written: list[int] = []
        self._num_message_tokens = self._num_closing = 0

    @property
    def _written_without_end(self) -> list[int]:
        return self._written[:-1] if self._written[-1] in self.chat.end_ids else self._written

    @property
    def _token_budget(self) -> TokenBudget:
        """Which of the two limits on an episode's tokens comes first."""
        is_whole = self.token_limit == self.sampling.max_tokens_per_episode
        return "max_tokens_per_episode" if is_whole else "max_completion_tokens"

    def _read_turn(self, reply: TurnReply) -> Turn:
        """A turn cut at its own limit is answered, not the end: a rambling agent can recover, or fail and learn from
        it.
        """
        is_ended = reply.token_ids[-1] in self.chat.end_ids
        written = self.chat.read_turn(self._written_without_end)
        turn = Turn(written.message, policy_version=reply.policy_version)
        if written.thought is not None:
            turn.thought, turn.thought_was_cut = written.thought, self._num_closing > 0
            turn.num_thought_tokens = written.num_thought_tokens - self._num_closing
        beyond = self._num_message_tokens - self.sampling.max_tokens_per_turn
        if beyond > 0:  # written in the first request, whose limit is the thought's
            turn.stop_reason = "max_tokens_per_turn"
        elif not is_ended:
            at_turn_limit = beyond == 0
            cut: StopReason = "max_tokens_per_turn" if at_turn_limit else self._token_budget
            turn.stop_reason = "stop_string" if reply.finish == "stop_string" else cut
        return turn

    def _reword(self, reply: str) -> str:
        return self.chat.call_format.reword(reply)

    def _append(self, token_ids: list[int]) -> None:
        self._unsent = [*self._unsent, *token_ids]
        self.sequence.append_given(token_ids)


class EngineEpisodes:
    """Episodes whose turns an engine writes; an EpisodeKind."""

    def __init__(self, engine: Engine, chat: ChatFormat, sampling: SamplingSettings):
        self.engine, self.chat, self.sampling = engine, chat, sampling
        self.num_opened = self.num_turns = 0
        self.clock = EngineClock(is_beside=engine.has_own_memory)
        self.running: dict[EpisodeHandle, EpisodeRun] = {}
        self.held: dict[EpisodeHandle, list[int]] = {}  # what the engine has of each episode
        self._opening: tuple[Problem, Opening] | None = None
        self._last: tuple[Problem, str, list[int]] | None = None  # the last prompt

    def open(self, key: EpisodeKey, environment: Environment, *, seed: int, stage: str, attempt: int) -> EpisodeRun:
        self.num_opened += 1
        opening = self._open_problem(key.problem, environment)
        run = EpisodeRun(
            key,
            self.num_opened,
            environment=environment,
            chat=self.chat,
            prompt=lambda request: self._prompt(key.problem, request, opening),
            tools=opening.tools,
            sampling=opening.sampling,
            seed=seed,
            stage=stage,
            attempt=attempt,
        )
        self.running[run.handle] = run
        return run

    def submit(self, run: EpisodeRun) -> None:
        """The engine must have the episode's exact ids: else the loss would train on text that was never sampled."""
        request = run.next_request()
        held = self.held.setdefault(run.handle, [])
        held += request.token_ids
        is_whole = held == run.sequence.token_ids
        assert is_whole, f"problem {run.key.problem.id}: the prompt does not extend the conversation"
        self.num_turns += 1
        self.clock.submit(run.handle, len(request.token_ids))
        self.engine.submit(request)

    def poll(self, until: Callable[[], bool]) -> list[EpisodeRun]:
        if not self.num_turns:
            return []
        self.clock.begin_poll(self.num_turns)
        replies = self.engine.poll(until)
        self.clock.end_poll([(reply.episode, len(reply.token_ids)) for reply in replies])
        self.num_turns -= len(replies)
        for reply in replies:
            self.held[reply.episode] += reply.token_ids
            self.running[reply.episode].advance(reply)
        return [self.running[reply.episode] for reply in replies]

    def release(self, run: EpisodeRun) -> None:
        del self.running[run.handle]
        if self.held.pop(run.handle, None) is not None:  # else its user never opened it, and the engine has none of it
            self.engine.release(run.handle)

    def withdraw(self, run: EpisodeRun) -> None:
        """Let the engine forget an episode between its turns, which goes on with its next turn."""
        if self.held.pop(run.handle, None) is not None:
            self.engine.release(run.handle)
        run.begin_anew()

    def lose(self, fault: EnvironmentFault, faults: FaultLog, *, num_left: int) -> None:
        """What the environment loses, the log of faults judges."""

    def counts(self) -> dict[str, float]:
        return self.engine.counts()

    def _open_problem(self, problem: Problem, environment: Environment) -> Opening:
        """Cached as prompts are: for one problem's samples, which follow one another; those of all problems would fill
        the memory.
        """
        if self._opening is None or self._opening[0] is not problem:
            tools = [tool.schema() for tool in environment.tools_for(problem)]
            budgets = self.sampling.within(environment.budgets_for(problem))
            self._opening = problem, Opening(tools, budgets, environment.rules_for(problem))
        return self._opening[1]

    def _prompt(self, problem: Problem, request: str, opening: Opening) -> tuple[list[int], SamplingSettings]:
        """The prompt of the user's first message, and the episode's budgets."""
        if self._last is None or self._last[0] is not problem or self._last[1] != request:
            self._last = problem, request, self.chat.prompt_ids(request, opening.tools, opening.rules)
        return self._last[2], opening.sampling
