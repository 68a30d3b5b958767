"""Memory by part, in numbers that add up by hand, and the settings with which a model fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.machine import GIB
from tasks.learning.shared.settings import StreamingSettings
from tasks.planning import memory, nearest
from tasks.planning.hardware import GPUS, amount, find_gpu, named_gpu
from tasks.planning.memory import plan_memory
from tasks.planning.nearest import arithmetic, check_size, describe, fits, nearest_that_fits
from tasks.planning.plays import Play
from tasks.planning.setup import Setup
from tests.planning.setups import setup
from tests.profiles import profile_params

COUNT = 494_032_768


def parts(wanted: Setup) -> dict[str, tuple[float, float]]:
    return {part.name: (part.rollout, part.update) for part in plan_memory(wanted).parts}


def test_full_training_in_float32_mirrors_the_weights_four_times() -> None:
    found = parts(setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None))
    assert found["weights"] == found["reference"] == (4 * COUNT, 4 * COUNT)
    assert found["gradients"] == (0, 4 * COUNT)
    assert found["optimizer"] == (8 * COUNT, 8 * COUNT)


def test_bfloat16_weights_have_float32_masters_and_the_frozen_reference_half_the_bytes() -> None:
    half = {"compute__weights": "bfloat16", "compute__frozen": "bfloat16"}
    found = parts(setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None, **half))
    assert found["weights"] == found["reference"] == (2 * COUNT, 2 * COUNT)
    assert found["optimizer"] == (12 * COUNT, 12 * COUNT)
    assert found["gradients"] == (0, 4 * COUNT)  # they are added up in float32


def test_an_offloaded_optimizer_is_on_the_device_for_the_update_alone() -> None:
    wanted = setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None, compute__offload="optimizer")
    assert parts(wanted)["optimizer"] == (0, 8 * COUNT)
    assert plan_memory(wanted).host == 8 * COUNT + 16 * COUNT  # and the copy that becomes a checkpoint


def test_under_lora_the_base_is_frozen_and_only_the_adapter_is_mirrored() -> None:
    wanted = setup("Qwen2.5-0.5B", "h100-80gb", compute__frozen="bfloat16")
    lora = wanted.settings.train.lora
    assert lora is not None
    adapter = wanted.shape.adapter_parameters(lora)
    found = parts(wanted)
    assert found["weights"] == (2 * COUNT, 2 * COUNT)
    assert found["optimizer"] == (8 * adapter, 8 * adapter)


def test_a_warm_start_trains_all_weights_under_lora_too_without_a_reference_and_an_engine() -> None:
    own: dict[str, Any] = {"warm_start__micro_batch_tokens": 8192, "warm_start__gradient_checkpointing": True}
    under_lora = setup("Qwen2.5-0.5B", "h100-80gb", **own)
    alike: dict[str, Any] = {
        "train__micro_batch_tokens": 8192,
        "train__gradient_checkpointing": True,
        "train__kl_weight": 0.0,
    }
    whole = plan_memory(setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None, **alike))
    assert memory.warm_start_memory(under_lora).peak == whole.phases["updating"]
    assert memory.warm_start_memory(setup("Qwen2.5-0.5B", "h100-80gb")).peak != whole.phases["updating"]


def test_on_a_cpu_a_warm_start_goes_on_while_its_checkpoint_is_written() -> None:
    on_gpu = setup("Qwen2.5-0.5B", "h100-80gb", compute__weights="float32")
    on_cpu = replace(on_gpu, machine=replace(on_gpu.machine, is_gpu=False))
    found = {part.name: part.update for part in memory.warm_start_memory(on_cpu).parts}
    assert found["checkpoint"] == 12 * COUNT  # the weights and two averages
    assert "checkpoint" not in {part.name for part in memory.warm_start_memory(on_gpu).parts}


def test_a_checkpoint_is_written_during_an_update_where_the_engine_plays_ahead() -> None:
    def checkpoint(**changed: Any) -> tuple[float, float]:
        wanted = setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None, train__kl_weight=0.0, **changed)
        return parts(replace(wanted, machine=replace(wanted.machine, is_gpu=False)))["checkpoint"]

    assert checkpoint() == (12 * COUNT, 0)
    assert checkpoint(train__max_staleness=1) == (12 * COUNT, 12 * COUNT)


def test_under_lora_the_base_of_a_sleeping_vllm_is_in_host_memory() -> None:
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb")
    host = {part.name: part.host for part in plan_memory(wanted).parts}
    assert host["engine's weights"] == 2 * 7_615_616_512
    full = setup("Qwen2.5-1.5B", "a100-80gb", profile="qwen2.5_1.5b_full_80gb")
    assert {part.name: part.host for part in plan_memory(full).parts}["engine's weights"] == 0


def test_keys_and_values_are_of_the_episodes_at_once() -> None:
    # 2 × 24 layers × 2 heads × 64 numbers a token, 4 bytes; 32 episodes at most, and one for padding.
    found = parts(setup("Qwen2.5-0.5B", "h100-80gb"))
    assert found["keys and values"] == (33 * 4096 * 2 * 24 * 2 * 64 * 4, 0)


@pytest.mark.parametrize(("gpu", "is_enough"), [("a100-80gb", True), ("a100-40gb", True), ("4090-24gb", False)])
def test_seven_billion_with_lora_is_told_for_80_40_and_24_gb(gpu: str, is_enough: bool) -> None:
    wanted = setup("Qwen2.5-7B", gpu, compute__frozen="bfloat16")
    assert fits(wanted) == is_enough
    changes = nearest_that_fits(wanted)
    assert changes is not None
    assert bool(changes) != is_enough
    assert all(key.startswith(("engine.", "train.")) for key, _ in changes)


def test_the_nearest_settings_fit_and_none_of_them_is_needless() -> None:
    wanted = setup("Qwen2.5-7B", "a100-80gb", train__lora=None, train__gradient_checkpointing=False)
    changes = nearest_that_fits(wanted)
    assert changes
    assert fits(nearest._changed(wanted, changes))
    assert not any(fits(nearest._changed(wanted, [item for item in changes if item is not one])) for one in changes)
    assert "train.gradient_checkpointing: true" in describe(changes)


def test_settings_that_would_be_refused_are_not_among_the_nearest() -> None:
    """With half of a reference there is no LoRA, with which 7 billion weights would fit 40 GB."""
    whole = setup("Qwen2.5-7B", "a100-40gb", train__lora=None)
    assert "train.lora" in dict(nearest_that_fits(whole) or [])
    assert nearest_that_fits(replace(whole, settings=whole.settings.changed("train.reference_mix", 0.5))) is None


def test_several_trainers_of_an_adapter_keep_its_base_as_wide_as_it_is() -> None:
    """Where the base may stay float32, bfloat16 adapters would be refused beside it (`refuse_cut`)."""
    one = setup("Qwen2.5-7B", "h200-141gb")
    launch = one.settings.launch.model_copy(update={"launcher": "external", "num_trainers": 2})
    two = replace(one, settings=one.settings.model_copy(update={"launch": launch}))
    half = ("compute.weights", "bfloat16")
    assert nearest._is_accepted(one, [half])
    assert not nearest._is_accepted(two, [half])
    assert nearest._is_accepted(two, [("compute.frozen", "bfloat16"), half])


def evaluated(wanted: Setup, *plays: Play) -> dict[str, float]:
    return {part.name: part.evaluate for part in plan_memory(replace(wanted, plays=plays)).parts if part.evaluate}


def test_evaluate_plays_as_many_as_the_engine_takes_at_once_whatever_a_batch_has() -> None:
    """A batch of 16 episodes, 256 places, 200 problems × 2: 2 × 28 layers × 4 heads × 128 numbers a token, 4 bytes."""
    batch: dict[str, Any] = {
        "train__problems_per_iteration": 4,
        "train__group_size": 4,
        "engine__max_concurrent_episodes": 256,
    }
    wanted = setup("Qwen2.5-7B", "a100-40gb", compute__frozen="bfloat16", **batch)
    few, many = (evaluated(wanted, Play("evaluate", 30), Play("evaluate", problems, 2)) for problems in (10, 200))
    a_token = 2 * 28 * 4 * 128 * 4
    assert many["keys and values"] == (256 + 1) * 4096 * a_token
    assert few["keys and values"] == (32 + 1) * 4096 * a_token  # 30 episodes, in slots that double
    # An adapter is merged into a model in compute.weights, and nothing of a trainer is there.
    assert many["weights"] == 4 * 7_615_616_512
    assert set(many) == {"process", "weights", "activations", "logits", "keys and values"}
    assert fits(wanted) and not fits(replace(wanted, plays=(Play("evaluate", 200, 2),)))
    assert arithmetic(plan_memory(replace(wanted, plays=(Play("evaluate", 200, 2),)))).endswith("while evaluating")


def test_of_several_plays_the_one_counts_that_takes_the_most() -> None:
    wanted = setup("Qwen2.5-0.5B", "h100-80gb")
    a_token = 2 * 24 * 2 * 64 * 4
    assert (
        evaluated(wanted, Play("evaluate", 32), Play("evaluate", 8, 1, 20_000))["keys and values"]
        == 9 * 20_000 * a_token
    )
    assert (
        evaluated(wanted, Play("evaluate", 32), Play("evaluate", 8, 1, 10_000))["keys and values"]
        == 33 * 4096 * a_token
    )


def test_the_pool_of_vllm_is_the_same_in_evaluation_and_the_model_beside_it_has_16_bits() -> None:
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb", compute__weights="float32")
    found, playing = evaluated(wanted, Play("evaluate", 500, 2)), parts(wanted)
    for name in ("engine's weights", "engine's workspace", "keys and values"):
        assert found[name] == playing[name][0]
    assert found["weights"] == 2 * 7_615_616_512
    in_float32 = replace(wanted, shape=replace(wanted.shape, stored="float32"))
    assert evaluated(in_float32, Play("evaluate", 500, 2))["weights"] == 4 * 7_615_616_512


def test_one_process_evaluates_the_whole_model_however_many_trained_it() -> None:
    one = setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None)
    launch = one.settings.launch.model_copy(update={"launcher": "external", "num_trainers": 4})
    four = replace(one, settings=one.settings.model_copy(update={"launch": launch}))
    assert evaluated(four, Play("evaluate", 40)) == evaluated(one, Play("evaluate", 40))


def test_episodes_that_are_evaluated_at_once_are_the_first_to_be_fewer() -> None:
    batch: dict[str, Any] = {
        "train__problems_per_iteration": 4,
        "train__group_size": 4,
        "engine__max_concurrent_episodes": 256,
    }
    wanted = setup("Qwen2.5-7B", "a100-80gb", compute__frozen="bfloat16", **batch)
    changes = nearest_that_fits(replace(wanted, plays=(Play("evaluate", 200, 2),)))
    assert changes == [("engine.max_concurrent_episodes", 64)]


def test_of_a_setting_with_several_steps_the_least_that_is_needed_is_told() -> None:
    """On 25 GB 16 episodes at once fit beside 16-bit weights, and none beside 30 GB."""
    wanted = replace(setup("Qwen2.5-7B", "4090-24gb", compute__frozen="bfloat16"), plays=(Play("evaluate", 100),))
    changes = dict(nearest_that_fits(wanted) or [])
    assert changes == {"engine.max_concurrent_episodes": 16, "compute.weights": "bfloat16"}


def test_groups_that_stream_are_all_under_way() -> None:
    streaming = StreamingSettings(groups_under_way=12, batch_deadline_seconds=None, least_batch_share=0.5)
    sizes: dict[str, Any] = {
        "train__problems_per_iteration": 8,
        "train__group_size": 4,
        "engine__max_concurrent_episodes": 256,
    }
    assert setup("Qwen2.5-0.5B", "h100-80gb", **sizes).at_once == 8 * 4
    assert setup("Qwen2.5-0.5B", "h100-80gb", **sizes, train__streaming=streaming).at_once == 12 * 4


def slots_of_the_engine(*, episodes: int, most: int) -> tuple[int, int]:
    """And the positions of each, where the longest of so many episodes needs 4,096."""
    from tasks.engines.transformers.ragged_cache import RaggedCache
    from tasks.engines.transformers.rows import Rows
    from tasks.rollouts.engine import TurnRequest

    rows = Rows(RaggedCache(1, 0, 0), max_positions=(most + 1) * 4096, max_context=4096)
    for number in range(episodes):
        request = TurnRequest(number, [1] * 96, 4000 if number == 3 else 100, seed=0)
        rows.open(request).begin_turn(request, frozenset())
        rows.make_room()
    return rows.cache.num_slots, rows.cache.capacity


def test_slots_of_the_engine_double_up_to_all_that_it_may_have() -> None:
    def slots(**changed: Any) -> float:
        wanted = setup("Qwen2.5-0.5B", "h100-80gb", train__problems_per_iteration=12, train__group_size=8, **changed)
        return parts(wanted)["keys and values"][0] / (4096 * 2 * 24 * 2 * 64 * 4)

    for most, wanted in ((256, 128), (100, 100)):  # of 96 episodes
        assert slots(engine__max_concurrent_episodes=most) == wanted + 1
        assert slots_of_the_engine(episodes=96, most=most) == (wanted, 4096)


def test_what_no_setting_makes_fit_has_no_nearest() -> None:
    tiny = replace(GPUS["4090-24gb"], memory=1e9)
    assert nearest_that_fits(replace(setup("Qwen2.5-7B", "4090-24gb"), machine=tiny)) is None


def test_a_run_far_beyond_the_devices_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = profile_params("my_model")
    params["compute"] |= {"device": "cpu", "frozen": "float32"}
    monkeypatch.setattr("tasks.planning.hardware.available_memory", lambda: 40e9)
    check_size(params)  # the shape of models/NAME is not known, so nothing is said
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    with pytest.raises(ValueError, match=r"30 GB weights .* = \d+ GB .* It fits with compute.frozen: bfloat16"):
        check_size(params)
    params["compute"]["frozen"] = "bfloat16"
    params["train"]["micro_batch_tokens"] = 4096
    check_size(params)  # not by so much that it could not be tried


def test_a_run_whose_evaluation_does_not_fit_is_refused_once_its_problems_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are curated nobody knows how many are played at once."""
    params: dict[str, Any] = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    params["paths"]["artifacts"] = str(tmp_path)
    params["engine"]["max_concurrent_episodes"] = 256
    params["compute"]["weights"] = "float32"
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["a100-80gb"])
    check_size(params)
    (tmp_path / "curate").mkdir()
    for count in (20, 300):
        for name in ("select", "test"):
            (tmp_path / "curate" / f"{name}.jsonl").write_text("{}\n" * count, encoding="utf-8")
        params["assess"] |= {"max_episodes": count, "num_problems": count}
        if count == 20:
            check_size(params)
    with pytest.raises(ValueError, match=r"while evaluating\. It fits with engine\.max_concurrent_episodes: 64"):
        check_size(params)


