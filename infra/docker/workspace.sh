#!/usr/bin/env bash
# workspace.sh COMMAND…: makes the current folder (a volume) a workspace of the image's project, and becomes the command.
# Code and recipe are the image's, results are the volume's: a new image changes the first and loses nothing of the
# second. TURNWISE_PROFILES says which profiles make params.yaml.
set -euo pipefail
image=$(cd "$(dirname "$0")/../.." && pwd)
workspace=$PWD

profiles=()
for name in ${TURNWISE_PROFILES:?names of infra/profiles, such as \"demo services\"}; do profiles+=(--profile "$name"); done
(cd "$image" && python -m tasks workspace new "$workspace" "${profiles[@]}" >/dev/null)

exec "$@"
