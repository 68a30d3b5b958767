"""What `paths.remote` gets: the results of each stage, the run's record, and checkpoints while a stage trains.

    results/<name>/    a stage's folder, the report, and the run: params, locks, records, the frozen tool cache
    resume/<stage>/<key>/    the newest checkpoints and snapshots of a training that has not ended

`key` is that of the stage's resume folder: the hash of its settings and of all it reads. A machine with an empty disk
whose settings, code and data are the same finds the checkpoints there, and goes on with the same bits.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tasks.core.files import atomic_folder, link_or_copy, numbered_folders
from tasks.core.resume import REFUSED
from tasks.core.settings import Paths
from tasks.core.stages import STAGES
from tasks.core.targets import remove_leftovers
from tasks.core.terminal import tell, warn
from tasks.core.urls import S3Url, parse_url
from tasks.storage.client import StorageError, Store, connect
from tasks.storage.folders import Manifest, fetch_files, files_below, find_manifest, put_folder
from tasks.storage.settings import StorageSections

RESULTS, RESUME = "results", "resume"
RUN = "run"
FOLDERS = (*STAGES, "report")
# In artifacts, and in the workspace.
OF_THE_RUN = ("run.json", "progress.png", "evaluations.jsonl", "accepted_drift.json", "provenance", "timings")
OF_THE_WORKSPACE = ("params.yaml", "dvc.yaml", "dvc.lock")
STEP = re.compile(r"(?:iteration|step)-(\d+)/")  # a checkpoint's folder; snapshots are deeper


def result_files(name: str, paths: Paths, frozen: Path | None) -> dict[str, Path]:
    """Of one folder under results/: file by its path there; empty where the run has none. `frozen`: the tool cache."""
    if name != RUN:
        folder = paths.artifacts / name
        return files_below(folder) if folder.is_dir() else {}
    places = {item: paths.artifacts / item for item in OF_THE_RUN}
    places |= {item: Path(item) for item in OF_THE_WORKSPACE}
    places |= {frozen.name: frozen} if frozen is not None else {}
    found: dict[str, Path] = {}
    for item, place in places.items():
        if place.is_dir():
            found |= {f"{item}/{file}": path for file, path in files_below(place).items()}
        elif place.exists():
            found[item] = place
    return found


def upload_results(store: Store, remote: S3Url, name: str, files: Mapping[str, Path], resume: S3Url | None) -> None:
    """`resume`: where the stage's checkpoints are, which may be the same snapshots."""
    known = None if resume is None else find_manifest(store, resume)
    copies = {} if known is None or resume is None else objects_of(known.manifest, resume)
    if files:
        put_folder(store, files, remote / RESULTS / name, keeps_versions=True, elsewhere=copies)


def objects_of(manifest: Manifest, url: S3Url) -> dict[str, S3Url]:
    return {file.sha256: url / file.key for file in manifest.files.values()}


def resume_url(remote: S3Url, stage: str, folder: Path) -> S3Url:
    return remote / RESUME / stage / folder.name


def upload_resume(store: Store, url: S3Url, folder: Path, staging: Path) -> None:
    """Make `url` the state in `folder`. The training deletes old checkpoints meanwhile, so hard links in `staging` are
    uploaded; FileNotFoundError where it did while they were made.
    """
    with atomic_folder(staging) as temporary:
        for item in resume_items(folder):
            _link_folder(item, temporary / item.relative_to(folder))
    if resume_items(staging):
        put_folder(store, files_below(staging), url, keeps_versions=False)


def _link_folder(folder: Path, target: Path) -> None:
    """OSError of one line: `copytree` goes on after an error, and raises a list of all."""
    try:
        shutil.copytree(folder, target, copy_function=link_or_copy)
    except shutil.Error as error:
        source, _, reason = error.args[0][0]
        raise (OSError if Path(source).exists() else FileNotFoundError)(reason) from None


def resume_items(folder: Path) -> list[Path]:
    """The checkpoints and the snapshots in a resume folder. Each is renamed there when it is complete."""
    return [*numbered_folders(folder / "snapshots"), *numbered_folders(folder)]


def fetch_resume(sections: StorageSections, stage: str, folder: Path) -> None:
    """Bring the checkpoints of `paths.remote` where they are newer than those here. ValueError where the server cannot
    be asked and nothing is here: a training that started over would replace hours of work there.
    """
    if sections.paths.remote is None:
        return
    remove_leftovers(folder.parent)  # of a call that was killed: this run alone writes there
    url, here = resume_url(parse_url(sections.paths.remote), stage, folder), numbered_folders(folder)
    try:
        store = connect(sections.storage)
        found = find_manifest(store, url)
        if found is None or newest_step(found.manifest) <= newest_step(files_below(folder) if here else {}):
            return
        with atomic_folder(folder) as temporary:
            fetch_files(store, url, found.manifest.files, temporary)
            if (folder / REFUSED).exists():
                (folder / REFUSED).rename(temporary / REFUSED)
    except StorageError as error:
        if not here:
            raise ValueError(f"paths.remote: {error}") from None
        warn(f"warning: paths.remote: {error} {stage} goes on from the checkpoint here.")
        return
    tell(f"{stage}: its checkpoints are from {url}")


def newest_step(files: Manifest | Mapping[str, Path]) -> int:
    """-1 where there is no checkpoint."""
    names = files.files if isinstance(files, Manifest) else files
    return max((int(found[1]) for name in names if (found := STEP.match(name))), default=-1)