def test_a_warm_start_that_does_not_fit_is_refused_before_the_base_model_is_assessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params: dict[str, Any] = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["a100-80gb"])
    check_size(params)
    params["assess"]["warm_start_below"] = 0.1
    with pytest.raises(ValueError, match=r"warm start .* a100-80gb .*15 GB weights.*assess.warm_start_below: 0\.0"):
        check_size(params)


def test_a_warm_start_that_fits_with_checkpointing_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 1.5 billion weights of Qwen 2.5 all but the activations, 20 GB of 34, fit 40 GB."""
    params: dict[str, Any] = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-1.5B-Instruct"
    params["assess"]["warm_start_below"] = 0.1
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["a100-40gb"])
    with pytest.raises(ValueError, match=r"warm start .*\. Set warm_start\.gradient_checkpointing: true\.$"):
        check_size(params)
    params["warm_start"]["gradient_checkpointing"] = True
    check_size(params)


def test_of_several_trainers_what_each_loads_or_what_rank_0_has_can_be_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7.6 billion weights in float32 are 30.5 GB: rank 0 has the model, its reference and the engine's copy, 91.4 GB.
    On processors of one machine two ranks have twice the first two, 152.3 GB.
    """
    params: dict[str, Any] = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    params["train"]["lora"] = None
    params["compute"] |= {"weights": "float32", "frozen": "float32"}
    params["launch"] |= {"launcher": "torchrun", "num_trainers": 2}
    card = GPUS["a100-80gb"]
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: replace(card, memory=92e9))
    with pytest.raises(ValueError, match=r"30 GB rank 0's whole policy .*15 GB weights .* = 131 GB while updating"):
        check_size(params)
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: replace(card, memory=140e9))
    check_size(params)
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: replace(card, memory=91e9))
    with pytest.raises(ValueError, match=r"2 trainers load 91 GB before each keeps its part\. Set compute\.weights"):
        check_size(params)
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: replace(card, memory=120e9, is_gpu=False))
    with pytest.raises(ValueError, match="2 trainers load 152 GB"):
        check_size(params)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_tenth_too_much_is_refused_on_a_gpu_and_may_be_tried_on_a_cpu(
    is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, Any] = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    machine = replace(GPUS["4090-24gb"], is_gpu=is_gpu)
    peak = plan_memory(replace(setup("Qwen2.5-7B", "4090-24gb", compute__frozen="bfloat16"), machine=machine)).peak
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: replace(machine, memory=peak / 1.1))
    if not is_gpu:
        check_size(params)
        return
    with pytest.raises(ValueError, match="does not fit"):
        check_size(params)


