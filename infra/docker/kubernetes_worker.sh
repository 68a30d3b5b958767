#!/usr/bin/env bash
# kubernetes_worker.sh POOL: brings the pool's job template up to this image and becomes its worker. The template is
# made anew at each start, so a new image or another setting needs no hand.
set -euo pipefail
template=$(mktemp)
python "$(dirname "$0")/job_template.py" >"$template"
prefect work-pool create "$1" --type kubernetes --base-job-template "$template" --overwrite
exec prefect worker start --type kubernetes --pool "$1" --with-healthcheck --install-policy never
