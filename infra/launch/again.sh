#!/usr/bin/env bash
# again.sh COMMAND…: the command, and 10 s after each of its ends once more, until this process is told to end. For
# servers under Slurm, which starts nothing again; Kubernetes and Ray do.
set -euo pipefail
running=
end() {
  kill "$running" || true
  wait "$running" || true
  exit 143
}
trap end TERM INT
while true; do
  status=0
  "$@" &
  running=$!
  wait "$running" || status=$?
  echo "$(hostname): $1 ended with status $status and is started again in 10 s" >&2
  sleep 10 &
  running=$!
  wait "$running"
done