def test_the_arithmetic_is_one_line_with_the_largest_first() -> None:
    told = arithmetic(plan_memory(setup("Qwen2.5-7B", "a100-40gb")))
    assert told.startswith("30 GB weights + 16 GB keys and values")
    assert "\n" not in told
    # 30 GB + 16 GB + 2.1 GB + 1.6 GB, and adapter, its averages, its reference and one row of logits
    assert "685 MB other parts = 50 GB" in told


def test_a_gpu_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="h100-80gb"):
        find_gpu("h9000")
    with pytest.raises(ValueError, match="Did you mean a100-80gb"):
        find_gpu("A100")


def test_a_card_is_found_by_the_words_of_its_name_and_its_memory() -> None:
    assert named_gpu("NVIDIA A100-SXM4-40GB", 39 * GIB).rate == GPUS["a100-40gb"].rate
    assert named_gpu("NVIDIA H100 80GB HBM3", 79 * GIB).bandwidth == GPUS["h100-80gb"].bandwidth
    for name in ("NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA T4"):
        assert not named_gpu(name, 16 * GIB).rate
    assert find_gpu("24gb").memory == pytest.approx(0.98 * 24 * GIB)


def test_amounts_are_told_as_people_do() -> None:
    assert [amount(value) for value in (1600, 1_640_000, 23.4e9, 4.2e15)] == [
        "1.6 KB", "1.6 MB", "23 GB", "4,200.0 TB"
    ]  # fmt: skip


