"""Names that MLflow keeps: which ones it takes all the way, so that params.yaml is refused before anything is trained.

MLflow checks a registered model's name when it is registered, and its `models:/NAME@ALIAS` URIs cannot hold all that
it lets in: the rules of both are stated here, since importing MLflow takes seconds and params load in milliseconds.
tests/tracking/test_names.py holds them against MLflow's own functions and a real registry.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import AfterValidator

MAX_NAME_LENGTH = 256  # of both columns in MLflow's databases; SQLite takes more, and Postgres does not
# / and : are refused when a model is registered; @ ends a name in a URI, ? and # end the whole URI, % starts an escape
# in it, and quotes end a text in a search.
REFUSED_IN_MODELS = "/:@?#%'\""
# What MLflow refuses in the name of a logged model, which is what it calls the files of a version.
REFUSED_IN_LOGGED_MODELS = re.compile(r"[/:.%'\"]")


def _check_name(name: str, refused: str = "") -> str:
    """ValueError that says what is wrong with a name, and which ones MLflow takes."""
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


def _check_model_name(name: str) -> str:
    return _check_name(name, REFUSED_IN_MODELS)


ModelName = Annotated[str, AfterValidator(_check_model_name)]
ExperimentName = Annotated[str, AfterValidator(_check_name)]


def logged_model_name(model: str) -> str:
    """The name under which MLflow lists the files of a registered model's versions, where it takes fewer letters."""
    return REFUSED_IN_LOGGED_MODELS.sub("-", model)


def model_uri(model: str, which: str) -> str:
    """`models:/NAME@champion` (`which` is `@champion`) or `models:/NAME/3` (`/3`), as one may paste it into a shell."""
    return shlex.quote(f"models:/{model}{which}")
