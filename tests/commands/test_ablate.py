"""The ablation: variants differ in what they say, a night's work survives kills, and an alarm is a result."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.ablate.ablate import Run, ablate, play, refuse_other_inputs
from tasks.commands.ablate.variants import VARIANTS_FILE, read_variants
from tasks.core.files import read_json, write_jsonl, write_text
from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths, load, read_params
from tasks.drift.pin import ACCEPT_VARIABLE, make_pin, write_pin
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.stage import CollapseAlarm
from tests import tiny
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.profiles import profile_params
from tests.stages.evaluate.stage_folder import Kill, small_params
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow
PARAMS = read_params(ROOT / "params.yaml")
VARIANTS = read_variants(PARAMS, (), ROOT / VARIANTS_FILE)
NAMES = [variant.name for variant in VARIANTS]
REWARD, ENGINE = Path("tasks/rewards/correctness.py"), Path("tasks/engines/transformers/engine.py")


class FakeTraining:
    """Stands in for `train_policy` and for the episodes on select; `calls` has a (variant, seed) a training run.

    `fate` names what happens to a variant: "alarm" at iteration 3 after one snapshot, "early alarm" before any, "kill".
    `success` is the share of the four select problems a variant's last snapshot solves.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.measured: list[tuple[str, str, int]] = []
        self.resumes: list[Path] = []
        self.fate: dict[str, str] = {}
        self.solved: dict[str, int] = {}
        self.kill_measuring = False

    def train(
        self, settings: Any, *, start: Path, problems: list[Problem], output: Path, resume: Path, alarms: Path
    ) -> list[dict[str, Any]]:
        name = output.parent.name
        self.calls.append(name)
        self.resumes.append(resume)
        write_text(resume / "checkpoint", "half a run")
        fate = self.fate.get(name.rsplit("-", 1)[0])
        if fate == "kill":
            raise KeyboardInterrupt
        last = 3 if fate else settings.train.num_iterations
        for step in (1, 2) if fate != "early alarm" else ():
            write_text(output / "snapshots" / f"iteration-{step:04d}" / "name", name)
        rows = [{"iteration": n, "success_rate": 0.5, "mean_sampled_tokens": 10.0 * n} for n in range(1, last + 1)]
        write_jsonl(output / "metrics.jsonl", rows)
        if fate:
            message = "iteration 3: completions grew."
            alarm = Alarm(iteration=3, signal="completion_length", message=message, values={}, since=1)
            raise CollapseAlarm(alarm.message, alarm, rows)
        return rows

    def measure(self, run: Run, model: Path, problems: list[Problem], settings: Any) -> list[Trajectory]:
        if self.kill_measuring:
            raise KeyboardInterrupt
        self.measured.append((run.variant.name, model.name, settings.seed))
        name = (model / "name").read_text() if (model / "name").exists() else ""
        solved = self.solved.get(name.rsplit("-", 1)[0], 4)
        return [trajectory(problem.id, number < solved) for number, problem in enumerate(problems)]


@pytest.fixture
def fake() -> FakeTraining:
    return FakeTraining()


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A finished run's curated problems, something in the place of its warm start, and code that two stages watch."""
    monkeypatch.chdir(tmp_path)
    paths = Paths("artifacts")
    stages = {"train": ["tasks/rewards", "${paths.artifacts}/assess"], "evaluate": ["tasks/engines/${engine.name}"]}
    write_text(Path("dvc.yaml"), yaml.safe_dump({"stages": {name: {"deps": deps} for name, deps in stages.items()}}))
    write_text(REWARD, "REWARD = 1")
    write_text(ENGINE, "ENGINE = 1")
    for split, problems in (("train", tiny.problems(12)[4:]), ("select", tiny.problems(4))):
        write_jsonl(paths.split(split), (problem.model_dump() for problem in problems))
    write_pin(paths.stage("curate"), make_pin(TravelDesk(), [], []))
    write_text(paths.start_model / "model.safetensors", "weights")
    write_text(Path(VARIANTS_FILE), (ROOT / VARIANTS_FILE).read_text(encoding="utf-8"))
    return paths


@pytest.fixture
def run(paths: Paths, fake: FakeTraining) -> Callable[..., dict[str, Any]]:
    """`run(only=…)` runs the ablation of 4 iterations over the fakes."""

    def run(params: dict[str, Any] = PARAMS, **options: Any) -> dict[str, Any]:
        return ablate(params, paths, train=fake.train, measure=fake.measure, **{"num_iterations": 4, **options})

    return run


