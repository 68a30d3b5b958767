"""infra/compose.yaml before anything runs: the specification's schema, and what every service must have.

Each rule returns what breaks it; each is shown to catch a planted fault.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.settings import read_params
from tests.conftest import ROOT
from tests.contracts.test_layout import files_of_the_project
from tests.infra.composition import COMPOSE, IMAGE_ROOT, VARIABLE, compose_text, environment, parse, texts, words
from tests.profiles import profile_params

SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|API_KEY|ACCESS_KEY")
MOUNTED = re.compile(r"/run/secrets/([\w.]+)")


def is_job(service: dict[str, Any]) -> bool:
    """Whether it ends by itself."""
    return service["restart"] == "no"


def faults(compose: dict[str, Any]) -> list[str]:
    return sorted({*_loose(compose), *_unloadable(compose), *_open(compose), *_unready(compose), *_unknown(compose)})


def _loose(compose: dict[str, Any]) -> Iterator[str]:
    """What a break-in could use."""
    for name, service in compose["services"].items():
        image = service["image"]
        if not image.startswith("turnwise-") and not re.search(r":\d+\.\d+[\w.-]*$", image):
            yield f"{name}: image {image} is not pinned"
        if not image.startswith("turnwise-") and service.get("user", "root").split(":")[0] in ("root", "0"):
            yield f"{name}: runs as root"  # ours have a USER (test_images)
        if not service["read_only"] or "/tmp" not in {place.split(":")[0] for place in service["tmpfs"]}:
            yield f"{name}: its root can be written"
        if service["cap_drop"] != ["ALL"] or "no-new-privileges:true" not in service["security_opt"]:
            yield f"{name}: may gain rights"
        if service.get("privileged") or any("docker.sock" in text for text in texts(service)):
            yield f"{name}: has the machine"


def _unloadable(compose: dict[str, Any]) -> Iterator[str]:
    """Docker mounts a tmpfs noexec unless told otherwise, and HOME of our images is /tmp."""
    for name, service in compose["services"].items():
        if _computes(service) and "/tmp:exec" not in service["tmpfs"]:
            yield f"{name}: what it compiles in /tmp cannot be loaded"


def _open(compose: dict[str, Any]) -> Iterator[str]:
    """Who could reach it, and with what."""
    for name, service in compose["services"].items():
        if "network_mode" in service:
            yield f"{name}: is in a network of others"
        yield from (f"{name}: port {port} is open to others" for port in service.get("ports", []) if _is_open(port))
        for variable, value in environment(service).items():
            if SECRET_NAME.search(variable) and not variable.endswith("_FILE"):
                yield f"{name}: {variable} is a secret in a variable"
            if re.search(r"://[^/\s]*:[^/\s]*@", value):
                yield f"{name}: {variable} is a URL with a password"


def _is_open(port: str) -> bool:
    return not str(port).startswith("127.0.0.1:")


def _unready(compose: dict[str, Any]) -> Iterator[str]:
    services = compose["services"]
    for name, service in services.items():
        if not is_job(service) and "healthcheck" not in service:
            yield f"{name}: has no health check"
        for other, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if is_job(services.get(other, service)) else "service_healthy"
            if other not in services or how["condition"] != wanted:
                yield f"{name}: waits for {other} in vain"
        for other in services:
            needs = any(
                re.search(rf"(//|@){other}:\d", text) for text in (*environment(service).values(), *words(service))
            )
            if needs and other != name and other not in _waits_for(services, name):
                yield f"{name}: does not wait for {other}"
            if needs and not set(service["networks"]) & set(services[other]["networks"]):
                yield f"{name}: does not reach {other}"


def _waits_for(services: dict[str, Any], name: str) -> set[str]:
    direct = set(services[name].get("depends_on", {}))
    return direct.union(*(_waits_for(services, other) for other in direct if other in services))


def _unknown(compose: dict[str, Any]) -> Iterator[str]:
    """What is named and not there, there and not named, or there and of no use."""
    used: set[str] = set()
    for name, service in compose["services"].items():
        given = set(service.get("secrets", []))
        read = {secret for text in texts(service) for secret in MOUNTED.findall(text)}
        if name == "caddy":
            read |= set(MOUNTED.findall((ROOT / "infra" / "docker" / "Caddyfile").read_text(encoding="utf-8")))
        used |= given
        yield from (f"{name}: reads the secret {secret} and is not given it" for secret in read - given)
        yield from (f"{name}: is given the secret {secret} and does not read it" for secret in given - read)
        for text in (text for text in texts(service) if text.startswith(f"{IMAGE_ROOT}/")):
            if not (ROOT / text.removeprefix(f"{IMAGE_ROOT}/")).is_file():
                yield f"{name}: {text} is not in the image"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            is_there = (COMPOSE.parent / source).exists() if source.startswith(".") else source in compose["volumes"]
            if not is_there:
                yield f"{name}: the volume {source} is not there"
            if volume.endswith(":ro") and source in compose["volumes"] and not _is_filled(compose, source):
                yield f"{name}: nobody writes to the volume {source}"
    yield from (f"the secret {secret} is not used" for secret in set(compose["secrets"]) - used)
    yield from (f"the secret {secret} is not defined" for secret in used - set(compose["secrets"]))


def _is_filled(compose: dict[str, Any], volume: str) -> bool:
    """Whether a service writes to it."""
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    return any(mount.split(":")[0] == volume and not mount.endswith(":ro") for mount in mounts)


def _computes(service: dict[str, Any]) -> bool:
    """Whether it plays or trains: torch, Triton or our C is compiled there and loaded."""
    return service["image"].startswith("turnwise-gpu:") or any(
        word.endswith("/workspace.sh") for word in words(service)
    )


def schema_errors(file: Path) -> str:
    check = str(Path(sys.executable).parent / "check-jsonschema")
    command = [check, "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_compose_keeps_every_rule():
    assert faults(parse(compose_text())) == []


@pytest.mark.slow
def test_compose_is_what_the_specification_allows(tmp_path: Path):
    assert "ok" in schema_errors(COMPOSE)
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(compose_text().replace("read_only: true", "readonly: true"), encoding="utf-8")
    assert "readonly" in schema_errors(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("postgres:15.18-bookworm", "postgres:latest", "postgres: image postgres:latest is not pinned"),
        ("    user: postgres\n", "", "postgres: runs as root"),
        ("  read_only: true\n", "  read_only: false\n", "caddy: its root can be written"),
        ("cap_drop: [ALL]", "cap_drop: [NET_RAW]", "prefect: may gain rights"),
        ("127.0.0.1:4200:4200", "4200:4200", "prefect: port 4200:4200 is open to others"),
        ("${BIND_ADDRESS:-127.0.0.1}:8443", "${BIND_ADDRESS:-0.0.0.0}:8443", "port 0.0.0.0:8443:8443 is open"),
        (
            "MLFLOW_AUTH_ADMIN_PASSWORD__FILE: /run/secrets/mlflow_admin_password",
            "MLFLOW_AUTH_ADMIN_PASSWORD: password1234",
            "mlflow: MLFLOW_AUTH_ADMIN_PASSWORD is a secret in a variable",
        ),
        (
            "asyncpg://prefect@",
            "asyncpg://prefect:hunter2@",
            "prefect: PREFECT_SERVER_DATABASE_CONNECTION_URL is a URL",
        ),
        ("secrets: [postgres_password]", "secrets: []", "postgres: reads the secret postgres_password"),
        ("  vllm_api_key: {file: ./secrets/vllm_api_key}\n", "", "the secret vllm_api_key is not defined"),
        ("mlflow: {condition: service_healthy}", "mlflow: {condition: service_started}", "worker: waits for mlflow"),
        (
            "prepare: {condition: service_completed_successfully}",
            "s3: {condition: service_healthy}",
            "wait for postgres",
        ),
        ("networks: [front, databases]", "networks: [front]", "prefect: does not reach postgres"),
        (
            "docker/prepare.py",
            "docker/prepared.py",
            "prepare: /opt/turnwise/infra/docker/prepared.py is not in the image",
        ),
        ("  workspace:\n", "", "worker: the volume workspace is not there"),
        ('tmpfs: ["/tmp:exec"] # what', "tmpfs: [/tmp] # what", "worker: what it compiles in /tmp cannot be loaded"),
        ('  tmpfs: ["/tmp:exec"]\n', "  tmpfs: [/tmp]\n", "vllm: what it compiles in /tmp cannot be loaded"),
        ('volumes: ["models:/models"]', "volumes: []", "worker-gpu: nobody writes to the volume models"),
    ],
)
def test_a_planted_fault_is_found(was: str, becomes: str, fault: str):
    assert was in compose_text()
    found = faults(parse(compose_text().replace(was, becomes)))
    assert any(fault in line for line in found), found


def test_every_variable_is_in_the_example_with_its_value():
    example = (ROOT / "infra" / ".env.example").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^([A-Z_0-9]+)=(.*)$", example, re.MULTILINE))
    assert dict(VARIABLE.findall(compose_text())) == stated
    lines = example.splitlines()
    assert not [line for number, line in enumerate(lines) if "=" in line and not lines[number - 1].startswith("#")]


def test_git_and_images_leave_secrets_out():
    kept = [
        str(file) for file in files_of_the_project() if file.parts[:2] == ("infra", "secrets") or file.name == ".env"
    ]
    assert kept == []
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert left_out.index("infra/secrets") > left_out.index("!infra") and "infra/.env" in left_out


def test_the_profile_of_services_names_the_servers_of_compose():
    compose = parse(compose_text())
    params = profile_params("services")
    assert params["tracking"]["uri"] == "http://mlflow:5000"
    root = next(word for word in words(compose["services"]["mlflow"]) if "artifact-root" in word)
    assert root.endswith(params["tracking"]["artifact_location"])
    assert params["paths"]["remote"].startswith("s3://turnwise/")
    assert (
        params["storage"] == read_params(ROOT / "params.yaml")["storage"]
    )  # the endpoint is a variable of the machine


def test_the_worker_on_a_gpu_finds_the_model_of_its_profiles_where_the_service_model_puts_it():
    compose = parse(compose_text())["services"]
    worker, model = compose["worker-gpu"], compose["model"]
    first, *_ = environment(worker)["TURNWISE_PROFILES"].split()
    (mount,) = (volume.split(":")[1] for volume in worker["volumes"] if volume.startswith("models:"))
    (place,) = (volume.split(":")[1] for volume in model["volumes"] if volume.startswith("models:"))
    wanted = Path(worker["working_dir"]) / profile_params(first)["model"]["path"]
    _, _, hub, _, folder = words(model)
    assert wanted.relative_to(mount) == Path(folder).relative_to(place)
    assert hub.rpartition("/")[2] == wanted.name
    of_kubernetes = yaml.safe_load((ROOT / "infra" / "kubernetes" / "model.yaml").read_text(encoding="utf-8"))
    (container,) = of_kubernetes["spec"]["template"]["spec"]["containers"]
    assert container["args"][:3] == words(model)[:3]
    assert Path(container["workingDir"]) / container["args"][-1] == wanted
