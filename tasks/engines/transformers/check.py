"""Check before any episode that the in-process engine computes what the model's own forward does.

Its cache and attention plans are right only if every token attends to all before it. Some configs say that it does not;
the rest shows by playing three short episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.memory import ForwardLimits
from tasks.engines.transformers.shard import EngineShard, Shard
from tasks.engines.transformers.shard_in_c import ShardInC
from tasks.engines.transformers.step_in_c import StepInC, fits
from tasks.models.architecture import check_own_forward, example_ids, own_logp
from tasks.models.limits import check_playable
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest

# Forwards of up to 12 tokens, of which up to 3 join a step. So 12 tokens of either long prompt are read alone and the
# rest in one chunk of both; two replies are read together and a short one with the step.
LIMITS = ForwardLimits(num_bytes=12, per_token=1, in_step=3)
PROMPTS, APPENDS = (18, 17, 3), (6, 5, 2)  # tokens of each episode
WRITTEN = 2  # tokens of a turn
_checked: dict[str, bool] = {}  # architectures that passed in this process, and whether their steps run in C


def check_architecture(model: PreTrainedModel, *, max_tokens: int) -> bool:
    """Whether the model's steps may run in C. ValueError for a model whose episodes of up to `max_tokens` the engine
    would play with another distribution.

    The episodes are played once in a process for each architecture: in C 0.05 s, else about 1 s on a CPU, most of it
    tracing.
    """
    check_playable(model.config, max_tokens=max_tokens)
    architecture = f"{model.device.type} {model.dtype} {model.config.to_json_string()} {model}"
    if architecture not in _checked:
        runs_in_c = fits(model) and _agrees_in_c(model)
        if not runs_in_c:
            _compare(model, in_c=False)
        _checked[architecture] = runs_in_c
    return _checked[architecture]


def _agrees_in_c(model: PreTrainedModel) -> bool:
    """A later transformers may compute a family otherwise: then its own forward plays."""
    try:
        _compare(model, in_c=True)
    except ValueError:
        return False
    return True


def _compare(model: PreTrainedModel, *, in_c: bool) -> None:
    check_own_forward(
        model,
        lambda: _gaps_from_own_forward(model, in_c=in_c),
        who="engine.name: transformers",
        harm="another policy would be played",
        remedy="Set engine.name: vllm.",
    )


def _gaps_from_own_forward(model: PreTrainedModel, *, in_c: bool) -> list[float]:
    shard = _shard(model, in_c=in_c)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    sampled: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]  # place in the text, log-prob
    for turn, lengths in enumerate((PROMPTS, APPENDS)):
        requests: list[TurnRequest | EpisodeHandle] = []
        for episode, length in enumerate(lengths):
            read = example_ids(model.config, length, start=50 * episode + 25 * turn)
            requests.append(TurnRequest(episode, read, WRITTEN, seed=episode))
            texts[episode] += read
        for reply in _replies(shard, requests):
            text = texts[reply.episode]
            sampled[reply.episode] += enumerate(reply.sampler_logp, start=len(text))
            text += reply.token_ids
    return [
        logp - row[place - 1]
        for places, row in zip(sampled, own_logp(model, texts), strict=True)
        for place, logp in places
    ]


def _shard(model: PreTrainedModel, *, in_c: bool) -> Shard:
    max_context = max(PROMPTS) + max(APPENDS) + 2 * WRITTEN
    max_positions = (len(PROMPTS) + 1) * max_context
    if in_c:
        step = StepInC(model, max_context=max_context, temperature=1.0, top_p=1.0)
        return ShardInC(
            step, end_ids=(), stop=None, max_context=max_context, max_positions=max_positions, has_thread=False
        )
    return EngineShard(
        Decoder(model, temperature=1.0, top_p=1.0),
        end_ids=(),
        stop=None,
        max_context=max_context,
        max_episodes=len(PROMPTS),
        max_positions=max_positions,
        limits=LIMITS,
    )


def _replies(shard: Shard, requests: Sequence[TurnRequest | EpisodeHandle]) -> list[TurnReply]:
    replies = shard.start(requests, 0)()
    while len(replies) < len(requests):
        replies += shard.start([], 0)()
    return replies
