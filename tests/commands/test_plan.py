"""The command `plan`: a model, a machine and settings in; memory, time, dollars and where it fits out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tasks.commands.plan.output import count, dollars, print_plan
from tasks.commands.plan.plan import Plan, as_json, make_plan, played_lengths
from tasks.core.console import SafeConsole
from tasks.core.files import write_jsonl
from tasks.core.records import TokenSequence
from tasks.core.settings import Paths
from tests.measurement.synthetic import trajectory
from tests.profiles import profile_params


def test_nothing_need_be_downloaded_to_know_where_seven_billion_with_lora_fit() -> None:
    plan = make_plan(model="Qwen2.5-7B", gpu="a100-80gb", profiles=["my_model"], dollars_per_hour=2.0)
    assert plan.fits_on["a100-80gb"] == "yes"
    # 27 GB of the card's 25: 7.8 GB are keys and values, of 32 episodes at once.
    assert plan.fits_on["4090-24gb"] == "with engine.max_concurrent_episodes: 16"
    assert "episodes at once: 32 of a batch, up to 32 where a model is measured" in plan.head
    row = json.loads(as_json(plan))
    assert row["fits"]
    assert row["memory"]["weights"]["evaluate"] == 2 * 7_615_616_512
    assert row["memory"]["weights"]["update"] == 2 * 7_615_616_512
    assert row["dollars"] == pytest.approx(2.0 * row["seconds"]["total"] / 3600)
    assert row["dollars_most"] == pytest.approx(2.0 * row["seconds"]["total_most"] / 3600)


def test_what_does_not_fit_is_told_with_the_arithmetic_and_the_status_says_so() -> None:
    plan = make_plan(model="Qwen2.5-7B", gpu="4090-24gb", profiles=["my_model"], tokens=(2000, 300, 300))
    output = io.StringIO()
    assert not print_plan(plan, SafeConsole(file=output, width=120))
    told = output.getvalue()
    assert told.startswith("does not fit: 15 GB weights")
    assert "other parts" in told and "dollars" not in told
    assert "2,000 of prompt, 300 sampled, 300 of replies" in told
    assert "LoRA, bfloat16 base, engine transformers" in told
    assert json.loads(as_json(plan))["dollars"] is None


def printed(plan: Plan) -> str:
    output = io.StringIO()
    print_plan(plan, SafeConsole(file=output, width=120))
    return output.getvalue()


def test_a_plan_says_that_it_is_an_estimate_and_for_what() -> None:
    told = printed(make_plan(model="Qwen/Qwen2.5-0.5B", gpu="H100-80GB", profiles=["my_model"]))
    assert told.startswith("fits: ")
    assert "An estimate: no GPU figure was measured" in told
    assert "--tokens PROMPT SAMPLED REPLIES" in told
    assert "Qwen/Qwen2.5-0.5B: no such folder, planned by its name" in told
    assert "one iteration" in told
    assert "warm start" not in told


@pytest.mark.slow
def test_a_plan_for_several_trainers_says_that_it_is_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params = profile_params("my_model")
    params["launch"] |= {"launcher": "torchrun", "num_trainers": 4}
    params["model"]["path"] = "models/Qwen2.5-0.5B-Instruct"
    monkeypatch.setattr("tasks.commands.plan.plan.read_params", lambda: params)
    told = printed(make_plan(gpu="H100-80GB"))
    assert "memory is that of rank 0 of 4, times and dollars are of one" in told


@pytest.mark.slow
def test_a_plan_with_servers_of_its_own_says_how_many_gpus_a_run_takes() -> None:
    """One whose engine is on the trainer's GPU takes one."""
    plan = make_plan(profiles=["bfcl_qwen2.5_7b"], gpu="h100-80gb")
    assert "a run takes 4 GPUs, 1 of them for vLLM's servers" in printed(plan)
    assert "a run takes" not in printed(make_plan(profiles=["qwen2.5_7b_lora_80gb"], gpu="h100-80gb"))


