"""What the results were made with; refused where today's settings, code or data differ.

A setting may have been edited since, a stage run by hand, a file pulled: the lineage would be wrong. So each stage's
record (`provenance.py`) and its entry in dvc.lock are compared with today's. Settings that no earlier stage reads may
differ, and so may the source of problems after curate has read it: that is the next run's reason (decision 0110). It
takes under a second: of large folders only the recorded hash is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.files import dvc_md5, read_json, read_yaml
from tasks.core.params_text import read_as_dvc
from tasks.core.provenance import ARTIFACTS, LOCK_FILE, RECORDED, Origin, code_hashes, hash_now, provenance_file
from tasks.core.settings import MAX_REPEATED, PARAMS_FILE, Paths, read_params
from tasks.core.text import first_few, one_line
from tasks.core.urls import local_path
from tasks.tracking.metrics import flatten

MAX_TOLD = 3  # differences in one line
WHOLE = ("curate", "evaluate")  # small enough to be hashed again; of others the next stage's record has the hash
NOT_SET = object()


class Edit(NamedTuple):
    """What differs between today and what a stage ran with; `in_lock`: in dvc.lock alone, and not in its record.
    `is_in_last`: the last stage that was asked about began with today's.
    """

    stage: str
    told: str
    in_lock: bool
    is_in_last: bool = False


def read_origin(paths: Paths) -> Origin:
    """What curate to evaluate ran with; ValueError in one line where that is unknown or differs from today's."""
    params, text = read_params(), PARAMS_FILE.read_text(encoding="utf-8")
    lock = _read_lock()
    records = _records(RECORDED, paths)
    edit = _first_edit(records, params, text, lock, paths)
    if edit is not None:
        raise ValueError(
            f"{edit.told}. So its results are not those of today's settings, code and data, and the lineage of the "
            f"promoted version would be wrong. {_remedy(edit)}."
        )
    return Origin(params, text, lock, hash_now(LOCK_FILE), records)


def find_edit(last: str, paths: Paths) -> Edit | None:
    """The first of the stages up to `last` that ran with something else than there is today."""
    params, text = read_params(), PARAMS_FILE.read_text(encoding="utf-8")
    records = _records(RECORDED[: RECORDED.index(last) + 1], paths)
    edit = _first_edit(records, params, text, _read_lock(), paths)
    if edit is None or edit.stage == last:
        return edit
    return edit._replace(is_in_last=not any(_changes(records[last], records, params, paths, fed=None)))


def _first_edit(
    records: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any], text: str, lock: bytes | None, paths: Paths
) -> Edit | None:
    locked = (read_as_dvc(lock) or {}).get("stages", {}) if lock is not None else {}
    params_of_dvc = read_as_dvc(text)
    for stage, record in records.items():
        fed = _source_fed_since(record, locked.get(stage) or {})
        if found := list(_changes(record, records, params, paths, fed=fed)):
            return Edit(stage, f"{stage}: {first_few(found, MAX_TOLD, by='; ')}", in_lock=False)
        if found := [f"dvc.lock: {item}" for item in _lock_changes(stage, locked, params_of_dvc, paths, fed=fed)]:
            return Edit(stage, f"{stage}: {first_few(found, MAX_TOLD, by='; ')}", in_lock=True)
    return None


def _source_fed_since(record: Mapping[str, Any], entry: Mapping[str, Any]) -> str | None:
    """The source of problems, which curate alone reads and may have changed since: `tasks/pipeline/order.py` sees to it
    that the record has the hash of what was read. None where dvc.lock has today's hash, and so another than the record.
    """
    source = record["settings"].get("curate", {}).get("source")
    if record["stage"] != "curate" or source not in record["data"]:
        return None
    file, locked = local_path(source), {item["path"]: item.get("md5") for item in entry.get("deps") or []}
    is_todays = file.is_file() and locked.get(Path(source).as_posix()) == dvc_md5(file)
    return None if is_todays else str(source)


def _remedy(edit: Edit) -> str:
    if edit.in_lock:
        return (
            f"Run `dvc repro` (`dvc commit -f {edit.stage}` where it ran by hand, or was edited while it ran), then "
            f"promote again"
        )
    return (
        f"Run `dvc repro` (`dvc repro --force --single-item {edit.stage}` where that finds nothing to do), then "
        f"promote again; or undo the change, with `dvc commit -f {edit.stage}` if `dvc status` then names {edit.stage}"
    )