def test_the_sizes_of_forwards_are_those_of_the_engine() -> None:
    from tasks.engines.transformers import memory as engine

    assert {False: engine.FORWARD_BYTES["cpu"], True: engine.FORWARD_BYTES["cuda"]} == memory.FORWARD_BYTES
    assert (engine.HIDDEN_COPIES, engine.MLP_COPIES) == (memory.FED_HIDDEN, memory.FED_INNER)


def test_the_sizes_of_a_chunk_of_logits_are_those_of_the_trainer() -> None:
    from tasks.learning.shared import chunked_head

    assert {False: chunked_head.LOGIT_BYTES["cpu"], True: chunked_head.LOGIT_BYTES["cuda"]} == memory.LOGIT_BYTES


def test_on_a_cpu_a_checkpoint_is_still_being_written_while_the_next_episodes_are_played() -> None:
    wanted = setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None)
    on_cpu = replace(wanted, machine=replace(wanted.machine, is_gpu=False))
    assert parts(on_cpu)["checkpoint"] == (16 * COUNT, 0)  # weights, reference and two averages


def test_an_engine_that_plays_ahead_is_awake_in_the_update_and_has_copies_of_what_is_trained() -> None:
    sleeping = parts(setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None))
    ahead = setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None, train__max_staleness=1)
    assert "copies to play with" not in sleeping
    assert parts(ahead)["copies to play with"] == (4 * COUNT, 4 * COUNT)
    assert sleeping["keys and values"][1] == 0
    assert parts(ahead)["keys and values"] == (sleeping["keys and values"][0],) * 2
    assert plan_memory(ahead).host == 4 * COUNT + 16 * COUNT  # the copy that waits, and the checkpoint


