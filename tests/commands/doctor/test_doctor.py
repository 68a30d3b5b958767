"""The doctor as a whole: a sound project passes every check; the table, the file that it leaves, the command."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tasks.__main__ import app
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.doctor import CHECKS, Examined, examine, examined_key, has_passed, show
from tasks.commands.doctor.findings import Finding, of_error
from tasks.core.console import SafeConsole
from tasks.core.files import write_json
from tasks.core.settings import Paths, load
from tasks.models.settings import on_cpu
from tasks.pipeline.order import THREAD_VARIABLES
from tests import tiny
from tests.commands.doctor.project import edit, found, look, params
from tests.conftest import ROOT


@pytest.mark.slow
def test_a_sound_project_passes_every_check_without_torch_and_without_weights(curated: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tasks.core.settings import *;"
        "from tasks.commands.doctor.doctor import *;"
        "import yaml; params = yaml.safe_load(sys.stdin);"
        "found = examine(DoctorContext(load(DoctorSections, params), Paths(Path(sys.argv[1]))));"
        "print([item for item in found if item.result != 'pass'], len(found) == len(CHECKS));"
        "print({'torch', 'great_expectations', 'mlflow'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(curated)], input=yaml.safe_dump(params()), cwd=ROOT, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "[] True\nset()\n", done.stdout + done.stderr


@pytest.mark.slow
def test_before_assess_the_tokenizer_is_built_as_it_will_be(artifacts: Path) -> None:
    shutil.rmtree(artifacts / "assess")
    examined = look("chat template", artifacts)
    assert examined.result == "pass"
    assert "not built yet" in examined.finding
    assert look("loss mask", artifacts).result == look("memory", artifacts).result == "pass"


def test_the_base_model_is_looked_at_where_it_is_there_unless_params_name_another_model(artifacts: Path) -> None:
    shutil.copytree(artifacts / "assess" / "base_model", artifacts / "warm_start" / "model")  # of a run before
    assert "assess/base_model" in look("chat template", artifacts).finding
    examined = look("chat template", artifacts, model__path="models/other")
    found(
        examined,
        "fail",
        "model.path = 'models/other' does not exist",
        "hf download OWNER/NAME --local-dir models/other",
    )


def test_a_crash_of_one_check_fails_it_and_the_others_still_run(curated: Path) -> None:
    def crashes(context: DoctorContext) -> Finding:
        raise ZeroDivisionError("division by zero")

    context = DoctorContext(load(DoctorSections, params()), Paths(curated))
    first, second = examine(context, {"odd": crashes, "threads": CHECKS["threads"]})
    found(first, "fail", "the check crashed with ZeroDivisionError: division by zero", "--debug")
    assert second.result == "pass"
    with pytest.raises(ZeroDivisionError):
        examine(context, {"odd": crashes}, debug=True)


EXAMINED = [
    Examined("chat template", "pass", "four turns keep their prefix", ""),
    Examined("disk", "warn", "[bold]nearly[/bold] " + "full " * 20, "Free some space."),
    Examined("splits", "fail", "a group is in two splits", "Curate again."),
]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_ends_with_remedies_and_the_count(width: int) -> None:
    console = SafeConsole(width=width, record=True, file=io.StringIO())
    show(EXAMINED, Paths("artifacts"), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(line.rstrip() for line in lines)
    assert "[bold]nearly[/bold]" in text  # what is quoted is never markup
    assert text.endswith(
        "warn disk\n     Free some space.\n\nfail splits\n     Curate again.\n\n"
        "doctor: 1 pass, 1 warn, 1 fail\nresults     artifacts/doctor.json"
    )


@pytest.fixture
def project(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml and the artifacts, as the working directory."""
    folder = artifacts.parent
    (folder / "params.yaml").write_text(yaml.safe_dump(params()), encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def doctor() -> Result:
    return CliRunner().invoke(app, ["doctor"], env=dict.fromkeys(THREAD_VARIABLES))  # as they were, afterwards


@pytest.mark.slow
def test_the_command_ends_with_0_on_a_warning_and_with_1_on_a_failure(project: Path) -> None:
    (project / "params.yaml").write_text(yaml.safe_dump(params(compute=on_cpu(9999).model_dump())), encoding="utf-8")
    warned = doctor()
    assert warned.exit_code == 0, warned.output
    assert f"doctor: {len(CHECKS) - 1} pass, 1 warn, 0 fail" in warned.stdout
    assert has_passed(params(compute=on_cpu(9999).model_dump()), Paths("artifacts"))

    edit(project / "artifacts", "test", lambda rows: rows[0]["reference"][0]["calls"].clear())
    failed = doctor()
    assert failed.exit_code == 1, failed.output
    assert "fail references score 1" in failed.stdout
    assert failed.stderr == ""
    assert not has_passed(params(compute=on_cpu(9999).model_dump()), Paths("artifacts"))


def test_without_curated_data_it_says_so_in_one_line(project: Path) -> None:
    shutil.rmtree(project / "artifacts" / "curate")
    done = doctor()
    assert done.exit_code == 1
    assert done.stderr == (
        "error: artifacts/curate: does not exist, and the doctor examines curated problems. "
        "Run `dvc repro curate` first.\n"
    )


def test_what_passed_stays_passed_until_a_setting_or_an_input_changes(project: Path) -> None:
    def record(*results: str) -> None:
        rows = [{"result": result} for result in results]
        write_json(Path("artifacts/doctor.json"), {"key": examined_key(params()), "results": rows})

    paths = Paths("artifacts")
    assert not has_passed(params(), paths)
    record("pass", "warn")
    assert has_passed(params(), paths)
    assert not has_passed(params(seed=8), paths)
    Path("dvc.lock").write_text("{schema: '2.0', stages: {evaluate: {cmd: x}}}\n", encoding="utf-8")
    assert has_passed(params(), paths)  # it comes after training
    Path("dvc.lock").write_text("{schema: '2.0', stages: {curate: {cmd: x}}}\n", encoding="utf-8")
    assert not has_passed(params(), paths)
    record("pass", "fail")
    assert not has_passed(params(), paths)
    Path("artifacts/doctor.json").write_text("[1]", encoding="utf-8")
    assert not has_passed(params(), paths)


def test_an_error_for_people_is_split_into_what_was_found_and_what_to_do() -> None:
    finding = of_error(ValueError("models/x: no tokenizer (v1.2 of it). Put the files beside the weights. Then run."))
    assert finding.text == "models/x: no tokenizer (v1.2 of it)"
    assert finding.remedy == "Put the files beside the weights. Then run."


@pytest.mark.slow
def test_a_model_of_ones_own_is_read_as_training_reads_it_and_asked_for_its_tools(
    artifacts: Path, tmp_path: Path
) -> None:
    shutil.rmtree(artifacts / "assess")
    own = tiny.model_folder(tmp_path / "own", "llama")
    changed = {"model__path": str(own), "sampling__max_tokens_per_episode": 256}
    found(look("chat template", artifacts, **changed), "warn", "names no tool", "Use a template that renders `tools`")
    assert look("loss mask", artifacts, **changed).result == look("memory", artifacts, **changed).result == "pass"
