"""A key that no client could send is refused before the model is looked up."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.commands.serve.serve import serve
from tests.profiles import profile_params


@pytest.mark.parametrize("key", ["schlüssel-1234", "k-1234-5678\n", " k-1234-5678", "k-1234\t5678"])
def test_a_key_that_no_header_carries_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_KEY", key)
    params = profile_params("demo")
    params["serve"] |= {"key_variable": "AGENT_KEY"}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    with pytest.raises(ValueError, match=r"value of AGENT_KEY .*Choose another key") as caught:
        serve("nowhere")
    assert key.strip() not in str(caught.value)
