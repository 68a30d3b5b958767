#!/usr/bin/env bash
# kubernetes.sh: starts the Job of infra/kubernetes/training, or waits for the one that is at work, until it has ended;
# the status is 1 where it failed. A Job that has ended stays for a day, and `kubectl apply` would start none beside it.
set -euo pipefail
job=(--namespace turnwise job/training)

is() { # complete, or failed: `kubectl wait` for one alone would miss the other
  kubectl wait --for=condition="$1" --timeout=0s "${job[@]}" >/dev/null 2>&1
}

if is complete || is failed; then kubectl delete "${job[@]}"; fi
kubectl apply --kustomize infra/kubernetes/training
until is complete; do
  if is failed; then
    echo "error: job/training failed, so not all was trained; its checkpoints stay. What its ranks told:" >&2
    echo "kubectl logs ${job[*]} --all-pods --prefix" >&2
    exit 1
  fi
  sleep 10
  kubectl get "${job[@]}" >/dev/null # ends this where somebody deleted it
done
