#!/usr/bin/env bash
# fetch_champion.sh models:/NAME@champion: puts the registered model into /models/champion, its weights verified, where a
# server finds it when it starts again. A copy that fails leaves the model that was there.
set -euo pipefail
folder=${MODELS:-/models}
rm -rf "$folder/next"
python -m tasks fetch "$1" "$folder/next" --registry "$MLFLOW_TRACKING_URI"
rm -rf "$folder/before"
[ ! -e "$folder/champion" ] || mv "$folder/champion" "$folder/before"
mv "$folder/next" "$folder/champion"
rm -rf "$folder/before"