def test_every_variant_changes_what_it_is_named_for_and_nothing_else():
    assert {variant.name: variant.changes for variant in VARIANTS} == {
        "base": [],
        "kl_0": ["train.kl_weight: 0.001 → 0.0", "train.reference_interval: 10 → null"],
        "kl_0.04": ["train.kl_weight: 0.001 → 0.04"],
        "fixed_reference": ["train.reference_interval: 10 → null"],
        "shaped_reward": [
            'reward.parts: [] → [{"name": "format", "weight": 0.2}, {"name": "call_validity", "weight": 0.2}]'
        ],
        "overlong_kept": ["train.filter_overlong: true → false"],
        "kl_0_overlong_kept": [
            "train.filter_overlong: true → false",
            "train.kl_weight: 0.001 → 0.0",
            "train.reference_interval: 10 → null",
        ],
    }


def test_the_base_is_the_recipe_and_every_variant_is_a_valid_setting():
    assert NAMES[0] == "base"
    kl_weights = [variant.settings.train.kl_weight for variant in VARIANTS]
    assert kl_weights == [0.001, 0.0, 0.04, 0.001, 0.001, 0.001, 0.0]


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ("mine: {trian: {kl_weight: 0.1}}", "variant mine: changes something that training does not read"),
        ("mine: 3", "variant mine: changes something that training does not read"),
        ("mine: {train: {kl_wait: 0.1}}", r"infra/ablation\.yaml, variant mine.*Did you mean kl_weight"),
    ],
)
def test_an_overlay_with_an_unknown_key_is_refused_in_one_line(tmp_path: Path, overlay: str, said: str):
    file = tmp_path / "infra" / "ablation.yaml"
    write_text(file, overlay)
    with pytest.raises(ValueError, match=said) as caught:
        read_variants(PARAMS, (), file)
    assert "\n" not in str(caught.value)


