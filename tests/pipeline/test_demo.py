"""The demo at full size, once: what the README promises of it, and the champion it leaves, in other people's hands."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.format import load_chat
from tasks.core.files import read_json
from tasks.core.records import Problem
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.flow
STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote", "total")
SHARED = {"success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished demo at the default params; every test below looks at this one run."""
    project = make_project(tmp_path_factory.mktemp("demo") / "project", profile=None)
    project.has_own_forks = True
    project.flow()
    return project


@pytest.fixture(scope="module")
def summary(demo: Project) -> dict[str, Any]:
    return dict(read_json(demo.artifacts / "summary.json"))


@pytest.fixture(scope="module")
def champion(demo: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The champion as MLflow's own client downloads it, in a process that knows nothing of turnwise."""
    folder = tmp_path_factory.mktemp("champion")
    code = (
        "import mlflow, sys; mlflow.set_tracking_uri(sys.argv[1]); mlflow.set_registry_uri(sys.argv[1]);"
        "mlflow.artifacts.download_artifacts('models:/travel-desk-agent@champion', dst_path=sys.argv[2])"
    )
    uri = f"sqlite:///{demo.artifacts / 'mlflow' / 'mlflow.db'}"
    subprocess.run(
        [sys.executable, "-c", code, uri, str(folder)], cwd=demo.folder, env=demo.environment(), check=True, timeout=600
    )
    return folder


@pytest.fixture(scope="module")
def fetched(demo: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The champion as `python -m tasks fetch` hands it to whoever serves it."""
    folder = tmp_path_factory.mktemp("fetched") / "model"
    done = demo.run("tasks", "fetch", "models:/travel-desk-agent@champion", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def fresh_problems(count: int) -> list[Problem]:
    """Problems of another seed than any split was drawn from."""
    return list(TravelDesk().generate(seed=987654, num_problems=count, max_level=3))


def test_the_summary_has_the_agreed_shape(summary: dict[str, Any]) -> None:
    more = {"greedy", "sharded", "warm_start_attempts", "warm_start_best_of_k"}
    assert set(summary) == {"baseline", "warm_start", "select", "test", "champion", "seconds"} | more
    assert set(summary["baseline"]) == set(summary["warm_start"]) == SHARED
    assert set(summary["select"]) == SHARED | {"snapshot"}
    assert set(summary["test"]) == SHARED | {"by_category"}
    assert set(summary["seconds"]) == set(STAGES)
    assert summary["champion"] == {"model": "travel-desk-agent", "version": 1, "alias": "champion", "promoted": True}


def test_it_goes_from_nothing_to_a_champion_far_above_its_warm_start(summary: dict[str, Any]) -> None:
    print(json.dumps(summary, indent=1))
    assert summary["baseline"]["success_rate"] < 0.02
    assert 0.30 <= summary["warm_start"]["success_rate"] <= 0.70
    assert summary["test"]["success_rate"] >= 0.93
    assert summary["test"]["ci_low"] > summary["warm_start"]["ci_high"]
    assert min(summary["test"]["by_category"].values()) >= 0.85
    assert len(summary["test"]["by_category"]) == 11


def test_telling_requests_in_parts_is_measured_for_each_policy(summary: dict[str, Any]) -> None:
    told = summary["sharded"]
    assert {told[policy]["in_parts"]["num_problems"] for policy in ("base", "warm_start", "best")} == {264}
    assert told["base"]["at_once"]["success_rate"] == told["base"]["in_parts"]["success_rate"] == 0
    assert told["best"]["in_parts"]["ci_low"] > told["warm_start"]["in_parts"]["ci_high"]
    assert told["noise"]["changed_share"] == 0  # a script


def test_the_evidence_is_wide_enough(demo: Project, summary: dict[str, Any]) -> None:
    assert summary["test"]["num_problems"] >= 500
    assert summary["select"]["num_problems"] >= 500
    by_category = demo.evaluation()["test"]["best"]["by_category"]
    assert min(result["num_problems"] for result in by_category.values()) >= 50


def test_no_stage_was_refused_a_fork(demo: Project) -> None:
    told = (demo.artifacts / ".forks.log").read_text()
    assert "refused" not in told
    assert all(f"tasks {stage}: process" in told for stage in ("curate", "assess", "warm_start", "train", "evaluate"))


def test_memory_stays_under_4_gb(demo: Project) -> None:
    """The largest child of this process so far; the flow and its stages are among them."""
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"largest process: {peak_gb:.2f} GB")
    assert peak_gb < 4


def test_the_report_chart_decision_and_validation_page_are_there(demo: Project) -> None:
    for name in ("report/index.html", "progress.png", "promote/decision.json", "validation/index.html"):
        assert (demo.artifacts / name).stat().st_size > 500


def test_a_second_demo_is_served_from_the_cache_and_changes_nothing(demo: Project, summary: dict[str, Any]) -> None:
    hashes, versions = demo.snapshot_hashes(), demo.versions()
    demo.flow("--reason", "once more")
    again = read_json(demo.artifacts / "summary.json")
    print(f"second run: {again['seconds']['total']:.1f} s")
    assert again["seconds"]["total"] < summary["seconds"]["total"] / 4  # 12 of 230 s on an idle machine
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
    assert read_json(demo.artifacts / "promote" / "outcome.json")["decision"] == "hold"
    assert demo.decision()["decision"] == "promote"  # the page of what made the champion stays
    assert (demo.snapshot_hashes(), demo.versions()) == (hashes, versions)


def test_the_champion_loads_as_it_is_and_solves_fresh_problems(champion: Path, demo: Project) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(champion).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(champion).chat_template
    sampling = SamplingSettings(**demo.params()["sampling"])
    engine = EngineSettings(name="transformers", max_concurrent_episodes=64, probe_tolerance=1e-3, settings=None)
    chat = load_chat(champion)
    collector = Collector(
        EngineEpisodes(
            load_engine(champion, chat, engine=engine, sampling=sampling, compute=on_cpu(2)),
            chat,
            sampling,
        ),
        TravelDesk(),
        max_concurrent_episodes=64,
        seed=1,
        stage="fresh",
    )
    played = collector.collect([EpisodeKey(problem, 0, 0) for problem in fresh_problems(66)])
    assert sum(trajectory.is_success for trajectory in played) / len(played) > 0.8


VLLM_EPISODE = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from tasks.core.tool_calls import parse_calls
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.chat.format import load_chat
from tests.worlds import answer_calls
from pathlib import Path

folder = Path(sys.argv[1])
llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=512, generation_config="vllm")
chat, world = load_chat(folder), TravelDesk()
solved = []
for problem in world.generate(seed=987654, num_problems=11, max_level=3):
    episode, ids, final = world.start(problem), chat.prompt_ids(problem.requests[0], []), None
    for _ in range(10):
        params = SamplingParams(temperature=0.0, max_tokens=28, stop_token_ids=[chat.end_of_turn])
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        written = list(output.outputs[0].token_ids)
        text = chat.decode([i for i in written if i != chat.end_of_turn])
        calls = parse_calls(text)
        if not calls:
            final = text
            break
        replies = tuple(reply.text for reply in answer_calls(episode, calls))
        ids = [*ids, *[i for i in written if i != chat.end_of_turn], chat.end_of_turn, *chat.reply_ids(replies)]
    solved.append(episode.verdict(final).success)
print("SOLVED", json.dumps(solved))
"""


def test_the_fetched_champion_loads_in_vllm_and_solves_fresh_problems(fetched: Path, demo: Project) -> None:
    environment = {
        **demo.environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # a compiler would hold up the first batch for 15 s
        "PYTHONPATH": str(demo.folder),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", VLLM_EPISODE, str(fetched)], cwd=demo.folder, env=environment, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("SOLVED")), "")
    assert line, done.stdout[-2000:] + done.stderr[-4000:]
    solved = json.loads(line.removeprefix("SOLVED "))
    assert sum(solved) >= 8, solved
