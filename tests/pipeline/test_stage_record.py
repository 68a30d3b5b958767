"""The record of curate is of the problems that it read, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core import provenance
from tasks.core.files import read_json
from tasks.core.passing_faults import PassingFault
from tasks.pipeline import order
from tests.profiles import profile_params


@pytest.mark.parametrize("grows", [False, True])
def test_a_source_that_grows_while_curate_reads_it_is_read_again_and_recorded_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
):
    source = tmp_path / "problems.jsonl"
    source.write_text("{}\n", encoding="utf-8")
    params = profile_params("test")
    params["curate"]["source"], params["paths"]["artifacts"] = str(source), str(tmp_path / "artifacts")

    class Curate:
        SETTINGS = order.CommonSections

        @staticmethod
        def run(settings: object, paths: object) -> None:
            (tmp_path / "artifacts" / "curate").mkdir()
            if grows:
                source.write_text("{}\n{}\n", encoding="utf-8")

    for module in (order, provenance):
        monkeypatch.setattr(module, "read_params", lambda: params)
    monkeypatch.setattr(order, "check_params", lambda params: None)
    monkeypatch.setattr(order, "stage_module", lambda name: Curate)
    record = tmp_path / "artifacts" / "provenance" / "curate.json"
    if grows:
        with pytest.raises(PassingFault, match=r"problems\.jsonl was changed while curate read it.*`mv`"):
            order.run_stage("curate")
        assert not record.exists()
    else:
        order.run_stage("curate")
        assert str(source) in read_json(record)["data"]
