"""Whether a run fits its device, with all that it starts there, and the nearest settings that do where it does not.

Changes are tried in one order, from those that cost nothing to those that change what is trained: the share of the
device's memory that vLLM needs to start, frozen weights in bfloat16, gradient checkpointing, smaller forwards, fewer
episodes at once, the optimizer's state off the device, trained weights in bfloat16, LoRA. Each is added to those before
it until the run fits; those that turn out not to be needed are then taken back, the last first. What the settings
refuse beside the others is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tasks.models.settings import LoRASettings
from tasks.planning.hardware import amount
from tasks.planning.memory import SHARE, enough_share, loaded_bytes, plan_memory, share_fault, warm_start_memory
from tasks.planning.parts import Memory
from tasks.planning.setup import Setup, measured_at_once, setup_of

TIGHT = 0.9  # from this share of the device's memory, an estimate is no promise
# Of a processor's memory, beyond which nothing is loaded: other programs may give some back, and pages can be swapped.
FAR_BEYOND = 1.2
SMALLEST_EPISODES = 8
LONGEST = 1 << 22  # tokens of an episode, beyond which nobody looks
ON_ONE_CARD = "One card computes a whole episode, and no setting makes one of this length fit"
FIELDS = {"playing": "rollout", "updating": "update", "saving": "save", "evaluating": "evaluate"}
WITHOUT_WARM_START = "Set assess.warm_start_below: 0.0, which leaves the warm start out."
CHECKPOINTED = ("warm_start.gradient_checkpointing", True)
LOADED_REMEDY = "Set compute.weights (with train.lora: compute.frozen) to bfloat16, or take a smaller model."
LORA = LoRASettings(rank=16, alpha=32, target_modules="all-linear")
Change = tuple[str, Any]  # a key of params.yaml and its value


def fits(setup: Setup) -> bool:
    return plan_memory(setup).peak <= setup.machine.memory and share_fault(setup) is None


def nearest_that_fits(setup: Setup) -> list[Change] | None:
    """The changes to the settings that make it fit, [] where it does; None where none of them does. Of a setting with
    several steps it is the first that is enough beside the others.
    """
    found = next((changes for changes in _steps(setup) if fits(_changed(setup, changes))), None)
    if found is None:
        return None
    for number in reversed(range(len(found))):
        (key, _), before, after = found[number], found[:number], found[number + 1 :]
        weaker = [[], *([change] for change in _changes(setup) if change[0] == key)]
        less = ([*before, *change, *after] for change in weaker)
        found = next(changes for changes in less if _is_accepted(setup, changes) and fits(_changed(setup, changes)))
    return found


def arithmetic(memory: Memory) -> str:
    """The largest phase in one line: `30 GB weights + 15 GB keys and values = 45 GB while playing`."""
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    sizes = [(getattr(part, FIELDS[phase]), part.name) for part in memory.parts]
    told = [f"{amount(size)} {name}" for size, name in sorted(sizes, reverse=True) if size > 0.01 * memory.peak]
    rest = memory.peak - sum(size for size, _ in sizes if size > 0.01 * memory.peak)
    others = [f"{amount(rest)} other parts"] if rest >= 1 else []
    return f"{' + '.join([*told, *others])} = {amount(memory.peak)} while {phase}"


def remedy(setup: Setup) -> str:
    changes = nearest_that_fits(setup)
    if changes is not None:
        return f"It fits with {describe(changes)}."
    *_, most = _steps(setup)
    longest = longest_episode(_changed(setup, most))
    if longest:
        return f"{ON_ONE_CARD}: set sampling.max_tokens_per_episode to {longest} or less, or take a larger device."
    return "No setting makes it fit: take a larger device or a smaller model."


def warm_start_that_fits(setup: Setup, changes: Sequence[Change] = ()) -> list[Change] | None:
    """What makes the warm start fit beside these changes, [] where it does; None where only leaving it out helps."""
    tried: tuple[list[Change], ...] = ([], [CHECKPOINTED])
    memory = setup.machine.memory
    return next((own for own in tried if warm_start_memory(_changed(setup, [*changes, *own])).peak <= memory), None)


def warm_start_remedy(setup: Setup) -> str:
    changes = warm_start_that_fits(setup)
    return WITHOUT_WARM_START if changes is None else f"Set {describe(changes)}."


def longest_episode(setup: Setup) -> int:
    """The most tokens that an episode may have, every other setting as it is but smaller forwards where they are
    longer than it; 0 where not even a short one fits. One rank computes a whole episode, however many there are.
    """
    settings, least, most = setup.settings, 0, LONGEST
    while least < most:
        tokens = (least + most + 1) // 2
        forward = min(settings.train.micro_batch_tokens, tokens)
        changes = [("sampling.max_tokens_per_episode", tokens), ("train.micro_batch_tokens", forward)]
        least, most = (tokens, most) if fits(_changed(setup, changes)) else (least, tokens - 1)
    return least


def describe(changes: list[Change]) -> str:
    """As params.yaml writes them: `compute.offload: optimizer, train.gradient_checkpointing: true`."""
    return ", ".join(f"{key}: {_yaml(value)}" for key, value in changes)


def describe_load(setup: Setup, loaded: float) -> str:
    return f"{setup.settings.launch.num_trainers} trainers load {amount(loaded)} before each keeps its part"


def check_size(params: dict[str, Any]) -> None:
    """ValueError where a run, or the warm start that it may need, does not fit its GPU, or is far beyond a processor's
    memory: it would be killed, or out of memory, minutes or hours later.
    """
    setup = setup_of(params)
    if setup is None:
        return
    machine = setup.machine
    allowed = machine.memory if machine.is_gpu else FAR_BEYOND * machine.memory
    where = f"does not fit {machine.name} with {amount(machine.memory)}"
    if setup.settings.launch.num_trainers > 1 and (loaded := loaded_bytes(setup)) > allowed:
        raise ValueError(f"{setup.shape.name} {where}: {describe_load(setup, loaded)}. {LOADED_REMEDY}")
    if (memory := plan_memory(setup)).peak > allowed:
        raise ValueError(f"{setup.shape.name} {where}: {arithmetic(memory)}. {remedy(setup)}")
    if fault := share_fault(setup):
        raise ValueError(f"{setup.shape.name} {where}: {fault}. {remedy(setup)}")
    if params["assess"]["warm_start_below"] > 0 and (memory := warm_start_memory(setup)).peak > allowed:
        raise ValueError(
            f"a warm start of {setup.shape.name}, which trains all weights, {where}: {arithmetic(memory)}. "
            f"{warm_start_remedy(setup)}"
        )


def _steps(setup: Setup) -> Iterator[list[Change]]:
    """No change, then each added to those before it."""
    tried: list[Change] = []
    yield tried
    for change in _changes(setup):
        more = [item for item in tried if item[0] != change[0]] + [change]
        if _is_accepted(setup, more):
            tried = more
            yield tried


def _is_accepted(setup: Setup, changes: list[Change]) -> bool:
    """Whether params.yaml with these would be: by the settings' own classes, and by several trainers of an adapter
    (`refuse_cut` in stages/train/policy.py).
    """
    settings = _changed(setup, changes).settings
    dtypes = settings.compute.weights, settings.compute.frozen
    if settings.train.lora and settings.launch.num_trainers > 1 and dtypes == ("bfloat16", "float32"):
        return False
    try:
        type(settings).model_validate(settings.model_dump())
    except ValidationError:
        return False
    return True


def _changes(setup: Setup) -> Iterator[Change]:
    settings = setup.settings
    if share_fault(setup):
        yield SHARE, enough_share(setup)
    yield "compute.frozen", "bfloat16"
    yield "train.gradient_checkpointing", True
    longest = settings.sampling.max_tokens_per_episode
    at_once = max(setup.at_once, measured_at_once(setup))
    for size in _halves(settings.train.micro_batch_tokens, longest):
        yield "train.micro_batch_tokens", size
    for number in () if setup.is_vllm else _halves(at_once, SMALLEST_EPISODES):
        yield "engine.max_concurrent_episodes", number
    if setup.machine.is_gpu and settings.launch.num_trainers == 1:
        yield "compute.offload", "optimizer"
    yield "compute.weights", "bfloat16"
    if settings.train.lora is None:
        yield "train.lora", LORA


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _changed(setup: Setup, changes: Sequence[Change]) -> Setup:
    settings = setup.settings
    for key, value in changes:
        settings = settings.changed(key, value)
    return replace(setup, settings=settings)


def _yaml(value: Any) -> str:
    if isinstance(value, LoRASettings):
        return f"{{rank: {value.rank}, alpha: {value.alpha:g}, target_modules: {value.target_modules}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