@pytest.mark.slow
def test_a_model_path_where_no_folder_is_is_planned_by_its_name_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    params = profile_params("my_model")
    params["model"]["path"] = "models/Qwen2.5-0.5B-Instruct"
    monkeypatch.setattr("tasks.commands.plan.plan.read_params", lambda: params)
    assert "models/Qwen2.5-0.5B-Instruct: no such folder, planned by its name" in printed(make_plan(gpu="h100-80gb"))


@pytest.mark.slow
def test_what_a_warm_start_would_take_under_lora_is_told_where_there_may_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = profile_params("qwen2.5_7b_lora_80gb")
    params["assess"]["warm_start_below"] = 0.1
    params["warm_start"]["stop"] = {**profile_params("demo")["warm_start"]["stop"], "max_attempts": 3}
    monkeypatch.setattr("tasks.commands.plan.plan.read_params", lambda: params)
    plan = make_plan(gpu="a100-80gb")
    told = printed(plan)
    assert told.startswith("the warm start does not fit") and not plan.does_fit
    assert "warm start would train all weights" in told
    assert "Set assess.warm_start_below: 0.0" in told
    assert plan.fits_on["a100-80gb"] == "without a warm start"
    assert "steps, up to 3 times, if the base model needs them" in told
    assert plan.seconds is not None and plan.seconds.warm_start_most > 2 * plan.seconds.warm_start > 0


def test_of_a_card_whose_speed_is_not_known_memory_alone_is_planned() -> None:
    plan = make_plan(model="Qwen2.5-0.5B", gpu="48GB", profiles=["my_model"])
    assert plan.seconds is None
    assert "unknown for this card" in printed(plan)
    assert json.loads(as_json(plan))["seconds"] is None


@pytest.mark.slow
def test_a_run_whose_vllm_would_not_start_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    params = profile_params("qwen2.5_7b_lora_80gb")
    params["engine"]["settings"]["gpu_memory_utilization"] = 0.15
    monkeypatch.setattr("tasks.commands.plan.plan.read_params", lambda: params)
    plan = make_plan(gpu="a100-80gb")
    assert not plan.does_fit and plan.seconds is None
    told = printed(plan)
    assert told.startswith("does not fit: engine.settings.gpu_memory_utilization is 0.15;")
    assert "would not start" in told and "fits: " not in told
    assert plan.fits_on["a100-80gb"] == "with engine.settings.gpu_memory_utilization: 0.22"
    row = json.loads(as_json(plan))
    assert not row["fits"] and "would not start" in row["share_fault"]


def test_what_is_beyond_nine_tenths_is_tight() -> None:
    plan = make_plan(model="Qwen2.5-1.5B", gpu="l40s-48gb", profiles=["qwen2.5_0.5b_24gb", "bfcl"])
    assert 0.9 < plan.memory.peak / plan.setup.machine.memory <= 1
    assert printed(plan).startswith("tight: ")
    assert plan.fits_on["l40s-48gb"] == "tight"
    assert plan.fits_on["a100-80gb"] == "yes"


