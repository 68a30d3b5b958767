"""evaluate goes on after kill -9: finished episodes are neither played nor paid for again, and results are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tasks.core.files import read_json, read_jsonl, write_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.models.folders import folder_hash
from tasks.rollouts.collect import collect_missing, measured_keys
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.finished import FinishedEpisodes
from tests import tiny
from tests.conftest import ROOT
from tests.engines.endpoint.chat_endpoint import KEY, VARIABLE, ChatEndpoint, settings
from tests.measurement.synthetic import trajectory
from tests.stages.evaluate.stage_folder import PROBLEMS, evaluated, files_of
from tests.stages.evaluate.test_evaluate import paths, scripts

__all__ = ["paths"]
# Runs evaluate and is killed while it writes its episode number argv[3], half a line of which is on disk.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from tasks.rollouts.finished import FinishedEpisodes
from tasks.core.settings import Paths
from tests.stages.evaluate.test_evaluate import evaluated

add, left = FinishedEpisodes.add, [int(sys.argv[3])]

def add_or_die(self, trajectory):
    left[0] -= 1
    if left[0] == 0:
        with self.file.open("a") as stream:
            stream.write(json.dumps(trajectory.to_row())[:200])
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, trajectory)

FinishedEpisodes.add = add_or_die
evaluated(Paths(sys.argv[1]), json.loads(sys.argv[2]))
"""


def test_a_line_cut_short_is_no_episode_and_our_own_faults_are_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "resume" / "select_a.jsonl"
    first = FinishedEpisodes(file)
    for item in (trajectory("a"), trajectory("b", outcome="environment_error"), trajectory("b", sample_index=1)):
        first.add(item)
    assert [item.outcome for item in first.read([("b", 0), ("a", 0)])] == ["environment_error", "success"]
    with file.open("a") as stream:
        stream.write('{"problem_id": "c", "sample_ind')
    again = FinishedEpisodes(file)
    assert (len(again), ("a", 0) in again, ("b", 0) in again, ("c", 0) in again) == (2, True, False, False)
    again.add(trajectory("c"))
    assert [item.problem_id for item in FinishedEpisodes(file).read([("c", 0), ("b", 1), ("a", 0)])] == ["c", "b", "a"]
    assert FinishedEpisodes(file).read([("a", 0)]) == [trajectory("a")]


def test_no_file_stays_open_once_its_episodes_are_played(tmp_path: Path) -> None:
    """A race of a thousand snapshots has a file for each, and a process may have 256 open on macOS."""
    problems = tiny.problems(2)

    def collect(keys: list[EpisodeKey], on_end: Callable[[Trajectory], None]) -> list[Trajectory]:
        played = [trajectory(key.problem.id) for key in keys]
        for item in played:
            on_end(item)
        return played

    faults = SimpleNamespace(num_finished=0)
    collector: Any = SimpleNamespace(faults=faults, counts=lambda: defaultdict(float), collect=collect)
    kept = [FinishedEpisodes(tmp_path / f"select_{number}.jsonl") for number in range(3)]
    for finished in kept:
        collect_missing(collector, measured_keys(problems, 1), finished, label="select")
    assert not [file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]
    kept[0].add(trajectory("c"))
    assert len(FinishedEpisodes(kept[0].file)) == 3
    kept[0].close()


def flip_an_outcome(data: bytes) -> bytes:
    """The second episode counts as a success, in valid JSON."""
    first, second, *rest = data.splitlines(keepends=True)
    assert second.count(b'"outcome":"failure"') == 1
    return b"".join([first, second.replace(b'"outcome":"failure"', b'"outcome":"success"'), *rest])


