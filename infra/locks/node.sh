#!/usr/bin/env bash
# Makes sure Node is there for the example in infra/examples/memory, whose MCP server is published for it, and installs
# that server as its package-lock.json pins it, beside it. Node is Debian's own package where it is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

has_node() { command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1; }
fail() {
  echo "error: $1, and the tests of infra/examples/memory need it. $2, or leave those tests out: make test NODE=no" >&2
  exit 1
}

if ! has_node; then
  source infra/locks/debian.sh
  install_packages .cache/node.log nodejs npm || fail "node or npm is missing" "Install the packages nodejs (18 or later) and npm"
fi

example=infra/examples/memory
if ! cmp -s "$example/package-lock.json" "$example/node_modules/.turnwise-lock"; then
  echo "set-up: installing the MCP server of $example"
  npm ci --prefix "$example" --ignore-scripts --no-audit --no-fund >.cache/npm.log 2>&1 || {
    tail -n 5 .cache/npm.log >&2
    fail "its MCP server could not be installed" "Check the network and npm's registry setting"
  }
  cp "$example/package-lock.json" "$example/node_modules/.turnwise-lock"
fi
