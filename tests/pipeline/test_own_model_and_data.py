"""One's own model and one's own problems, with LoRA and everything that saves memory: all of it is params.yaml's.

One flow for both, since nothing of one depends on the other; the embedded model's whole weights train in every other
file.
"""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest

from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.files import TRAINED_ON
from tasks.models.folders import is_adapter, load_model, merged_snapshot, weights_hash
from tasks.models.settings import on_cpu
from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on
from tests import tiny
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, databases: Path, prefect: dict[str, str]) -> Project:
    """A Llama nobody trained and 200 rows of JSONL, beside the project rather than in it."""
    folder = tmp_path_factory.mktemp("own")
    project = make_project(folder / "project").lay(databases)
    tiny.model_folder(folder / "llama", "llama")
    rows = TravelDesk().generate(seed=99, num_problems=200, max_level=2)
    with (folder / "mine.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(problem.model_dump()) + "\n" for problem in rows)
    project.set_params(
        {
            "model.path": str(folder / "llama"),
            "curate.source": str(folder / "mine.jsonl"),
            "curate.num_test_sets": 1,
            "sampling.max_turns": 8,
            "sampling.max_tokens_per_episode": 200,
            "warm_start.num_steps": 40,
            "train.num_iterations": 2,
            "train.snapshot_interval": 1,
            "train.lora": {"rank": 8, "alpha": 16, "target_modules": "all-linear"},
            "train.gradient_checkpointing": True,
            "train.autocast": "bfloat16",
            "train.importance_correction": "token_truncate",
            "train.micro_batch_tokens": 1024,
        }
    )
    project.server = prefect
    project.flow()
    return project


@pytest.fixture(scope="module")
def merged(own: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The challenger, as `promote` registers it."""
    snapshot = own.artifacts / "train" / "snapshots" / own.evaluation()["best_snapshot"]
    with chdir(own.folder):
        return merged_snapshot(snapshot, tmp_path_factory.mktemp("merged") / "model", compute=on_cpu(1))


def test_the_flow_runs_on_them_to_a_decision(own: Project) -> None:
    assert own.decision()["decision"] in ("promote", "hold", "reject")
    assert (own.artifacts / "report" / "index.html").exists()


def test_a_snapshot_is_the_adapter_alone(own: Project) -> None:
    snapshots = sorted((own.artifacts / "train" / "snapshots").iterdir())
    assert [snapshot.name for snapshot in snapshots] == ["iteration-0001", "iteration-0002"]
    for snapshot in snapshots:
        assert is_adapter(snapshot)
        assert [item.name for item in snapshot.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_the_challenger_is_a_whole_llama_without_a_trace_of_the_adapter(own: Project, merged: Path) -> None:
    assert not (own.artifacts / "promote" / "merged").exists()
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"
    assert not is_adapter(merged)
    assert weights_hash(merged) == own.decision()["challenger"]["weights"]
    assert not [name for name, _ in load_model(merged, compute=on_cpu(1)).named_parameters() if "lora" in name]


def test_every_model_of_the_run_says_what_it_learnt_from_and_the_users_has_no_such_file(
    own: Project, merged: Path
) -> None:
    """The adapter's snapshot, the whole model it was merged into, and the warm start, which saw less."""
    paths, base = Paths(own.artifacts), Path(own.params()["model"]["path"])
    train, select = (digests_of(read_split(paths, name)) for name in ("train", "select"))
    for folder in (merged, own.artifacts / "train" / "snapshots" / "iteration-0002"):
        assert read_trained_on(folder) == TrainedOn(train, chosen=select, elsewhere=frozenset([base.name]))
    warm_start = read_trained_on(own.artifacts / "warm_start" / "model")
    assert warm_start.trained.ids and warm_start.trained.ids <= train.ids and not warm_start.chosen.ids
    assert not (base / TRAINED_ON).exists()


def test_the_base_under_the_adapter_is_checked(own: Project) -> None:
    """Another warm start under the same adapter would be another model."""
    snapshot = own.artifacts / "train" / "snapshots" / "iteration-0002"
    base = own.artifacts / "warm_start" / "model" / "model.safetensors"
    content = base.read_bytes()
    base.unlink()  # a link of DVC's, which an edit in place would follow
    base.write_bytes(content[:-4] + b"\x00\x00\x00\x01")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(own.folder)
            with pytest.raises(ValueError, match=r"its files .* changed since"):
                weights_hash(snapshot)
    finally:
        base.write_bytes(content)


def test_the_base_is_a_pointer_and_the_users_folder_is_untouched(own: Project) -> None:
    pointer = json.loads((own.artifacts / "assess/base_model/pointer.json").read_text())
    assert pointer["path"] == own.params()["model"]["path"]
    assert not list(Path(pointer["path"]).glob("*.partial"))


def test_every_row_is_somewhere_and_no_group_on_two_sides(own: Project) -> None:
    groups: dict[str, set[str]] = {}
    for split in ("train", "select", "test"):
        lines = (own.artifacts / "curate" / f"{split}.jsonl").read_text().splitlines()
        groups[split] = {json.loads(line)["split_group"] for line in lines}
    assert not groups["train"] & groups["select"]
    assert not groups["test"] & (groups["train"] | groups["select"])


def test_dvc_sees_an_edit_of_the_users_file(own: Project) -> None:
    source = Path(own.params()["curate"]["source"])
    source.write_text("\n".join(source.read_text().splitlines()[:-1]) + "\n")
    assert "curate" in own.changed()
