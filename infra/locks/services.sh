#!/usr/bin/env bash
# Makes sure a Postgres server's programs are there for the tests of services: Debian's own package. The tests start a
# server of their own with them; the one that the package may start is not used.
set -euo pipefail

PATH="$PATH:$(printf '%s:' /usr/lib/postgresql/*/bin)"
if command -v initdb >/dev/null 2>&1 && command -v pg_isready >/dev/null 2>&1; then exit 0; fi

source "$(dirname "$0")/debian.sh"
install_packages .cache/services.log postgresql && exit 0
echo "error: Postgres is missing, and the tests of services start it. Install the package postgresql, or leave those" \
  "tests out: make test SERVICES=no" >&2
exit 1
