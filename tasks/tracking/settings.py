"""The section `tracking` of params.yaml, and which names MLflow takes, checked before any training.

MLflow checks a registered model's name only when it is registered, and accepts names that its `models:/NAME@ALIAS` URIs
cannot contain. Its rules are repeated here, since importing MLflow takes seconds; tests/tracking compares them with
MLflow's own functions and a real registry.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tasks.core.settings import Settings
from tasks.core.surroundings import LOOPBACK
from tasks.core.urls import refuse_home

SQLITE = "sqlite:///"
DATABASES = r"(?:postgresql|mysql|mssql)(?:\+\w+)?"  # databases that MLflow uses without a server
MAX_NAME_LENGTH = 256  # of both columns in MLflow's databases; SQLite takes more, and Postgres does not
# / and : are refused when a model is registered; @ ends a name in a URI, ? and # end the whole URI, % starts an escape
# in it, and quotes end a text in a search.
REFUSED_IN_MODELS = "/:@?#%'\""
# What MLflow refuses in the name of a logged model, its term for a version's files.
REFUSED_IN_LOGGED_MODELS = re.compile(r"[/:.%'\"]")


def check_uri(uri: str) -> str:
    refuse_home(uri.removeprefix(SQLITE))
    if re.match(rf"{SQLITE}.|(https?|{DATABASES})://[^/]", uri):
        return uri
    raise ValueError(
        f"{uri!r} names neither a server nor a database that MLflow could keep a model registry in. Write "
        f"sqlite:///artifacts/mlflow/mlflow.db, or the URL of an MLflow server such as http://HOST:5000"
    )


def check_name(name: str, refused: str = "") -> str:
    odd = next((letter for letter in name if letter in refused or not letter.isprintable()), None)
    if odd is not None:
        wrong = f"has {odd!r} in it"
    elif name != name.strip() or not name:
        wrong = "is empty, or begins or ends with a space"
    elif refused and (name == "." or name.startswith("..")):
        wrong = "begins as the path of another folder does"
    elif len(name) > MAX_NAME_LENGTH:
        wrong = f"has {len(name)} characters"
    else:
        return name
    without = f" and without {' '.join(refused)}" if refused else ""
    raise ValueError(
        f"the name {name[:60]!r} {wrong}, and MLflow could not keep or find what is trained under it. Choose one of at "
        f"most {MAX_NAME_LENGTH} printable characters{without}, such as travel-desk-2.5"
    )


def check_model_name(name: str) -> str:
    return check_name(name, REFUSED_IN_MODELS)


ModelName = Annotated[str, AfterValidator(check_model_name)]
ExperimentName = Annotated[str, AfterValidator(check_name)]


class TrackingSettings(Settings):
    """Where MLflow keeps runs (`uri`) and files, the experiment's name, and the number of traces (0: none)."""

    uri: Annotated[str, AfterValidator(check_uri)]
    artifact_location: Annotated[str, AfterValidator(refuse_home)] = Field(min_length=1)
    experiment: ExperimentName
    num_traces: int = Field(ge=0)

    @property
    def database(self) -> Path | None:
        """MLflow's sqlite file; None where `uri` is a server or another database."""
        return Path(self.uri.removeprefix(SQLITE)) if self.uri.startswith(SQLITE) else None

    @property
    def is_missing(self) -> bool:
        """Whether no flow ever ran here: a question to MLflow would make its sqlite file first, which takes seconds."""
        return self.database is not None and not self.database.exists()

    @property
    def files(self) -> Path | None:
        """The folder of MLflow's files; None where a bucket, a URL of a folder or the server has them."""
        return None if ":/" in self.artifact_location else Path(self.artifact_location)

    @property
    def is_local(self) -> bool:
        """Whether MLflow is a file or a server of this machine."""
        return self.database is not None or urlsplit(self.uri).hostname in LOOPBACK

    @model_validator(mode="after")
    def _check_artifact_location(self) -> TrackingSettings:
        """MLflow's client writes to a local path itself, on the machine that it runs on."""
        if self.is_local or self.files is None:
            return self
        raise ValueError(
            f"artifact_location = {self.artifact_location!r} is a folder of this machine and uri is another's server, "
            f"so no other machine would find a model's files. Set it to s3://BUCKET/PREFIX, to mlflow-artifacts:/ "
            f"(the server stores them), or to file:///FOLDER for one that every machine has mounted"
        )


class TrackingSections(Settings):
    tracking: TrackingSettings


def logged_model_name(model: str) -> str:
    """The name of a registered model's files in MLflow's list of logged models, which takes fewer characters."""
    return REFUSED_IN_LOGGED_MODELS.sub("-", model)


def model_uri(model: str, which: str) -> str:
    """`models:/NAME@champion` (`which` is `@champion`) or `models:/NAME/3` (`/3`), quoted for a shell."""
    return shlex.quote(f"models:/{model}{which}")
