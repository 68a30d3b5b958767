"""Check of S3: whether everything that params.yaml and DVC name there can be read or written."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, passed
from tasks.commands.dvc_remote import dvc_remote
from tasks.storage.client import StorageError
from tasks.storage.inputs import check_storage, check_writable, urls_of


def storage(context: DoctorContext) -> Finding:
    """A flow asks for what params.yaml names before it begins; DVC's remote is for `dvc push`, by hand."""
    params = context.settings.model_dump()
    check_storage(params)
    named, remote = urls_of(params), dvc_remote()
    if remote is not None:
        url, endpoint = remote
        try:
            check_writable(url, context.settings.storage, endpoint)
        except StorageError as error:
            raise ValueError(f"DVC's remote: {error}") from None
        named.append("DVC's remote")
    if not named:
        return passed("nothing is on S3")
    return passed(f"S3 answers, and takes our keys for {', '.join(named)}")
