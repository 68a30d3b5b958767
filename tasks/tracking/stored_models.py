"""What one MLflow has under every name: logged models, which are files, and the registered versions they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tasks.tracking.connection import paged
from tasks.tracking.registry import Registry, as_version
from tasks.tracking.versions import Version

LOGGED_MODEL = re.compile(r"models:/[^/]+")  # the source of a version; that of a copy is models:/NAME/VERSION


def every_version(registry: Registry) -> dict[str, list[Version]]:
    """All versions of all names, by where their files are: the id of a logged model, or for one that was copied or
    registered by hand its artifact location.
    """
    found: dict[str, list[Version]] = {}
    for item in paged(lambda token: registry.client.search_model_versions(page_token=token)):
        version = as_version(item)
        place = version.model_id
        if not LOGGED_MODEL.fullmatch(str(item.source)):
            place = str(registry.client.get_model_version_download_uri(item.name, str(item.version)))
        found.setdefault(place.rstrip("/"), []).append(version)
    return found


def versions_of_experiment(registry: Registry) -> list[Version]:
    """All versions of this name, and those of others whose files are in this project's experiment."""
    here = {place for model in logged_models(registry) for place in (model.model_id, model.artifact_location)}
    found = [(place, version) for place, each in every_version(registry).items() for version in each]
    return [version for place, version in found if version.model == registry.model or place in here]


def logged_models(registry: Registry, where: str | None = None) -> Iterator[Any]:
    """Those of the project's experiment."""
    here = [registry.experiment_id]
    return paged(lambda token: registry.client.search_logged_models(here, where, page_token=token))