def test_of_a_mixture_it_says_how_many_experts_a_token_passes(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    experts = {"moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts), encoding="utf-8")
    plan = make_plan(model=str(tmp_path), gpu="h100-80gb", profiles=["my_model"])
    assert "2 of 6 experts per token" in printed(plan)
    assert json.loads(as_json(plan))["model"]["experts"]["total"] == 6


def test_a_folder_that_could_not_be_loaded_is_not_planned(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (tmp_path / "model-00001-of-00005.safetensors").touch()
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.safetensors.*no such file.*not whole"):
        make_plan(model=str(tmp_path), gpu="h100-80gb", profiles=["my_model"])


def test_figures_are_rounded_to_what_an_estimate_is_worth() -> None:
    assert [count(value) for value in (854, 12_345, 1_260_000, 14_400_000, 999_900)] == [
        "850", "12k", "1.3M", "14M", "1.0M"
    ]  # fmt: skip
    assert [dollars(value) for value in (2.345, 61.4)] == ["2.35", "61"]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ((-5, 0, 0), "at least 1 token of prompt"),
        ((0, 10, 0), "at least 1 token of prompt"),
        ((10, 10, -1), "0 of replies"),
        ((100_000, 100_000, 0), r"200,000 tokens, and sampling\.max_tokens_per_episode 420 end"),
        ((400, 20, 1), "421 tokens"),
    ],
)
def test_lengths_that_no_episode_has_are_refused(tokens: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^--tokens .*{reason}") as refused:
        make_plan(tokens=tokens, profiles=["demo"])
    assert "\n" not in str(refused.value)


def test_lengths_beyond_the_budget_of_what_follows_a_prompt_are_refused_too() -> None:
    """2,048 tokens after a prompt, of 8,192 in all."""
    profiles = ["qwen2.5_7b_lora_80gb", "bfcl"]
    with pytest.raises(ValueError, match=r"max_completion_tokens 2,048 end an episode at 3,048"):
        make_plan(gpu="a100-80gb", profiles=profiles, tokens=(1000, 2000, 49))
    assert make_plan(gpu="a100-80gb", profiles=profiles, tokens=(1000, 2000, 48)).lengths.total == 3048


def test_a_plan_has_the_lengths_of_the_episodes_that_were_played_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the whole budget of each: that was three times the time which the doctor tells."""
    paths = Paths(tmp_path)
    assert played_lengths(paths) is None
    monkeypatch.setattr("tasks.commands.plan.plan.load_paths", lambda params: paths)
    for stage, masks in {"assess": ["0001"], "warm_start": ["00110", "0000110011"]}.items():
        played = []
        for number, mask in enumerate(masks):
            sampled = [sign == "1" for sign in mask]
            item = trajectory(f"p{number}")
            item.sequences = [TokenSequence([1] * len(mask), sampled, [0.0] * len(mask))]
            played.append(item.to_row())
        write_jsonl(paths.stage(stage) / "trajectories.jsonl", played)
    plan = make_plan()
    assert "lengths: 3 of prompt, 3 sampled, 2 of replies, the means of 2 played by warm_start" in plan.head
    lengths = plan.lengths
    assert (lengths.prompt, lengths.sampled, lengths.replies, lengths.longest) == (3.0, 3.0, 1.5, 6)
    assert make_plan(tokens=(7, 8, 9)).lengths.prompt == 7
    assert any("the worst case" in line for line in make_plan(profiles=["demo"]).head)
    item.sequences *= 2  # an agent's episode, of which each conversation is read by itself
    write_jsonl(paths.stage("warm_start") / "trajectories.jsonl", [item.to_row()])
    assert played_lengths(paths) is None


@pytest.mark.slow
def test_the_demo_is_planned_from_params_yaml_for_this_processor() -> None:
    plan = make_plan()
    assert plan.setup.machine.name == "cpu"
    assert 0 < plan.memory.peak < 2e9
    assert plan.seconds is not None and plan.seconds.num_iterations == 110


def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Qwen3-4B"):
        make_plan(model=str(tmp_path))
    with pytest.raises(ValueError, match="a100-40gb"):
        make_plan(gpu="a9000")
    with pytest.raises(ValueError, match="--gpu ''"):
        make_plan(gpu="")
    with pytest.raises(ValueError, match="quantized"):
        make_plan(model="Qwen/Qwen2.5-7B-Instruct-AWQ", gpu="a100-40gb")
    with pytest.raises(ValueError, match="bfcl and mcp are two environments"):
        make_plan(profiles=["bfcl", "mcp"])
    with pytest.raises(ValueError, match="my_model"):
        make_plan(profiles=["nobody"])
