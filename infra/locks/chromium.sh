#!/usr/bin/env bash
# Makes sure Chromium is there for the browser tests: Debian's own package, since the build that the test library
# would download comes from a host that many machines cannot reach. CHROMIUM names another one.
set -euo pipefail

for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then exit 0; fi
done

root=""
if [ "$(id -u)" -ne 0 ]; then
  root="sudo -n"
  command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null || root="none"
fi
if [ "$root" != none ] && command -v apt-get >/dev/null 2>&1; then
  echo "set-up: installing Debian's chromium for the browser tests"
  export DEBIAN_FRONTEND=noninteractive
  if { $root apt-get update -qq && $root apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } \
      >.cache/chromium.log 2>&1; then
    exit 0
  fi
  tail -n 5 .cache/chromium.log >&2
fi
echo "error: Chromium is missing, and the browser tests drive it. Install the package chromium (or name a binary in" \
  "CHROMIUM), or leave those tests out: make test BROWSER=no" >&2
exit 1
