"""A registered model version: its tags, and the files of its lineage."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tasks.models.files import LINEAGE, TRAINED_ON

ALIASES = CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
# Not `.gz`: MLflow stores such a file on S3 as an encoding of another, and its server then hands out the unpacked one.
TRAJECTORIES_FILE = "test_trajectories.jsonl.gzip"
DECISION_FILE = "decision.json"
PROVENANCE_FILE = "provenance.json"  # what each stage ran with, by stage
LINEAGE_FILES = (
    *(DECISION_FILE, "params.yaml", "dvc.lock", "evaluation.json", "card.json"),
    *(TRAJECTORIES_FILE, TRAINED_ON, PROVENANCE_FILE),
)
FOLDER_TAG = "folder_hash"  # of every file of a model
FILES_TAG = "lineage_files"  # {path under lineage/: SHA-256}
VERIFYING_TAGS = ("weights_hash", FOLDER_TAG, "files_bytes", FILES_TAG)  # what its files are compared with
EARLIER_FILE = "earlier.json"  # of weights registered again: the tags that were replaced


@dataclass(frozen=True, slots=True)
class Version:
    """A registered model version; `weights` is the hash of its weight files, `tags` its lineage, `model_id` the logged
    model that has its files.
    """

    model: str
    version: int
    weights: str
    tags: dict[str, str]
    model_id: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} version {self.version}"

    @property
    def identity(self) -> str:
        """The hash of all its files; of its weights where somebody deleted that tag."""
        return self.tags.get(FOLDER_TAG, self.weights)

    def has_files_of(self, other: Version) -> bool:
        """Whether both are one version with the same files, whatever its other tags say by now."""
        return (self.version, self.weights, self.identity) == (other.version, other.weights, other.identity)

    @property
    def lineage_files(self) -> dict[str, str]:
        """SHA-256 of each file of its lineage, by path."""
        try:
            files = dict(json.loads(self.tags.get(FILES_TAG, "{}")))
        except (TypeError, ValueError):
            raise ValueError(
                f"{self.name}: its tag {FILES_TAG} was edited and is no longer a list of files, so the files of "
                f"its lineage are unknown. Put it back: python -m tasks registry restore."
            ) from None
        return {f"{LINEAGE}/{path}": str(digest) for path, digest in files.items()}

    @property
    def lineage_folder(self) -> str:
        return next((path.rpartition("/")[0] for path in self.lineage_files), LINEAGE)