def test_an_adapter_beside_bfloat16_weights_has_masters_as_those_have() -> None:
    wanted = setup("Qwen2.5-0.5B", "h100-80gb", compute__weights="bfloat16")
    lora = wanted.settings.train.lora
    assert lora is not None
    adapter = wanted.shape.adapter_parameters(lora)
    assert parts(wanted)["adapter"] == parts(wanted)["reference"] == (2 * adapter, 2 * adapter)
    assert parts(wanted)["optimizer"] == (12 * adapter, 12 * adapter)
    assert memory.snapshot_bytes(wanted) == 2 * adapter


def test_a_snapshot_has_the_dtype_of_the_published_files_whatever_is_trained() -> None:
    assert memory.snapshot_bytes(setup("Qwen2.5-0.5B", "h100-80gb", train__lora=None)) == 2 * COUNT


def test_with_checkpointing_another_layer_costs_its_input_alone() -> None:
    def updating(num_layers: int) -> float:
        wanted = setup("Qwen2.5-0.5B", "h100-80gb", train__gradient_checkpointing=True)
        there = replace(wanted, shape=replace(wanted.shape, num_layers=num_layers))
        return parts(there)["activations"][1]

    assert updating(24) - updating(23) == 4 * 8192 * 896  # micro-batches of 8,192 positions


