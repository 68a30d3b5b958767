#!/usr/bin/env bash
# Makes sure Chromium is there for the browser tests: Debian's own package, since the build that the test library
# would download comes from a host that many machines cannot reach. CHROMIUM names another one.
set -euo pipefail

for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then exit 0; fi
done

source "$(dirname "$0")/debian.sh"
install_packages .cache/chromium.log chromium fonts-dejavu-core && exit 0
echo "error: Chromium is missing, and the browser tests drive it. Install the package chromium (or name a binary in" \
  "CHROMIUM), or leave those tests out: make test BROWSER=no" >&2
exit 1