def _read_lock() -> bytes | None:
    if not LOCK_FILE.exists():
        return None
    read_yaml(LOCK_FILE)  # raises an error that describes the damage
    return LOCK_FILE.read_bytes()


def _records(stages: Sequence[str], paths: Paths) -> dict[str, dict[str, Any]]:
    return {stage: _record(stage, paths) for stage in stages}


def _record(stage: str, paths: Paths) -> dict[str, Any]:
    file = provenance_file(stage, paths)
    if not file.exists():
        raise ValueError(
            f"{file}: does not exist, so nobody knows what {stage} ran with, and a version without that cannot be made "
            f"again. Run `dvc repro`, then promote again."
        )
    record: dict[str, Any] = read_json(file)
    if record["stage"] != stage:
        raise ValueError(
            f"{file}: it is the record of {record['stage']!r}, so nobody knows what {stage} ran with. Run "
            f"`rm {file} && dvc repro`, then promote again."
        )
    return record


def _changes(
    record: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, Any],
    paths: Paths,
    *,
    fed: str | None,
) -> Iterator[str]:
    """What differs between a stage's record and today, `fed` aside, a phrase each."""
    stage = record["stage"]
    yield from _setting_changes(record["settings"], params, verb="ran with")
    before, now = record["code"], code_hashes(stage)
    for name in sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        yield f"{name} was {'added' if name not in before else 'changed' if name in now else 'removed'}"
    for name, before in record["data"].items():
        if name != fed and _data_now(name, records, paths) != before:
            yield f"{name} was changed"
    if stage in WHOLE and hash_now(paths.stage(stage)) != record["outs"]:
        yield f"{paths.stage(stage)} is not what it left"


def _setting_changes(before: Mapping[str, Any], params: Mapping[str, Any], *, verb: str) -> Iterator[str]:
    for name, ran, has in differing_settings(before, params):
        yield f"it {verb} {name} = {ran}, and {PARAMS_FILE} has {has}"


def differing_settings(before: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(dotted name, value it ran with, value now) of each setting that differs; `before` has sections, or
    `section.key`, of `params`.
    """
    now = {name: _at(params, name) for name in before}
    old, new = dict(flatten(before)), dict(flatten(now))
    for name in {**old, **new}:
        ran, has = old.get(name, NOT_SET), new.get(name, NOT_SET)
        if ran != has:
            yield name, _show(ran), _show(has)


def _at(params: Mapping[str, Any], name: str) -> Any:
    found: Any = params
    for part in name.split("."):
        found = found.get(part, NOT_SET) if isinstance(found, Mapping) else NOT_SET
    return found


def _show(value: Any) -> str:
    if value is NOT_SET:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return one_line(text, MAX_REPEATED)


def _data_now(name: str, records: Mapping[str, Mapping[str, Any]], paths: Paths) -> str:
    """The hash of what a record calls `name`: another stage's folder as that stage recorded it, else computed now."""
    folder, _, rest = name.partition("/")
    if folder != ARTIFACTS:
        return hash_now(local_path(name))
    return str(records[rest]["outs"]) if rest in records else hash_now(paths.artifacts / rest)


def _lock_changes(
    stage: str, locked: Mapping[str, Any], params: Mapping[str, Any], paths: Paths, *, fed: str | None
) -> Iterator[str]:
    """The same for a stage's entry in dvc.lock. None where there is none: its own record is enough."""
    entry = locked.get(stage)
    if entry is None:
        return
    yield from _setting_changes((entry.get("params") or {}).get(str(PARAMS_FILE), {}), params, verb="has")
    made = {out["path"]: out.get("md5") for other in locked.values() for out in other.get("outs") or []}
    for item in entry.get("deps") or []:
        path = Path(item["path"])
        now = made[item["path"]] if item["path"] in made else dvc_md5(path) if path.is_file() else item.get("md5")
        is_fed = fed is not None and path == Path(fed)
        if item.get("hash") == "md5" and now != item.get("md5") and not is_fed:
            yield f"{path} was changed"
    file = provenance_file(stage, paths)
    if made.get(file.as_posix()) != dvc_md5(file):
        yield f"it is of another run of {stage} than the one whose results are here"
