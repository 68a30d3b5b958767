"""A secret in params.yaml is refused, whichever setting holds it, and no message repeats it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.profile import apply_profiles
from tasks.core.settings import read_params
from tasks.pipeline.order import check_params
from tests.conftest import ROOT
from tests.profiles import profile_params
from tests.tools.judge.endpoint import judge_row

SECRET = "hunter2-Zq8"
MCP: dict[str, Any] = {
    "command": ["serve"], "url": None, "environment": {}, "headers": {}, "allowed_tools": None, "reset": "process",
    "reset_tool": None, "checker": "tasks.custom.a:b", "max_servers": 1, "start_timeout_seconds": 1.0,
}  # fmt: skip
JUDGE = judge_row("https://host/v1", Path("artifacts"), api_key_variable="KEY")
FRONTIER: dict[str, Any] = {
    "url": "https://host/v1", "model": "m", "api_key_variable": "KEY", "temperature": None, "max_output_tokens": 1,
    "max_concurrent_episodes": 1, "max_retries": 0, "timeout_seconds": 1.0, "price_per_million_input_tokens": None,
    "price_per_million_output_tokens": None, "samples_per_problem": 1, "num_problems": None,
}  # fmt: skip
VLLM: dict[str, Any] = {
    "mode": "server", "urls": ["http://host:8000"], "num_servers": 1, "dtype": "auto", "enforce_eager": True,
    "kv_cache_gib": 1, "gpu_memory_utilization": 0.5, "tensor_parallel_size": 1, "transfer": "disk", "folder": "f",
    "start_timeout_seconds": 1.0, "request_timeout_seconds": 1.0, "max_restarts": 0,
}  # fmt: skip


def params_with(place: str, value: Any) -> dict[str, Any]:
    """The test profile with an MCP server, its judge, a frontier model and vLLM servers, and `value` at `place`."""
    params = profile_params("test")
    judged = "judge" in place
    params["environment"]["name"] = "mcp"
    params["environment"]["settings"] = {**MCP, **({"checker": None} if judged else {})}
    params["environment"]["judge"] = dict(JUDGE) if judged else None
    params["evaluate"]["frontier"] = dict(FRONTIER)
    params["engine"] |= {"name": "vllm", "settings": dict(VLLM)}
    if place in ("environment.settings.url", "environment.settings.headers"):
        params["environment"]["settings"] |= {"command": None, "url": "https://host/mcp", "reset": "none"}
    *path, key = place.split(".")
    section = params
    for part in path:
        section = section[part]
    assert key in section
    section[key] = value
    return params


def refused(params: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        check_params(params)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_params_the_cases_start_from_are_good() -> None:
    check_params(params_with("environment.judge.api_key_variable", "KEY"))
    check_params(params_with("environment.settings.url", "https://host:8080/a@b?page=2"))
    check_params(params_with("environment.settings.headers", {"Authorization": "MY_TOKEN"}))
    check_params(params_with("tracking.uri", "postgresql+psycopg://mlflow@127.0.0.1:5432/mlflow"))
    check_params(params_with("tracking.artifact_location", "sftp://host:22/path@v1"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("tracking.uri", f"https://me:{SECRET}@mlflow.example.org"),
        ("tracking.uri", f"https://{SECRET}@mlflow.example.org"),
        ("tracking.uri", f"postgresql://me:12/{SECRET}@db/mlflow"),
        ("tracking.uri", f"mysql+pymysql://me@db/mlflow?ssl=1&password={SECRET}"),
        ("tracking.artifact_location", f"sftp://me:{SECRET}@store/runs"),
        ("tracking.artifact_location", f"sftp://me:12-{SECRET}/34@store:22/runs"),
        ("curate.source", f"https://me:{SECRET}@data.example.org/problems.jsonl"),
        ("model.path", f"https://me:{SECRET}@data.example.org/model"),
        ("environment.settings.url", f"https://me:{SECRET}@tools.example.org/mcp"),
        ("environment.settings.url", f"https://tools.example.org/mcp?api_key={SECRET}"),
        ("environment.settings.command", ["npx", "server-postgres", f"postgresql://me:{SECRET}@db/shop"]),
        ("environment.judge.url", f"https://me:{SECRET}@judge.example.org/v1"),
        ("evaluate.frontier.url", f"https://me:{SECRET}@frontier.example.org/v1"),
        ("engine.settings.urls", ["http://10.0.0.1:8000", f"http://me:{SECRET}@10.0.0.2:8000"]),
    ],
)
def test_a_url_with_a_password_or_a_key_is_refused_by_the_name_of_its_setting(place: str, value: Any) -> None:
    message = refused(params_with(place, value))
    assert message.startswith(f"params.yaml: {place} is a URL with a user name or password")
    assert "Leave it out" in message


@pytest.mark.parametrize("key", [SECRET, f"sk_live_{SECRET}".replace("-", "_"), 20261122, [SECRET], {"key": SECRET}])
@pytest.mark.parametrize("place", ["environment.judge.api_key_variable", "evaluate.frontier.api_key_variable"])
def test_a_key_where_a_variables_name_belongs_is_refused_and_not_repeated(place: str, key: Any) -> None:
    message = refused(params_with(place, key))
    assert message.startswith(f"params.yaml: {place}: it must be the name of an environment variable")
    assert "20261122" not in message and "hunter2" not in message


@pytest.mark.parametrize("key", ["ghp_hunter2", "sk_live_hunter2", "hf_hunter2", "hunter2"])
@pytest.mark.parametrize("place", ["environment.settings.environment", "environment.settings.headers"])
def test_a_key_that_could_be_a_variables_name_is_refused_before_any_run_logs_it(place: str, key: str) -> None:
    message = refused(params_with(place, {"SHOP_KEY": key}))
    assert message.startswith(f"params.yaml: {place}: SHOP_KEY must be the name of an environment variable")
    assert "capitals" in message and "hunter2" not in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("environment.settings.headers", f"Authorization: Bearer {SECRET}"),
        ("environment.settings.headers", [f"Authorization: Bearer {SECRET}"]),
        ("environment.settings.environment", f"KEY={SECRET}"),
        ("environment.judge", SECRET),
        ("evaluate.frontier", [SECRET]),
        ("evaluate.frontier.url", {"key": SECRET}),
        ("engine.settings.urls", SECRET),
    ],
)
def test_what_stands_where_a_section_belongs_is_not_repeated(place: str, value: Any) -> None:
    message = refused(params_with(place, value))
    assert f"params.yaml: {place} " in message
    assert " a list" in message or " a text" in message or " a table" in message
    assert SECRET not in message


def test_neither_broken_yaml_nor_a_profile_shows_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = Path("params.yaml")
    for text in (f"tracking:\n  uri: https://me:{SECRET}@h: [\n", f"a: {{k: {SECRET}, k: 2}}\n", f"a: '{SECRET}"):
        params.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"not valid YAML .*, line \d") as caught:
            read_params()
        assert SECRET not in str(caught.value)
    shutil.copytree(ROOT / "infra" / "profiles", tmp_path / "infra" / "profiles")
    params.write_text(yaml.safe_dump(params_with("evaluate.frontier.api_key_variable", SECRET)), encoding="utf-8")
    told = "\n".join(apply_profiles(["test"]))
    assert SECRET not in told and "not compared" in told
