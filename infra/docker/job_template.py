"""python job_template.py: the Job that a Prefect worker on Kubernetes makes of a run, as a work pool's template (JSON).

Prefect's own template with what it leaves out: the workspace, secrets as files, no rights, GPUs. JOB_IMAGE, JOB_GPUS,
JOB_CPUS and JOB_MEMORY (infra/kubernetes) are defaults that a deployment's job variables may change.
"""

from __future__ import annotations

import json
import os
from typing import Any

SCRIPTS = "/opt/turnwise/infra/docker"
SECRETS = ("mlflow_worker_password", "s3_credentials")
CLOSED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD = {
    "enableServiceLinks": False,
    "automountServiceAccountToken": False,
    "shareProcessNamespace": True,  # its first process ends the children that a killed stage leaves
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "volumes": [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": "workspace"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {
            "name": "secrets",
            "secret": {"secretName": "turnwise", "items": [{"key": name, "path": name} for name in SECRETS]},
        },
    ],
}
CONTAINER = {
    "command": ["bash", "/opt/with_secrets.sh", "bash", f"{SCRIPTS}/workspace.sh"],
    "workingDir": "/workspace",
    "envFrom": [{"configMapRef": {"name": name}} for name in ("store", "job")],
    "securityContext": CLOSED,
    "volumeMounts": [
        {"name": "workspace", "mountPath": "/workspace"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "secrets", "mountPath": "/run/secrets", "readOnly": True},
    ],
}


def job_template(image: str, *, gpus: str, cpus: str, memory: str) -> dict[str, Any]:
    from prefect_kubernetes import KubernetesWorker

    template = KubernetesWorker.get_default_base_job_template()
    manifest = template["job_configuration"]["job_manifest"]
    manifest["metadata"]["labels"] = "{{ labels }}"
    manifest["spec"]["template"]["metadata"] = {"labels": {"app": "job"}}  # which the network's rules name
    pod = manifest["spec"]["template"]["spec"]
    for key in ("completions", "parallelism"):  # of the Job; Prefect's template has them in the pod
        manifest["spec"][key] = pod.pop(key)
    pod |= POD
    container = pod["containers"][0]
    container |= CONTAINER
    container["resources"]["limits"]["nvidia.com/gpu"] = "{{ gpus }}"
    _set_defaults(template["variables"]["properties"], image, gpus=gpus, cpus=cpus, memory=memory)
    return template


def _set_defaults(variables: dict[str, Any], image: str, *, gpus: str, cpus: str, memory: str) -> None:
    variables["gpus"] = {"type": "string", "title": "GPUs", "description": "NVIDIA GPUs of a run's pod."}
    chosen = {
        "image": image,
        "gpus": gpus,
        "cpu_request": cpus,
        "memory_request": memory,
        "memory_limit": memory,
        "namespace": "turnwise",
        "service_account_name": "job",
        "finished_job_ttl": 86400,
        "pod_watch_timeout_seconds": 900,  # an image of gigabytes is pulled first
    }
    for name, value in chosen.items():
        variables[name]["default"] = value


if __name__ == "__main__":
    names = ("gpus", "cpus", "memory")
    print(
        json.dumps(job_template(os.environ["JOB_IMAGE"], **{name: os.environ[f"JOB_{name.upper()}"] for name in names}))
    )