def zero_a_page(data: bytes) -> bytes:
    """Of the second line, all but its ends."""
    first, second, *rest = data.splitlines(keepends=True)
    return b"".join([first, second[:20] + bytes(len(second) - 40) + second[-20:], *rest])


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], set[str], int]] = {
    "nothing": (lambda data: data, {"a", "b", "c"}, 0),
    "an outcome flipped": (flip_an_outcome, {"a", "c"}, 1),
    "a page of zeros": (zero_a_page, {"a", "c"}, 1),
    "zeros that swallow the end of a line": (lambda data: data.replace(b"\n", b"\0", 1), {"c"}, 1),
    "half a file": (lambda data: data[: len(data) // 2], {"a"}, 0),
    "an empty file": (lambda data: b"", set(), 0),
    "no text": (lambda data: b"\xff\xfe\n" * 3, set(), 3),
    "JSON of another shape": (lambda data: b'[1]\n{"episode": 3, "sha256": 4}\n7\n', set(), 3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_kept_episodes_that_are_damaged_are_told_of_and_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    change, left, num_told = DAMAGES[damage]
    first = FinishedEpisodes(tmp_path / "select_a.jsonl")
    for name in "abc":
        first.add(trajectory(name, outcome="success" if name == "a" else "failure"))
    first.file.write_bytes(change(first.file.read_bytes()))
    again = FinishedEpisodes(first.file)
    told = capsys.readouterr().err
    assert {name for name in "abc" if (name, 0) in again} == left
    assert told.count("\n") == (num_told > 0)
    assert not num_told or (str(first.file) in told and f"{num_told} of " in told and "played again" in told)
    again.add(trajectory("b", outcome="failure"))
    assert [item.outcome for item in FinishedEpisodes(first.file).read([("b", 0)])] == ["failure"]
    assert capsys.readouterr().err == ""


def test_an_episode_that_is_damaged_while_the_stage_runs_stops_it_in_one_line(tmp_path: Path) -> None:
    finished, copied = FinishedEpisodes(tmp_path / "select_a.jsonl"), tmp_path / "copied.jsonl"
    finished.add(trajectory("a"))
    finished.file.write_bytes(b"\0" * 4096)
    with pytest.raises(ValueError, match=r"select_a\.jsonl.*Run the stage again"):
        finished.read([("a", 0)])
    with pytest.raises(ValueError, match="damaged"):
        finished.copy([("a", 0)], copied)
    assert [item.name for item in tmp_path.iterdir()] == ["select_a.jsonl"]


def test_copied_episodes_are_the_file_that_writing_them_makes(tmp_path: Path) -> None:
    finished, copied, written = (tmp_path / f"{name}.jsonl" for name in ("finished", "copied", "written"))
    first = FinishedEpisodes(finished)
    for name in "abc":
        first.add(trajectory(name))
    asked = [("c", 0), ("d", 0), ("a", 0)]
    again = FinishedEpisodes(finished)  # as a run does that goes on
    again.add(trajectory("d"))
    again.copy(asked, copied)
    write_jsonl(written, (trajectory(name).to_row() for name, _ in asked))
    assert copied.read_bytes() == written.read_bytes()
    assert again.read(asked) == [trajectory(name) for name, _ in asked]
    again.forget()
    again.add(trajectory("e"))
    assert again.read([("e", 0)]) == [trajectory("e")]


@pytest.mark.slow
def test_evaluate_killed_twice_plays_only_what_is_missing(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 episodes of the endpoint, 2 × 12 on select, 3 × 12 on test and as many greedily. The first kill hits the
    endpoint's 8th episode, so that 5 of them are left, the second the 15th of 24 on select, so that 10 are.
    """
    monkeypatch.setenv(VARIABLE, KEY)
    tiny.model_folder(paths.stage("train") / "snapshots" / "iteration-0002", seed=1)
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in PROBLEMS))
    endpoint = ChatEndpoint(scripts())
    with endpoint.serving() as url:
        frontier = settings(url, max_concurrent_episodes=1).model_dump(mode="json")
        whole = evaluated(paths, frontier)
        without_kill, num_asked = files_of(paths), len(endpoint.asked)
        endpoint.asked.clear()
        for killed_at in (8, 5 + 15):
            killed(paths, frontier, killed_at)
        seen: list[tuple[str, str, int]] = []
        add = FinishedEpisodes.add

        def recorded(self: FinishedEpisodes, item: Trajectory) -> None:
            seen.append((self.file.stem, item.problem_id, item.sample_index))
            add(self, item)

        monkeypatch.setattr(FinishedEpisodes, "add", recorded)
        again = evaluated(paths, frontier)
    # The bytes of episodes hold log-probs, which the company they were played in moves by up to 1e-5.
    assert again.pop("contents").keys() == whole.pop("contents").keys()
    assert again == whole
    counts = Counter(name for name, _, _ in seen)
    assert again["best_snapshot"] == "iteration-0001"
    other = folder_hash(paths.stage("train") / "snapshots" / "iteration-0002")
    on_test = {f"{kind}_{model[:16]}": 12 for kind in ("test", "greedy") for model in again["folders"].values()}
    assert counts == {f"select_{other[:16]}": 10, **on_test}
    # One at a time, so only the endpoint's 8th episode was under way when the first kill came, and was paid for twice.
    eighth = len(PROBLEMS[7].reference[0].calls) + 1
    assert len(endpoint.asked) == num_asked + eighth
    assert files_of(paths).keys() == without_kill.keys()
    same_but_for_last_digits(paths, without_kill)
    assert not (paths.artifacts / ".resume" / "evaluate").exists()
    timed = read_json(paths.artifacts / "timings" / "evaluate.json")
    assert {name: row["episodes"] for name, row in timed["test"].items()} == {"base": 12, "warm_start": 12, "best": 12}
    assert timed["select"]["iteration-0002"]["episodes"] == 10 and timed["select"]["iteration-0002"]["seconds"] > 0


def killed(paths: Paths, frontier: dict[str, Any], at: int) -> None:
    command = [sys.executable, "-c", KILLED, str(paths.artifacts), json.dumps(frontier), str(at)]
    child = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, timeout=600)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]


def same_but_for_last_digits(paths: Paths, before: dict[str, bytes]) -> None:
    """Who shares a forward with whom changes the last digits of log-probs, and nothing else."""
    for file in sorted((paths.stage("evaluate") / "trajectories").iterdir()):
        was = [json.loads(line) for line in before[f"trajectories/{file.name}"].splitlines()]
        now = [row for _, row in read_jsonl(file)]
        for old, new in zip(was, now, strict=True):
            for now_written, was_written in zip(new["sequences"], old["sequences"], strict=True):
                assert now_written.pop("sampler_logp") == pytest.approx(was_written.pop("sampler_logp"), abs=1e-5)
            assert new == old