def test_a_cpu_keeps_free_blocks_up_to_what_lets_the_thread_give_them_back() -> None:
    from tasks.models import torch_setup

    wanted = setup("Qwen2.5-0.5B", "h100-80gb")
    on_cpu = replace(wanted, machine=replace(wanted.machine, is_gpu=False))
    assert parts(on_cpu)["free blocks"] == (torch_setup.HEAP_GROWTH,) * 2
    assert "free blocks" not in parts(wanted)


def test_of_vllm_over_two_gpus_each_has_half_of_the_weights_and_of_the_heads() -> None:
    """15.2 GB of weights in bfloat16. Half of them and of 8,192 tokens' keys and values are within 0.15 of 80 GB."""
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb")
    settings = wanted.settings.changed("engine.settings.tensor_parallel_size", 2).changed(memory.SHARE, 0.15)
    two = replace(wanted, settings=settings)
    assert parts(two)["engine's weights"][0] == 7_615_616_512
    room = 0.15 * wanted.machine.memory - 7_615_616_512 - memory.ENGINE_WORKSPACE
    assert parts(two)["keys and values"][0] == pytest.approx(room)
    assert memory.cached_tokens(two) == pytest.approx(room / (2 * 28 * 4 * 128 * 2 / 2))
    assert memory.share_fault(two) is None


def test_a_share_that_vllms_weights_and_one_episode_exceed_does_not_fit_and_the_nearest_raises_it() -> None:
    """15.2 GB of weights, 2.1 GB of workspace and 0.9 GB of an episode, of 84.8 GB: 0.216."""
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb")
    assert memory.share_fault(wanted) is None
    small, enough = (replace(wanted, settings=wanted.settings.changed(memory.SHARE, share)) for share in (0.15, 0.22))
    told = memory.share_fault(small)
    assert told is not None and "gpu_memory_utilization is 0.15" in told and "take 0.22 of a100-80gb" in told
    assert plan_memory(small).peak < small.machine.memory and not fits(small)
    assert nearest_that_fits(small) == [(memory.SHARE, 0.22)]
    assert fits(enough)
    # Of 25 GB it would be 0.71, and beside a trainer vLLM may have 0.6.
    assert nearest_that_fits(replace(wanted, machine=GPUS["4090-24gb"])) is None


def test_a_share_that_a_longer_play_beside_training_exceeds_does_not_fit_and_the_play_is_named() -> None:
    """An episode of 32,768 tokens takes 1.9 GB beside 17.3 GB: 0.227 of 84.8 GB, where training needs 0.213."""
    wanted = setup("Qwen2.5-7B", "a100-80gb", profile="qwen2.5_7b_lora_80gb")
    short = replace(wanted, settings=wanted.settings.changed(memory.SHARE, 0.22), plays=(Play("evaluate", 64),))
    assert memory.share_fault(short) is None and fits(short)
    also = Play("evaluate.also (long)", 16, 4, 32_768)
    long = replace(short, plays=(*short.plays, also))
    told = memory.share_fault(long)
    assert told is not None and "one episode of evaluate.also (long) take 0.23 of" in told
    assert not fits(long) and nearest_that_fits(long) == [(memory.SHARE, 0.23)]
    both = replace(long, settings=wanted.settings.changed(memory.SHARE, 0.15), plays=short.plays)
    assert "one episode take 0.22" in str(memory.share_fault(both))


def test_a_run_is_refused_where_its_vllm_would_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = profile_params("qwen2.5_7b_lora_80gb")
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["a100-80gb"])
    check_size(params)
    params["engine"]["settings"]["gpu_memory_utilization"] = 0.15
    with pytest.raises(ValueError, match=r"would not start\. It fits with engine\.\S+gpu_memory_utilization: 0\.22"):
        check_size(params)
