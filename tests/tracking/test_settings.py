"""Names of models and experiments: what params.yaml lets in goes all the way in MLflow; the rest is refused there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from tasks.commands.fetch import fetch
from tasks.commands.lineage import lineage
from tasks.commands.rollback import rollback
from tasks.core.settings import load
from tasks.stages.promote.settings import PromoteSections
from tasks.tracking.connection import experiment_id
from tasks.tracking.registry import Registry
from tasks.tracking.settings import (
    MAX_NAME_LENGTH,
    REFUSED_IN_MODELS,
    ModelName,
    TrackingSettings,
    logged_model_name,
    model_uri,
)
from tests.conftest import ROOT
from tests.profiles import NAMES, profile_params
from tests.tracking.candidates import promote, state
from tests.tracking.project import SETTINGS

TAKEN = [
    ".a..\\$(b)`c`&|;!*[d]{e}<f>~=+,-",
    "-Reiseb\u00fcro \u65c5",
    "x" * MAX_NAME_LENGTH,
]
REFUSED = ["", " ", " a", "a ", ".", "..", "..a", "a\nb", "a\tb", "a\0b", "a\u2028b", "a\u200bb", "\ud800", "x" * 257]
REFUSED += [f"a{letter}b" for letter in REFUSED_IN_MODELS]


def settings_with(section: str, key: str, name: str) -> PromoteSections:
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    return load(PromoteSections, {**params, section: {**params[section], key: name}})


def go_all_the_way(name: str, folder: Path) -> None:
    """Two versions under one name: registered, made champion, fetched, told where they came from, rolled back."""
    params = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    params["promote"]["model_name"] = name
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    for snapshot in ("a", "b"):
        promote(snapshot, model=name)
    registry = Registry(SETTINGS, name)
    try:
        fetch(f"models:/{name}@champion", folder / "fetched")
        assert (folder / "fetched" / "model.safetensors").read_bytes() == b"b"
        row = lineage(f"models:/{name}/2")
        assert (row["missing"], row["altered"]) == (["lineage/dvc.lock"], [])  # this project has none
        assert "version 1 is champion" in rollback(to=None, reason="a drill")
        assert state(registry) == (1, None)  # before version 1 there was nobody, and 2 was rolled back
    finally:
        registry.client.delete_registered_model(name)


@pytest.mark.parametrize(
    ("location", "files"),
    [
        ("artifacts/mlflow", Path("artifacts/mlflow")),
        ("/srv/mlflow", Path("/srv/mlflow")),
        ("s3://bucket/mlflow", None),
        ("file:///srv/mlflow", None),
        ("mlflow-artifacts:/travel", None),
    ],
)
def test_only_a_path_is_a_folder_of_files(location: str, files: Path | None):
    assert SETTINGS.model_copy(update={"artifact_location": location}).files == files


def test_mlflow_is_missing_where_its_file_is_and_never_where_it_is_a_server(tmp_path: Path):
    here = SETTINGS.model_copy(update={"uri": f"sqlite:///{tmp_path}/mlflow.db"})
    assert (here.database, here.is_missing) == (tmp_path / "mlflow.db", True)
    (tmp_path / "mlflow.db").touch()
    assert not here.is_missing
    server = SETTINGS.model_copy(update={"uri": "http://127.0.0.1:1"})
    assert (server.database, server.is_missing) == (None, False)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("uri", "sqlite:///~/mlflow.db"), ("artifact_location", "~/mlflow")])
def test_a_home_folder_that_no_shell_expands_is_refused_with_its_path(key: str, value: str):
    with pytest.raises(ValueError, match=str(Path.home())):
        TrackingSettings.model_validate({**SETTINGS.model_dump(), key: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_a_name_that_params_yaml_takes_goes_all_the_way(registry: Registry, tmp_path: Path, name: str):
    settings_with("promote", "model_name", name)
    go_all_the_way(name, tmp_path)


@pytest.mark.slow
def test_the_names_in_every_profile_are_taken(registry: Registry):
    for profile in NAMES:
        params = profile_params(profile)
        assert is_taken(params["promote"]["model_name"])
        experiment = TrackingSettings.model_validate(params["tracking"]).experiment
        assert experiment_id(registry.client, SETTINGS.model_copy(update={"experiment": experiment}))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_mlflow_would_lose_later_is_refused_with_the_params(name: str):
    with pytest.raises(ValueError, match=r"params.yaml: promote\.model_name: .*Choose one") as caught:
        settings_with("promote", "model_name", name)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", " a", "a\nb", "\ud800", "x" * 257])
def test_an_experiment_that_no_database_could_keep_is_refused_with_the_params(name: str):
    with pytest.raises(ValueError, match=r"params.yaml: tracking\.experiment: .*Choose one"):
        settings_with("tracking", "experiment", name)


def test_every_letter_is_judged_as_mlflows_own_functions_do():
    """What they refuse is refused here too; what is taken here survives MLflow's URIs and is a name of files."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.utils.models import _parse_model_uri
    from mlflow.utils.validation import _validate_experiment_name, _validate_logged_model_name, _validate_model_name

    letters = [chr(number) for number in [*range(0x250), 0x2028, 0x200B, 0xFEFF, 0xD800, 0x1F600]]
    taken = [name for name in (*TAKEN, *(f"a{letter}b" for letter in letters)) if is_taken(name)]
    assert len(taken) > 500
    for name in taken:
        _validate_model_name(name)
        _validate_experiment_name(name)
        _validate_logged_model_name(logged_model_name(name))
        assert _parse_model_uri(f"models:/{name}/3")[1:3] == (name, "3")
        assert _parse_model_uri(f"models:/{name}@champion").name == name
    with pytest.raises(MlflowException):
        _validate_logged_model_name("bfcl-qwen2.5-7b")  # which is why the files have a name of their own


def is_taken(name: str) -> bool:
    try:
        TypeAdapter(ModelName).validate_python(name)
    except ValueError:
        return False
    return True


def test_a_command_with_an_odd_name_may_be_pasted():
    assert model_uri("travel-desk", "@champion") == "models:/travel-desk@champion"
    assert model_uri("a b", "/3") == "'models:/a b/3'"
