"""A project whose stages take a blink: the real flow, promotion, tracking and report over made-up stage results."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.pipeline.project import ROOT, Project, make_project

CODE = "toy_stage.py"
DATA = "toy_problems.txt"
RESULTS = "${paths.artifacts}"
PARAMS = {"curate": ["seed", "curate.test_rotation"], "train": ["seed", "train"]}
DATA_OF = {"curate": [DATA]}
# Instead of the doctor's checks, which would find nothing to look at in made-up data.
CHECKS = """

def toy(context: DoctorContext) -> Finding:
    return Finding("fail" if Path("knobs/fail_doctor").exists() else "warn", "the toy is unwell", "Leave it in peace.")


CHECKS.clear()
CHECKS["toy"] = toy
"""
# Instead of the real stages, so that toys are started as those are: by DVC, and as forks where there is a fork server.
START = """
if __name__ == "__main__" and sys.argv[1] in {stages}:
    import toy_stage

    with quick_exit():
        toy_stage.main(sys.argv[1])
        raise SystemExit
"""
AFTER = "from tasks.pipeline.cli_errors import stop_in_another_python  # noqa: E402\n"  # of tasks/__main__.py
# Instead of playing a model, whose weights are made up, such as a champion that is measured again.
PLAYING = """

def sample_episodes(model_folder, environment, problems, play, **others):
    from pathlib import Path

    from toy_stage import played

    has_fallen = Path("knobs/fail_champion").exists()
    return played(0.2 if has_fallen else 0.95, [problem.id for problem in problems])
"""


def make_toy_project(folder: Path) -> Project:
    """The repository as after a clone, with toy stages under the real names; `knobs/` is where tests steer them.

    Of what one stage hands the next, each depends on the same files as the real one.
    """
    project = make_project(folder)
    graph = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    stages = {
        stage: {
            "cmd": real["cmd"],
            "params": PARAMS.get(stage, []),
            "deps": [
                CODE,
                *DATA_OF.get(stage, []),
                *(dep.replace(RESULTS, "artifacts") for dep in real["deps"] if dep.startswith(RESULTS)),
            ],
            "outs": [f"artifacts/{stage}", f"artifacts/provenance/{stage}.json"],
        }
        for stage, real in graph["stages"].items()
    }
    (project.folder / "dvc.yaml").write_text(yaml.safe_dump({**graph, "stages": stages}), encoding="utf-8")
    (project.folder / "dvc.lock").unlink(missing_ok=True)
    shutil.copy(ROOT / "tests" / "pipeline" / CODE, project.folder / CODE)
    (project.folder / DATA).write_text("".join(f"p{number}\n" for number in range(200)), encoding="utf-8")
    for file, text in (("commands/doctor/doctor.py", CHECKS), ("rollouts/collect.py", PLAYING)):
        with (project.folder / "tasks" / file).open("a", encoding="utf-8") as stream:
            stream.write(text)
    command = project.folder / "tasks" / "__main__.py"
    before, found, after = command.read_text(encoding="utf-8").partition(AFTER)
    assert found
    command.write_text(before + START.format(stages=list(stages)) + found + after, encoding="utf-8")
    (project.folder / "knobs").mkdir()
    return project


def turn_knob(project: Project, name: str) -> None:
    """Until knobs are released, make a stage wait (`hold_train`; `early_train`: before it reads params), fail
    (`fail_train`) or draw a bar (`bar_train`).
    `fail_doctor` makes the doctor fail, who only warns otherwise; `fail_champion` every model that is played.
    """
    (project.folder / "knobs" / name).touch()


def release_knobs(project: Project) -> None:
    for knob in (project.folder / "knobs").iterdir():
        knob.unlink()
