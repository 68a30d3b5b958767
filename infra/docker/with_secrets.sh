#!/usr/bin/env bash
# with_secrets.sh COMMAND…: for each variable NAME__FILE, sets NAME to the content of the file it names (a mounted
# secret) and becomes the command. So a secret is in no image, no compose file, no manifest and no argument list, and
# nothing here prints one.
set -euo pipefail

fail() {
  echo "error: $1, so the server would refuse access or be open to all. $2" >&2
  exit 1
}

for variable in $(compgen -e | grep '__FILE$' || true); do
  file=${!variable}
  name=${variable%__FILE}
  [ -z "${!name:-}" ] || fail "$name and $variable are both set" "Unset $name: the file is its only source"
  [ -r "$file" ] || fail "$variable names $file, which cannot be read" "infra/docker/make_secrets.sh makes the secrets"
  value=$(<"$file")
  [ -n "$value" ] || fail "$variable names $file, which is empty" "Delete it and run infra/docker/make_secrets.sh"
  export "$name=$value"
  unset "$variable"
done

exec "$@"