def test_all_variants_are_trained_and_compared_with_the_base(run: Any, fake: FakeTraining, paths: Paths):
    fake.solved = {"kl_0": 1}

    results = run()

    assert fake.calls == [f"{name}-11" for name in NAMES]
    assert {item["name"]: item["result"]["success_rate"] for item in results["variants"]}["kl_0"] == 0.25
    differences = [item["difference"] and item["difference"]["difference"] for item in results["variants"]]
    assert differences == [None, -0.75, 0.0, 0.0, 0.0, 0.0, 0.0]
    folder = paths.stage("ablation")
    assert read_json(folder / "results.json") == results
    assert (folder / "table.md").read_text().startswith("# Ablation")
    assert (folder / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_snapshot_alone_is_kept_and_measured_and_nothing_is_left_to_resume(
    run: Any, fake: FakeTraining, paths: Paths
):
    run(only=["base"])
    assert fake.measured == [("base", "iteration-0002", 11)]
    assert [item.name for item in (paths.stage("ablation") / "base-11" / "train" / "snapshots").iterdir()] == [
        "iteration-0002"
    ]
    assert not list((paths.artifacts / ".resume" / "ablate").iterdir())


def test_a_finished_run_is_not_run_again_and_is_in_the_table_where_it_is_asked_for(run: Any, fake: FakeTraining):
    """Of three finished variants two are compared: their one difference has the whole confidence."""
    run(only=["base", "kl_0"])
    results = run(only=["base", "kl_0.04"])
    assert fake.calls == ["base-11", "kl_0-11", "kl_0.04-11"]
    assert results["confidence_of_each"] == results["confidence"]
    assert [item["name"] for item in results["variants"]] == ["base", "kl_0.04"]
    assert results["variants"][1]["difference"] is not None


def test_without_the_base_there_is_no_difference(run: Any):
    (variant,) = run(only=["kl_0"])["variants"]
    assert variant["difference"] is None


def test_a_killed_run_goes_on_in_the_same_resume_folder_and_leaves_no_half_result(
    run: Any, fake: FakeTraining, paths: Paths
):
    fake.fate = {"kl_0": "kill"}
    with pytest.raises(KeyboardInterrupt):
        run(only=["base", "kl_0"])
    assert not (paths.stage("ablation") / "kl_0-11" / "train").exists()
    assert [item["name"] for item in read_json(paths.stage("ablation") / "results.json")["variants"]] == ["base"]

    fake.fate = {}
    results = run(only=["base", "kl_0"])

    assert fake.calls == ["base-11", "kl_0-11", "kl_0-11"]
    assert fake.resumes[1] == fake.resumes[2] != fake.resumes[0]
    assert [item["name"] for item in results["variants"]] == ["base", "kl_0"]


def test_a_kill_while_measuring_does_not_train_again(run: Any, fake: FakeTraining):
    fake.kill_measuring = True
    with pytest.raises(KeyboardInterrupt):
        run(only=["base"])
    fake.kill_measuring = False
    run(only=["base"])
    assert fake.calls == ["base-11"]


def test_checkpoints_of_other_settings_are_never_taken_up(run: Any, fake: FakeTraining, paths: Paths):
    fake.fate = {"base": "kill"}
    for iterations in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            run(only=["base"], num_iterations=iterations)
    assert fake.resumes[0].parent == fake.resumes[1].parent
    assert fake.resumes[0].parent == paths.artifacts / ".resume" / "ablate" / "base-11"
    assert fake.resumes[0] != fake.resumes[1]


def test_an_alarm_is_a_result_with_its_iteration_and_reason(run: Any, fake: FakeTraining):
    fake.fate = {"kl_0": "alarm"}
    base, kl_0 = run(only=["base", "kl_0"])["variants"]
    (stopped,) = kl_0["runs"]
    assert stopped["alarm"] == {"iteration": 3, "signal": "completion_length", "reason": "completions grew."}
    assert (stopped["num_iterations"], stopped["snapshot"]) == (3, "iteration-0002")
    assert base["runs"][0]["alarm"] is None


def test_a_run_stopped_before_its_first_snapshot_is_measured_by_the_warm_start(run: Any, fake: FakeTraining):
    fake.fate = {"kl_0": "early alarm"}
    (variant,) = run(only=["kl_0"])["variants"]
    assert fake.measured == [("kl_0", "model", 11)]
    assert variant["runs"][0]["snapshot"] == "warm start"


def test_seeds_are_trained_round_by_round_and_all_measured_with_the_same_random_numbers(run: Any, fake: FakeTraining):
    results = run(only=["base", "kl_0"], num_seeds=2)
    assert fake.calls == ["base-11", "kl_0-11", "base-12", "kl_0-12"]
    assert {seed for _, _, seed in fake.measured} == {11}
    assert [entry["seed"] for entry in results["variants"][1]["runs"]] == [11, 12]


def test_an_unknown_variant_is_refused_with_the_nearest_names(run: Any, fake: FakeTraining):
    with pytest.raises(ValueError, match="'kl_zero' is not a variant, so nothing was run"):
        run(only=["base", "kl_zero"])
    assert fake.calls == []


@pytest.mark.parametrize(("missing", "maker"), [("curate/select.jsonl", "curate"), ("warm_start/model", "warm_start")])
def test_without_a_finished_run_the_stage_to_run_is_named(run: Any, paths: Paths, missing: str, maker: str):
    shutil.rmtree(paths.artifacts / missing.split("/")[0])
    with pytest.raises(ValueError, match=f"Run `dvc repro` first, .* or `python -m tasks {maker}` alone"):
        run()


def test_kept_runs_of_other_settings_are_not_mixed_in_and_not_overwritten(run: Any, fake: FakeTraining, paths: Paths):
    run(only=["base"])
    with pytest.raises(ValueError, match=r"base-11: was made from .*train\.num_iterations: 4 → 9.*Move artifacts"):
        run(only=["base", "kl_0"], num_iterations=9)
    write_text(paths.start_model / "model.safetensors", "other weights")
    with pytest.raises(ValueError, match=r"data\.warm_start"):
        run(only=["base", "kl_0"])
    assert fake.calls == ["base-11"]


def test_only_the_runs_of_an_edited_variant_are_named_and_go(tmp_path: Path):
    """Of three finished runs two are of the edited variant, whose weight was 1."""
    runs = []
    for name, weight in (("base-11", 0), ("kl-11", 1), ("kl-12", 1)):
        runs.append(Run(VARIANTS[0], VARIANTS[0].settings, {"weight": weight}, tmp_path / name, tmp_path))
        write_text(runs[-1].folder / "inputs.json", f'{{"weight": {weight}}}')
        runs[-1].trained.mkdir()
    refuse_other_inputs(runs)
    edited = [replace(run, inputs={"weight": 2}) for run in runs[1:]]
    named = re.escape(
        f"(weight: 1 → 2), so it cannot be compared in one table. Move {runs[1].folder}, {runs[2].folder} "
    )
    with pytest.raises(ValueError, match=named):
        refuse_other_inputs([runs[0], *edited])


@pytest.mark.parametrize("file", [REWARD, ENGINE])
def test_other_code_is_another_run_and_a_page_of_it_is_not(run: Any, fake: FakeTraining, file: Path):
    fake.fate = {"base": "kill"}
    for name, text in (("README.md", "What it is."), (file.name, "CHANGED = 2")):
        with pytest.raises(KeyboardInterrupt):
            run(only=["base"])
        write_text(file.parent / name, text)
    fake.fate = {}
    run(only=["base"])
    assert fake.resumes[0] == fake.resumes[1] != fake.resumes[2]

    write_text(file, "CHANGED = 3")
    with pytest.raises(ValueError, match=rf"base-11: was made from .*code\.{file}: \w+ → .*Move artifacts"):
        run(only=["base"])


def test_an_environment_that_changed_since_curation_is_refused_before_any_training(
    run: Any, fake: FakeTraining, paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    earlier = make_pin(TravelDesk(), [], [])
    earlier["description"]["tools"]["order"] = {"name": "order"}
    write_pin(paths.stage("curate"), earlier)
    with pytest.raises(ValueError, match=r"another environment.*tools: order .*is gone.*--accept-drift"):
        run(only=["base"])
    assert fake.calls == []
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    run(only=["base"])
    write_pin(paths.stage("curate"), make_pin(TravelDesk(), [], []))
    with pytest.raises(ValueError, match=r"data\.environment: "):
        run(only=["base"])
    assert fake.calls == ["base-11"]


def test_runs_on_another_torch_are_not_mixed(run: Any, monkeypatch: pytest.MonkeyPatch):
    run(only=["base"])
    monkeypatch.setattr("tasks.stages.evaluate.measurement_key.package_versions", lambda: {"torch": "9.9"})
    with pytest.raises(ValueError, match=r"packages\.torch: .* → 9\.9"):
        run(only=["base"])


def test_a_variant_that_params_yaml_already_is_would_train_the_base_twice(run: Any, fake: FakeTraining):
    params = {**PARAMS, "train": {**PARAMS["train"], "filter_overlong": False}}
    with pytest.raises(ValueError, match=r"variant overlong_kept: params\.yaml already has these values"):
        run(params)
    run(params, only=["base", "kl_0"])
    assert fake.calls == ["base-11", "kl_0-11"]


def test_the_environment_of_the_measurement_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[TravelDesk] = []
    monkeypatch.setattr(TravelDesk, "close", lambda environment: closed.append(environment))
    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", lambda *_, **__: [])
    settings = load(EvaluateSections, {**PARAMS, "environment": environment_settings().model_dump(mode="json")})
    run = Run(VARIANTS[0], VARIANTS[0].settings, {}, tmp_path / "base-11", tmp_path / "resume")
    assert play(run, tmp_path, [], settings) == []
    assert len(closed) == 1


def test_a_measurement_that_was_killed_goes_on_from_the_episodes_that_ended(
    paths: Paths, fake: FakeTraining, monkeypatch: pytest.MonkeyPatch
):
    """Of four problems with a sample each three are played, and one is left."""
    params = small_params(select_samples_per_problem=1)
    params["engine"] |= {"max_concurrent_episodes": 1}
    tiny.model_folder(paths.start_model)
    fake.fate = {"base": "early alarm"}
    kill = Kill(monkeypatch)
    kill.at = 3
    with pytest.raises(KeyboardInterrupt):
        ablate(params, paths, only=["base"], train=fake.train)
    ablate(params, paths, only=["base"], train=fake.train)
    assert (fake.calls, kill.num_ended) == (["base-11"], 4)
    assert not list((paths.artifacts / ".resume" / "ablate").iterdir())


def test_two_variants_for_two_real_iterations_end_in_a_table_and_a_figure(paths: Paths):
    """Random weights over a small world: nothing is learnt, and everything is exercised."""
    params = profile_params("test")
    params["train"] |= {"problems_per_iteration": 2, "group_size": 2, "snapshot_interval": 1}
    tiny.model_folder(paths.start_model)
    for split, problems in (("train", tiny.problems(12, max_level=1)[4:]), ("select", tiny.problems(4, max_level=1))):
        write_jsonl(paths.split(split), (problem.model_dump() for problem in problems))

    results = ablate(params, paths, only=["base", "shaped_reward"], num_iterations=2)

    base, shaped = results["variants"]
    assert [entry["num_iterations"] for entry in (*base["runs"], *shaped["runs"])] == [2, 2]
    assert base["runs"][0]["snapshot"] == "iteration-0002"
    assert shaped["difference"]["num_problems"] == 4
    assert (paths.stage("ablation") / "ablation.png").exists()
