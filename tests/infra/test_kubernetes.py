"""infra/kubernetes, rendered by kustomize: valid for Kubernetes, closed, and naming nothing that is not there.

The Job that a worker makes of a run is filled in by Prefect's own class and held to the same rules.
"""

from __future__ import annotations

import copy
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.pipeline.launch import LAUNCHED
from tests.conftest import ROOT
from tests.infra.composition import IMAGE_ROOT, compose_text, environment, parse, words

FOLDER = ROOT / "infra" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
TEMPLATE = runpy.run_path(str(ROOT / "infra" / "docker" / "job_template.py"))
SECRETS = set(parse(compose_text())["secrets"]) - {"tls_certificate", "tls_key"}  # what make_secrets.sh makes
JOBS = ("run", "training")  # which end
Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, and it has kustomize")
    command = [kubectl, "kustomize", str(FOLDER / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def manifests(overlay: str, *, folder: str = "overlays/") -> list[Manifest]:
    return [*yaml.safe_load_all(rendered(f"{folder}{overlay}"))]


def job(overlay: str) -> Manifest:
    """The Job of a run, as the worker sends it to the cluster."""
    from prefect.utilities.templating import apply_values
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    stated = next(item for item in manifests(overlay) if item["metadata"]["name"] == "jobs")["data"]
    chosen = {name: stated[f"JOB_{name.upper()}"] for name in ("gpus", "cpus", "memory")}
    template = TEMPLATE["job_template"](stated["JOB_IMAGE"], **chosen)
    defaults = KubernetesWorkerJobConfiguration._get_base_config_defaults(template["variables"]["properties"])
    configuration = KubernetesWorkerJobConfiguration(**apply_values(template["job_configuration"], defaults))
    configuration.env = {"PREFECT_API_URL": "http://prefect:4200/api"}
    configuration.command = "prefect flow-run execute"
    configuration._populate_env_in_manifest()
    configuration._populate_command_if_not_present()
    configuration._populate_generate_name_if_not_present()
    configuration.job_manifest["metadata"]["name"] = "run"
    return configuration.job_manifest


def invalid(text: str, tmp_path: Path) -> str:
    """What Kubernetes' own schema refuses."""
    file = tmp_path / "manifests.yaml"
    file.write_text(text, encoding="utf-8")
    program = str(Path(sys.executable).parent / "kubernetes-validate")
    done = subprocess.run([program, "--strict", "--quiet", str(file)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def faults(items: list[Manifest]) -> list[str]:
    return sorted({*_loose(items), *_dangling(items)})


def _pods(items: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Name, labels and spec of the pods of each workload."""
    for item in items:
        if "template" in item.get("spec", {}):
            pod = item["spec"]["template"]
            yield item["metadata"]["name"], pod["metadata"]["labels"], pod["spec"]


def _loose(items: list[Manifest]) -> Iterator[str]:
    for name, labels, pod in _pods(items):
        if not pod["securityContext"].get("runAsNonRoot") or "seccompProfile" not in pod["securityContext"]:
            yield f"{name}: may run as root"
        if (
            "job" not in name
            and name != "run"
            and pod.get("serviceAccountName") != "worker"
            and pod.get("automountServiceAccountToken", True)
        ):
            yield f"{name}: has a token of the cluster"
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            closed = container["securityContext"]
            if closed != TEMPLATE["CLOSED"]:
                yield f"{name}: may gain rights, or write to its root"
            if not re.search(r":[\w.-]+$", container["image"]) or container["image"].endswith(":latest"):
                yield f"{name}: {container['image']} is not pinned"
            if "memory" not in container["resources"].get("limits", {}):
                yield f"{name}: may take all memory"
            for variable in container.get("env", []):
                is_secret = re.search(r"PASSWORD|TOKEN|AUTH_STRING|API_KEY|SECRET_KEY", variable["name"])
                if is_secret and not re.search(r"_FILE$|SECRET_(NAME|KEY)$", variable["name"]):
                    yield f"{name}: {variable['name']} is a secret in a variable"
        yield from (f"{name}: has no {probe}" for probe in _missing_probes(name, pod))
        policies = [item for item in items if item["kind"] == "NetworkPolicy"]
        if policies and not any(_selects(policy, labels) for policy in policies):
            yield f"{name}: no rule of the network is about it"


def _missing_probes(name: str, pod: Manifest) -> list[str]:
    wanted = ["startupProbe", "livenessProbe"] if name not in JOBS else []
    return [probe for container in pod["containers"] for probe in wanted if probe not in container]


def _selects(policy: Manifest, labels: Manifest) -> bool:
    wanted = policy["spec"]["podSelector"].get("matchLabels", {})
    return bool(wanted) and wanted.items() <= labels.items()


def _dangling(items: list[Manifest]) -> Iterator[str]:
    names = {(item["kind"], item["metadata"]["name"]) for item in items}
    services = {name for kind, name in names if kind == "Service"}
    for name, _, pod in _pods(items):
        mounted = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for volume in mounted.values():
            secret = volume.get("secret", {})
            if secret and not {item["key"] for item in secret["items"]} <= SECRETS:
                yield f"{name}: a secret that make_secrets.sh does not make"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and ("PersistentVolumeClaim", claim) not in names:
                yield f"{name}: the volume {claim} is not there"
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            given = {
                f"/run/secrets/{item['key']}"
                for mount in container["volumeMounts"]
                for item in mounted.get(mount["name"], {}).get("secret", {}).get("items", [])
            }
            maps = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
            yield from (
                f"{name}: the settings {map_} are not there" for map_ in maps if ("ConfigMap", map_) not in names
            )
            stated = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
            data = {
                key: value
                for item in items
                if item["metadata"]["name"] in maps
                for key, value in item.get("data", {}).items()
            }
            for value in {**data, **stated}.values():
                if value.startswith("/run/secrets/") and value not in given:
                    yield f"{name}: {value} is not mounted"
                for host in re.findall(r"(?://|@)([a-z][a-z0-9]*):\d+", value):
                    if host not in services:
                        yield f"{name}: there is no service {host}"
            for word in [*container.get("args", []), *container.get("command", [])]:
                if word.startswith(f"{IMAGE_ROOT}/") and not (ROOT / word.removeprefix(f"{IMAGE_ROOT}/")).is_file():
                    yield f"{name}: {word} is not in the image"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_and_keeps_every_rule(overlay: str, tmp_path: Path):
    assert invalid(rendered(f"overlays/{overlay}"), tmp_path) == ""
    assert faults(manifests(overlay)) == []


def _admitted(rule: Manifest) -> set[str]:
    """The apps that a rule lets in."""
    selectors = [peer["podSelector"] for peer in rule["from"]]
    stated = {selector["matchLabels"]["app"] for selector in selectors if "app" in selector.get("matchLabels", {})}
    return stated.union(*(listed["values"] for each in selectors for listed in each.get("matchExpressions", [])))


def test_whoever_may_send_to_a_store_is_let_in_there_and_nobody_else():
    files = ("base/network.yaml", "components/in-cluster/stores.yaml", "training/network.yaml")
    items = [item for file in files for item in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))]
    rules = [item["spec"] for item in items if item["kind"] == "NetworkPolicy" and item["spec"]["podSelector"]]
    for store, port in {"prefect": 4200, "mlflow": 5000, "postgres": 5432, "s3": 8333}.items():
        sends = {
            rule["podSelector"]["matchLabels"]["app"]
            for rule in rules
            for way in rule.get("egress", [])
            if {"port": port} in way.get("ports", [])
        }
        lets_in = [
            _admitted(way)
            for rule in rules
            if rule["podSelector"]["matchLabels"]["app"] == store
            for way in rule["ingress"]
            if {"port": port} in way["ports"]
        ]
        assert sends == set().union(*lets_in), store


def _matches(selector: Manifest | None, app: str) -> bool:
    if selector is None:
        return False
    wanted = selector.get("matchLabels", {})
    listed = selector.get("matchExpressions", [])
    return wanted.items() <= {"app": app}.items() and all(app in each["values"] for each in listed)


def reaches(policies: list[Manifest], source: str, target: str, port: int) -> bool:
    """As Kubernetes has it: where a policy is about a pod, only what one of them allows, on both sides."""

    def allows(way: str, pod: str, peers: str, other: str) -> bool:
        about = [rule for rule in policies if way in rule["policyTypes"] and _matches(rule["podSelector"], pod)]
        rules = [rule for each in about for rule in each.get(way.lower(), [])]
        return not about or any(
            port in [item["port"] for item in rule.get("ports", [{"port": port}])]
            and any(
                "namespaceSelector" not in peer and _matches(peer.get("podSelector"), other)
                for peer in rule.get(peers, [{"podSelector": {}}])
            )
            for rule in rules
        )

    return allows("Egress", source, "to", target) and allows("Ingress", target, "from", source)


def addresses(items: list[Manifest]) -> dict[str, list[tuple[str, int]]]:
    """What the stages in a pod of an app talk to: MLflow, S3, the servers of `engine.settings.urls`, Prefect."""
    comment = (FOLDER / "training" / "servers.yaml").read_text(encoding="utf-8")
    (leader,) = (item for item in items if item["metadata"]["name"] == "training")
    port = re.search(r"leader\+=:(\d+)", (ROOT / "infra" / "launch" / "torchrun.sh").read_text(encoding="utf-8"))
    store = next(item["data"] for item in items if item["metadata"]["name"] == "store")
    profile = yaml.safe_load((ROOT / "infra" / "profiles" / "services.yaml").read_text(encoding="utf-8"))

    def of(text: str) -> list[tuple[str, int]]:
        """(service, port) of each url: a pod of a service is `pod.service`."""
        return [(host.split(".")[-1], int(number)) for host, number in re.findall(r"http://([a-z0-9.-]+):(\d+)", text)]

    stores = [*of(profile["tracking"]["uri"]), *of(" ".join(store.values()))]
    servers = of(comment)
    assert servers and stores and port
    meeting = (leader["spec"]["template"]["spec"]["subdomain"], int(port[1]))
    return {
        "job": [*stores, *servers, *of("http://prefect:4200")],
        "trainers": [*stores, *servers, meeting],
        "ray": stores,
    }


def test_every_address_that_a_stage_uses_is_reached_from_its_pod_and_servers_by_no_other():
    items = [*manifests("training", folder=""), *manifests("gpu")]
    policies = [item["spec"] for item in items if item["kind"] == "NetworkPolicy"]
    used = addresses(items)
    closed = [
        f"{app} -> {target}:{port}"
        for app, wanted in used.items()
        for target, port in wanted
        if not reaches(policies, app, target, port)
    ]
    assert closed == []
    others = ("prefect", "mlflow", "worker", "ray", "s3", "postgres")
    assert not [app for app in others if reaches(policies, app, "servers", 8000)]
    assert not reaches(policies, "job", "trainers", 29400)


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_job_of_a_run_is_valid_and_keeps_every_rule(overlay: str, tmp_path: Path):
    made = job(overlay)
    assert invalid(yaml.safe_dump(made), tmp_path) == ""
    assert faults([*manifests(overlay), made]) == []
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == {"cpu": "0", "gpu": "1"}[overlay]
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert made["spec"]["template"]["spec"]["serviceAccountName"] == "job"


@pytest.mark.slow
def test_the_job_that_fetches_a_model_is_valid_keeps_every_rule_and_reaches_the_hub(tmp_path: Path):
    made = yaml.safe_load((FOLDER / "model.yaml").read_text(encoding="utf-8"))
    made["metadata"] = {"name": "model-job", "namespace": "turnwise"}
    assert invalid(yaml.safe_dump(made), tmp_path) == ""
    assert [line for line in faults([*manifests("gpu"), made]) if "Probe" not in line] == []
    policies = [item["spec"] for item in manifests("gpu") if item["kind"] == "NetworkPolicy"]
    (egress,) = (rule for rule in policies if _matches(rule["podSelector"], "job") and rule["podSelector"])
    assert {"port": 443} in [port for way in egress["egress"] for port in way["ports"]]


@pytest.mark.parametrize("file", ["model.yaml", "ray/train.yaml"])
def test_a_file_that_no_overlay_changes_says_what_image_to_put_in_and_names_it_once(file: str):
    text = (FOLDER / file).read_text(encoding="utf-8")
    (image,) = re.findall(r"image: (\S+):local$", text, re.MULTILINE)
    assert re.search(rf"^# .*`image`.*REGISTRY/{image}:TAG", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_ranks_and_servers_on_several_nodes_are_valid_and_keep_every_rule(tmp_path: Path):
    assert invalid(rendered("training"), tmp_path) == ""
    items = [*manifests("training", folder=""), *manifests("gpu")]
    assert faults(items) == []
    job = next(item for item in items if item["kind"] == "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    nodes, ranks, leader, stage = container["args"]
    assert job["completionMode"] == "Indexed" and int(nodes) == job["completions"] == job["parallelism"]
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    service = next(item for item in items if item["metadata"]["name"] == "trainers" and item["kind"] == "Service")
    assert leader == f"training-0.{service['metadata']['name']}" == f"training-0.{job['template']['spec']['subdomain']}"
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert stage in LAUNCHED


@pytest.mark.slow
def test_the_worker_gives_a_jobs_login_by_the_secrets_name():
    """Prefect's worker otherwise writes the login into each Job's manifest."""
    worker = next(pod for name, _, pod in _pods(manifests("cpu")) if name == "worker")
    stated = {variable["name"]: variable["value"] for variable in worker["containers"][0]["env"]}
    prefix = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET"
    assert (stated[f"{prefix}_NAME"], stated[f"{prefix}_KEY"]) == ("turnwise", "prefect_auth")
    assert stated["PREFECT_API_AUTH_STRING__FILE"].endswith("/prefect_auth")


def test_the_worker_may_start_jobs_and_read_no_secret():
    role = next(item for item in manifests("cpu") if item["kind"] == "Role")
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {("jobs", "create"), ("jobs", "delete"), ("pods", "watch"), ("pods/log", "get")} <= allowed
    assert not [resource for resource, _ in allowed if resource in ("secrets", "*")]
    assert not [item for item in manifests("cpu") if item["kind"].startswith("Cluster")]


def test_servers_are_started_as_compose_starts_them():
    compose = parse(compose_text())["services"]
    pods = {name: pod["containers"][0] for name, _, pod in _pods(manifests("cpu"))}
    assert pods["s3"]["args"] == words(compose["s3"])
    assert pods["prefect"]["args"] == words(compose["prefect"])
    by_variable = ("--allowed-hosts", "--cors-allowed-origins")  # addresses are in a ConfigMap
    assert pods["mlflow"]["args"] == [word for word in words(compose["mlflow"]) if not word.startswith(by_variable)]
    for name in ("prefect", "mlflow", "postgres"):
        stated = {variable["name"]: variable["value"] for variable in pods[name].get("env", [])}
        stated.pop("PGDATA", None)
        assert stated.items() <= environment(compose[name]).items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("runAsNonRoot: true", "runAsNonRoot: false", "may run as root"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "may gain rights"),
        ("automountServiceAccountToken: false\n      containers", "containers", "has a token of the cluster"),
        ("image: postgres:15.18-bookworm", "image: postgres", "postgres: postgres is not pinned"),
        ("livenessProbe:", "livelyProbe:", "has no livenessProbe"),
        ("key: prefect_auth", "key: prefect_login", "a secret that make_secrets.sh does not make"),
        ("name: store\n", "name: stored\n", "the settings store are not there"),
        ("@postgres:5432", "@postgresql:5432", "there is no service postgresql"),
        ("docker/prepare.py", "docker/prepared.py", "is not in the image"),
        ("value: /run/secrets/mlflow_secret_key", "value: /run/secrets/flask_key", "flask_key is not mounted"),
        ("name: PGPASSWORD__FILE", "name: PGPASSWORD", "PGPASSWORD is a secret in a variable"),
    ],
)
def test_a_planted_fault_is_found(was: str, becomes: str, fault: str):
    text = rendered("overlays/cpu")
    assert was in text
    parts = text.replace(was, becomes, 1) if was == "name: store\n" else text.replace(was, becomes)
    found = faults([*yaml.safe_load_all(parts)])
    assert any(fault in line for line in found), found


@pytest.mark.slow
def test_kubernetes_own_schema_finds_a_planted_fault(tmp_path: Path):
    wrong = copy.deepcopy(manifests("cpu"))
    next(item for item in wrong if item["kind"] == "Deployment")["spec"]["replica"] = 1
    assert "replica" in invalid(yaml.safe_dump_all(wrong), tmp_path)


@pytest.mark.slow
def test_the_other_components_render(tmp_path: Path):
    """Your own Postgres and S3, and an ingress: `overlays/cpu` with its component exchanged."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "cpu" / "kustomization.yaml"
    text = overlay.read_text(encoding="utf-8")
    changed = text.replace("[../../components/in-cluster]", "[../../components/external, ../../components/ingress]")
    overlay.write_text(changed, encoding="utf-8")
    made = rendered(str(overlay.parent))
    assert invalid(made, tmp_path) == ""
    items = [*yaml.safe_load_all(made)]
    assert faults(items) == []
    assert "StatefulSet" not in {item["kind"] for item in items}
    ingress = next(item for item in items if item["kind"] == "Ingress")["spec"]
    assert {rule["host"] for rule in ingress["rules"]} == set(ingress["tls"][0]["hosts"])


def ray_pods() -> list[Manifest]:
    """The pods of KubeRay's cluster, as Deployments, which Kubernetes' own schema knows. KubeRay gives them probes."""
    made = yaml.safe_load((FOLDER / "ray" / "train.yaml").read_text(encoding="utf-8"))
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayJob")
    cluster = made["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"ray-{name}"},
            "spec": {
                "selector": {"matchLabels": group["template"]["metadata"]["labels"]},
                "template": group["template"],
            },
        }
        for name, group in groups.items()
    ]


@pytest.mark.slow
def test_the_pods_of_kuberays_job_are_valid_and_keep_every_rule_but_the_probes_that_kuberay_adds(tmp_path: Path):
    assert invalid(yaml.safe_dump_all(ray_pods()), tmp_path) == ""
    found = faults([*manifests("gpu"), *ray_pods()])
    assert [line for line in found if "Probe" not in line] == []
    assert {line.split(":")[0] for line in found} == {"ray-head", "ray-gpus"}


def test_the_pods_of_kuberays_job_have_the_stores_and_keys_of_the_trainers():
    """The driver on the head asks S3 and MLflow, and so does rank 0 on a worker."""
    trainers = yaml.safe_load_all((FOLDER / "training" / "trainers.yaml").read_text(encoding="utf-8"))
    trainer = next(item for item in trainers if item["kind"] == "Job")["spec"]["template"]["spec"]
    for pod in (item["spec"]["template"]["spec"] for item in ray_pods()):
        assert _secrets(pod) == _secrets(trainer)
        assert pod["containers"][0]["envFrom"] == trainer["containers"][0]["envFrom"]
    entrypoint = yaml.safe_load((FOLDER / "ray" / "train.yaml").read_text(encoding="utf-8"))["spec"]["entrypoint"]
    assert entrypoint.split()[:2] == trainer["containers"][0]["command"][:2]  # a password is in a file


def _secrets(pod: Manifest) -> list[Manifest]:
    (container,) = pod["containers"]
    return [item for item in (*pod["volumes"], *container["volumeMounts"]) if item["name"] == "secrets"]


def test_kuberays_job_has_the_locked_ray_and_room_for_as_many_ranks_as_its_nodes_have_gpus():
    """2 nodes of 8 GPUs: 8 ranks and 8 servers, as the head of the file says."""
    text = (FOLDER / "ray" / "train.yaml").read_text(encoding="utf-8")
    cluster = yaml.safe_load(text)["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "infra" / "locks" / "ray.txt").read_text(encoding="utf-8")
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    asked = {name: int(re.search(rf"{name} (\d+)", text)[1]) for name in ("num_trainers", "num_servers")}  # type: ignore[index]
    assert asked["num_trainers"] + asked["num_servers"] == gpus == 16
